"""Rows in memory, indexed, with a record of what changed since it was last asked.

Reading is safe from other threads while one thread writes: what ``find`` and ``all`` return is
copied in one step that no other thread can interrupt.
"""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from controlplane.projections.base import Key, R, Row


class _Table:
    """``rows`` by key; ``indexes``: by field, its getter and the rows by its value and key."""

    __slots__ = ("indexes", "key_of", "rows")

    def __init__(self, kind: type[Row]) -> None:
        self.key_of = attrgetter(kind.__struct_fields__[0])
        self.rows: dict[Key, Any] = {}
        self.indexes = {
            field: (attrgetter(field), defaultdict[Any, dict[Key, Any]](dict))
            for field in kind.indexed
        }

    def index(self, key: Key, old: Row | None, new: Row) -> None:
        for value_of, index in self.indexes.values():
            value = value_of(new)
            if old is not None and (before := value_of(old)) != value:
                del index[before][key]
            index[value][key] = new

    def unindex(self, key: Key, old: Row) -> None:
        for value_of, index in self.indexes.values():
            del index[value_of(old)][key]


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
        key, rows = table.key_of(row), table.rows
        if table.indexes:
            table.index(key, rows.get(key), row)
        rows[key] = row
        self._changed[kind, key] = None

    def delete(self, table: type[R], key: Key) -> None:
        kept = self._tables[table]
        old = kept.rows.pop(key, None)
        if old is not None:
            kept.unindex(key, old)
            self._changed[table, key] = None

    def find(self, table: type[R], **equal: Any) -> tuple[R, ...]:
        ((field, value),) = equal.items()
        assert field in table.indexed, f"{table.__name__}.{field} is not indexed"
        found = self._tables[table].indexes[field][1].get(value)
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
