"""A database in a folder that cannot be written: a restored backup, mounted to stay as it is.

SQLite wants to write even to read: a log in WAL mode has an index in ``-shm``. So it is told how
much it may believe::

    engine.sqlite3                    closed in order: immutable=1, nothing else is looked at
    engine.sqlite3, -wal, -shm        still open, or cut off: mode=ro, the log is read with it
    engine.sqlite3, -wal              a log without its index, which nothing here could make
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import connection

from controlplane.adapters.store_writes import folder_of


class NeedsWriting(Exception):
    """What cannot be done in this folder, in a sentence."""


def read_only_file() -> Path | None:
    """SQLite's file, if this process may not write it or beside it; else None."""
    folder = folder_of()
    if folder is None:
        return None
    file = Path(str(connection.settings_dict["NAME"]))
    return None if os.access(folder, os.W_OK) and os.access(file, os.W_OK) else file


@contextmanager
def opened_for_reading(file: Path) -> Iterator[None]:
    """Django's default database is ``file``, and is not written; raises NeedsWriting."""
    settings, before = connection.settings_dict, connection.settings_dict["NAME"]
    connection.close()
    settings["NAME"] = _address(file)
    try:
        yield
    finally:
        connection.close()
        settings["NAME"] = before


def is_opened_for_reading() -> bool:
    return "?mode=ro" in str(connection.settings_dict["NAME"])


def _address(file: Path) -> str:
    if _beside(file, "-shm").exists():
        return f"{file.as_uri()}?mode=ro"
    log = _beside(file, "-wal")
    if log.exists() and log.stat().st_size:
        raise NeedsWriting(
            f"{log} can be read only where it can be written: copy the folder, all three "
            f"{file.name}* of it, and name the copy with ENGINE_DATA_DIR."
        )
    return f"{file.as_uri()}?mode=ro&immutable=1"


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.name}{suffix}")
