"""What an event would change: the projections' own handlers, run on rows that are not kept.

For the audit, which shows each change as it was and as it became::

    trial = Trial(rows)  # rows before the event
    handler(trial, TenantTierChanged("acme", "premium"), recorded)
    trial.differences()  # {"tenant acme": ({"tier": "free"}, {"tier": "premium"})}

Rejected: a table of which event changes which fields. It would be a second, unchecked description
of the handlers.
"""

from collections.abc import Callable
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, ne
from typing import Any

import msgspec

from controlplane.projections.base import Key, R, Row, key_of

Fields = dict[str, Any]

# Counters and ids that change with everything and say nothing to whoever reads an audit.
_NOISE = frozenset({"version", "last_seen", "secret_id", "previous_secret_id", "num_keys"})


class Trial:
    """``projections.base.Rows`` over other rows, which stay as they are."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._tried: dict[type[Row], dict[Key, Any]] = {}  # None: deleted

    def get(self, table: type[R], key: Key) -> R | None:
        tried = self._tried.get(table)
        if tried is not None and key in tried:
            return tried[key]
        found: R | None = self._rows.get(table, key)
        return found

    def put(self, row: Row) -> None:
        self._tried.setdefault(type(row), {})[key_of(row)] = row

    def delete(self, table: type[R], key: Key) -> None:
        self._tried.setdefault(table, {})[key] = None

    def find(self, table: type[R], field: str, value: Any) -> tuple[R, ...]:
        rows: tuple[R, ...] = self._rows.find(table, field, value)
        tried = self._tried.get(table)
        if not tried:
            return rows
        return (
            *_without(rows, tried),
            *(row for row in _put(tried) if getattr(row, field) == value),
        )

    def all(self, table: type[R]) -> tuple[R, ...]:
        tried = self._tried.get(table, {})
        return (*_without(self._rows.all(table), tried), *_put(tried))

    def differences(self) -> dict[str, tuple[Fields, Fields]]:
        """By thing, the fields that differ: before and after. A new thing was nothing before."""
        found = {}
        for table, tried in self._tried.items():
            for key, after in tried.items():
                before = self._rows.get(table, key)
                names = _differing(table, before, after)
                if names:
                    found[f"{_kind(table)} {key}"] = _told(before, names), _told(after, names)
        return found


def _without(rows: tuple[R, ...], tried: dict[Key, Any]) -> list[R]:
    return [row for row in rows if key_of(row) not in tried]


def _put(tried: dict[Key, Any]) -> list[Any]:
    return [row for row in tried.values() if row is not None]


def _differing(table: type[Row], before: Row | None, after: Row | None) -> list[str]:
    """Names of fields, sorted. What was not, or is no more, had None in all of them."""
    names, values_of = _fields(table)
    was = repeat(None) if before is None else values_of(before)
    became = repeat(None) if after is None else values_of(after)
    return list(compress(names, map(ne, was, became)))


@cache
def _fields(table: type[Row]) -> tuple[tuple[str, ...], Callable[[Row], tuple[Any, ...]]]:
    """The fields that are told of, sorted, and what gives their values in a row."""
    names = tuple(sorted(set(table.__struct_fields__) - _NOISE))
    return names, attrgetter(*names)


def _told(row: Row | None, names: list[str]) -> Fields:
    return {} if row is None else {one: msgspec.to_builtins(getattr(row, one)) for one in names}


@cache
def _kind(table: type[Row]) -> str:
    return "".join(f" {c.lower()}" if c.isupper() else c for c in table.__name__).strip()
