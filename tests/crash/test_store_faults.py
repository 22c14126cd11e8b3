"""A full disk, a lock that is held, a damaged row: typed refusals, reads go on, nothing restarts.

These speak to the REST surface, as a person's browser would; ``tests/contracts`` asks the stores
themselves.
"""

import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test import Client

from controlplane import bootstrap
from controlplane.adapters.access.models import LoginFailures
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.store_writes import BELIEVED_S, StoreWrites, store_writes
from controlplane.application.ports import AuditUnavailable
from controlplane.entrypoints.rest import reading
from tests.absent import skip_without
from tests.contracts.test_ledger import an_end, an_intent
from tests.crash import images
from tests.databases import pointed_at
from tests.rest.conftest import PASSWORD, Api, key_of, login

MEGABYTES = 8


@pytest.fixture(autouse=True)
def fresh_reading() -> Iterator[None]:
    reading._projector.cache_clear()
    yield
    reading._projector.cache_clear()
    store_writes.note_written()  # what failed here is no news of the next test's store


@contextmanager
def full_soon(
    migrated_file: Path, mount: Path, blocker: Any, megabytes: int = MEGABYTES
) -> Iterator[Path]:
    """Django's database on a small file system of its own."""
    if reason := images.why_not():
        skip_without(f"a small file system of its own; {reason}")
    with images.tmpfs(mount, megabytes) as folder:
        path = folder / "engine.sqlite3"
        shutil.copy(migrated_file, path)
        with blocker.unblock(), pointed_at(path):
            yield folder


@pytest.fixture
def small_disk(migrated_file: Path, tmp_path: Path, django_db_blocker: Any) -> Iterator[Path]:
    with full_soon(migrated_file, tmp_path / "small", django_db_blocker) as folder:
        yield folder
        bootstrap.event_store().close()


def fill(folder: Path) -> Path:
    """Until not a byte is free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast


def refused_until_it_is_not(call: Callable[[], Any], attempts: int = 400) -> Any:
    """The first answer that is not a success: what is left in allocated pages is used up first."""
    for _ in range(attempts):
        answer = call()
        if answer.status_code >= 400:
            return answer
    raise AssertionError("the disk does not become full")


def create(api: Api, name: str) -> Any:
    return api.post("tenants/", {"name": name}, headers={"Idempotency-Key": f"key-{name}"})


def test_a_full_disk_refuses_writes_typed_serves_reads_and_passes(small_disk: Path) -> None:
    """507 store_full with Retry-After and never a 500; reads answer; the same process goes on."""
    admin = login("root", "admin")
    assert create(admin, "before").status_code == 201
    ballast = fill(small_disk)
    count = iter(range(10_000))
    full = refused_until_it_is_not(lambda: create(admin, f"t{next(count)}"))
    assert (full.status_code, full.json()["code"]) == (507, "store_full"), full.content
    assert int(full["Retry-After"]) >= 1 and "no space left" in full.json()["detail"]
    assert admin.get("tenants/").status_code == 200
    assert admin.get("events/").status_code == 200
    refused = f"t{next(count) - 1}"
    ballast.unlink()
    again = create(admin, refused)
    assert again.status_code == 201, again.content
    position = int(again["X-Log-Position"])
    found = admin.get(f"tenants/{refused}/?min_position={position}")
    assert found.status_code == 200
    assert bootstrap.event_store().verify().position == position


def readiness(admin: Api) -> tuple[int, bool, bool]:
    """What the probe answers, its word on writing, and ``ready`` of the status."""
    probe = Client().get("/readyz")
    status = admin.get("status/")
    assert status.status_code == 200, status.content
    return probe.status_code, probe.json()["checks"]["store_writable"], status.json()["ready"]


def test_with_a_full_disk_the_web_process_is_not_ready(small_disk: Path) -> None:
    """Before anything failed, for want of free space; and ready by itself once there is some."""
    admin = login("root", "admin")
    assert readiness(admin) == (200, True, True)
    ballast = fill(small_disk)
    assert readiness(admin) == (503, False, False)
    ballast.unlink()
    assert readiness(admin) == (200, True, True)


def test_after_a_failed_write_it_is_not_ready_until_one_succeeds(small_disk: Path) -> None:
    """A failure counts though there is space again: nobody has shown that it is enough."""
    admin = login("root", "admin")
    ballast = fill(small_disk)
    count = iter(range(10_000))
    refused_until_it_is_not(lambda: create(admin, f"t{next(count)}"))
    ballast.unlink()
    assert readiness(admin) == (503, False, False)
    assert create(admin, "again").status_code == 201
    assert readiness(admin) == (200, True, True)


def test_a_failed_write_is_believed_for_half_a_minute(tmp_path: Path) -> None:
    """Who is sent nothing, because it is not ready, would never write and so never be ready."""
    now = [0.0]
    writes = StoreWrites(lambda: now[0])
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    writes.note_failed(error)
    assert "no space" in writes.why_not(tmp_path)
    now[0] = BELIEVED_S - 1
    assert "no space" in writes.why_not(None)
    now[0] = BELIEVED_S
    assert writes.why_not(tmp_path) == ""


def test_a_held_lock_is_no_word_on_the_disk(tmp_path: Path) -> None:
    writes = StoreWrites()
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    writes.note_failed(error)
    assert writes.why_not(tmp_path) == ""


def test_a_read_only_file_system_is_not_ready(small_disk: Path) -> None:
    admin = login("root", "admin")
    bootstrap.event_store().close()
    connections.close_all()  # nothing can be remounted below a file that is open for writing
    images.call("mount", "-o", "remount,ro", small_disk)
    probe = Client().get("/readyz")
    assert (probe.status_code, probe.json()["checks"]["store_writable"]) == (503, False)
    images.call("mount", "-o", "remount,rw", small_disk)
    assert readiness(admin) == (200, True, True)


def test_a_full_disk_keeps_no_key_from_reading(small_disk: Path) -> None:
    """When a key was last used cannot be noted then; that is left."""
    admin = login("root", "admin")
    assert create(admin, "acme").status_code == 201
    reader = key_of(admin, "acme", "admin:read")
    fill(small_disk)
    with pytest.raises(OperationalError):
        while True:
            LoginFailures.objects.create(who=secrets.token_hex(500), since=0.0)
    answer = reader.get("models/")
    assert answer.status_code == 200, answer.content


def test_a_full_disk_refuses_a_login_typed(small_disk: Path) -> None:
    """A session cannot be written: 507, not a 500; and it can, once there is room."""
    login("root", "admin")
    ballast = fill(small_disk)

    def log_in() -> Any:
        client = Client(enforce_csrf_checks=True)
        return Api(client=client).post("session/", {"username": "root", "password": PASSWORD})

    full = refused_until_it_is_not(log_in)
    assert (full.status_code, full.json()["code"]) == (507, "store_full"), full.content
    ballast.unlink()
    assert log_in().status_code == 200


async def test_a_full_disk_admits_no_request_and_passes(small_disk: Path) -> None:
    """No intent, no service: AuditUnavailable, and nothing of it is left; then admitted again."""
    ledger = LedgerStore()
    await ledger.admit(live := an_intent())
    ballast = fill(small_disk)
    with pytest.raises(AuditUnavailable, match="full"):
        for number in range(2_000):
            await ledger.admit(refused := an_intent(request_id=f"r-{number}"))
    ballast.unlink()
    await ledger.admit(refused)
    assert await ledger.settle(an_end(live)) and await ledger.settle(an_end(refused))
    await ledger.close()


def test_a_held_lock_is_store_busy_within_the_timeout(database: Path) -> None:
    """A foreign writer holds the file: after 5 s a 503 with Retry-After; reads do not wait."""
    admin = login("root", "admin")
    assert create(admin, "before").status_code == 201
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    busy = create(admin, "during")
    waited = time.monotonic() - began
    assert (busy.status_code, busy.json()["code"]) == (503, "store_busy"), busy.content
    assert int(busy["Retry-After"]) >= 1
    assert 4 < waited < 6
    began = time.monotonic()
    assert admin.get("tenants/").status_code == 200
    assert time.monotonic() - began < 1
    refused = Api().post("session/", {"username": "root", "password": PASSWORD})
    assert (refused.status_code, refused.json()["code"]) == (503, "store_busy"), refused.content
    holder.execute("ROLLBACK")
    holder.close()
    assert create(admin, "during").status_code == 201
    bootstrap.event_store().close()


def damage(path: Path, position: int) -> None:
    """One bit of one row's data, as a bit error or an intruder would leave it."""
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TRIGGER eventstore_event_no_update")
        (data,) = raw.execute(
            "SELECT data FROM eventstore_event WHERE position = ?", (position,)
        ).fetchone()
        flipped = data.replace(b"tier", b"tieR")  # 0x72 and 0x52: bit 5
        assert flipped != data
        raw.execute("UPDATE eventstore_event SET data = ? WHERE position = ?", (flipped, position))
    raw.close()


def test_a_damaged_row_stops_the_replay_there_and_what_was_good_is_served(database: Path) -> None:
    """Reads answer from the last good projection; whoever waits for more is told why in a type."""
    admin = login("root", "admin")
    good = int(create(admin, "good")["X-Log-Position"])
    assert admin.get(f"tenants/?min_position={good}").status_code == 200
    bad = int(create(admin, "bad")["X-Log-Position"])
    damage(database, bad)
    waiting = admin.get(f"tenants/?min_position={bad}")
    assert (waiting.status_code, waiting.json()["code"]) == (503, "integrity_error")
    assert str(bad) in waiting.json()["detail"]
    served = admin.get("tenants/")
    assert served.status_code == 200
    assert [one["tenant_id"] for one in served.json()["results"]] == ["good"]
    past = admin.get(f"tenants/?as_of={bad}")
    assert (past.status_code, past.json()["code"]) == (503, "integrity_error"), past.content
    assert admin.get(f"tenants/?as_of={good}").status_code == 200
    bootstrap.command_handler.cache_clear()  # a new process, which must fold the stream
    written = admin.patch("tenants/bad/", {"tier": "premium"})
    assert (written.status_code, written.json()["code"]) == (503, "integrity_error")
    assert not any("Retry-After" in one for one in (waiting, past, written)), "no wait mends it"
    bootstrap.event_store().close()
