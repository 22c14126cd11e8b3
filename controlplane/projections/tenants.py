"""Tenants and their API keys. The keys' secrets are elsewhere, in the access store."""

from typing import ClassVar

from msgspec.structs import replace

from controlplane.domain import tenant as domain
from controlplane.domain.budget import Budget
from controlplane.projections.base import Projection, Recorded, Row, Rows


class Tenant(Row, frozen=True):
    """A tenant that was not deleted. ``num_keys`` counts the live ones.

    The ledger reads ``budgets`` in the transaction that admits a request.
    """

    tenant_id: str
    name: str
    tier: str
    created_at: float
    version: int
    suspended: bool = False
    suspended_reason: str = ""
    budgets: tuple[Budget, ...] = ()
    num_keys: int = 0
    captures_text: bool = False
    text_generation: int = 0


class ApiKey(Row, frozen=True):
    """Issued once, revoked at most once; kept while its tenant is. Which of its two secrets are
    good now is said by ``api_key.why_not``."""

    indexed: ClassVar = ("tenant_id",)

    key_id: str
    tenant_id: str
    name: str
    last4: str
    scopes: tuple[str, ...]
    expires_at: float | None
    created_at: float
    role: str = "developer"
    secret_id: str = ""
    previous_secret_id: str = ""
    previous_until: float = 0.0
    rotated_at: float | None = None
    suspended: bool = False
    suspended_reason: str = ""
    revoked: bool = False
    revoked_at: float | None = None
    models: tuple[str, ...] = ()


def _created(rows: Rows, event: domain.TenantCreated, recorded: Recorded) -> None:
    rows.put(Tenant(event.tenant_id, event.name, event.tier, event.at, recorded.version))


def _change(rows: Rows, tenant_id: str, recorded: Recorded, **fields: object) -> None:
    tenant = rows.get(Tenant, tenant_id)
    if tenant is not None:
        rows.put(replace(tenant, version=recorded.version, **fields))


def _tier(rows: Rows, event: domain.TenantTierChanged, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, tier=event.tier)


def _suspended(rows: Rows, event: domain.TenantSuspended, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, suspended=True, suspended_reason=event.reason)


def _resumed(rows: Rows, event: domain.TenantResumed, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, suspended=False, suspended_reason="")


def _budget(
    rows: Rows, event: domain.TenantBudgetSet | domain.TenantBudgetReset, recorded: Recorded
) -> None:
    tenant = rows.get(Tenant, event.tenant_id)
    if tenant is not None:
        budgets = {one.budget_id: one for one in tenant.budgets}
        after = sorted(domain.with_budget(budgets, event).items())
        _change(rows, event.tenant_id, recorded, budgets=tuple(one for _, one in after))


def _deleted(rows: Rows, event: domain.TenantDeleted, recorded: Recorded) -> None:
    for key in rows.find(ApiKey, "tenant_id", event.tenant_id):
        rows.delete(ApiKey, key.key_id)
    rows.delete(Tenant, event.tenant_id)


def _key_issued(rows: Rows, event: domain.ApiKeyIssued, recorded: Recorded) -> None:
    rows.put(
        ApiKey(
            event.key_id,
            event.tenant_id,
            event.name,
            event.last4,
            event.scopes,
            event.expires_at,
            event.at,
            event.role,
            event.key_id,
            models=event.models,
        )
    )
    _count_keys(rows, event.tenant_id, recorded)


def _change_key(rows: Rows, event: domain.KeyEvent, recorded: Recorded, **fields: object) -> None:
    key = rows.get(ApiKey, event.key_id)
    if key is not None:
        rows.put(replace(key, **fields))
    _count_keys(rows, event.tenant_id, recorded)


def _key_rotated(rows: Rows, event: domain.ApiKeyRotated, recorded: Recorded) -> None:
    key = rows.get(ApiKey, event.key_id)
    fields = {
        "secret_id": event.secret_id,
        "last4": event.last4,
        "previous_secret_id": key.secret_id if key else "",
        "previous_until": event.previous_until,
        "rotated_at": event.at,
    }
    _change_key(rows, event, recorded, **fields)


def _key_suspended(rows: Rows, event: domain.ApiKeySuspended, recorded: Recorded) -> None:
    _change_key(rows, event, recorded, suspended=True, suspended_reason=event.reason)


def _key_resumed(rows: Rows, event: domain.ApiKeyResumed, recorded: Recorded) -> None:
    _change_key(rows, event, recorded, suspended=False, suspended_reason="")


def _key_revoked(rows: Rows, event: domain.ApiKeyRevoked, recorded: Recorded) -> None:
    _change_key(rows, event, recorded, revoked=True, revoked_at=event.at)


def _count_keys(rows: Rows, tenant_id: str, recorded: Recorded) -> None:
    keys = rows.find(ApiKey, "tenant_id", tenant_id)
    _change(rows, tenant_id, recorded, num_keys=sum(not key.revoked for key in keys))


def _captures(rows: Rows, event: domain.TenantCaptureStarted, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, captures_text=True)


def _captures_not(rows: Rows, event: domain.TenantCaptureStopped, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, captures_text=False)


def _erased(rows: Rows, event: domain.TenantTextErased, recorded: Recorded) -> None:
    _change(rows, event.tenant_id, recorded, text_generation=event.generation + 1)


PROJECTION = Projection(
    "tenants",
    4,
    (Tenant, ApiKey),
    {
        domain.TenantCreated: _created,
        domain.TenantTierChanged: _tier,
        domain.TenantSuspended: _suspended,
        domain.TenantResumed: _resumed,
        domain.TenantBudgetSet: _budget,
        domain.TenantBudgetReset: _budget,
        domain.TenantDeleted: _deleted,
        domain.TenantCaptureStarted: _captures,
        domain.TenantCaptureStopped: _captures_not,
        domain.TenantTextErased: _erased,
        domain.ApiKeyIssued: _key_issued,
        domain.ApiKeyRotated: _key_rotated,
        domain.ApiKeySuspended: _key_suspended,
        domain.ApiKeyResumed: _key_resumed,
        domain.ApiKeyRevoked: _key_revoked,
    },
)
