"""A disk that failed to sync ends the process: what it had said it holds may be gone.

After ``fsync`` failed, Linux marks the pages clean that were never written, so the next ``fsync``
of the same file succeeds and proves nothing (PostgreSQL learnt it in 2018, and panics since). Only
a restart helps, which reads the file as the disk has it. Nor may a connection be closed in order:
the last one to close runs a checkpoint, which is such a second sync. Worked example::

    commit   fdatasync(engine.sqlite3-wal) = EIO     SQLITE_IOERR_FSYNC
    waiting callers                                   503 store_error, as for any failure
    later calls in this process                       503 at once, the file is not touched
    0.5 s later                                       exit status 74; a supervisor restarts it
"""

import os
import sqlite3
import sys
import threading

EXIT_STATUS = 74  # EX_IOERR of sysexits.h
GRACE_S = 0.5  # for the answers to those who wait
# Extended result codes: SQLITE_IOERR (10) with FSYNC (4) and DIR_FSYNC (5) in the second byte.
_FAILED_SYNCS = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)

_failed = threading.Event()


def is_failed_sync(error: BaseException | None) -> bool:
    """Whether SQLite says, in ``error`` or a cause of it, that something could not be synced."""
    while error is not None:
        if getattr(error, "sqlite_errorcode", 0) in _FAILED_SYNCS:
            return True
        error = error.__cause__
    return False


def has_failed() -> bool:
    """Whether a sync has failed in this process, which is about to end."""
    return _failed.is_set()


def leave_if_failed(error: BaseException) -> None:
    """``leave`` if that is what ``error`` means."""
    if is_failed_sync(error):
        leave(error)


def leave(error: BaseException) -> None:
    """Let the callers have their answer, then end this process without closing anything."""
    if _failed.is_set():
        return
    _failed.set()
    print(f"the disk failed to sync ({error}): this process ends", file=sys.stderr, flush=True)
    threading.Thread(target=_end, name="failed-sync", daemon=True).start()


def _end() -> None:
    threading.Event().wait(GRACE_S)
    os._exit(EXIT_STATUS)
