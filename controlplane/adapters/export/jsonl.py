"""A row a line, as canonical JSON: keys sorted, no spaces, an event's data as it is stored.

::

    {"actor":"user:ada","address":"10.0.0.1",…,"data":{"at":1.0,…},…,"leaf":"9c1f…","position":7,…}
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from controlplane.application.exports import Row, row_fields, shapes_of, widening

_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "float?": float | None,
    "text": str,
    "text?": str | None,
    "json": msgspec.Raw,
}


def _line_type(log: str, shape: str) -> Any:
    fields = [(name, _TYPES[kind]) for name, kind in row_fields(log, shape)]
    return msgspec.defstruct("Line", fields, forbid_unknown_fields=True)


class Jsonl:
    name = "jsonl"
    content_type = "application/x-ndjson"

    def __init__(self, log: str) -> None:
        self._log = log
        self._json = [at for at, (_, kind) in enumerate(row_fields(log)) if kind == "json"]
        self._shapes = shapes_of(log)
        self._shape = _line_type(log, self._shapes[0])
        self._encode_lines = msgspec.json.Encoder(order="sorted").encode_lines

    def start(self) -> bytes:
        return b""

    def rows(self, rows: Sequence[Row]) -> bytes:
        return self._encode_lines([self._line(row) for row in rows])

    def end(self) -> bytes:
        return b""

    def read(self, content: BinaryIO) -> Iterator[Row]:
        row_of = self.reader()
        return (row_of(line) for line in content)

    def reader(self) -> Callable[[bytes], Row]:
        """Gives the row of each line of one file, the first one first; raises ValueError."""
        astuple, decode = msgspec.structs.astuple, None
        widen: Callable[[Row], Row] = _same

        def row_of(line: bytes) -> Row:
            nonlocal decode, widen
            try:
                if decode is None:
                    shape, decode = self._decoder(line)
                    widen = widening(self._log, shape)
                values = astuple(decode(line))
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise ValueError(str(error)) from error
            return widen(self._plain(values) if self._json else values)

        return row_of

    def _decoder(self, line: bytes) -> tuple[str, Callable[[bytes], Any]]:
        """For a file that begins with ``line``: what was the newest shape when it was written."""
        for shape in self._shapes[1:]:
            decode = msgspec.json.Decoder(_line_type(self._log, shape)).decode
            with suppress(msgspec.MsgspecError, UnicodeError):
                decode(line)
                return shape, decode
        return self._shapes[0], msgspec.json.Decoder(self._shape).decode

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


def _same(row: Row) -> Row:
    return row
