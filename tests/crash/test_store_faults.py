"""A full disk, a lock that is held, a damaged row: typed refusals, reads go on, nothing restarts.

These speak to the REST surface, as a person's browser would; ``tests/contracts`` asks the stores
themselves.
"""

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from controlplane import bootstrap
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.ports import AuditUnavailable
from controlplane.entrypoints.rest import reading
from tests.absent import skip_without
from tests.contracts.test_ledger import an_end, an_intent
from tests.crash import images
from tests.databases import pointed_at
from tests.rest.conftest import PASSWORD, Api, login

MEGABYTES = 8


@pytest.fixture(autouse=True)
def fresh_reading() -> Iterator[None]:
    reading._projector.cache_clear()
    yield
    reading._projector.cache_clear()


@pytest.fixture
def small_disk(migrated_file: Path, tmp_path: Path, django_db_blocker: Any) -> Iterator[Path]:
    """Django's database on a file system of eight megabytes."""
    if reason := images.why_not():
        skip_without(f"a small file system of its own; {reason}")
    with images.tmpfs(tmp_path / "small", MEGABYTES) as folder:
        path = folder / "engine.sqlite3"
        shutil.copy(migrated_file, path)
        with django_db_blocker.unblock(), pointed_at(path):
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
    assert int(full["Retry-After"]) >= 1
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
