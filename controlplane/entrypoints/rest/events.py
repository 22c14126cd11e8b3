"""An event as the API shows it: the same for a page, a file and the live stream."""

from typing import Any

import msgspec

from controlplane.application.ports import RecordedEvent
from controlplane.domain.audit import undone_position
from controlplane.domain.decider import Event
from controlplane.domain.event_types import type_of


def event_data(event: Event) -> dict[str, Any]:
    """The event's fields, without the tag that repeats its type."""
    data = msgspec.to_builtins(event)
    return {name: value for name, value in data.items() if name != "type"}


def unrecorded(event: Event) -> dict[str, Any]:
    """``{type, data}`` of an event that is not (or need not be known to be) in the log."""
    return {"type": type_of(event), "data": event_data(event)}


def event_json(recorded: RecordedEvent) -> dict[str, Any]:
    return {
        "position": recorded.position,
        "stream": recorded.stream,
        "version": recorded.version,
        "type": recorded.type,
        "data": event_data(recorded.event),
        "actor": recorded.meta.actor,
        "reason": recorded.meta.reason,
        "undoes": undone_position(recorded.meta.causation_id),
        "recorded_at": recorded.recorded_at,
        "hash": recorded.hash.hex(),
    }


def visible(stream: str, tenant_id: str | None) -> bool:
    """Whoever is confined to a tenant sees that tenant's own stream and nothing else."""
    return tenant_id is None or stream == f"tenant-{tenant_id}"
