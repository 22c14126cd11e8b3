"""The check of a live store: every record of both logs against the chain, the seals and the copies.

::

    head 2,600           read first
    checkpoint 1,048     marked as archived: its leaves come from the tree, no row may be left
    checkpoint 2,048     follows the one before; its 1,000 records give its root
    copies               the file beside the data has the same two
    2,049 to 2,600       not sealed yet: the chain alone
    strays, sums, file   nothing lies outside the positions; what ``also`` looks at

Memory stays constant: a segment of at most 1,000 records is read, checked and forgotten. What
is appended meanwhile is left to the next check: the head is read first.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from controlplane.application.notes import PublicKey
from controlplane.application.proving import (
    Damaged,
    Finding,
    LogProof,
    NoteChain,
    Proved,
    archive_named,
    check_copies,
)
from controlplane.application.records import EVENTS, NEWEST
from controlplane.application.seal import Records, SealStore
from controlplane.application.tiles import HASH_BYTES, WIDTH

_BATCH = 2_000

# place -> the notes of a log that it holds, oldest first
Copies = Mapping[str, Callable[[str], Sequence[str]]]


class StoredLog(Records, Protocol):
    """A log's records, and what is stored beside their order."""

    def strays(self, head: int) -> list[tuple[int, str]]:
        """(position, id) of stored rows that no position of the log leads to; a few suffice."""


class StoredSeals(SealStore, Protocol):
    def notes(self, log: str) -> Iterator[tuple[int, str, str]]:
        """(size, note, archive) of every checkpoint as it is stored, readable or not."""


@dataclass(frozen=True)
class Checked:
    """The result of one check: the logs that are intact, and the first finding if there is one."""

    logs: tuple[Proved, ...]
    finding: Finding | None
    seconds: float

    @property
    def records(self) -> int:
        return sum(log.checked for log in self.logs)

    @property
    def records_per_second(self) -> float:
        return self.records / max(self.seconds, 1e-9)


def check_everything(
    logs: Sequence[StoredLog],
    seals: StoredSeals,
    keys: Sequence[PublicKey],
    copies: Copies,
    unreadable: tuple[type[Exception], ...] = (),
    also: Sequence[Callable[[], Iterator[Finding]]] = (),
) -> Checked:
    """Every log, then what ``also`` finds; ends at the first finding."""
    began, proved = time.perf_counter(), []
    try:
        for records in logs:
            proved.append(check_log(records, seals, keys, copies, unreadable))
        finding = next((found for more in also for found in more()), None)
    except Damaged as damaged:
        finding = damaged.finding
    except unreadable as error:
        finding = Finding("database", 0, "", "file", f"cannot be read: {error.__cause__ or error}")
    return Checked(tuple(proved), finding, time.perf_counter() - began)


def check_log(
    records: StoredLog,
    seals: StoredSeals,
    keys: Sequence[PublicKey],
    copies: Copies,
    unreadable: tuple[type[Exception], ...] = (),
) -> Proved:
    """Raises Damaged. ``copies``: place -> the notes it holds of a log. ``unreadable``: what
    reading raises for a row whose bytes the database cannot decode."""
    return _Check(records, seals, keys, unreadable).run(copies)


class _Check:
    def __init__(
        self,
        records: StoredLog,
        seals: StoredSeals,
        keys: Sequence[PublicKey],
        unreadable: tuple[type[Exception], ...],
    ) -> None:
        self._records, self._seals, self._unreadable = records, seals, unreadable
        self._chain = NoteChain(records.log, keys)
        self._proof = LogProof(records.log, lambda *tile: seals.tile(records.log, *tile))
        self._checked = 0
        self._archives: dict[str, None] = {}

    def run(self, copies: Copies) -> Proved:
        log, head = self._records.log, self._records.head()
        for size, note, archive in self._seals.notes(log):
            self._segment(size, note, archive)
        self._chain.end()
        for place, notes in copies.items():
            check_copies(self._chain, notes(log), place)
        if self._chain.size > head.position:
            self._raise(head.position + 1, "", "head", f"{self._chain.size} records were sealed")
        self._checked += self._proof.tail(
            NEWEST[log], self._rows(self._chain.size, head.position, NEWEST[log]), head
        )
        self._proof.end()
        for position, name in self._records.strays(head.position):
            self._raise(position, name, "position", "inserted: no position of the log leads here")
        root = self._chain.last.checkpoint.root.hex() if self._chain.last else ""
        return Proved(
            log,
            head.position,
            self._chain.size,
            root,
            self._chain.count,
            self._checked,
            tuple(self._archives),
        )

    def _segment(self, size: int, note: str, archive: str) -> None:
        before = self._chain.size
        checkpoint = self._chain.follow(note)
        if checkpoint.size != size:
            self._raise(before + 1, "", "checkpoint", f"filed under size {size}")
        if archive:
            self._archives[archive_named(checkpoint, str(archive), self._chain.keys)] = None
            for row in chain.from_iterable(self._rows(before, size, checkpoint.record)):
                columns = row[0] if self._records.log == EVENTS else row
                self._raise(columns[0], "", "position", "inserted: its segment is archived")
            self._proof.sealed(checkpoint, self._archived(before, size))
        else:
            rows = self._rows(before, size, checkpoint.record)
            self._checked += self._proof.segment(checkpoint, rows)

    def _archived(self, after: int, upto: int) -> list[bytes]:
        """Leaves from the tree, of records that lie in an archive."""
        log, leaves = self._records.log, []
        for index in range(after // WIDTH, (upto - 1) // WIDTH + 1):
            tile = self._seals.tile(log, 0, index)
            leaves += [tile[at : at + HASH_BYTES] for at in range(0, len(tile), HASH_BYTES)]
        skipped = after % WIDTH
        return leaves[skipped : skipped + upto - after]

    def _rows(self, after: int, upto: int, shape: str) -> Iterator[Sequence[Any]]:
        """Everything stored in ``(after, upto]``, in batches; a gap does not end it."""
        while after < upto:
            yield self._read(after, min(upto, after + _BATCH), shape)
            after = min(upto, after + _BATCH)

    def _read(self, after: int, upto: int, shape: str) -> Sequence[Any]:
        try:
            return self._records.read(after, upto, _BATCH, shape)
        except self._unreadable as error:
            if upto - after == 1:
                self._raise(upto, "", "leaf", f"the row cannot be read: {error}")
            middle = (after + upto) // 2
            return [*self._read(after, middle, shape), *self._read(middle, upto, shape)]

    def _raise(self, position: int, name: str, check: str, detail: str) -> None:
        raise Damaged(Finding(self._records.log, position, name, check, detail))
