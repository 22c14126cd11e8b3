"""Records as JSONL or CSV, in a stream, with the manifest of exactly those bytes.

JSONL holds the record as it is, keys sorted. CSV is RFC 4180 and safe to open in a spreadsheet: a
text cell that a spreadsheet would run as a formula starts with a ``'``::

    {"actor": "=HYPERLINK(...)", "position": 7}   ->   '=HYPERLINK(...),7

The manifest says how many records there are, the first and the last position, and the SHA-256 of
the content, so that whoever receives the file can tell that it is whole::

    export = Export("csv", ("position", "actor"))
    for chunk in export.chunks(records):
        file.write(chunk)
    export.manifest  # Manifest(count=…, first_position=…, last_position=…, sha256=…)
"""

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

FORMATS = ("jsonl", "csv")
CONTENT_TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_CHUNK_RECORDS = 200

_json = msgspec.json.Encoder(order="sorted")


class Manifest(msgspec.Struct, frozen=True):
    """``first_position`` and ``last_position`` are 0 if there is no record."""

    format: str
    count: int
    first_position: int
    last_position: int
    sha256: str


class Export:
    """One pass over records that have a ``position``; ``columns`` are the CSV's, in order."""

    def __init__(self, kind: str, columns: Sequence[str]) -> None:
        self._kind, self._columns = kind, columns
        self._hash = hashlib.sha256()
        self._count = self._first = self._last = 0

    def chunks(self, records: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        """The content, in pieces of about 200 records."""
        if self._kind == "csv":
            yield self._counted(_csv_line(self._columns))
        lines: list[bytes] = []
        for record in records:
            lines.append(self._line(record))
            self._note(int(record["position"]))
            if len(lines) == _CHUNK_RECORDS:
                yield self._counted(b"".join(lines))
                lines.clear()
        if lines:
            yield self._counted(b"".join(lines))

    @property
    def manifest(self) -> Manifest:
        """Of what ``chunks`` has given so far."""
        return Manifest(self._kind, self._count, self._first, self._last, self._hash.hexdigest())

    def _note(self, position: int) -> None:
        self._first = self._first or position
        self._last = position
        self._count += 1

    def _counted(self, chunk: bytes) -> bytes:
        self._hash.update(chunk)
        return chunk

    def _line(self, record: dict[str, Any]) -> bytes:
        if self._kind == "jsonl":
            return _json.encode(record) + b"\n"
        return _csv_line([record[column] for column in self._columns])


def _csv_line(cells: Sequence[Any]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow([_cell(cell) for cell in cells])
    return line.getvalue().encode()


def _cell(value: Any) -> Any:
    """Numbers stay numbers; structures become JSON; text is made harmless."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else _json.encode(value).decode()
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
