"""The admin audit: who did what to which thing, when, from where; refused orders too.

What agents report and planners decide is not in it: those are ``fleet`` and ``decisions``. An
entry shows what the order changed, as it was and as it became; for that this projection comes
before the others, and tries their handlers on rows that are not kept (see ``trial``).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import msgspec

from controlplane.domain import audit, model, node, retention, route, routing, tenant
from controlplane.domain.audit import CommandRefused, undone_position
from controlplane.domain.decider import Event
from controlplane.projections import catalog, fleet, routes, tenants
from controlplane.projections.base import Handler, Projection, Recorded, Row, Rows
from controlplane.projections.trial import Trial


class AuditEntry(Row, frozen=True):
    """``outcome``: done | refused. ``action``: the event's type, or the refused command's name.
    ``detail`` says why it was refused, ``reason`` why it was wanted. ``before`` and ``after``: by
    thing, the fields that changed; ``asked``: what a refused command asked for."""

    history: ClassVar = True

    position: int
    at: float
    actor: str
    address: str
    action: str
    target: str
    outcome: str
    code: str
    detail: str
    reason: str
    correlation_id: str
    before: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    after: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    asked: dict[str, Any] = msgspec.field(default_factory=dict)
    undoes: int | None = None


def _done(rows: Rows, event: Any, recorded: Recorded) -> None:
    trial = Trial(rows)
    for handler in _CHANGING[type(event)]:
        handler(trial, event, recorded)
    changed = trial.differences()
    rows.put(
        _entry(
            recorded,
            event.at,
            recorded.type,
            recorded.stream,
            before={thing: before for thing, (before, _) in changed.items() if before},
            after={thing: after for thing, (_, after) in changed.items() if after},
        )
    )


def _refused(rows: Rows, event: CommandRefused, recorded: Recorded) -> None:
    rows.put(
        _entry(
            recorded,
            event.at,
            event.command,
            event.target,
            "refused",
            event.code,
            event.detail,
            asked=event.asked,
        )
    )


def _of_access(rows: Rows, event: Any, recorded: Recorded) -> None:
    """Users, logins, limits, weights, retention and epochs are no rows of the read model: the
    event says all there is."""
    changes: dict[str, Any]
    match event:
        case audit.DashboardUserSaved():
            thing = f"user {event.username}"
            changes = {
                "before": {thing: {"role": event.role_before}} if event.role_before else {},
                "after": {thing: {"role": event.role, "tenant_id": event.tenant_id}},
            }
        case audit.SignedIn():
            thing = f"user {event.username}"
            changes = {"after": {thing: {"signed_in_by": event.method}}}
        case retention.RetentionSet():
            thing = f"retention {event.kind}"
            changes = {
                "before": {thing: {"days": event.days_before}},
                "after": {thing: {"days": event.days}},
            }
        case retention.SegmentRemoved():
            thing = f"retention {event.kind}"
            moved = {"first": event.first, "upto": event.upto, "archive": event.archive}
            changes = {"after": {thing: moved}}
        case routing.RoutingWeightsSet():
            thing = f"routing {routing.NAME}"
            changes = _weights_changed(thing, event)
        case audit.EpochAdvanced():
            thing = "controller epoch"
            changes = {
                "before": {thing: {"epoch": event.epoch_before}},
                "after": {thing: {"epoch": event.epoch}},
            }
        case audit.TextRead():
            thing = f"tenant {event.tenant_id}"
            changes = {"after": {f"request {event.request_id}": {"text": "read"}}}
        case _:
            thing = f"gateway {event.gateway}"
            policy = getattr(event, "policy", "shared")
            changes = {"after": {thing: {"limits": policy}}}
    rows.put(_entry(recorded, event.at, recorded.type, thing.replace(" ", "-", 1), **changes))


def _weights_changed(
    thing: str, event: routing.RoutingWeightsSet
) -> dict[str, dict[str, dict[str, Any]]]:
    """Those that changed alone."""
    before, after = (msgspec.to_builtins(one) for one in (event.before, event.after))
    names = [name for name in after if before[name] != after[name]]
    return {
        "before": {thing: {name: before[name] for name in names}},
        "after": {thing: {name: after[name] for name in names}},
    }


def _entry(
    recorded: Recorded,
    at: float,
    action: str,
    target: str,
    outcome: str = "done",
    code: str = "",
    detail: str = "",
    **shown: Any,
) -> AuditEntry:
    meta = recorded.meta
    return AuditEntry(
        recorded.position,
        at,
        meta.actor,
        meta.address,
        action,
        target,
        outcome,
        code,
        detail,
        meta.reason,
        meta.correlation_id,
        undoes=undone_position(meta.causation_id),
        **shown,
    )


ADMINISTRATIVE: tuple[type[Event], ...] = (
    *get_args(tenant.TenantEvent),
    *get_args(model.ModelEvent),
    *get_args(route.RouteEvent),
    node.NodeDrainStarted,
    node.NodeDrainEnded,
    node.NodeRemoved,
    *get_args(retention.RetentionEvent),
    routing.RoutingWeightsSet,
)
_CHANGED: Sequence[Projection] = (
    tenants.PROJECTION,
    catalog.PROJECTION,
    routes.PROJECTION,
    fleet.PROJECTION,
)
_CHANGING: defaultdict[type[Event], list[Handler]] = defaultdict(list)
for _projection in _CHANGED:
    for _kind, _handler in _projection.handlers.items():
        _CHANGING[_kind].append(_handler)

_HANDLERS: dict[type[Event], Handler] = {kind: _done for kind in ADMINISTRATIVE}

PROJECTION = Projection(
    "audit",
    6,
    (AuditEntry,),
    {
        **_HANDLERS,
        CommandRefused: _refused,
        audit.DashboardUserSaved: _of_access,
        audit.SignedIn: _of_access,
        audit.LimitsUnshared: _of_access,
        audit.LimitsShared: _of_access,
        audit.TextRead: _of_access,
        audit.EpochAdvanced: _of_access,
        retention.RetentionSet: _of_access,
        retention.SegmentRemoved: _of_access,
        routing.RoutingWeightsSet: _of_access,
    },
)
