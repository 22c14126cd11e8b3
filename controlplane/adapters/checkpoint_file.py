"""Checkpoints beside the data, in a file a log: so that a log cannot be cut off with its seals.

``DIR/events.notes`` holds the signed notes, oldest first, an empty line after each. A crash between
the store's commit and the file's write leaves the file behind; the next round brings it up::

    store  … 2048  3048  3100          file  … 2048          3048 and 3100 are appended, synced
"""

import fcntl
import os
import re
from pathlib import Path
from typing import BinaryIO

from controlplane.application.notes import join_notes, split_notes
from controlplane.application.seal import Sealed, SealStore

_BATCH = 500
_TAIL = 64 * 1024  # bytes that hold the last note many times over
_NOTE_END = re.compile(
    rb"\n\xe2\x80\x94 [^\n]+\n\n"
)  # a signature's line and the empty one after it


class CheckpointFiles:
    """``application.seal.Copies`` in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, log: str) -> Path:
        return self._folder / f"{log}.notes"

    def bring_up(self, log: str, store: SealStore) -> int:
        path, copied = self.path(log), 0
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a command may seal beside the controller
            size = _last_size(file)
            while missing := store.checkpoints(log, size, _BATCH):
                file.write(join_notes([one.note for one in missing]).encode())
                file.flush()
                os.fsync(file.fileno())
                size, copied = missing[-1].checkpoint.size, copied + len(missing)
        return copied

    def notes(self, log: str) -> list[str]:
        path = self.path(log)
        return list(split_notes(path.read_text())) if path.exists() else []


def _last_size(file: BinaryIO) -> int:
    """Of the last whole note; a torn one behind it is cut off."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, end - _TAIL))
    tail = file.read()
    whole = max((found.end() for found in _NOTE_END.finditer(tail)), default=0)
    if start + whole != end:
        file.truncate(start + whole)
    notes = list(split_notes(tail[:whole].decode(errors="replace")))
    return Sealed.read(notes[-1]).checkpoint.size if notes else 0
