"""Retention of the ledger: old segments go into an archive, and only then leave the database.

Requests alone, with their attempts: the event log is what everything is rebuilt from, and is kept.
Captured text goes into no archive. A worked example, with segments of 1 to 1,000 and 1,001 to
1,800 older than what is to be kept::

    export     positions 1 to 1,800 into requests-from-1/, signed as any export
    verify     read back from there with the public key: every leaf, the log's own checkpoints
    remove     segment by segment: its rows, and in the same transaction its mark, a signed note
               of where they are

Whatever is killed in between is repeated: rows go only with a mark, and a mark comes only when the
archive was read back whole. Checkpoints and tree stay, so ``verify`` recomputes every root and the
chain of checkpoints across the gap, and an archived row can be proved to have been there.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from controlplane.application.checkpoint import Checkpoint
from controlplane.application.export_job import ExportJob
from controlplane.application.export_scan import Source
from controlplane.application.exports import (
    MANIFEST,
    Destination,
    ExportError,
    Filters,
    Format,
    SignedManifest,
)
from controlplane.application.failpoints import passing
from controlplane.application.notes import Signer, sign
from controlplane.application.proving import mark_text
from controlplane.application.seal import Sealed


class Archivable(Protocol):
    """Where the rows are."""

    def oldest(self, log: str) -> list[Sealed]:
        """Segments whose rows are still here, in order; at most some hundreds."""

    def move_out(self, sealed: Sealed, mark: str) -> int:
        """Mark the segment and delete its rows, in one transaction; how many rows."""


@dataclass(frozen=True)
class Archived:
    """``rows`` left the database for ``name``."""

    name: str
    first: int
    upto: int
    rows: int


def archive_mark(checkpoint: Checkpoint, name: str, signer: Signer) -> str:
    """The signed note that lets a segment's rows be absent."""
    return sign(f"{mark_text(checkpoint)}{name}\n", [signer])


def archive(
    source: Source,
    rows: Archivable,
    form: Format,
    place: Callable[[str], Destination],
    verify: Callable[[Path], object],
    before: float,
    most: int = 1_000,
) -> Archived | None:
    """Move out the oldest whole segments sealed before that time (Unix seconds), at most ``most``;
    None if there is none.

    ``place(name)`` is the archive of that name; ``verify`` raises for a folder that is not a whole
    export. A checkpoint is younger than its records, so what is moved is old enough.
    """
    due: list[Sealed] = []
    for sealed in rows.oldest(source.log)[:most]:
        if sealed.checkpoint.at >= before:
            break
        due.append(sealed)
    if not due:
        return None
    first, upto = due[0].checkpoint.first, due[-1].checkpoint.size
    name = f"{source.log}-from-{first}"
    where = place(name)
    for _ in ExportJob(source, form, Filters(after=first - 1), where).run(upto):
        pass
    passing("retain.archived")
    _read_back(where, verify)
    passing("retain.verified")
    moved = sum(
        rows.move_out(one, archive_mark(one.checkpoint, name, source.signer)) for one in due
    )
    return Archived(name, first, upto, moved)


def _read_back(where: Destination, verify: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="archive-") as folder:
        content = where.get(MANIFEST)
        if content is None:
            raise ExportError("The archive has no manifest.")
        manifest = msgspec.json.decode(content, type=SignedManifest).manifest
        parts = [one.name for one in manifest.parts]
        for name in [MANIFEST, *parts, *(one.name for one in manifest.files)]:
            part = where.get(name)
            if part is not None:  # what is missing is the verifier's to name
                (Path(folder) / name).write_bytes(part)
        verify(Path(folder))
