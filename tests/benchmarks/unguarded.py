"""A gateway that guarantees nothing, to measure what the guarantees cost.

``python -m tests.benchmarks.unguarded`` is the gateway's process with the same server, routing,
tokenizer, bus and handlers, and in-memory ports that do nothing where the product authenticates,
limits, reserves, writes the intent and settles. It takes every bearer token for the one tenant of
``UNGUARDED_TENANT``. No setting of the product leads here.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
django.setup()

from controlplane.application.inference import Job  # noqa: E402
from controlplane.application.limits import DEFAULT_LIMITS  # noqa: E402
from controlplane.application.ports import Clock, EventStore, Intent, Terminal  # noqa: E402
from controlplane.dispatch.admit import Admission, admit, full  # noqa: E402
from controlplane.domain.policy import USE_MODEL, Principal, Rule  # noqa: E402
from controlplane.entrypoints.openai import process  # noqa: E402
from controlplane.entrypoints.openai.gateway import Gateway, GatewaySettings  # noqa: E402
from controlplane.entrypoints.openai.principals import TenantPrincipal  # noqa: E402
from controlplane.projections.base import Rows  # noqa: E402
from controlplane.projections.tenants import Tenant  # noqa: E402


class NoLedger:
    """``ports.Ledger`` that keeps nothing; its writer does nothing and finds nothing."""

    def __init__(self) -> None:
        self.writer = self

    async def admit(self, intent: Intent) -> None: ...

    async def settle(self, terminal: Terminal) -> bool:
        return True

    async def progress(self, produced: Mapping[str, int]) -> None: ...

    async def submit(self, what: object) -> list[Any]:
        return []

    async def close(self) -> None: ...


class NoLimits:
    """``inference.Limits`` of nobody; the headers' figures are those of a tenant that is new."""

    def __init__(self) -> None:
        rate = DEFAULT_LIMITS["premium"].rate
        self._fresh = admit(full(rate, 0.0), rate, 1, 0.0)

    async def take(self, job: Job) -> Admission:
        return self._fresh

    def give_back(self, job: Job, num_tokens: int, was_refused: bool = False) -> None: ...


class Everybody:
    """``Authenticator`` that looks at no token."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._principal: TenantPrincipal | None = None

    def apply(self, event: object) -> None: ...

    async def from_header(self, header: bytes | None, rule: Rule = USE_MODEL) -> TenantPrincipal:
        if self._principal is None:
            tenant = self._rows.get(Tenant, os.environ["UNGUARDED_TENANT"])
            assert tenant is not None
            rights = Principal("jwt:bench", "developer", tenant.tenant_id, ("inference",))
            self._principal = TenantPrincipal(tenant, "jwt:bench", rights)
        return self._principal


class Unguarded(Gateway):
    """The product's gateway but for those ports."""

    def __init__(
        self, settings: GatewaySettings, store: EventStore, ledger: object, clock: Clock
    ) -> None:
        super().__init__(settings, store, NoLedger(), clock)  # type: ignore[arg-type]
        self.authenticator = Everybody(self.live.rows)  # type: ignore[assignment]

    def _limits(self, settings: GatewaySettings) -> Any:
        return NoLimits()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.unguarded")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path)
    options = parser.parse_args()
    process.Gateway = Unguarded  # type: ignore[misc]
    process.run("127.0.0.1", options.port, options.port_file)
