"""A new database for the log of a simulation: SQLite, in a folder of its own.

While it is open it stands in the place of this process's configured one, since migrations that move
rows speak to that; so this is for a command, not for a process that serves. The folder is one that
``ENGINE_DATA_DIR`` may name afterwards. Nothing in it is worth a disk's flush: what is lost is
simulated again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections


class FolderInUse(Exception):
    """The folder is there and holds something."""


@contextmanager
def database(folder: Path) -> Iterator[None]:
    """A migrated database in ``folder`` as the default one, while the context lasts."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderInUse(f"{folder} exists and is not empty.")
    folder.mkdir(parents=True, exist_ok=True)
    options = dict(settings.SQLITE["OPTIONS"])
    options["init_command"] = options["init_command"].replace("FULL", "OFF")
    known = {**settings.SQLITE, "NAME": str(folder / "engine.sqlite3"), "OPTIONS": options}
    before = connections.databases[DEFAULT_DB_ALIAS]
    _exchange({**before, **known})
    try:
        call_command("migrate", verbosity=0)
        yield
    finally:
        _exchange(before)


def _exchange(default: dict) -> None:
    connections[DEFAULT_DB_ALIAS].close()
    del connections[DEFAULT_DB_ALIAS]
    connections.databases[DEFAULT_DB_ALIAS] = default
