"""A row a line, as canonical JSON: keys sorted, no spaces, an event's data as it is stored.

::

    {"actor":"user:ada","address":"10.0.0.1",…,"data":{"at":1.0,…},…,"leaf":"9c1f…","position":7,…}
"""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from controlplane.application.exports import Row, row_fields

_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "float?": float | None,
    "text": str,
    "text?": str | None,
    "json": msgspec.Raw,
}


class Jsonl:
    name = "jsonl"
    content_type = "application/x-ndjson"

    def __init__(self, log: str) -> None:
        fields = row_fields(log)
        self._json = [at for at, (_, kind) in enumerate(fields) if kind == "json"]
        shape = msgspec.defstruct(
            "Line", [(name, _TYPES[kind]) for name, kind in fields], forbid_unknown_fields=True
        )
        self._shape: Any = shape
        self._encode_lines = msgspec.json.Encoder(order="sorted").encode_lines
        self._decode = msgspec.json.Decoder(shape).decode

    def start(self) -> bytes:
        return b""

    def rows(self, rows: Sequence[Row]) -> bytes:
        return self._encode_lines([self._line(row) for row in rows])

    def end(self) -> bytes:
        return b""

    def read(self, content: BinaryIO) -> Iterator[Row]:
        astuple = msgspec.structs.astuple
        for line in content:
            try:
                values = astuple(self._decode(line))
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise ValueError(str(error)) from error
            if self._json:
                values = self._plain(values)
            yield values

    def _line(self, row: Row) -> Any:
        if not self._json:
            return self._shape(*row)
        values = list(row)
        for at in self._json:
            values[at] = msgspec.Raw(values[at])
        return self._shape(*values)

    def _plain(self, values: Row) -> Row:
        plain = list(values)
        for at in self._json:
            plain[at] = bytes(plain[at])
        return tuple(plain)
