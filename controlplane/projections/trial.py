"""What an event would change: the projections' own handlers, run on rows that are not kept.

For the audit, which shows each change as it was and as it became::

    trial = Trial(rows)  # rows before the event
    handler(trial, TenantTierChanged("acme", "premium"), recorded)
    trial.differences()  # {"tenant acme": ({"tier": "free"}, {"tier": "premium"})}

Rejected: a table of which event changes which fields. It would be a second, unchecked description
of the handlers.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import astuple

from controlplane.projections.base import Key, R, Row, key_of

Fields = dict[str, Any]

# Counters and ids that change with everything and say nothing to whoever reads an audit.
_NOISE = frozenset({"version", "last_seen", "secret_id", "previous_secret_id", "num_keys"})


class Trial:
    """``projections.base.Rows`` over other rows, which stay as they are."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._tried: dict[tuple[type[Row], Key], Row | None] = {}

    def get(self, table: type[R], key: Key) -> R | None:
        if (table, key) in self._tried:
            return self._tried[table, key]  # type: ignore[return-value]
        found: R | None = self._rows.get(table, key)
        return found

    def put(self, row: Row) -> None:
        self._tried[type(row), key_of(row)] = row

    def delete(self, table: type[R], key: Key) -> None:
        self._tried[table, key] = None

    def find(self, table: type[R], **equal: Any) -> tuple[R, ...]:
        ((field, value),) = equal.items()
        kept = self._untried(table, self._rows.find(table, **equal))
        return (*kept, *(row for row in self._of(table) if getattr(row, field) == value))

    def all(self, table: type[R]) -> tuple[R, ...]:
        return (*self._untried(table, self._rows.all(table)), *self._of(table))

    def differences(self) -> dict[str, tuple[Fields, Fields]]:
        """By thing, the fields that differ: before and after. A new thing was nothing before."""
        found = {}
        for (table, key), after in self._tried.items():
            before = self._rows.get(table, key)
            names = _differing(table, before, after)
            if names:
                found[f"{_kind(table)} {key}"] = _told(before, names), _told(after, names)
        return found

    def _untried(self, table: type[R], rows: tuple[R, ...]) -> Iterator[R]:
        return (row for row in rows if (table, key_of(row)) not in self._tried)

    def _of(self, table: type[R]) -> Iterator[R]:
        for (kind, _), row in self._tried.items():
            if kind is table and row is not None:
                yield row  # type: ignore[misc]


def _differing(table: type[Row], before: Row | None, after: Row | None) -> list[str]:
    """Names of fields, sorted. What was not, or is no more, had None in all of them."""
    names = table.__struct_fields__
    nothing = (None,) * len(names)
    was = nothing if before is None else astuple(before)
    became = nothing if after is None else astuple(after)
    differ = [name for name, a, b in zip(names, was, became, strict=True) if a != b]
    return sorted(name for name in differ if name not in _NOISE)


def _told(row: Row | None, names: list[str]) -> Fields:
    return {} if row is None else {one: msgspec.to_builtins(getattr(row, one)) for one in names}


@cache
def _kind(table: type[Row]) -> str:
    return "".join(f" {c.lower()}" if c.isupper() else c for c in table.__name__).strip()
