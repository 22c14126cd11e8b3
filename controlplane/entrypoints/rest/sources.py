"""Where rows come from: the read model as it is now, or the log folded up to a position.

Both give the same row structs, so whatever renders them cannot tell the difference; that makes
``as_of`` the same answer that was given then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from django.apps import apps
from django.db import models

from controlplane.projections.base import Row, Rows, key_of

R = TypeVar("R", bound=Row)
T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """Which rows: ``equal`` fields, then ``keep`` (a filter no column can express), by ``order``
    (a field, with ``-`` descending)."""

    equal: dict[str, Any] = field(default_factory=dict)
    keep: Callable[[Any], bool] | None = None
    order: str = ""


class Source(Protocol):
    def get(self, table: type[R], key: str) -> R | None: ...

    def select(self, table: type[R], selection: Selection = Selection()) -> list[R]: ...


def page(rows: Sequence[T], query: dict[str, Any]) -> tuple[int, Sequence[T]]:
    """The count, and the stretch that ``offset`` and ``limit`` name."""
    start = query["offset"]
    return len(rows), rows[start : start + query["limit"]]


class DatabaseSource:
    """The read model's tables. Lists are of a fleet's size, so they are filtered and cut here;
    what grows with the log (events, requests, decisions) is paged by position in SQL."""

    def get(self, table: type[R], key: str) -> R | None:
        found = model_of(table).objects.filter(pk=key).values().first()
        return None if found is None else row_of(table, found)

    def select(self, table: type[R], selection: Selection = Selection()) -> list[R]:
        order = selection.order or table.__struct_fields__[0]
        found = model_of(table).objects.filter(**selection.equal).order_by(order)
        rows = [row_of(table, values) for values in found.values()]
        return [row for row in rows if selection.keep is None or selection.keep(row)]


class FoldedSource:
    """Rows in memory, from ``projections.fold``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def get(self, table: type[R], key: str) -> R | None:
        return self._rows.get(table, key)

    def select(self, table: type[R], selection: Selection = Selection()) -> list[R]:
        order = selection.order.removeprefix("-")
        rows = [
            row
            for row in self._rows.all(table)
            if all(getattr(row, name) == value for name, value in selection.equal.items())
            and (selection.keep is None or selection.keep(row))
        ]
        by = (lambda row: getattr(row, order)) if order else key_of
        return sorted(rows, key=by, reverse=selection.order.startswith("-"))


def model_of(table: type[Row]) -> Any:
    """The Django model of a row class: they have the same name."""
    found: type[models.Model] = apps.get_model("readmodel", table.__name__)
    return found


def row_of(table: type[R], values: dict[str, Any]) -> R:
    return msgspec.convert(values, table)
