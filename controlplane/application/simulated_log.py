"""The log of a simulation, into an event store: the same streams and versions, its own times.

What one stream holds of one moment is appended at once::

    ("placement", PlacementDecided at 900.0)           one append, recorded at 900.0
    ("node-n1", NodeAcknowledged at 901.0)
    ("node-n1", ReplicaStateChanged at 901.0)          one append of both, recorded at 901.0
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Protocol

from controlplane.application.ports import Append, EventMeta, EventStore
from controlplane.domain.decider import Event

META = EventMeta(actor="system:simulator", reason="a simulation")


class SettableClock(Protocol):
    """The clock that the store records by."""

    def set(self, now: float) -> None: ...


def write(store: EventStore, clock: SettableClock, events: Iterable[tuple[str, Event]]) -> int:
    """Append all, in order; how many."""
    number = 0
    for (stream, at), group in groupby(events, key=_moment):
        found = [event for _, event in group]
        clock.set(at)
        store.append(Append(stream, None, found, META))
        number += len(found)
    return number


def _moment(entry: tuple[str, Any]) -> tuple[str, float]:
    return entry[0], entry[1].at
