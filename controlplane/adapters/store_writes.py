"""Whether the store can be written, as far as this process can tell without writing.

Two signs: what became of the last write here, and the file system that SQLite's file is on. A
probe costs one ``statvfs``; it writes nothing, which on a full disk would only take the last page.
A failure is believed for 30 s, since a process that is not asked because it is not ready would not
write again and so never learn better. Worked example, on a disk that is full and then emptied::

    append   SQLITE_FULL                     note_failed     "no space is left"
    probe    0 bytes free                    503             (PostgreSQL: for the failure alone)
    append   committed, or 30 s later        note_written
    probe    3 GiB free                      200
"""

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from django.db import connections

MIN_FREE_BYTES = 1 << 20  # a write needs its pages twice: in the write-ahead log, then in the file
BELIEVED_S = 30.0  # as long as the Retry-After of a refusal for want of space

NO_SPACE = "cannot be written: no space is left"
READ_ONLY = "cannot be written: it is read-only"
FAILED = "cannot be written: the last write failed"

# By SQLite's primary result code, and by PostgreSQL's SQLSTATE (disk_full, read_only_transaction).
_REASONS: dict[object, str] = {
    sqlite3.SQLITE_FULL: NO_SPACE,
    sqlite3.SQLITE_READONLY: READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: FAILED,
    sqlite3.SQLITE_IOERR: FAILED,
    "53100": NO_SPACE,
    "25006": READ_ONLY,
}


@dataclass(frozen=True)
class Failure:
    reason: str
    at: float


class StoreWrites:
    """Told by whoever writes, in any thread; ``monotonic`` in seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._failure: Failure | None = None

    def note_written(self) -> None:
        self._failure = None

    def note_failed(self, error: BaseException) -> None:
        """Remember it if the store could not take it; a lock that is held passes by itself."""
        if reason := _reason(error):
            self._failure = Failure(reason, self._monotonic())

    def why_not(self, folder: Path | None) -> str:
        """Why nothing can be written now, empty if it can; ``folder``: where SQLite's file is."""
        failure = self._failure
        if failure is not None and self._monotonic() - failure.at < BELIEVED_S:
            return failure.reason
        return "" if folder is None else _why_not_in(folder)


def _reason(error: BaseException | None) -> str:
    """Of ``error`` or of what caused it; empty if it says nothing of the store."""
    while error is not None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if found := _REASONS.get(getattr(error, "sqlstate", None) or code):
            return found
        error = error.__cause__
    return ""


def _why_not_in(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return READ_ONLY
    num_free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return NO_SPACE if num_free * found.f_frsize < MIN_FREE_BYTES else ""


store_writes = StoreWrites()


def why_unwritable(alias: str = "default") -> str:
    """``StoreWrites.why_not`` of this process, for the Django database ``alias``."""
    return store_writes.why_not(folder_of(alias))


def folder_of(alias: str = "default") -> Path | None:
    """Where SQLite's file is; None for a database that has no file here."""
    name = str(connections[alias].settings_dict["NAME"])
    is_file = connections[alias].vendor == "sqlite" and name.startswith("/")
    return Path(name).parent if is_file else None
