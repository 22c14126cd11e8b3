"""Rows in memory, indexed, with a record of what changed since it was last asked.

Reading is safe from other threads while one thread writes: what ``find`` and ``all`` return is
copied in one step that no other thread can interrupt.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from controlplane.projections.base import Key, R, Row, key_of


class MemoryRows:
    """``projections.base.Rows``."""

    def __init__(self) -> None:
        self._tables: defaultdict[type[Row], dict[Key, Any]] = defaultdict(dict)
        self._indexes: defaultdict[tuple[type[Row], str, Any], dict[Key, Any]] = defaultdict(dict)
        self._changed: dict[tuple[type[Row], Key], None] = {}

    def get(self, table: type[R], key: Key) -> R | None:
        return self._tables[table].get(key)

    def put(self, row: Row) -> None:
        table, key = type(row), key_of(row)
        rows = self._tables[table]
        if table.indexed:
            self._index(table, key, rows.get(key), row)
        rows[key] = row
        self._changed[table, key] = None

    def delete(self, table: type[R], key: Key) -> None:
        old = self._tables[table].pop(key, None)
        if old is not None:
            self._unindex(table, key, old)
            self._changed[table, key] = None

    def find(self, table: type[R], **equal: Any) -> tuple[R, ...]:
        ((field, value),) = equal.items()
        assert field in table.indexed, f"{table.__name__}.{field} is not indexed"
        found = self._indexes.get((table, field, value))
        return tuple(found.values()) if found else ()

    def all(self, table: type[R]) -> tuple[R, ...]:
        return tuple(self._tables[table].values())

    def count(self, table: type[Row]) -> int:
        return len(self._tables[table])

    def take_changes(self) -> list[tuple[type[Row], Key, Row | None]]:
        """What was put (with the row) or deleted (with None) since the last call."""
        changed, self._changed = self._changed, {}
        return [(table, key, self._tables[table].get(key)) for table, key in changed]

    def load(self, rows: Iterable[Row]) -> None:
        """Put rows that count as unchanged."""
        for row in rows:
            self.put(row)
        self._changed.clear()

    def forget_history(self) -> None:
        """Drop the rows that no handler reads."""
        for table in self._tables:
            if table.history:
                self._tables[table].clear()

    def _index(self, table: type[Row], key: Key, old: Row | None, new: Row) -> None:
        for field in table.indexed:
            value = getattr(new, field)
            if old is not None and (before := getattr(old, field)) != value:
                self._indexes[table, field, before].pop(key, None)
            self._indexes[table, field, value][key] = new

    def _unindex(self, table: type[Row], key: Key, old: Row) -> None:
        for field in table.indexed:
            self._indexes[table, field, getattr(old, field)].pop(key, None)
