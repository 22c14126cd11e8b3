"""Whether a stored log is the one that was sealed, and if not, which record is the first to differ.

``LogProof`` takes the checkpoints and the records of one log in order, a segment at a time. Worked
example: an intruder changed event 1,500 of 2,600, then wrote every later hash of the chain anew::

    checkpoint 1,048    its records give its root             good
    checkpoint 2,048    its records give another root         so something in 1,049-2,048
                        leaf 1,500 is not the tile's leaf     event 1,500 is named

The chain names a record changed without that effort; positions name one that is missing; a
checkpoint's copy outside the database names an end that was cut off together with its seals.
Where nothing stored says which record it was, the segment of at most 1,000 is named.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.application.chain import GENESIS, link
from controlplane.application.checkpoint import Checkpoint
from controlplane.application.notes import NoteError, PublicKey, note_hash, parse_note
from controlplane.application.ports import Head
from controlplane.application.records import (
    EVENTS,
    belongs,
    leaf_function,
    leaves_function,
    record_id,
)
from controlplane.application.seal import Sealed
from controlplane.application.tiles import HASH_BYTES, WIDTH, ReadTile, Tile, TiledTree


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong. ``check``: position | chain | leaf | root | tile | checkpoint
    | signature | copy | head | usage | text | row | file | manifest. ``record_id`` may be
    unknown."""

    log: str
    position: int
    record_id: str
    check: str
    detail: str

    def __str__(self) -> str:
        named = f" ({self.record_id})" if self.record_id else ""
        return f"{self.log}, position {self.position}{named}: {self.check}: {self.detail}"


class Damaged(Exception):
    """Carries the finding that ends a verification."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class Proved:
    """What a log that is intact holds."""

    log: str
    head: int  # last position
    sealed: int  # records under the newest checkpoint
    root: str  # its root, hex
    num_checkpoints: int
    checked: int  # records recomputed
    archives: tuple[str, ...] = ()  # where others lie


@dataclass
class NoteChain:
    """The checkpoints of one log, one after the other: form, order, links, and signatures."""

    log: str
    keys: Collection[PublicKey]
    last: Sealed | None = None
    signed: bool = True  # the last one, by one of the keys
    count: int = 0
    hashes: dict[int, bytes] = field(default_factory=dict)  # size -> hash of the note

    @property
    def size(self) -> int:
        return self.last.checkpoint.size if self.last else 0

    def follow(self, note: str, *, first: bool = True) -> Checkpoint:
        """The next one, checked. ``first``: the chain begins at the log's first checkpoint."""
        try:
            sealed = Sealed.read(str(note))
            self.signed = bool(parse_note(note).signers(self.keys))
        except NoteError as error:
            raise self._damaged("checkpoint", str(error)) from error
        one, before = sealed.checkpoint, self.last
        if one.log != self.log or not belongs(one.record, self.log):
            raise self._damaged("checkpoint", f"it is one of {one.origin}, {one.record}")
        if before or first:
            self._linked(one, before)
        self.last, self.count = sealed, self.count + 1
        self.hashes[one.size] = note_hash(note)
        return one

    def _linked(self, one: Checkpoint, before: Sealed | None) -> None:
        previous = note_hash(before.note) if before else b""
        if one.first != self.size + 1 or one.size < one.first:
            detail = f"a checkpoint is missing: the next one covers {one.first} to {one.size}"
            raise self._damaged("checkpoint", detail)
        if one.previous != previous:
            detail = f"that of size {one.size} does not follow the one before, or that was changed"
            raise self._damaged("checkpoint", detail)
        if before and (one.at < before.checkpoint.at or one.origin != before.checkpoint.origin):
            raise self._damaged("checkpoint", "its time or origin contradicts the one before")

    def end(self) -> None:
        """The newest must be signed by one of the keys; it stands for all before it."""
        if not self.signed and self.last:
            names = parse_note(self.last.note).key_names
            detail = f"the newest checkpoint, of size {self.size}, is signed by {names} alone"
            raise Damaged(Finding(self.log, self.size, "", "signature", detail))

    def _damaged(self, check: str, detail: str) -> Damaged:
        return Damaged(Finding(self.log, self.size + 1, "", check, detail))


class LogProof:
    """One log, fed in order: a checkpoint with its records, and at last what is not sealed yet.

    ``read_tile`` gives the stored tree, which tells which record of a segment is wrong. Rows come
    in batches: one whose leaves cannot be computed at once is gone through row by row, which names
    the row.
    """

    def __init__(self, log: str, read_tile: ReadTile) -> None:
        self.log, self.tree = log, TiledTree()
        self._read_tile, self._chain = read_tile, GENESIS

    def segment(self, checkpoint: Checkpoint, batches: Iterable[Sequence[Any]]) -> int:
        """Records up to the checkpoint; raises Damaged. How many there were."""
        first = self.tree.size
        leaves = list(self._leaves(checkpoint.record, batches, checkpoint.size))
        if first + len(leaves) < checkpoint.size:
            position = first + len(leaves) + 1
            detail = f"missing, though sealed: the checkpoint covers {checkpoint.size}"
            raise self._damaged(position, "", "position", detail)
        self.sealed(checkpoint, leaves)
        return len(leaves)

    def sealed(self, checkpoint: Checkpoint, leaves: Sequence[bytes]) -> None:
        """Leaves up to the checkpoint, which must give its root; raises Damaged."""
        first = self.tree.size
        tiles = self.tree.extend(leaves)
        if self.tree.root() != checkpoint.root:
            raise self._named_by_tile(tiles, first, checkpoint)
        if self._chain.hash != checkpoint.chain and self.log == EVENTS:
            if self._chain.position == checkpoint.size:
                detail = "the chain's value is not the one sealed"
                raise self._damaged(checkpoint.size, "", "chain", detail)
            self._chain = Head(checkpoint.size, checkpoint.chain)  # its rows are in an archive
        self._compare_full(tiles)

    def tail(self, shape: str, batches: Iterable[Sequence[Any]], head: Head) -> int:
        """What is not sealed yet, up to the head row; raises Damaged. How many there were."""
        count = sum(1 for _ in self._leaves(shape, batches, head.position))
        reached = self.tree.size + count
        if reached != head.position:
            detail = f"missing: the head is at {head.position}"
            raise self._damaged(reached + 1, "", "head", detail)
        if self.log == EVENTS and self._chain.hash != head.hash:
            raise self._damaged(reached, "", "head", "the head row holds another hash")
        return count

    def end(self) -> None:
        """The last, partly filled tiles too are those of the records; raises Damaged."""
        for place, content in sorted(self.tree.partial().items()):
            self._compare(place, content)

    def _leaves(self, shape: str, batches: Iterable[Sequence[Any]], upto: int) -> Iterator[bytes]:
        all_at_once, position = leaves_function(shape), self.tree.size
        for rows in batches:
            last = position + len(rows)
            found = self._at_once(all_at_once, rows, position) if last <= upto else None
            yield from self._one_by_one(shape, rows, position, upto) if found is None else found
            position = last

    def _at_once(
        self, leaves: Callable[[Sequence[Any]], list[bytes]], rows: Sequence[Any], position: int
    ) -> list[bytes] | None:
        """None if there is something wrong with one of the rows."""
        is_chained, chain = self.log == EVENTS, self._chain
        columns = [row for row, _ in rows] if is_chained else rows
        if [row[0] for row in columns] != list(range(position + 1, position + 1 + len(rows))):
            return None
        try:
            found = leaves(columns)
            if is_chained:
                for row, stored in rows:
                    self._link(row, stored)
        except (TypeError, ValueError, UnicodeError, Damaged):
            self._chain = chain
            return None
        return found

    def _one_by_one(
        self, shape: str, rows: Sequence[Any], position: int, upto: int
    ) -> Iterator[bytes]:
        leaf = leaf_function(shape)
        for row in rows:
            position += 1
            columns, stored = row if self.log == EVENTS else (row, None)
            if columns[0] != position or position > upto:
                raise self._misplaced(position, columns, upto)
            try:
                if stored is not None:
                    self._link(columns, stored)
                yield leaf(columns)
            except (TypeError, ValueError, UnicodeError) as error:
                detail = f"a field holds what it cannot hold: {error}"
                raise self._damaged(position, self._id(columns), "leaf", detail) from error

    def _link(self, columns: Any, stored: bytes) -> None:
        digest = link(self._chain.hash, columns)
        if digest != stored:
            detail = "changed: its hash is not that of its fields after the record before"
            raise self._damaged(columns[0], self._id(columns), "chain", detail)
        self._chain = Head(columns[0], digest)

    def _misplaced(self, position: int, columns: Any, upto: int) -> Damaged:
        if position > upto:
            return self._damaged(position, self._id(columns), "position", "inserted after the end")
        detail = f"missing: the next one stored is {columns[0]} ({self._id(columns)})"
        return self._damaged(position, "", "position", detail)

    def _compare_full(self, tiles: dict[Tile, bytes]) -> None:
        for place, content in sorted(tiles.items()):
            if len(content) == WIDTH * HASH_BYTES:
                self._compare(place, content)

    def _compare(self, place: Tile, content: bytes) -> None:
        at = _first_difference(content, self._read_tile(*place))
        if at is not None:
            level, index = place
            position = ((index * WIDTH + at) << (8 * level)) + 1
            detail = f"the stored tree differs from the records: tile {place}, hash {at}"
            raise self._damaged(min(position, self.tree.size), "", "tile", detail)

    def _named_by_tile(
        self, tiles: dict[Tile, bytes], first: int, checkpoint: Checkpoint
    ) -> Damaged:
        for (level, index), content in sorted(tiles.items()):
            if level == 0:
                stored = self._read_tile(level, index)[: len(content)]
                at = _first_difference(content, stored)
                if at is not None and index * WIDTH + at >= first:
                    detail = "changed: its leaf is not the one sealed"
                    return self._damaged(index * WIDTH + at + 1, "", "leaf", detail)
        detail = f"a record of {first + 1} to {checkpoint.size} is not the one sealed"
        return self._damaged(first + 1, "", "root", detail)

    def _id(self, columns: Any) -> str:
        return record_id(self.log, columns)

    def _damaged(self, position: int, name: str, check: str, detail: str) -> Damaged:
        return Damaged(Finding(self.log, position, name, check, detail))


def mark_text(checkpoint: Checkpoint) -> str:
    """How the mark of an archived segment begins; the archive's name follows."""
    return f"{checkpoint.origin}/archive\n{checkpoint.first}\n{checkpoint.size}\n"


def archive_named(checkpoint: Checkpoint, mark: str, keys: Collection[PublicKey]) -> str:
    """Where a segment's rows lie, by its signed mark; raises Damaged for any other."""
    try:
        note = parse_note(mark)
        signed = bool(note.signers(keys)) and note.text.startswith(mark_text(checkpoint))
    except NoteError:
        signed = False
    if not signed:
        detail = (
            f"{checkpoint.first} to {checkpoint.size} are said to be archived by nobody we trust"
        )
        raise Damaged(Finding(checkpoint.log, checkpoint.first, "", "signature", detail))
    return note.text.removeprefix(mark_text(checkpoint)).strip()


def check_copies(chain: NoteChain, notes: Iterable[str], place: str) -> int:
    """Checkpoints kept elsewhere are those of the store; raises Damaged. How many there were."""
    count = 0
    for count, note in enumerate(notes, 1):
        try:
            one = Sealed.read(note).checkpoint
        except NoteError as error:
            finding = Finding(chain.log, 0, "", "copy", f"{place}, note {count}: {error}")
            raise Damaged(finding) from error
        if one.size > chain.size:
            detail = (
                f"cut off: {place} has a checkpoint of {one.size}, here the last is {chain.size}"
            )
            raise Damaged(Finding(chain.log, chain.size + 1, "", "copy", detail))
        if chain.hashes.get(one.size) != note_hash(note):
            detail = f"{place} has another checkpoint of {one.size} than the store"
            raise Damaged(Finding(chain.log, one.first, "", "copy", detail))
    return count


def _first_difference(one: bytes, other: bytes) -> int | None:
    """The first hash in which two tiles differ, or that the other lacks."""
    if one == other:
        return None
    for at in range(0, max(len(one), len(other)), HASH_BYTES):
        if one[at : at + HASH_BYTES] != other[at : at + HASH_BYTES]:
            return at // HASH_BYTES
    return None
