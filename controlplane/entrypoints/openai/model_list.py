"""``GET /v1/models``: what a tenant may ask for, and whether it could be answered now."""

import asyncio
from typing import Any

import msgspec

from controlplane.application.fleet_state import FleetState
from controlplane.dispatch.resolve import visible_names
from controlplane.entrypoints.openai.orders import OrderDesk
from controlplane.entrypoints.openai.principals import Authenticator, TenantPrincipal
from controlplane.entrypoints.openai.request import Request
from controlplane.projections.base import Rows
from controlplane.projections.catalog import Model


class Models:
    """The models a tenant may ask for."""

    def __init__(
        self, state: FleetState, rows: Rows, desk: OrderDesk, authenticator: Authenticator
    ) -> None:
        self._state, self._rows = state, rows
        self._desk, self._authenticator = desk, authenticator

    async def list(self, request: Request) -> None:
        principal = await self._authenticator.from_header(request.headers.get(b"authorization"))
        names = visible_names(self._state.catalog, principal.caller)
        data = await asyncio.gather(*[self._describe(principal, name) for name in names])
        await request.respond(200, msgspec.json.encode({"object": "list", "data": data}))

    async def get(self, request: Request, name: str) -> None:
        principal = await self._authenticator.from_header(request.headers.get(b"authorization"))
        await request.respond(200, msgspec.json.encode(await self._describe(principal, name)))

    async def _describe(self, principal: TenantPrincipal, name: str) -> dict[str, Any]:
        """Raises Refused ``model_not_found``, for a foreign model as for an absent one."""
        found = self._desk.resolve(name, principal.caller, principal.subject, "")
        row = self._rows.get(Model, found.model)
        return {
            "id": name,
            "object": "model",
            "created": int(row.created_at) if row else 0,
            "owned_by": "engine",
            "root": found.version_id,
            "parent": None if name == found.model else found.model,
            "max_model_len": await self._desk.context_length(found),
            "ready": self._state.num_ready(found.version_id) > 0,
        }
