"""``python -m controlplane.verify DIR --key FILE``: is this export all there, and unchanged?

Needs the public key and nothing else: no database, no Django, no network. It recomputes every
leaf, the export's Merkle root, each part's SHA-256, the signature over the manifest, and, for an
export without filters, the log's own checkpoints and an event log's hash chain. Exit status: 0 if
everything holds, 1 with the first changed, missing, moved or inserted row named, 2 if it was asked
for in a way that cannot be answered. Worked example, one digit changed in the second part::

    $ python -m controlplane.verify audit/ --key sealing.pub
    NOT INTACT: requests, position 31207 (req-9f3c): leaf: changed: its fields do not give its leaf
"""

import argparse
import gc
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.application.chain import link
from controlplane.application.checkpoint import Checkpoint
from controlplane.application.exports import (
    CHECKPOINTS,
    KEYS,
    MANIFEST,
    POSITION,
    ExportError,
    Format,
    Manifest,
    Part,
    Row,
    RowMaker,
    attempts_name,
    read_attempts,
    read_manifest,
)
from controlplane.application.merkle import Frontier
from controlplane.application.notes import NoteError, PublicKey, parse_keys, split_notes
from controlplane.application.proving import Damaged, Finding, NoteChain
from controlplane.application.records import EVENTS, NEWEST, UnknownShape, record_id

BATCH = 64  # rows, checked at once


@dataclass(frozen=True)
class Verified:
    """``sealed``: records that the log's own checkpoints were recomputed from."""

    manifest: Manifest
    sealed: int
    seconds: float


def verify_export(folder: Path, keys: Sequence[PublicKey]) -> Verified:
    """Raises Damaged with the first finding, ExportError where it cannot be checked."""
    began = time.perf_counter()
    manifest = _manifest(folder, keys)
    _files(folder, manifest)
    rows = _Rows(manifest, keys, _text(folder, CHECKPOINTS))
    form = format_of(manifest.format, manifest.log, manifest.formula_safe)
    for number, part in enumerate(manifest.parts, 1):
        rows.beside(_attempts(folder, manifest, number))
        _part(folder, part, form, rows)
        rows.nothing_beside()
    sealed = rows.end()
    return Verified(manifest, sealed, time.perf_counter() - began)


def _manifest(folder: Path, keys: Sequence[PublicKey]) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ExportError(f"There is no folder {folder}.")
    if not path.is_file():
        raise Damaged(Finding("export", 0, "", "file", f"{MANIFEST} is missing"))
    try:
        manifest = read_manifest(path.read_bytes(), keys)
    except NoteError as error:
        raise Damaged(Finding("export", 0, "", "manifest", str(error))) from error
    if manifest.format not in FORMATS:
        raise ExportError(f"The format {manifest.format} is not known here.")
    return manifest


def _files(folder: Path, manifest: Manifest) -> None:
    """Nothing is missing but what the parts' own check names, and nothing was added."""
    parts = {part.name for part in manifest.parts}
    known = parts | {file.name for file in manifest.files} | {MANIFEST}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            finding = Finding(manifest.log, 0, "", "file", f"{path.name} does not belong to it")
            raise Damaged(finding)
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != file.sha256:
            detail = f"{file.name} is {'changed' if path.is_file() else 'missing'}"
            raise Damaged(Finding(manifest.log, 0, "", "file", detail))


def _text(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_bytes().decode(errors="replace") if path.is_file() else ""


def _attempts(folder: Path, manifest: Manifest, number: int) -> dict[int, str] | None:
    """The hashes of the attempts that lie beside a part; None for an export made without them."""
    name = attempts_name(number)
    if name not in (file.name for file in manifest.files):
        return None
    try:
        return read_attempts((folder / name).read_bytes())
    except ValueError as error:
        detail = f"{name} cannot be read: {error}"
        raise Damaged(Finding(manifest.log, 0, "", "file", detail)) from error


def _part(folder: Path, part: Part, form: Format, rows: "_Rows") -> None:
    path = folder / part.name
    if not path.is_file():
        raise rows.damaged("file", f"missing: {part.name}, with {part.rows} rows")
    with path.open("rb") as file:
        whole = _digest(file) == part.sha256
        reached = rows.number + part.rows
        file.seek(0)
        try:
            for batch in _batches(form.read(file)):
                rows.check_all(batch, reached)
            rows.flush()
        except (ValueError, UnknownShape) as error:
            raise rows.damaged("row", f"it cannot be read in {part.name}: {error}") from error
        if rows.number < reached:
            raise rows.damaged("row", f"missing: {part.name} ends after row {rows.number}")
        if not whole:
            raise _first_changed(file, part, form, rows)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """What can be read before one that cannot comes first; then the error."""
    batch: list[Row] = []
    try:
        for row in rows:
            batch.append(row)
            if len(batch) == BATCH:
                yield batch
                batch = []
    except (ValueError, UnknownShape):
        yield batch
        raise
    yield batch


def _digest(file: BinaryIO) -> str:
    digest = sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _first_changed(file: BinaryIO, part: Part, form: Format, rows: "_Rows") -> Damaged:
    """All rows mean what they should, yet the bytes differ: the first row written otherwise."""
    log, detail = rows.manifest.log, f"{part.name} is not the file that was signed"
    file.seek(0)
    content, at = file.read(), len(form.start())
    for row in form.read(io.BytesIO(content)) if form.name != "parquet" else ():
        written = form.rows([row])
        if content[at : at + len(written)] != written:
            name = record_id(log, row[POSITION:])
            return Damaged(Finding(log, row[POSITION], name, "row", f"written otherwise: {detail}"))
        at += len(written)
    where = f"{detail}, outside its rows {part.first_row} to {part.first_row + part.rows - 1}"
    return Damaged(Finding(log, part.first_position, "", "file", where))


class _Rows:
    """All rows of an export, in order, against its own tree, the log's tree and the chain."""

    def __init__(self, manifest: Manifest, keys: Sequence[PublicKey], notes: str) -> None:
        self.manifest, self.number = manifest, 0
        self._maker, self._tree = RowMaker(manifest.log), Frontier()
        self._position, self._seen = manifest.filters.after, 0
        self._whole, self._is_events = manifest.filters.whole, manifest.log == EVENTS
        self._leaves: list[bytes] = []  # checked, and not in the trees yet
        self._attempts: dict[int, str] | None = None
        start = manifest.start
        self._log: Frontier | None = None
        self._chain = b""
        if start is not None:
            peaks = map(bytes.fromhex, start.peaks)
            self._log = Frontier(start.size, peaks) if start.size else self._tree
            self._chain = bytes.fromhex(start.chain)
        self._checkpoints = list(_checkpoints(manifest, keys, notes))[::-1]
        self._until = self._room()

    def check_all(self, rows: Sequence[Row], reached: int) -> None:
        """A batch of them; raises Damaged. Where one is wrong they are gone through one by one,
        which names it."""
        leaves = self._plain(rows, reached)
        if leaves is None:
            for row in rows:
                self.check(row, reached)
            return
        for row in rows:
            if self._attempts is not None and self._attempts.pop(row[POSITION], "") != row[-2]:
                raise self.damaged("leaf", "its attempts are not those of the export", row)
            self.number, self._position = row[0], row[POSITION]
        self._leaves += leaves
        while len(self._leaves) >= self._until:
            self._flush(self._until)

    def _plain(self, rows: Sequence[Row], reached: int) -> list[bytes] | None:
        """The leaves of requests of a whole export, if each is what it says and where it should
        be; None if not, or if they are others, which have more to be checked."""
        count, shape = len(rows), NEWEST[self.manifest.log]
        if self._is_events or not self._whole or self.number + count > reached:
            return None
        due = range(self.number + 1, self.number + 1 + count)
        places = zip(due, repeat(shape), range(self._position + 1, self._position + 1 + count))
        if [row[:3] for row in rows] != list(places):
            return None
        try:
            leaves = self._maker.leaves(shape, rows)
        except (TypeError, ValueError, UnicodeError):
            return None
        return leaves if [row[-1] for row in rows] == [leaf.hex() for leaf in leaves] else None

    def check(self, row: Row, reached: int) -> None:
        """One row; raises Damaged."""
        number, shape, position = row[:3]
        if number != self.number + 1 or self.number == reached:
            raise self._misplaced(row, reached)
        if self._whole and position != self._position + 1:
            raise self.damaged("position", f"missing: the next row has position {position}")
        if position <= self._position:
            raise self.damaged("position", "moved: it comes before the row in front of it", row)
        columns = self._maker.columns(row)
        leaf = self._maker.leaf(shape, columns)
        if leaf.hex() != row[-1]:
            raise self.damaged("leaf", "changed: its fields do not give its leaf", row)
        if self._is_events:
            self._linked(row, columns)
        elif self._attempts is not None and self._attempts.pop(position, "") != columns[-1]:
            raise self.damaged("leaf", "its attempts are not those of the export", row)
        self.number, self._position = number, position
        self._leaves.append(leaf)
        if len(self._leaves) == self._until:
            self.flush()

    def beside(self, attempts: dict[int, str] | None) -> None:
        """What lies beside the part that comes now: each request's hash of its attempts."""
        self._attempts = attempts

    def nothing_beside(self) -> None:
        """The part is over, and no attempts are left of requests that it does not have."""
        for position in sorted(self._attempts or ()):
            detail = f"inserted: attempts of {position}, which is not in its part"
            raise Damaged(Finding(self.manifest.log, position, "", "row", detail))

    def flush(self) -> None:
        """Put what was checked into the trees; raises Damaged at a checkpoint with another root."""
        self._flush(len(self._leaves))

    def _flush(self, count: int) -> None:
        leaves, self._leaves = self._leaves[:count], self._leaves[count:]
        self._tree.extend(leaves)
        if self._log is not None:
            if self._log is not self._tree:
                self._log.extend(leaves)
            self._sealed()
        self._until = self._room()

    def _room(self) -> int:
        """Rows until the next checkpoint's size."""
        if self._log is None or not self._checkpoints:
            return 2**62
        return self._checkpoints[-1].size - self._log.size

    def _linked(self, row: Row, columns: Row) -> None:
        stored = row[-2]
        if not self._chain:
            if stored is not None and not self._whole:
                raise self.damaged("chain", "changed: it has a hash, in an export with gaps", row)
            return
        self._chain = link(self._chain, columns)
        if self._chain.hex() != stored:
            raise self.damaged("chain", "changed: its hash does not follow the row before", row)

    def _sealed(self) -> None:
        """At each checkpoint's size the log's tree has its root."""
        assert self._log is not None
        while self._checkpoints and self._checkpoints[-1].size <= self._log.size:
            one = self._checkpoints.pop()
            if one.size == self._log.size and one.root != self._log.root():
                detail = f"a record of {one.first} to {one.size} is not the one sealed"
                raise Damaged(Finding(self.manifest.log, one.first, "", "root", detail))
            self._seen = one.size

    def _misplaced(self, row: Row, reached: int) -> Damaged:
        number = row[0]
        if self.number == reached:
            return self.damaged("row", f"inserted: the part ends with row {reached}", row)
        kind = "missing" if number > self.number + 1 else "inserted or moved"
        return self.damaged("row", f"{kind}: row {self.number + 1} is number {number}", row)

    def end(self) -> int:
        """How far the log's own checkpoints reached; raises Damaged."""
        manifest = self.manifest
        if self.number != manifest.rows or self._tree.root().hex() != manifest.root:
            raise self.damaged("root", "the rows are not those that the manifest signs")
        return self._seen

    def damaged(self, check: str, detail: str, row: Row | None = None) -> Damaged:
        log = self.manifest.log
        name = record_id(log, row[POSITION:]) if row else ""
        position = row[POSITION] if row and check in ("leaf", "chain") else self._position + 1
        return Damaged(Finding(log, position, name, check, f"row {self.number + 1}: {detail}"))


def _checkpoints(manifest: Manifest, keys: Sequence[PublicKey], notes: str) -> Iterator[Checkpoint]:
    """The log's checkpoints that came with the export, chained and the last one signed."""
    chain = NoteChain(manifest.log, keys)
    for note in split_notes(notes):
        before = chain.count
        yield chain.follow(note, first=before > 0 or manifest.filters.after == 0)
    chain.end()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        keys = _keys(options.key)
        verified = verify_export(options.folder, keys)
    except Damaged as found:
        print(f"NOT INTACT: {found.finding}")
        return 1
    except (ExportError, NoteError, OSError) as error:
        print(f"Cannot be verified: {error}", file=sys.stderr)
        return 2
    _print(verified, options.allow_partial)
    return 0 if verified.manifest.complete or options.allow_partial else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m controlplane.verify", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="An export, with its manifest.")
    parser.add_argument(
        "--key", required=True, help=f"Public keys: a file, or one key. The {KEYS} in DIR proves"
        " nothing by itself: compare it with the installation's.",
    )  # fmt: skip
    parser.add_argument(
        "--allow-partial", action="store_true", help="An export that is still being made is fine."
    )
    return parser


def _keys(given: str) -> list[PublicKey]:
    """Of a file, or of a key as it is written: ``name+hash+base64``."""
    path = Path(given)
    is_key = "+" in given and not path.is_file()
    keys = parse_keys(given if is_key else path.read_text())
    if not keys:
        raise NoteError("no key was given")
    return keys


def _print(verified: Verified, allow_partial: bool) -> None:
    one = verified.manifest
    rate = one.rows / max(verified.seconds, 1e-9)
    state = "Intact" if one.complete or allow_partial else "NOT COMPLETE"
    print(f"{state}: {one.rows} {one.log}, positions {one.first_position} to {one.last_position}")
    print(f"root {one.root}")
    if one.start is not None:
        print(f"the log's own checkpoints hold up to position {verified.sealed}")
    print(f"{rate:,.0f} records/s")


if __name__ == "__main__":
    gc.disable()  # nothing here makes cycles, and looking for them is a tenth of the time
    sys.exit(main())
