"""What an export reads: the log in order, as rows, checked against the sealed tree on the way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from controlplane.application.chain import GENESIS, follow_columns
from controlplane.application.exports import Filters, Row, RowMaker, Start
from controlplane.application.notes import Signer
from controlplane.application.ports import Clock, Head, IntegrityError
from controlplane.application.records import EVENTS, NEWEST, record_id
from controlplane.application.seal import Records, Sealed, SealStore, frontier_of
from controlplane.application.tiles import HASH_BYTES, WIDTH

_READ = 1_000


@runtime_checkable
class WithAttempts(Protocol):
    """Records that have attempts beside them."""

    def attempts(self, after: int, upto: int) -> Mapping[int, Sequence[Any]]:
        """By position, each as ``records.ATTEMPT_FIELDS`` has it."""


@dataclass
class Source:
    """One log to export from."""

    installation: str
    records: Records
    seals: SealStore
    signer: Signer
    clock: Clock

    @property
    def log(self) -> str:
        return self.records.log


@dataclass
class Scan:
    """Rows of a log from ``after`` on, checked against the sealed tree while they are read."""

    source: Source
    filters: Filters
    chain: Head = GENESIS
    number: int = 0
    position: int = 0
    _segments: list[Sealed] = field(default_factory=list)
    _sealed_so_far: bool = True  # of what was read last; asked for once each time
    _tile: tuple[int, bytes] = (-1, b"")

    def rows(self, upto: int, limit: int) -> Iterator[list[Row]]:
        """Batches until ``upto`` is reached or ``limit`` rows were given; ``position`` then says
        how far the log was looked through."""
        log, given = self.source.log, 0
        matches, maker = self.filters.matcher(log), RowMaker(log)
        while self.position < upto and given < limit:
            read = self.source.records.read(self.position, upto, _READ, NEWEST[log])
            if not read:
                raise IntegrityError(self.position + 1, "missing, or moved to an archive")
            self._sealed_so_far = True
            rows: list[Row] = []
            for record in read:
                columns, digest = record if log == EVENTS else (record, None)
                self._contiguous(columns[0], record)
                if matches(columns):
                    self.number += 1
                    shape = self._shape(columns[0])
                    kept = digest if self.filters.whole else None
                    rows.append(maker.row(self.number, shape, columns, kept))
                    self._sealed(columns, rows[-1])
                if given + len(rows) == limit:
                    break
            given += len(rows)
            yield rows

    def _contiguous(self, position: int, record: Any) -> None:
        if position != self.position + 1:
            raise IntegrityError(self.position + 1, f"missing: the next one stored is {position}")
        if self.source.log == EVENTS and self.filters.whole:
            self.chain = follow_columns(self.chain, [record])
        self.position = position

    def _shape(self, position: int) -> str:
        """What the segment of ``position`` was sealed as; the newest if it is not sealed yet."""
        while self._segments and self._segments[0].checkpoint.size < position:
            self._segments.pop(0)
        if not self._segments and self._sealed_so_far:
            self._segments = self.source.seals.checkpoints(self.source.log, position - 1, 100)
            self._sealed_so_far = bool(self._segments)
        if self._segments and self._segments[0].checkpoint.first <= position:
            return self._segments[0].checkpoint.record
        return NEWEST[self.source.log]

    def _sealed(self, columns: Sequence[Any], row: Row) -> None:
        position = columns[0]
        if not self._segments:
            return  # not sealed yet
        index, at = divmod(position - 1, WIDTH)
        if self._tile[0] != index or len(self._tile[1]) <= at * HASH_BYTES:  # it has grown since
            self._tile = (index, self.source.seals.tile(self.source.log, 0, index))
        if self._tile[1][at * HASH_BYTES : (at + 1) * HASH_BYTES] != bytes.fromhex(row[-1]):
            name = record_id(self.source.log, columns)
            raise IntegrityError(position, f"{name} is not the record that was sealed")


def start_of(source: Source, after: int) -> Start | None:
    """The tree and the chain at ``after``; None where the log is not sealed that far."""
    last = source.seals.last(source.log)
    if after > (last.checkpoint.size if last else 0):
        return None
    tree = frontier_of(lambda *tile: source.seals.tile(source.log, *tile), after)
    chain = b""
    if source.log == EVENTS:
        chain = (
            source.records.read(after - 1, after, 1, NEWEST[EVENTS])[0][1] if after else bytes(32)
        )
    return Start(after, tuple(peak.hex() for peak in tree.peaks), chain.hex())


def chain_at(source: Source, position: int) -> Head:
    """The chain's value at ``position``; of no meaning for a log without a chain."""
    if source.log != EVENTS or position == 0:
        return GENESIS
    rows = source.records.read(position - 1, position, 1, NEWEST[EVENTS])
    if not rows:
        raise IntegrityError(position, "missing, or moved to an archive")
    return Head(position, rows[0][1])
