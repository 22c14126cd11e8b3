"""The registry of everything the log may hold: type string and schema version, never a class path.

Stored bytes are canonical JSON (sorted keys, no spaces); the type string and
schema version are columns of their own. An old schema version is lifted by ``upcasters`` first.
"""

from typing import Any

import msgspec

from controlplane.domain import (
    audit,
    model,
    node,
    placement,
    retention,
    route,
    routing,
    scaling,
    tenant,
)
from controlplane.domain.decider import Event
from controlplane.domain.upcasters import lift


class UnknownEvent(Exception):
    """The log holds a type or a newer version than this build knows: stop, never guess."""


def _members(union: Any) -> tuple[type[Event], ...]:
    return tuple(getattr(union, "__args__", (union,)))


EVENT_TYPES: dict[str, type[Event]] = {
    kind.__struct_config__.tag: kind  # type: ignore[misc]
    for union in (
        tenant.TenantEvent,
        model.ModelEvent,
        route.RouteEvent,
        node.NodeEvent,
        placement.PlacementEvent,
        audit.AuditEvent,
        retention.RetentionEvent,
        routing.RoutingEvent,
        scaling.ScalingEvent,
    )
    for kind in _members(union)
}
# Type -> newest version; absent means 1.
SCHEMA_VERSIONS: dict[str, int] = {
    "ApiKeyIssued": 2,
    "CommandRefused": 2,
    "ModelAccessChanged": 2,
    "ModelVersionAdded": 7,
    "NodeJoined": 4,
    "PlacementDecided": 5,
    "ReplicaBecameReady": 2,
    "ReplicaFailed": 2,
    "ReplicaStateChanged": 2,
    "TenantBudgetSet": 2,
}

_encoder = msgspec.json.Encoder(order="sorted")
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in EVENT_TYPES.items()}
_of_today = {(name, SCHEMA_VERSIONS.get(name, 1)): one.decode for name, one in _decoders.items()}


def type_of(event: Event) -> str:
    return str(event.__struct_config__.tag)


def schema_version(name: str) -> int:
    return SCHEMA_VERSIONS.get(name, 1)


def encode(event: Event) -> bytes:
    """Canonical JSON of the event, type tag included (the tag repeats the column on purpose)."""
    return _encoder.encode(event)


def decode(name: str, version: int, data: bytes) -> Event:
    """The event in today's shape; raises UnknownEvent for a type or version of the future."""
    today = _of_today.get((name, version))
    if today is not None:  # nearly always
        return today(data)
    decoder, newest = _decoders.get(name), SCHEMA_VERSIONS.get(name, 1)
    if decoder is None or not 1 <= version <= newest:
        raise UnknownEvent(f"{name} version {version}")
    return decoder.decode(_encoder.encode(lift(name, version, newest, msgspec.json.decode(data))))
