"""A tenant: who may ask, at which tier, with which keys and budget. Stream ``tenant-<id>``.

Its keys are decided in ``api_key``, capture of its text in ``capture``; both are part of this
aggregate.
"""

import msgspec
from msgspec.structs import replace

from controlplane.domain import api_key, capture
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
from controlplane.domain.budget import MAX_BUDGETS, Budget, check_budget
from controlplane.domain.capture import (
    NO_CAPTURE,
    Capture,
    CaptureCommand,
    CaptureEvent,
    EraseText,
    StartCapture,
    StopCapture,
    TenantCaptureStarted,
    TenantCaptureStopped,
    TenantTextErased,
)
from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import TenantId, checked_name
from controlplane.domain.wording import count_of

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
    """The budget of this name is so from now on (see ``budget``); ``limit`` None: it is gone."""

    tenant_id: TenantId
    budget_id: str
    scope: str
    target: str
    unit: str
    limit: int | None
    period: str
    at: float


class TenantBudgetReset(Event, frozen=True, tag_field="type", tag="TenantBudgetReset"):
    """``forgiven`` of what was spent in this period (tokens or picodollars) counts no more."""

    tenant_id: TenantId
    budget_id: str
    forgiven: int
    at: float


TenantEvent = (
    TenantCreated
    | TenantTierChanged
    | TenantSuspended
    | TenantResumed
    | TenantDeleted
    | TenantBudgetSet
    | TenantBudgetReset
    | ApiKeyIssued
    | ApiKeyRotated
    | ApiKeySuspended
    | ApiKeyResumed
    | ApiKeyRevoked
    | TenantCaptureStarted
    | TenantCaptureStopped
    | TenantTextErased
)


# --- state ------------------------------------------------------------------------------------
class Tenant(State, frozen=True):
    exists: bool = False
    tier: str = "standard"
    suspended: bool = False
    deleted: bool = False
    budgets: dict[str, Budget] = msgspec.field(default_factory=dict)
    keys: Keys = NO_KEYS
    capture: Capture = NO_CAPTURE


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
        case TenantBudgetSet() | TenantBudgetReset():
            return replace(tenant, budgets=with_budget(tenant.budgets, event))
    if isinstance(event, KeyEvent):
        return replace(tenant, keys=api_key.evolve(tenant.keys, event))
    if isinstance(event, CaptureEvent):
        return replace(tenant, capture=capture.evolve(tenant.capture, event))
    return tenant


def with_budget(
    budgets: dict[str, Budget], event: TenantBudgetSet | TenantBudgetReset
) -> dict[str, Budget]:
    """The tenant's budgets after the event. A raise keeps what was forgiven of the same thing."""
    before = budgets.get(event.budget_id)
    if isinstance(event, TenantBudgetReset):
        if before is None:
            return budgets
        after = replace(before, forgiven=event.forgiven, forgiven_at=event.at)
        return {**budgets, event.budget_id: after}
    if event.limit is None:
        return {name: one for name, one in budgets.items() if name != event.budget_id}
    after = Budget(
        event.budget_id, event.scope, event.target, event.unit, event.limit, event.period
    )
    if before is not None and _counts_the_same(before, after):
        after = replace(before, limit=event.limit)
    return {**budgets, event.budget_id: after}


def _counts_the_same(one: Budget, other: Budget) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("scope", "target", "unit", "period")
    )


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
    """Make or change one; what was forgiven in ``budget`` is not looked at."""

    tenant_id: TenantId
    budget: Budget
    now: float


class RemoveBudget(Command, frozen=True):
    tenant_id: TenantId
    budget_id: str
    now: float


class ResetBudget(Command, frozen=True):
    """``spent``: what it counts at this moment, all of which is forgiven."""

    tenant_id: TenantId
    budget_id: str
    spent: int
    now: float


TenantCommand = (
    CreateTenant
    | ChangeTier
    | SuspendTenant
    | ResumeTenant
    | DeleteTenant
    | SetBudget
    | RemoveBudget
    | ResetBudget
    | IssueApiKey
    | RotateApiKey
    | SuspendApiKey
    | ResumeApiKey
    | RevokeApiKey
    | StartCapture
    | StopCapture
    | EraseText
)


# --- decisions --------------------------------------------------------------------------------
def decide(tenant: Tenant, command: TenantCommand) -> list[Event]:
    if isinstance(command, CreateTenant):
        return _create(tenant, command)
    if not tenant.exists or tenant.deleted:
        raise NotFound("tenant", command.tenant_id)
    if isinstance(command, KeyCommand):
        return api_key.decide(tenant.keys, command)
    if isinstance(command, CaptureCommand):
        return capture.decide(tenant.capture, command)
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
        case SetBudget() | RemoveBudget() | ResetBudget():
            return _decide_budget(tenant, command)
    raise AssertionError(command)


def _create(tenant: Tenant, command: CreateTenant) -> list[Event]:
    checked_name(command.name)
    _check_tier(command.tier)
    if tenant.exists:
        raise Conflict("tenant_exists", f"Tenant '{command.tenant_id}' exists already.")
    return [TenantCreated(command.tenant_id, command.name, command.tier, command.now)]


def _delete(tenant: Tenant, tenant_id: TenantId, now: float) -> list[Event]:
    if tenant.keys.live:
        keys = count_of(len(tenant.keys.live), "live key")
        raise Conflict("in_use", f"The tenant has {keys}; revoke what is live first.")
    return [TenantDeleted(tenant_id, now)]


def _decide_budget(tenant: Tenant, command: SetBudget | RemoveBudget | ResetBudget) -> list[Event]:
    match command:
        case SetBudget(tenant_id, budget, now):
            return _set_budget(tenant, tenant_id, budget, now)
        case RemoveBudget(tenant_id, budget_id, now):
            return _remove_budget(tenant, tenant_id, budget_id, now)
        case ResetBudget(tenant_id, budget_id, spent, now):
            if budget_id not in tenant.budgets:
                raise NotFound("budget", budget_id)
            return [TenantBudgetReset(tenant_id, budget_id, spent, now)]


def _set_budget(tenant: Tenant, tenant_id: TenantId, budget: Budget, now: float) -> list[Event]:
    check_budget(budget)
    before = tenant.budgets.get(budget.budget_id)
    if before is None and len(tenant.budgets) >= MAX_BUDGETS:
        raise Conflict("too_many_budgets", f"A tenant has at most {MAX_BUDGETS} budgets.")
    if before and before.limit == budget.limit and _counts_the_same(before, budget):
        return []
    return [_budget_set(tenant_id, budget, budget.limit, now)]


def _remove_budget(tenant: Tenant, tenant_id: TenantId, budget_id: str, now: float) -> list[Event]:
    budget = tenant.budgets.get(budget_id)
    return [] if budget is None else [_budget_set(tenant_id, budget, None, now)]


def _budget_set(tenant_id: TenantId, budget: Budget, limit: int | None, now: float) -> Event:
    return TenantBudgetSet(
        tenant_id,
        budget.budget_id,
        budget.scope,
        budget.target,
        budget.unit,
        limit,
        budget.period,
        now,
    )


def _check_tier(tier: str) -> None:
    if tier not in TIERS:
        raise Invalid("invalid_tier", f"tier is one of {', '.join(TIERS)}.", "tier")


DECIDER = Decider("tenant", Tenant(), decide, evolve)
