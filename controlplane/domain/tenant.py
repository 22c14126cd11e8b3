"""A tenant: who may ask, at which tier, with which keys and budget. Stream ``tenant-<id>``.

Its keys are decided in ``api_key``; they are part of this aggregate.
"""

from dataclasses import dataclass, replace

from controlplane.domain import api_key
from controlplane.domain.api_key import (
    NO_KEYS,
    ApiKeyIssued,
    ApiKeyResumed,
    ApiKeyRevoked,
    ApiKeyRotated,
    ApiKeySuspended,
    IssueApiKey,
    KeyCommand,
    KeyEvent,
    Keys,
    ResumeApiKey,
    RevokeApiKey,
    RotateApiKey,
    SuspendApiKey,
)
from controlplane.domain.decider import Command, Decider, Event
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import TenantId, checked_name

TIERS = ("free", "standard", "premium")


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


TenantEvent = (
    TenantCreated
    | TenantTierChanged
    | TenantSuspended
    | TenantResumed
    | TenantDeleted
    | TenantBudgetSet
    | ApiKeyIssued
    | ApiKeyRotated
    | ApiKeySuspended
    | ApiKeyResumed
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
    keys: Keys = NO_KEYS


def evolve(tenant: Tenant, event: TenantEvent) -> Tenant:
    if isinstance(event, KeyEvent):
        return replace(tenant, keys=api_key.evolve(tenant.keys, event))
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


TenantCommand = (
    CreateTenant
    | ChangeTier
    | SuspendTenant
    | ResumeTenant
    | DeleteTenant
    | SetBudget
    | IssueApiKey
    | RotateApiKey
    | SuspendApiKey
    | ResumeApiKey
    | RevokeApiKey
)


# --- decisions --------------------------------------------------------------------------------
def decide(tenant: Tenant, command: TenantCommand) -> list[Event]:
    if isinstance(command, CreateTenant):
        return _create(tenant, command)
    if not tenant.exists or tenant.deleted:
        raise NotFound("tenant", command.tenant_id)
    if isinstance(command, KeyCommand):
        return api_key.decide(tenant.keys, command)
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
    raise AssertionError(command)


def _create(tenant: Tenant, command: CreateTenant) -> list[Event]:
    checked_name(command.name)
    _check_tier(command.tier)
    if tenant.exists:
        raise Conflict("tenant_exists", f"Tenant '{command.tenant_id}' exists already.")
    return [TenantCreated(command.tenant_id, command.name, command.tier, command.now)]


def _delete(tenant: Tenant, tenant_id: TenantId, now: float) -> list[Event]:
    if tenant.keys.live:
        raise Conflict("in_use", f"{len(tenant.keys.live)} keys are live; revoke them first.")
    return [TenantDeleted(tenant_id, now)]


def _set_budget(tenant: Tenant, command: SetBudget) -> list[Event]:
    if command.tokens is not None and not 0 <= command.tokens < 2**62:
        raise Invalid("invalid_budget", "A budget is a token count from 0 up.", "tokens")
    if command.period not in ("day", "month", "total"):
        raise Invalid("invalid_budget", "period is day, month or total.", "period")
    if tenant.budget == (command.tokens, command.period):
        return []
    return [TenantBudgetSet(command.tenant_id, command.tokens, command.period, command.now)]


def _check_tier(tier: str) -> None:
    if tier not in TIERS:
        raise Invalid("invalid_tier", f"tier is one of {', '.join(TIERS)}.", "tier")


DECIDER = Decider("tenant", Tenant(), decide, evolve)
