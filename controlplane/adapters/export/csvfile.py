"""RFC 4180, safe to open in a spreadsheet, and still reversible.

A text cell that a spreadsheet would run as a formula gets a ``'`` in front, and so does one that
starts with a ``'`` already, so that a reader takes exactly one away::

    =HYPERLINK(…)   ->   '=HYPERLINK(…)         'quoted   ->   ''quoted

``formula_safe=False`` leaves cells as they are; the manifest says which it was. Absent numbers are
empty cells.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from controlplane.application.exports import Row, row_fields, shapes_of, widening

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")

csv.field_size_limit(2**31 - 1)


class Csv:
    name = "csv"
    content_type = "text/csv; charset=utf-8"

    def __init__(self, log: str, formula_safe: bool = True) -> None:
        self._log, self._safe, fields = log, formula_safe, row_fields(log)
        self._names = [name for name, _ in fields]
        self._write = [self._writer(kind) for _, kind in fields]
        self._shapes = {tuple(name for name, _ in row_fields(log, s)): s for s in shapes_of(log)}

    def start(self) -> bytes:
        return _lines([self._names])

    def rows(self, rows: Sequence[Row]) -> bytes:
        return _lines([[f(v) for f, v in zip(self._write, row, strict=True)] for row in rows])

    def end(self) -> bytes:
        return b""

    def read(self, content: BinaryIO) -> Iterator[Row]:
        text = io.TextIOWrapper(content, encoding="utf-8", newline="")
        try:
            lines = csv.reader(text, strict=True)
            shape = self._shapes.get(tuple(next(lines, ())))
            if shape is None:
                raise ValueError("the header is another one")
            widen = widening(self._log, shape)
            row_of = self._row_reader(shape)
            for cells in lines:
                yield widen(row_of(cells))
        except csv.Error as error:
            raise ValueError(str(error)) from error
        finally:
            text.detach()

    def _writer(self, kind: str) -> Callable[[Any], Any]:
        if kind == "json":
            return lambda value: value.decode()
        return self._defanged if kind.startswith("text") else _same

    def _row_reader(self, shape: str) -> Callable[[list[str]], Row]:
        """Texts are looked at one by one only in a row that has a quote somewhere."""
        kinds = [kind for _, kind in row_fields(self._log, shape)]
        texts = [at for at, kind in enumerate(kinds) if kind.startswith("text")]
        others = [(at, _READERS[kind]) for at, kind in enumerate(kinds) if kind != "text"]
        width = len(kinds)

        def row_of(cells: list[Any]) -> Row:
            if len(cells) != width:
                raise ValueError(f"a row has {len(cells)} cells, not {width}")
            if self._safe and "'" in "".join(cells):
                for at in texts:
                    cells[at] = cells[at][1:] if cells[at].startswith("'") else cells[at]
            for at, read in others:
                cells[at] = read(cells[at])
            return tuple(cells)

        return row_of

    def _defanged(self, text: str | None) -> str | None:
        return f"'{text}" if self._safe and text and text.startswith(FORMULA_STARTS) else text


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "float?": lambda cell: float(cell) if cell else None,
    "text?": lambda cell: cell or None,
    "json": str.encode,
}


def _same(value: Any) -> Any:
    return value


def _lines(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue().encode()
