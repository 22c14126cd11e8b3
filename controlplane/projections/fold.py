"""Folds a stretch of the log into rows: the same functions live, in a rebuild and for ``as_of``."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec

from controlplane.domain.decider import Event
from controlplane.projections import (
    audit,
    catalog,
    decisions,
    demand,
    fleet,
    routes,
    standing,
    tenants,
)
from controlplane.projections.base import Handler, Projection, R, Recorded, Row, Rows, key_of
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
ALL = (audit.PROJECTION, *STATE, decisions.PROJECTION, demand.PROJECTION)

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


def line_of(row: Row) -> bytes:
    """A row as it is hashed."""
    return _encode((type(row).__name__, row)) + b"\n"


class StateHash:
    """SHA-256 over rows of many tables, fed bit by bit, so that no state need be held to hash it.

    The rows of a table come in the order of ``in_order``; tables may come in any order, mixed.
    """

    def __init__(self, projections: Sequence[Projection] = ALL) -> None:
        self._digests = {table.__name__: sha256() for table in tables(projections)}

    def add(self, table: type[Row], lines: Iterable[bytes]) -> None:
        """``lines``: ``line_of`` each row."""
        digest = self._digests[table.__name__]
        for line in lines:
            digest.update(line)

    def hexdigest(self) -> str:
        whole = sha256()
        for name, digest in sorted(self._digests.items()):
            whole.update(f"{name} {digest.hexdigest()}\n".encode())
        return whole.hexdigest()


def in_order(table: type[R], rows: Iterable[R]) -> list[R]:
    """By key; history as the log has it, by position and then key."""
    if table.history:
        return sorted(rows, key=lambda row: (row.position, key_of(row)))  # type: ignore[attr-defined]
    return sorted(rows, key=key_of)


def state_hash(rows: MemoryRows, projections: Sequence[Projection] = ALL) -> str:
    """SHA-256 (hex) over every row of every table."""
    digest = StateHash(projections)
    for table in tables(projections):
        digest.add(table, map(line_of, in_order(table, rows.all(table))))
    return digest.hexdigest()
