"""The command that takes an administrative change back, computed from the log.

Nothing is erased: the compensating command appends an event of its own, which says what it undoes
(``causation_id`` is ``undo:<position>``) and can be undone like any other. A change is taken back
only while it is the last word on its aspect; else the later change would go with it unseen::

    position 10   TenantTierChanged(acme, premium)    it was free before
    position 14   TenantBudgetSet(acme, 1000)         another aspect
    undo of 10    ChangeTier(acme, free)              appended at 15, causation undo:10
    undo of 10    Conflict already_undone (by 15)
    undo of 15    ChangeTier(acme, premium)

    position 20   TenantTierChanged(acme, standard)
    undo of 15    Conflict changed_since (at 20): undo that first

What cannot be taken back says why: a revoked key's secret is erased, a deleted tenant's id is never
used again. What nodes report and planners decide is no change by a person.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from controlplane.application.order import Order
from controlplane.application.ports import RecordedEvent
from controlplane.domain import model, node, retention, route, routing, tenant
from controlplane.domain.audit import undone_position
from controlplane.domain.budget import period_start
from controlplane.domain.decider import Command, Decider, Event, fold
from controlplane.domain.errors import Conflict


@dataclass(frozen=True)
class _Change:
    """An event to take back: the state before it, and the events of its stream up to it."""

    before: Any
    event: Any
    earlier: Sequence[Event]
    now: float


@dataclass(frozen=True)
class _Rule:
    """``aspect``: what the event has the last word on. ``back``: the command, or why there is
    none."""

    aspect: Callable[[Any], tuple[str, ...]]
    back: Callable[[_Change], Command] | str


def compensation(stream: Sequence[RecordedEvent], position: int, now: float) -> Order:
    """What undoes the event at ``position``; ``stream`` is all of its stream, as it is now.

    Raises Conflict: not_undoable, already_undone, changed_since.
    """
    index = next(i for i, one in enumerate(stream) if one.position == position)
    recorded, later = stream[index], stream[index + 1 :]
    rule = RULES.get(type(recorded.event))
    if rule is None:
        raise Conflict("not_undoable", f"{recorded.type} is a report or a plan, no order.")
    if isinstance(rule.back, str):
        raise Conflict("not_undoable", rule.back)
    _require_last_word(recorded, later, rule)
    decider = next(one for one in _DECIDERS if recorded.stream.startswith(f"{one.category}-"))
    earlier = [one.event for one in stream[:index]]
    change = _Change(fold(decider, earlier), recorded.event, earlier, now)
    return Order(decider, recorded.stream.partition("-")[2], rule.back(change))


def _require_last_word(
    recorded: RecordedEvent, later: Sequence[RecordedEvent], rule: _Rule
) -> None:
    aspect = rule.aspect(recorded.event)
    for one in later:
        if undone_position(one.meta.causation_id) == recorded.position:
            raise Conflict("already_undone", f"It was undone at position {one.position}.")
        other = RULES.get(type(one.event))
        if other is not None and other.aspect(one.event) == aspect:
            raise Conflict(
                "changed_since",
                f"{one.type} at position {one.position} changed the same again; undo that first.",
            )


# --- the commands -----------------------------------------------------------------------------
def _resume_suspension(change: _Change) -> Command:
    reasons = [one.reason for one in change.earlier if isinstance(one, tenant.TenantSuspended)]
    return tenant.SuspendTenant(change.event.tenant_id, reasons[-1], change.now)


def _suspend_key_again(change: _Change) -> Command:
    about = change.event
    reasons = [
        one.reason
        for one in change.earlier
        if isinstance(one, tenant.ApiKeySuspended) and one.key_id == about.key_id
    ]
    return tenant.SuspendApiKey(about.tenant_id, about.key_id, reasons[-1], change.now)


def _former_budget(change: _Change) -> Command:
    about, former = change.event, change.before.budgets.get(change.event.budget_id)
    if former is None:
        return tenant.RemoveBudget(about.tenant_id, about.budget_id, change.now)
    return tenant.SetBudget(about.tenant_id, former, change.now)


def _former_count(change: _Change) -> Command:
    """What was forgiven before, if that was in the period that still runs."""
    about, former = change.event, change.before.budgets[change.event.budget_id]
    starts = [period_start(former.period, at) for at in (former.forgiven_at, change.now)]
    forgiven = former.forgiven if starts[0] == starts[1] else 0
    return tenant.ResetBudget(about.tenant_id, about.budget_id, forgiven, change.now)


def _resume_drain(change: _Change) -> Command:
    reasons = [one.reason for one in change.earlier if isinstance(one, node.NodeDrainStarted)]
    return node.DrainNode(change.event.node_id, reasons[-1], change.now)


def _former_scale(change: _Change) -> Command:
    spec = change.before.versions[change.event.version]
    return model.ScaleVersion(
        change.event.name, change.event.version, spec.min_replicas, spec.max_replicas, change.now
    )


def _former_default(change: _Change) -> Command:
    former = model.default_version(change.before)
    if former is None:
        raise Conflict("not_undoable", "The model had no default version before.")
    return model.SetDefaultVersion(change.event.name, former, change.now)


def _former_arms(change: _Change) -> Command:
    before: route.Route = change.before
    return route.ChangeArms(change.event.name, before.arms, before.sticky, change.now)


def _former_route(change: _Change) -> Command:
    before: route.Route = change.before
    return route.CreateRoute(change.event.name, before.arms, before.sticky, change.now)


# --- the rules --------------------------------------------------------------------------------
def _fixed(*aspect: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda event: aspect


def _per(name: str, field: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda event: (name, getattr(event, field))


_TENANT_RULES: dict[type[Event], _Rule] = {
    tenant.TenantCreated: _Rule(
        _fixed("life"), lambda c: tenant.DeleteTenant(c.event.tenant_id, c.now)
    ),
    tenant.TenantDeleted: _Rule(
        _fixed("life"), "A deleted tenant's id is never used again; create one of another name."
    ),
    tenant.TenantTierChanged: _Rule(
        _fixed("tier"), lambda c: tenant.ChangeTier(c.event.tenant_id, c.before.tier, c.now)
    ),
    tenant.TenantSuspended: _Rule(
        _fixed("suspension"), lambda c: tenant.ResumeTenant(c.event.tenant_id, c.now)
    ),
    tenant.TenantResumed: _Rule(_fixed("suspension"), _resume_suspension),
    tenant.TenantBudgetSet: _Rule(_per("budget", "budget_id"), _former_budget),
    tenant.TenantBudgetReset: _Rule(_per("budget's count", "budget_id"), _former_count),
    tenant.ApiKeyIssued: _Rule(
        _per("key", "key_id"),
        lambda c: tenant.RevokeApiKey(c.event.tenant_id, c.event.key_id, c.now),
    ),
    tenant.ApiKeyRevoked: _Rule(
        _per("key", "key_id"), "The key's secret was erased when it was revoked; issue a new key."
    ),
    tenant.ApiKeyRotated: _Rule(
        _per("secret", "secret_id"),
        "A secret that was replaced is not made the newest again; rotate the key once more.",
    ),
    tenant.ApiKeySuspended: _Rule(
        _per("key pause", "key_id"),
        lambda c: tenant.ResumeApiKey(c.event.tenant_id, c.event.key_id, c.now),
    ),
    tenant.ApiKeyResumed: _Rule(_per("key pause", "key_id"), _suspend_key_again),
    tenant.TenantCaptureStarted: _Rule(
        _fixed("capture"), lambda c: tenant.StopCapture(c.event.tenant_id, c.now)
    ),
    tenant.TenantCaptureStopped: _Rule(
        _fixed("capture"), lambda c: tenant.StartCapture(c.event.tenant_id, c.now)
    ),
    tenant.TenantTextErased: _Rule(
        _fixed("text"), "The key of that text is destroyed; nothing can read it any more."
    ),
}
_MODEL_RULES: dict[type[Event], _Rule] = {
    model.ModelRegistered: _Rule(
        _fixed("life"), "A model's name stays registered; retire its versions instead."
    ),
    model.ModelVersionAdded: _Rule(
        lambda event: ("version", event.spec.version),
        lambda c: model.RetireVersion(c.event.name, c.event.spec.version, c.now),
    ),
    model.ModelVersionRetired: _Rule(
        _per("version", "version"),
        "A retired version is not started again; add its specification under another name.",
    ),
    model.ModelVersionScaled: _Rule(_per("scale", "version"), _former_scale),
    model.ModelPriceSet: _Rule(
        _per("price", "version"),
        lambda c: model.SetModelPrice(
            c.event.name, c.event.version, model.price_of(c.before, c.event.version), c.now
        ),
    ),
    model.ModelDefaultVersionSet: _Rule(_fixed("default"), _former_default),
    model.ModelAliasAdded: _Rule(
        _per("alias", "alias"), lambda c: model.RemoveAlias(c.event.name, c.event.alias, c.now)
    ),
    model.ModelAliasRemoved: _Rule(
        _per("alias", "alias"), lambda c: model.AddAlias(c.event.name, c.event.alias, c.now)
    ),
    model.ModelAccessChanged: _Rule(
        _fixed("access"), lambda c: model.ChangeAccess(c.event.name, c.before.access, c.now)
    ),
}
_ROUTE_RULES: dict[type[Event], _Rule] = {
    route.RouteCreated: _Rule(_fixed("route"), lambda c: route.DeleteRoute(c.event.name, c.now)),
    route.RouteArmsChanged: _Rule(_fixed("route"), _former_arms),
    route.RouteDeleted: _Rule(_fixed("route"), _former_route),
}
_NODE_RULES: dict[type[Event], _Rule] = {
    node.NodeDrainStarted: _Rule(
        _fixed("drain"), lambda c: node.UndrainNode(c.event.node_id, c.now)
    ),
    node.NodeDrainEnded: _Rule(_fixed("drain"), _resume_drain),
    node.NodeRemoved: _Rule(_fixed("node"), "A node joins when its agent reports; start that."),
}
_RETENTION_RULES: dict[type[Event], _Rule] = {
    retention.RetentionSet: _Rule(
        _fixed("days"),
        lambda c: retention.SetRetention(c.event.kind, c.event.days_before, c.now),
    ),
    retention.SegmentRemoved: _Rule(
        _per("segment", "first"), "Its records lie in the archive, and are not put back."
    ),
}
_ROUTING_RULES: dict[type[Event], _Rule] = {
    routing.RoutingWeightsSet: _Rule(
        _fixed("weights"), lambda c: routing.SetRoutingWeights(asdict(c.event.before), c.now)
    ),
}
RULES = (
    _TENANT_RULES | _MODEL_RULES | _ROUTE_RULES | _NODE_RULES | _RETENTION_RULES | _ROUTING_RULES
)
_DECIDERS: tuple[Decider[Any], ...] = (
    tenant.DECIDER,
    model.DECIDER,
    route.DECIDER,
    node.DECIDER,
    retention.DECIDER,
    routing.DECIDER,
)
