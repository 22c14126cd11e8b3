"""Folds a stretch of the log into rows: the same functions live, in a rebuild and for ``as_of``."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec

from controlplane.domain.decider import Event
from controlplane.projections import audit, catalog, decisions, fleet, routes, standing, tenants
from controlplane.projections.base import Handler, Projection, Recorded, Row, Rows, key_of
from controlplane.projections.memory import MemoryRows

# What a gateway or a planner needs; and with it what only people read, which grows with the log.
STATE = (
    tenants.PROJECTION,
    catalog.PROJECTION,
    routes.PROJECTION,
    fleet.PROJECTION,
    standing.PROJECTION,
)
# The audit comes first: it shows what an event changes, so it must see the rows before.
ALL = (audit.PROJECTION, *STATE, decisions.PROJECTION)

_encode = msgspec.json.Encoder(order="sorted").encode


class Folder:
    """Applies events to ``rows`` by the given projections, in their order."""

    def __init__(self, rows: Rows, projections: Sequence[Projection] = STATE) -> None:
        self.rows = rows
        self._handlers: defaultdict[type[Event], list[Handler]] = defaultdict(list)
        for projection in projections:
            for kind, handler in projection.handlers.items():
                self._handlers[kind].append(handler)

    def apply(self, recorded: Recorded) -> None:
        event = recorded.event
        for handler in self._handlers.get(type(event), ()):
            handler(self.rows, event, recorded)


def fold_rows(events: Iterable[Recorded], projections: Sequence[Projection] = STATE) -> MemoryRows:
    """The rows after ``events``, which start at position 1."""
    folder = Folder(rows := MemoryRows(), projections)
    for recorded in events:
        folder.apply(recorded)
    return rows


def tables(projections: Sequence[Projection] = ALL) -> tuple[type[Row], ...]:
    return tuple(table for projection in projections for table in projection.tables)


def fingerprint(projections: Sequence[Projection] = ALL) -> str:
    """Changes with every projection's version: rows kept under another one are out of date."""
    return ",".join(f"{projection.name}:{projection.version}" for projection in projections)


def state_hash(rows: MemoryRows, projections: Sequence[Projection] = ALL) -> str:
    """SHA-256 (hex) over every row of every table, in the order of names and keys."""
    digest = sha256()
    for table in sorted(tables(projections), key=lambda table: table.__name__):
        for row in sorted(rows.all(table), key=key_of):
            digest.update(_encode((table.__name__, row)) + b"\n")
    return digest.hexdigest()
