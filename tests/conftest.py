"""Settings for every test: nothing is written into the working tree, and each test that asks for
``database`` has one of its own.

With ``pytest -n 2`` there are two lanes. What watches real processes against the clock, and mostly
waits, goes first: half of it in each, one test after another. Then come the files of everything
else, which want the processor, in whichever lane is free::

    first     agent/..., e2e/..., limits/..., live/...              | contracts/test_damage.py | ...
    second    application/..., crash/..., openai/..., placement/... | access/test_jwt.py | ...

``database`` (SQLite, migrated, a file of this test alone) suits everything that uses the event
store, which has connections and threads of its own. ``@pytest.mark.django_db`` works too, with a
file shared by the run.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.databases import pointed_at

TIMED = (
    {"agent", "e2e", "limits", "live"},
    {"application", "crash", "openai", "placement"},
)
_DATA_DIR = Path(tempfile.mkdtemp(prefix="engine-tests-"))
os.environ["ENGINE_DATA_DIR"] = str(_DATA_DIR)


class Lanes(LoadScopeScheduling):
    """What has the most tests is handed out first: the two halves, whole, and then the files."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = path.split("/")[1]
        return next((f"timed {n}" for n, one in enumerate(TIMED) if folder in one), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Lanes:
    return Lanes(config, log)


def pytest_configure() -> None:
    """pytest-django has read the settings before this file: move what they hold."""
    from django.conf import settings

    settings.PASSWORD_HASHERS = ["tests.hashers.CheapArgon2"]
    settings.DATA_DIR = _DATA_DIR
    settings.DATABASES["default"]["NAME"] = str(_DATA_DIR / "engine.sqlite3")


def pytest_unconfigure() -> None:
    shutil.rmtree(_DATA_DIR, ignore_errors=True)


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """A file, since the event store's own connections could not share a database in memory."""
    from django.conf import settings

    settings.DATABASES["default"].setdefault("TEST", {})["NAME"] = str(_DATA_DIR / "test.sqlite3")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker) -> None:  # type: ignore[no-untyped-def]
    """Without the triggers that keep events for ever, so that tests can be cleaned up after.

    ``tests/contracts`` proves the triggers on databases of its own.
    """
    from django.db import connection

    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        for (name,) in cursor.fetchall():
            cursor.execute(f"DROP TRIGGER {name}")


@pytest.fixture(scope="session")
def migrated_file(django_db_blocker) -> Path:  # type: ignore[no-untyped-def]
    """A migrated SQLite database with nothing in it, to be copied."""
    from django.core.management import call_command
    from django.db import connections

    path = _DATA_DIR / "migrated.sqlite3"
    with django_db_blocker.unblock(), pointed_at(path):
        call_command("migrate", verbosity=0)
        connections["default"].cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def database(migrated_file: Path, tmp_path: Path, django_db_blocker) -> Iterator[Path]:  # type: ignore[no-untyped-def]
    """Django's default database is a fresh file for this test, alone in its data folder; its path.

    Keys and the copies of checkpoints lie beside it, so they too are of this test.
    """
    from django.conf import settings

    path, before = tmp_path / "engine.sqlite3", settings.DATA_DIR
    shutil.copy(migrated_file, path)
    settings.DATA_DIR = tmp_path
    try:
        with django_db_blocker.unblock(), pointed_at(path):
            yield path
    finally:
        settings.DATA_DIR = before


@pytest.fixture(autouse=True)
def fresh_bootstrap() -> Iterator[None]:
    """What ``bootstrap`` made for one test is not there in the next, whose database is another."""
    yield
    made = sys.modules.get("controlplane.bootstrap")
    for part in vars(made).values() if made else ():
        if hasattr(part, "cache_clear"):
            part.cache_clear()
