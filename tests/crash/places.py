"""Where one run of a campaign lives, and processes forked from a warm parent to live there.

A campaign imports Django and the product once and forks: a run's process is there within
milliseconds, not after the second that the imports take. The parent opens no connection, starts
no thread and no event loop, so there is nothing in it that must not be inherited.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.db import connections


@dataclass(frozen=True)
class Place:
    """``database``: Django's settings of one run's store. ``journal``: what was acknowledged, on
    a file system that the run's faults do not reach."""

    database: dict[str, Any]
    journal: Path
    nats_url: str = ""
    nats_creds: Path | None = None
    at: float = 0.0
    tag: str = ""


def sqlite(path: Path) -> dict[str, Any]:
    from controlplane.config.settings import _sqlite

    return {**_sqlite(), "NAME": str(path)}


def postgres(name: str, port: int = 5432, host: str = "127.0.0.1") -> dict[str, Any]:
    from controlplane.config.settings import _postgres

    return _postgres(f"postgres://postgres@{host}:{port}/{name}")


def point_django_at(database: dict[str, Any]) -> None:
    """For good, in a process of its own: every thread's default database is this one."""
    connections["default"].close()
    connections.settings["default"] = {**connections.settings["default"], **database}
    connections["default"] = connections.create_connection("default")


@contextmanager
def migrated_sqlite(folder: Path) -> Iterator[Path]:
    """An empty database with the product's tables, to be copied for each run."""
    path = folder / "template.sqlite3"
    run(lambda: _migrate(sqlite(path)))
    yield path


def copied_sqlite(template: Path, path: Path) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(template, path)
    return sqlite(path)


def _migrate(database: dict[str, Any]) -> None:
    from django.core.management import call_command

    point_django_at(database)
    call_command("migrate", verbosity=0)
    with connections["default"].cursor() as cursor:
        if connections["default"].vendor == "sqlite":
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connections.close_all()


def migrate(database: dict[str, Any]) -> None:
    """Make the product's tables there, in a process of its own."""
    run(lambda: _migrate(database))


# --- processes --------------------------------------------------------------------------------
def fork(work: Callable[[], Any], log: Path | None = None) -> int:
    """Run ``work`` in a forked process, which ends with it: 0, or 70 and a traceback; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        if log is not None:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, seconds: float) -> int:
    """The exit status, negative for a signal; after ``seconds`` it is killed: TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"process {pid} did not end within {seconds} s")
        time.sleep(0.002)


def run(work: Callable[[], Any], seconds: float = 60.0) -> None:
    """Run ``work`` in a forked process to its end; raises if it failed."""
    status = wait(fork(work), seconds)
    if status:
        raise RuntimeError(f"a forked process ended with {status}")


# --- journals ---------------------------------------------------------------------------------
class Journal:
    """One line of JSON per thing asked or acknowledged, in the file before the next step begins.

    Written by ``write(2)``, so that a killed process loses none of it.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, **details: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
