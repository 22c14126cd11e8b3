"""Undoing an event by its position: who may, what it would do, and doing it."""

import time
from typing import Any

import msgspec
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from controlplane import bootstrap
from controlplane.adapters.access import keys
from controlplane.application.order import Order
from controlplane.application.ports import RecordedEvent
from controlplane.application.undo import compensation
from controlplane.domain import tenant
from controlplane.domain.audit import cause_of_undo
from controlplane.domain.decider import Command
from controlplane.domain.errors import DomainError, NotFound
from controlplane.entrypoints.rest import reading, referring
from controlplane.entrypoints.rest.fields import MAX_POSITION
from controlplane.entrypoints.rest.granting import check_regrant
from controlplane.entrypoints.rest.writing import Write, perform, replayed

_RESOURCES: dict[type[Any], str] = {
    tenant.TenantBudgetSet: "budget",
    tenant.TenantBudgetReset: "budget",
    tenant.ApiKeyIssued: "key",
    tenant.ApiKeyRotated: "key",
    tenant.ApiKeySuspended: "key",
    tenant.ApiKeyResumed: "key",
    tenant.ApiKeyRevoked: "key",
    tenant.TenantCaptureStarted: "text",
    tenant.TenantCaptureStopped: "text",
    tenant.TenantTextErased: "text",
}


def recorded_at(position: int) -> RecordedEvent:
    """Raises NotFound for a position that the log does not hold."""
    lawful = 0 < position <= MAX_POSITION
    found = bootstrap.event_store().read_all(position - 1, 1, position) if lawful else []
    if not found:
        raise NotFound("event", str(position))
    return found[0]


def resource_of(recorded: RecordedEvent) -> str:
    """Whoever may undo a change is whoever may make it."""
    return _RESOURCES.get(type(recorded.event), recorded.stream.partition("-")[0])


def undo(request: Request, recorded: RecordedEvent, body: dict[str, Any]) -> HttpResponseBase:
    """The receipt of the compensating command, or with ``dry_run`` its preview."""
    try:
        order = _order(recorded)
    except DomainError:
        first = replayed(request)  # undone by this very request, whose answer was lost
        if first is not None:
            return first
        raise
    if isinstance(order.command, tenant.ResumeApiKey):
        check_regrant(request, order.target, order.command.key_id)
    response = perform(request, _write(recorded, order, body))
    if isinstance(order.command, tenant.RevokeApiKey) and "X-Log-Position" in response:
        keys.forget_key(order.command.key_id)
    return reading.in_effect(response) if resource_of(recorded) == "budget" else response


def _order(recorded: RecordedEvent) -> Order:
    stream = bootstrap.event_store().read_stream(recorded.stream)
    order = compensation(stream, recorded.position, time.time())
    referring.check(order.command)
    return order


def _write(recorded: RecordedEvent, order: Order, body: dict[str, Any]) -> Write:
    shown = {"undoes": recorded.position, "commands": [_shown(order.command)]}
    reason = body.get("reason") or f"Undoes {recorded.type} at position {recorded.position}."
    return Write(
        order.decider,
        order.target,
        order.command,
        reason,
        extra=lambda _: shown,
        causation_id=cause_of_undo(recorded.position),
    )


def _shown(command: Command) -> dict[str, Any]:
    data = msgspec.to_builtins(command)
    return {
        "type": type(command).__name__,
        "data": {name: value for name, value in data.items() if name != "now"},
    }
