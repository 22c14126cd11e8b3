"""The admin audit: who did what to which thing, when, from where; refused orders too.

What agents report and planners decide is not in it: those are ``fleet`` and ``decisions``.
"""

from typing import ClassVar, get_args

from controlplane.domain import model, node, route, tenant
from controlplane.domain.audit import CommandRefused
from controlplane.domain.decider import Event
from controlplane.projections.base import Handler, Projection, Recorded, Row, Rows


class AuditEntry(Row, frozen=True):
    """``outcome``: done | refused. ``action``: the event's type, or the refused command's name."""

    history: ClassVar = True

    position: int
    at: float
    actor: str
    address: str
    action: str
    target: str
    outcome: str
    code: str
    reason: str
    correlation_id: str


def _done(rows: Rows, event: tenant.TenantEvent, recorded: Recorded) -> None:
    _put(rows, event.at, recorded, recorded.type, recorded.stream, "done", "", recorded.meta.reason)


def _refused(rows: Rows, event: CommandRefused, recorded: Recorded) -> None:
    about = (event.command, event.target, "refused", event.code, event.detail)
    _put(rows, event.at, recorded, *about)


def _put(rows: Rows, at: float, recorded: Recorded, *about: str) -> None:
    action, target, outcome, code, reason = about
    meta = recorded.meta
    rows.put(
        AuditEntry(
            recorded.position,
            at,
            meta.actor,
            meta.address,
            action,
            target,
            outcome,
            code,
            reason,
            meta.correlation_id,
        )
    )


ADMINISTRATIVE: tuple[type[Event], ...] = (
    *get_args(tenant.TenantEvent),
    *get_args(model.ModelEvent),
    *get_args(route.RouteEvent),
    node.NodeDrainStarted,
    node.NodeDrainEnded,
)
_HANDLERS: dict[type[Event], Handler] = {kind: _done for kind in ADMINISTRATIVE}

PROJECTION = Projection("audit", 1, (AuditEntry,), {**_HANDLERS, CommandRefused: _refused})
