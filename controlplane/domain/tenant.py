"""A tenant: who may ask, at which tier, with which keys and budget. Stream ``tenant-<id>``."""

from dataclasses import dataclass, replace

from controlplane.domain.decider import Command, Decider, Event
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import KeyId, TenantId, checked_name

TIERS = ("free", "standard", "premium")
SCOPES = ("inference", "admin:read", "admin:write")


# --- events -----------------------------------------------------------------------------------
class TenantCreated(Event, frozen=True, tag_field="type", tag="TenantCreated"):
    tenant_id: TenantId
    name: str
    tier: str
    at: float


class TenantTierChanged(Event, frozen=True, tag_field="type", tag="TenantTierChanged"):
    tenant_id: TenantId
    tier: str
    at: float


class TenantSuspended(Event, frozen=True, tag_field="type", tag="TenantSuspended"):
    tenant_id: TenantId
    reason: str
    at: float


class TenantResumed(Event, frozen=True, tag_field="type", tag="TenantResumed"):
    tenant_id: TenantId
    at: float


class TenantDeleted(Event, frozen=True, tag_field="type", tag="TenantDeleted"):
    tenant_id: TenantId
    at: float


class TenantBudgetSet(Event, frozen=True, tag_field="type", tag="TenantBudgetSet"):
    """``tokens`` per calendar ``period`` (day, month, total) in UTC; None means no budget."""

    tenant_id: TenantId
    tokens: int | None
    period: str
    at: float


class ApiKeyIssued(Event, frozen=True, tag_field="type", tag="ApiKeyIssued"):
    """The secret is never here: its hash lives in the erasable access store under ``key_id``."""

    tenant_id: TenantId
    key_id: KeyId
    name: str
    last4: str
    scopes: tuple[str, ...]
    expires_at: float | None
    at: float


class ApiKeyRevoked(Event, frozen=True, tag_field="type", tag="ApiKeyRevoked"):
    tenant_id: TenantId
    key_id: KeyId
    at: float


TenantEvent = (
    TenantCreated
    | TenantTierChanged
    | TenantSuspended
    | TenantResumed
    | TenantDeleted
    | TenantBudgetSet
    | ApiKeyIssued
    | ApiKeyRevoked
)


# --- state ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tenant:
    exists: bool = False
    tier: str = "standard"
    suspended: bool = False
    deleted: bool = False
    budget: tuple[int | None, str] = (None, "month")
    live_keys: frozenset[str] = frozenset()
    revoked_keys: frozenset[str] = frozenset()


def evolve(tenant: Tenant, event: TenantEvent) -> Tenant:
    match event:
        case TenantCreated(tier=tier):
            return replace(tenant, exists=True, tier=tier)
        case TenantTierChanged(tier=tier):
            return replace(tenant, tier=tier)
        case TenantSuspended():
            return replace(tenant, suspended=True)
        case TenantResumed():
            return replace(tenant, suspended=False)
        case TenantDeleted():
            return replace(tenant, deleted=True)
        case TenantBudgetSet(tokens=tokens, period=period):
            return replace(tenant, budget=(tokens, period))
        case ApiKeyIssued(key_id=key):
            return replace(tenant, live_keys=tenant.live_keys | {key})
        case ApiKeyRevoked(key_id=key):
            return replace(
                tenant,
                live_keys=tenant.live_keys - {key},
                revoked_keys=tenant.revoked_keys | {key},
            )
    return tenant


# --- commands ---------------------------------------------------------------------------------
class CreateTenant(Command, frozen=True):
    tenant_id: TenantId
    name: str
    tier: str
    now: float


class ChangeTier(Command, frozen=True):
    tenant_id: TenantId
    tier: str
    now: float


class SuspendTenant(Command, frozen=True):
    tenant_id: TenantId
    reason: str
    now: float


class ResumeTenant(Command, frozen=True):
    tenant_id: TenantId
    now: float


class DeleteTenant(Command, frozen=True):
    tenant_id: TenantId
    now: float


class SetBudget(Command, frozen=True):
    tenant_id: TenantId
    tokens: int | None
    period: str
    now: float


class IssueApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    name: str
    last4: str
    scopes: tuple[str, ...]
    expires_at: float | None
    now: float


class RevokeApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    now: float


TenantCommand = (
    CreateTenant
    | ChangeTier
    | SuspendTenant
    | ResumeTenant
    | DeleteTenant
    | SetBudget
    | IssueApiKey
    | RevokeApiKey
)


# --- decisions --------------------------------------------------------------------------------
def decide(tenant: Tenant, command: TenantCommand) -> list[Event]:
    if isinstance(command, CreateTenant):
        return _create(tenant, command)
    if not tenant.exists or tenant.deleted:
        raise NotFound("tenant", command.tenant_id)
    match command:
        case ChangeTier(tenant_id, tier, now):
            _check_tier(tier)
            return [] if tenant.tier == tier else [TenantTierChanged(tenant_id, tier, now)]
        case SuspendTenant(tenant_id, reason, now):
            return [] if tenant.suspended else [TenantSuspended(tenant_id, reason, now)]
        case ResumeTenant(tenant_id, now):
            return [TenantResumed(tenant_id, now)] if tenant.suspended else []
        case DeleteTenant(tenant_id, now):
            return _delete(tenant, tenant_id, now)
        case SetBudget():
            return _set_budget(tenant, command)
        case IssueApiKey():
            return _issue_key(tenant, command)
        case RevokeApiKey():
            return _revoke_key(tenant, command)
    raise AssertionError(command)


def _create(tenant: Tenant, command: CreateTenant) -> list[Event]:
    checked_name(command.name)
    _check_tier(command.tier)
    if tenant.exists:
        raise Conflict("tenant_exists", f"Tenant '{command.tenant_id}' exists already.")
    return [TenantCreated(command.tenant_id, command.name, command.tier, command.now)]


def _delete(tenant: Tenant, tenant_id: TenantId, now: float) -> list[Event]:
    if tenant.live_keys:
        raise Conflict("in_use", f"{len(tenant.live_keys)} keys are live; revoke them first.")
    return [TenantDeleted(tenant_id, now)]


def _set_budget(tenant: Tenant, command: SetBudget) -> list[Event]:
    if command.tokens is not None and not 0 <= command.tokens < 2**62:
        raise Invalid("invalid_budget", "A budget is a token count from 0 up.", "tokens")
    if command.period not in ("day", "month", "total"):
        raise Invalid("invalid_budget", "period is day, month or total.", "period")
    if tenant.budget == (command.tokens, command.period):
        return []
    return [TenantBudgetSet(command.tenant_id, command.tokens, command.period, command.now)]


def _issue_key(tenant: Tenant, command: IssueApiKey) -> list[Event]:
    if command.key_id in tenant.live_keys:
        return []
    if command.key_id in tenant.revoked_keys:
        raise Conflict("key_revoked", "A revoked key cannot be issued again.")
    unknown = set(command.scopes) - set(SCOPES)
    if unknown or not command.scopes:
        raise Invalid("invalid_scope", f"Scopes are some of {', '.join(SCOPES)}.", "scopes")
    if command.expires_at is not None and command.expires_at <= command.now:
        raise Invalid("invalid_expiry", "A key must expire in the future.", "expires_at")
    return [
        ApiKeyIssued(
            command.tenant_id,
            command.key_id,
            command.name,
            command.last4,
            command.scopes,
            command.expires_at,
            command.now,
        )
    ]


def _revoke_key(tenant: Tenant, command: RevokeApiKey) -> list[Event]:
    if command.key_id in tenant.revoked_keys:
        return []
    if command.key_id not in tenant.live_keys:
        raise NotFound("key", command.key_id)
    return [ApiKeyRevoked(command.tenant_id, command.key_id, command.now)]


def _check_tier(tier: str) -> None:
    if tier not in TIERS:
        raise Invalid("invalid_tier", f"tier is one of {', '.join(TIERS)}.", "tier")


DECIDER = Decider("tenant", Tenant(), decide, evolve)
