"""Parquet with a fixed schema: a column a field, in the row's order, never inferred from data.

Counts are int64, times and milliseconds float64 (null where a request has none), the rest UTF-8
strings; an event's ``data`` is its JSON as a string. Pages carry checksums. A part is written a row
group a batch, so memory holds one batch. The schema's metadata names its version::

    pq.read_schema("part-00001.parquet").metadata[b"engine.rows"]   # b"events event/1"
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from controlplane.application.exports import Row, row_fields, shapes_of, widening
from controlplane.application.records import NEWEST

_TYPES = {
    "int": (pa.int64(), False),
    "float": (pa.float64(), False),
    "float?": (pa.float64(), True),
    "text": (pa.string(), False),
    "text?": (pa.string(), True),
    "json": (pa.string(), False),
}


def schema_of(log: str, newest: str = "") -> pa.Schema:
    shape = newest or NEWEST[log]
    columns = [pa.field(name, *_TYPES[kind]) for name, kind in row_fields(log, shape)]
    return pa.schema(columns, {b"engine.rows": f"{log} {shape}".encode()})


class Parquet:
    name = "parquet"
    content_type = "application/vnd.apache.parquet"

    def __init__(self, log: str) -> None:
        self._log, self._schema = log, schema_of(log)
        self._json = [at for at, (_, kind) in enumerate(row_fields(log)) if kind == "json"]
        self._sink = _Sink()
        self._writer: Any = None

    def start(self) -> bytes:
        self._sink = _Sink()
        self._writer = pq.ParquetWriter(
            self._sink, self._schema, compression="zstd", write_page_checksum=True
        )
        return self._taken()

    def rows(self, rows: Sequence[Row]) -> bytes:
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        for at in self._json:
            columns[at] = [value.decode() for value in columns[at]]
        arrays = [pa.array(v, f.type) for v, f in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        return self._taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._taken()

    def read(self, content: BinaryIO) -> Iterator[Row]:
        try:
            file = pq.ParquetFile(content, page_checksum_verification=True)
            widen = widening(self._log, self._shape(file.schema_arrow))
            for batch in file.iter_batches():
                columns = [column.to_pylist() for column in batch.columns]
                for at in self._json:
                    columns[at] = [text.encode() for text in columns[at]]
                yield from map(widen, zip(*columns, strict=True))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(str(error)) from error

    def _shape(self, schema: pa.Schema) -> str:
        """What was the newest when a file of ``schema`` was written."""
        for shape in shapes_of(self._log):
            if schema.equals(schema_of(self._log, shape), check_metadata=True):
                return shape
        raise ValueError("the schema is another one")

    def _taken(self) -> bytes:
        return self._sink.take()


class _Sink(io.RawIOBase):
    """Collects what the writer writes until it is taken; the writer only asks where it is."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, piece: Any) -> int:
        content = bytes(piece)
        self._pieces.append(content)
        self._at += len(content)
        return len(content)

    def take(self) -> bytes:
        taken, self._pieces = b"".join(self._pieces), []
        return taken
