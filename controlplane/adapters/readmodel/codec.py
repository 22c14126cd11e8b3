"""Rows of projections as rows of tables, and back; the SQL follows from the row class."""

from typing import Any, Generic, TypeVar, get_args

import msgspec

from controlplane.projections.base import Row

R = TypeVar("R", bound=Row)
_SCALARS = {str, int, float, bool, type(None)}


class Codec(Generic[R]):
    """A tuple, struct or mapping is kept as JSON in one column; everything else as it is."""

    def __init__(self, table: type[R]) -> None:
        self.table = table
        fields = msgspec.structs.fields(table)
        self.columns = tuple(field.name for field in fields)
        self._json = tuple(_is_nested(field.type) for field in fields)
        self.name = f"readmodel_{table.__name__.lower()}"
        quoted = [f'"{column}"' for column in self.columns]
        key, *others = quoted
        changes = ", ".join(f"{column} = excluded.{column}" for column in others)
        self.select = f"SELECT {', '.join(quoted)} FROM {self.name} ORDER BY {key}"
        self.delete = f"DELETE FROM {self.name} WHERE {key} = %s"
        self.delete_all = f"DELETE FROM {self.name}"
        self.upsert = (
            f"INSERT INTO {self.name} ({', '.join(quoted)})"
            f" VALUES ({', '.join(['%s'] * len(quoted))})"
            f" ON CONFLICT ({key}) DO UPDATE SET {changes}"
        )

    def encode(self, row: R) -> list[Any]:
        return [
            msgspec.json.encode(value).decode() if nested else value
            for value, nested in zip(msgspec.structs.astuple(row), self._json, strict=True)
        ]

    def decode(self, values: tuple[Any, ...]) -> R:
        """Not strict: SQLite gives booleans as 0 and 1."""
        fields = {
            column: msgspec.json.decode(value) if nested else value
            for column, value, nested in zip(self.columns, values, self._json, strict=True)
        }
        return msgspec.convert(fields, self.table, strict=False)


def _is_nested(kind: Any) -> bool:
    """Whether a field's type is more than a scalar or None."""
    members = get_args(kind) if type(None) in get_args(kind) else (kind,)
    return not all(member in _SCALARS for member in members)
