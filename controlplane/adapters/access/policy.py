"""Who may do what: one table, asked by the REST API and by the live websocket alike.

A principal has a role and either reaches everything (``tenant_id`` empty) or is confined to one
tenant. A confined principal may do what its role allows **and** the confined table allows; whose
rows it sees is then a matter of filtering, and a foreign row looks like an absent one. So an API
key of tenant ``acme`` with scope ``admin:write`` may issue keys for ``acme``, but neither raise
its own budget nor drain a node; keys of the operators' tenant (``ENGINE_OPERATOR_TENANT``) are
the ones that act for the whole fleet.
"""

from collections.abc import Collection
from dataclasses import dataclass

READ, WRITE = "read", "write"

RESOURCES = (
    "status",
    "tenant",
    "key",
    "budget",
    "model",
    "route",
    "node",
    "placement",
    "decision",
    "event",
    "request",
    "export",
    "catalog",
    "ticket",
)

ROLES = ("admin", "operator", "auditor", "developer", "viewer")

_EVERYTHING = frozenset(RESOURCES)
_VIEWS = frozenset({"status", "model", "route", "node", "placement", "decision", "event", "tenant"})

_READS: dict[str, frozenset[str]] = {
    "admin": _EVERYTHING,
    "operator": _EVERYTHING,
    "auditor": _EVERYTHING,
    "developer": _VIEWS | {"key", "budget", "request", "catalog"},
    "viewer": _VIEWS,
}
_WRITES: dict[str, frozenset[str]] = {
    "admin": _EVERYTHING,
    "operator": frozenset({"model", "route", "node", "catalog", "ticket"}),
    "auditor": frozenset(),
    "developer": frozenset({"key", "ticket"}),
    "viewer": frozenset(),
}
_CONFINED: dict[str, frozenset[str]] = {
    READ: frozenset(
        {"status", "tenant", "key", "budget", "model", "route", "event", "request", "export"}
    ),
    WRITE: frozenset({"key", "ticket"}),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody authenticated. ``actor`` goes into the events: ``user:ann`` or ``key:<key id>``."""

    actor: str
    role: str
    tenant_id: str = ""

    @property
    def confined(self) -> bool:
        return bool(self.tenant_id)

    def reaches(self, tenant_id: str) -> bool:
        """True if rows of ``tenant_id`` exist for this principal at all."""
        return not self.tenant_id or self.tenant_id == tenant_id


def allowed(principal: Principal, action: str, resource: str) -> bool:
    """May ``principal`` do ``action`` (read or write) on ``resource``? Unknown means no."""
    table = {READ: _READS, WRITE: _WRITES}.get(action, {})
    if resource not in table.get(principal.role, frozenset()):
        return False
    return not principal.confined or resource in _CONFINED[action]


def role_of_scopes(scopes: Collection[str]) -> str:
    """The role that an API key's scopes amount to; empty if it is for inference only."""
    if "admin:write" in scopes:
        return "admin"
    return "auditor" if "admin:read" in scopes else ""
