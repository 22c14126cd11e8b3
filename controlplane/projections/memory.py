"""Rows in memory, indexed, with a record of what changed since it was last asked.

Reading is safe from other threads while one thread writes: what ``find`` and ``all`` return is
copied in one step that no other thread can interrupt.
"""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from controlplane.projections.base import Key, R, Row

_NOWHERE: tuple[Any, list[dict[Key, Any]]] = (object(), [])  # as no row's values, None included


class _Table:
    """``rows`` by key. ``indexes``: by field, the rows by its value and key. ``places``: by key,
    the values that a row is found by (``values_of``) and the dicts that hold it for them, so that
    a row whose values are as before is put there at once."""

    __slots__ = ("indexes", "key_of", "places", "rows", "values_of")

    def __init__(self, kind: type[Row]) -> None:
        self.key_of = attrgetter(kind.__struct_fields__[0])
        self.values_of = attrgetter(*kind.indexed) if kind.indexed else None
        self.rows: dict[Key, Any] = {}
        self.indexes = {field: defaultdict[Any, dict[Key, Any]](dict) for field in kind.indexed}
        self.places: dict[Key, tuple[Any, list[dict[Key, Any]]]] = {}

    def move(self, key: Key, values: Any, row: Row) -> list[dict[Key, Any]]:
        """Where ``row`` is to be held from now on; nowhere else is any with its key."""
        self.leave(key)
        held = [index[getattr(row, field)] for field, index in self.indexes.items()]
        self.places[key] = values, held
        return held

    def leave(self, key: Key) -> None:
        _, held = self.places.pop(key, (None, ()))
        for rows in held:
            del rows[key]


class _Tables(dict[type[Row], _Table]):
    def __missing__(self, kind: type[Row]) -> _Table:
        return self.setdefault(kind, _Table(kind))  # in one step: another thread may ask too


class MemoryRows:
    """``projections.base.Rows``."""

    def __init__(self) -> None:
        self._tables = _Tables()
        self._changed: dict[tuple[type[Row], Key], None] = {}

    def get(self, table: type[R], key: Key) -> R | None:
        return self._tables[table].rows.get(key)

    def put(self, row: Row) -> None:
        kind = type(row)
        table = self._tables[kind]
        key = table.key_of(row)
        if table.values_of is not None:
            values = table.values_of(row)
            known, held = table.places.get(key, _NOWHERE)
            if known != values:
                held = table.move(key, values, row)
            for rows in held:
                rows[key] = row
        table.rows[key] = row
        self._changed[kind, key] = None

    def delete(self, table: type[R], key: Key) -> None:
        kept = self._tables[table]
        if kept.rows.pop(key, None) is not None:
            kept.leave(key)
            self._changed[table, key] = None

    def find(self, table: type[R], field: str, value: Any) -> tuple[R, ...]:
        assert field in table.indexed, f"{table.__name__}.{field} is not indexed"
        found = self._tables[table].indexes[field].get(value)
        return tuple(found.values()) if found else ()

    def all(self, table: type[R]) -> tuple[R, ...]:
        return tuple(self._tables[table].rows.values())

    def count(self, table: type[Row]) -> int:
        return len(self._tables[table].rows)

    def take_changes(self) -> list[tuple[type[Row], Key, Row | None]]:
        """What was put (with the row) or deleted (with None) since the last call."""
        changed, self._changed = self._changed, {}
        return [(table, key, self._tables[table].rows.get(key)) for table, key in changed]

    def load(self, rows: Iterable[Row]) -> None:
        """Put rows that count as unchanged."""
        for row in rows:
            self.put(row)
        self._changed.clear()

    def forget_history(self) -> None:
        """Drop the rows that no handler reads."""
        for kind, table in list(self._tables.items()):
            if kind.history:
                table.rows.clear()
