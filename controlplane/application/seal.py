"""Sealing: every 60 s or 1,000 records a log gets a signed checkpoint, and can lie no more.

The log of events and the ledger of ended requests are sealed each on its own. A worked example, at
14:00:00 with 2,500 events of which 1,048 are sealed::

    segment 1049-2048   1,000 leaves join the tree; its tiles, and a checkpoint of size 2,048
    segment 2049-2500   at 14:01:00, though only 452 have come

Before it signs, the sealer recomputes the events' hash chain from the checkpoint before: damage is
reported and never sealed over. Tiles and checkpoint are one transaction, and a segment's first
position is unique, so of two controllers that both believe to lead one seals and the other goes
on from there. Then the checkpoints are copied to where an intruder in the database cannot reach:
whoever cuts the end off a log must find every copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from controlplane.application.chain import GENESIS, follow_columns
from controlplane.application.checkpoint import Checkpoint, parse_checkpoint
from controlplane.application.failpoints import passing
from controlplane.application.merkle import Frontier
from controlplane.application.notes import Signer, note_hash, parse_note, sign
from controlplane.application.ports import Clock, EventStore, Head
from controlplane.application.records import EVENTS, NEWEST, leaf_function, record_id
from controlplane.application.tiles import ReadTile, Tile, grow, nodes_in

MAX_RECORDS = 1_000
MAX_SECONDS = 60.0
_END = 2**62
_MAX_SEGMENTS = 50  # in one round, so that a stop need not wait for a long log


@dataclass(frozen=True)
class Sealed:
    """A checkpoint as it is stored: what it says, and the signed note."""

    checkpoint: Checkpoint
    note: str

    @classmethod
    def read(cls, note: str) -> "Sealed":
        return cls(parse_checkpoint(parse_note(note).text), note)


class SealStore(Protocol):
    """Where checkpoints and tiles are kept; blocking."""

    def public_keys(self) -> list[str]:
        """Every public key that has signed here, the oldest first."""

    def last(self, log: str) -> Sealed | None: ...

    def checkpoints(self, log: str, after: int, limit: int) -> list[Sealed]:
        """Those with a size above ``after``, in order."""

    def tile(self, log: str, level: int, index: int) -> bytes:
        """Its hashes, one after the other; empty if there is none."""

    def add(self, sealed: Sealed, tiles: dict[Tile, bytes], keys: Sequence[str]) -> bool:
        """Durable when it returns; False if somebody else has sealed from there."""


class Records(Protocol):
    """One log's records as they are stored."""

    log: str

    def head(self) -> Head:
        """The last position, with the chain's value (empty without a chain)."""

    def read(self, after: int, upto: int, limit: int, shape: str) -> Sequence[Any]:
        """Stored columns of ``shape`` with ``after < position <= upto``, in order."""

    def leaves(self, previous: Checkpoint | None, rows: Sequence[Any]) -> tuple[list[bytes], bytes]:
        """The rows' leaf hashes, and the chain's value after them (empty without a chain).

        Raises IntegrityError at the first row that does not follow ``previous``.
        """


class Copies(Protocol):
    """A second place for checkpoints."""

    def bring_up(self, log: str, store: SealStore) -> int:
        """Copy what is missing there; how many were."""


class EventRecords:
    """The event log as ``Records``."""

    log = EVENTS

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._leaf = leaf_function(NEWEST[EVENTS])

    def head(self) -> Head:
        return self._store.head()

    def read(self, after: int, upto: int, limit: int, shape: str) -> Sequence[Any]:
        return self._store.read_columns(after, upto, limit)

    def leaves(self, previous: Checkpoint | None, rows: Sequence[Any]) -> tuple[list[bytes], bytes]:
        start = Head(previous.size, previous.chain) if previous else GENESIS
        reached = follow_columns(start, rows)
        return [self._leaf(columns) for columns, _ in rows], reached.hash

    def strays(self, head: int) -> list[tuple[int, str]]:
        """Events before the first position or behind the head."""
        low, high = (self._store.read_columns(*span, 1) for span in ((-_END, 0), (head, _END)))
        return [(columns[0], record_id(EVENTS, columns)) for columns, _ in (*low, *high)]


class Sealer:
    """``step()`` whenever there may be something to seal; blocking."""

    def __init__(
        self,
        installation: str,
        store: SealStore,
        signers: Sequence[Signer],
        clock: Clock,
        copies: Copies,
    ) -> None:
        """``signers``: the key, and while it is being replaced its successor too."""
        self._installation, self._store, self._signers = installation, store, signers
        self._clock, self._copies = clock, copies

    def step(self, logs: Iterable[Records], *, now: bool = False) -> int:
        """Seal what is due (``now``: whatever there is); the number of checkpoints made."""
        made = 0
        for records in logs:
            made += sum(1 for _ in self._seal_log(records, at_once=now))
            self._copies.bring_up(records.log, self._store)
            passing("seal.copied")
        return made

    def _seal_log(self, records: Records, at_once: bool) -> Iterator[Sealed]:
        for _ in range(_MAX_SEGMENTS):
            last = self._store.last(records.log)
            size = last.checkpoint.size if last else 0
            head, clock = records.head().position, self._clock.now()
            pending = head - size
            waited = clock - last.checkpoint.at if last else MAX_SECONDS
            overdue = at_once or not 0 <= waited < MAX_SECONDS  # a clock set back delays nothing
            if pending <= 0 or not (pending >= MAX_RECORDS or overdue):
                return
            sealed = self._seal(records, last, min(head, size + MAX_RECORDS), clock)
            if sealed is not None:
                yield sealed

    def _seal(self, records: Records, last: Sealed | None, upto: int, now: float) -> Sealed | None:
        before = last.checkpoint if last else None
        size, shape = before.size if before else 0, NEWEST[records.log]
        rows = records.read(size, upto, MAX_RECORDS, shape)
        leaves, chain = records.leaves(before, rows)
        tree = frontier_of(lambda *tile: self._store.tile(records.log, *tile), size)
        if before and tree.root() != before.root:
            raise SealingRefused(f"{records.log}: the stored tree is not the one sealed at {size}")
        tiles = grow(lambda *tile: self._store.tile(records.log, *tile), size, leaves)
        tree.extend(leaves)
        checkpoint = Checkpoint(
            origin=f"{self._installation}/{records.log}",
            size=tree.size,
            root=tree.root(),
            at=max(now, before.at if before else 0.0),
            first=size + 1,
            record=shape,
            previous=note_hash(last.note) if last else b"",
            chain=chain,
        )
        sealed = Sealed.read(sign(checkpoint.text, self._signers))
        keys = [signer.public.line for signer in self._signers]
        passing("seal.signed")
        added = self._store.add(sealed, tiles, keys)
        passing("seal.stored")
        return sealed if added else None


class SealingRefused(Exception):
    """What is stored contradicts what was sealed: nothing more is signed."""


def frontier_of(read: ReadTile, size: int) -> Frontier:
    """The tree's frontier at ``size``, from its tiles; raises ProofError if they do not hold it."""
    nodes, peaks, start = nodes_in(read), [], 0
    for level in range(size.bit_length() - 1, -1, -1):
        if size >> level & 1:
            peaks.append(nodes(level, start >> level))
            start += 1 << level
    return Frontier(size, peaks)
