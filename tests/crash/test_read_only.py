"""A data folder that is mounted read-only: a sentence from each command, and a verification."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command

from controlplane import bootstrap
from controlplane.adapters.eventstore.store import DjangoEventStore
from tests.absent import skip_without
from tests.application.test_sealing import fill_events
from tests.crash import images
from tests.e2e.product import ROOT


@pytest.fixture
def sealed(database: Path) -> Path:
    """A data folder with twenty events under a checkpoint; nobody has it open."""
    store: DjangoEventStore = bootstrap.event_store()
    fill_events(store, 20)
    call_command("seal", stdout=StringIO(), stderr=StringIO())
    store.close()
    write_back(database)
    return database


def write_back(database: Path, *statements: str) -> None:
    """Run them, and leave all that is in the write-ahead log in the file."""
    raw = sqlite3.connect(database, isolation_level=None)
    for statement in (*statements, "PRAGMA wal_checkpoint(TRUNCATE)"):
        raw.execute(statement)
    raw.close()


@contextmanager
def read_only(folder: Path, *files: Path) -> Iterator[Path]:
    """``folder`` with a copy of ``files``, mounted so that nobody can write there."""
    if reason := images.why_not():
        skip_without(f"a small file system of its own; {reason}")
    with images.tmpfs(folder, 16):
        for file in files:
            shutil.copy(file, folder)
        images.call("mount", "-o", "remount,ro", folder)
        yield folder


def manage(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"ENGINE_DATABASE_URL": "", "ENGINE_SECRET_KEY": "s" * 50, **variables}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL,
        env={**os.environ, "ENGINE_DATA_DIR": str(folder), **given},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def signing_key() -> Path:
    return Path(settings.SEALING_KEY or Path(settings.DATA_DIR) / "sealing_key")


def test_verify_reads_a_folder_that_nobody_can_write(sealed: Path, tmp_path: Path) -> None:
    """As a restored backup is best looked at; and it is no less strict there."""
    with read_only(tmp_path / "ro", sealed, signing_key()) as folder:
        ran = manage(folder, "verify")
        assert ran.returncode == 0, ran.stderr
        assert "events: intact up to position 20, 20 of them under 1 checkpoint" in ran.stdout
        assert sorted(one.name for one in folder.iterdir()) == ["engine.sqlite3", "sealing_key"]
    change = "UPDATE eventstore_event SET actor = 'user:eve' WHERE position = 7"
    write_back(sealed, "DROP TRIGGER eventstore_event_no_update", change)
    with read_only(tmp_path / "ro", sealed, signing_key()) as folder:
        ran = manage(folder, "verify")
        assert ran.returncode == 1 and "position 7" in ran.stderr, ran.stderr


def test_verify_reads_the_log_that_was_not_written_back(sealed: Path, tmp_path: Path) -> None:
    """A copy taken while somebody had it open, its index with it; without that it says so."""
    holder = sqlite3.connect(sealed)
    holder.execute("PRAGMA journal_mode=WAL")
    fill_events(bootstrap.event_store(), 5, seed=2)
    files = [sealed.with_name(f"{sealed.name}{suffix}") for suffix in ("", "-wal", "-shm")]
    with read_only(tmp_path / "ro", *files, signing_key()) as folder:
        ran = manage(folder, "verify")
        assert "events: intact up to position 25" in ran.stdout, ran.stderr
    with read_only(tmp_path / "ro", *files[:2], signing_key()) as folder:
        said = sentence(manage(folder, "verify"))
        assert f"{folder}/engine.sqlite3-wal" in said and "copy the folder" in said
    holder.close()
    bootstrap.event_store().close()


def sentence(ran: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error."""
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    (line,) = ran.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("command", ["create_admin", "apply --export", "demo"])
def test_what_writes_says_where_it_cannot(sealed: Path, tmp_path: Path, command: str) -> None:
    with read_only(tmp_path / "ro", sealed) as folder:
        said = sentence(manage(folder, *command.split()))
        assert str(folder) in said and "ENGINE_DATA_DIR" in said and "for writing" in said


def test_a_secret_that_cannot_be_made_is_asked_for(tmp_path: Path) -> None:
    with read_only(tmp_path / "ro") as folder:
        said = sentence(manage(folder, "demo", ENGINE_SECRET_KEY=""))
        assert f"{folder}/secret_key" in said and "ENGINE_SECRET_KEY" in said
