"""The text of requests of tenants that opted in: begun with the order, encrypted at its end.

A tenant's data key is fetched once (and made, the first time) and then held in memory until the log
says that it is destroyed or no longer used. Where no key can be had, the request is served and its
text is not kept: capture is a convenience, the record is not.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from controlplane.adapters.access import text_keys
from controlplane.application.capture import Capture, TextKey
from controlplane.application.ports import Clock
from controlplane.domain.capture import TenantCaptureStopped, TenantTextErased
from controlplane.domain.decider import Event
from controlplane.domain.tenant import TenantDeleted
from controlplane.entrypoints.openai.parameters import Parameters
from controlplane.projections.tenants import Tenant

InThread = Callable[..., Awaitable[Any]]

log = structlog.get_logger("gateway")


class Capturing:
    """``in_thread`` runs a function with a database connection, off the event loop."""

    def __init__(self, in_thread: InThread, clock: Clock) -> None:
        self._in_thread, self._clock = in_thread, clock
        self._keys: dict[tuple[str, int], TextKey | None] = {}

    async def begin(self, tenant: Tenant, endpoint: str, parameters: Parameters) -> Capture | None:
        """For a tenant that captures; None where its key is destroyed or cannot be had."""
        asked = (tenant.tenant_id, tenant.text_generation)
        if asked not in self._keys:
            try:
                key = await self._in_thread(text_keys.key_of, *asked, self._clock.now())
            except Exception as error:  # whatever keeps the key away must not refuse the request
                log.warning("text not captured", tenant=tenant.tenant_id, error=str(error))
                return None
            self._keys[asked] = key
        key = self._keys[asked]
        return None if key is None else Capture(key, endpoint, _prompt(parameters))

    def apply(self, event: Event) -> None:
        """A key that is not used any more is forgotten."""
        if isinstance(event, TenantTextErased | TenantCaptureStopped | TenantDeleted):
            ended = [asked for asked in self._keys if asked[0] == event.tenant_id]
            for asked in ended:
                del self._keys[asked]


def _prompt(parameters: Parameters) -> list[tuple[str, str]]:
    if parameters.messages:
        return [(message.role, message.content) for message in parameters.messages]
    return [
        ("prompt", one) if isinstance(one, str) else ("tokens", msgspec.json.encode(one).decode())
        for one in parameters.prompts
    ]
