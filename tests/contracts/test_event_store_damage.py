"""What an intruder, a bit error or a full disk does to the log on disk is noticed and named."""

import sqlite3
import time
from pathlib import Path

import psycopg
import pytest
from django.db import DatabaseError, connections

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.application.ports import EventStore, IntegrityError, StoreUnavailable
from tests.contracts.stores import Stores, append, changed, created

UNGUARD = {
    "sqlite": (
        "DROP TRIGGER eventstore_event_no_update",
        "DROP TRIGGER eventstore_event_no_delete",
    ),
    "postgres": ("ALTER TABLE eventstore_event DISABLE TRIGGER ALL",),
}


@pytest.fixture
def filled(durable: Stores) -> EventStore:
    """Nine events of three streams, the database no longer guarded by its triggers."""
    store = durable.open()
    for index in range(9):
        store.append(append(f"tenant-{index % 3}", None, created()))
    for statement in UNGUARD[durable.name]:
        durable.execute(statement, ())
    return store


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE eventstore_event SET actor = 'user:eve'",
        "DELETE FROM eventstore_event",
        "UPDATE eventstore_event SET version = 7",
    ],
)
def test_an_event_cannot_be_changed_or_deleted(durable: Stores, statement: str) -> None:
    """The database itself refuses, whoever asks."""
    durable.open().append(append("tenant-acme", 0, created()))
    with pytest.raises(DatabaseError, match="immutable"):
        durable.execute(statement, ())


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("actor", "user:eve"),
        ("reason", ""),
        ("recorded_at", 5.5),
        ("type", "TenantDeleted"),
        ("stream", "tenant-9"),
        ("version", 99),
        ("data", b'{"type":"TenantCreated"}'),
        ("data", b"\xff"),
        ("hash", bytes(32)),
    ],
)
def test_a_changed_field_is_found_at_its_position(
    durable: Stores, filled: EventStore, column: str, value: object
) -> None:
    durable.execute(f"UPDATE eventstore_event SET {column} = %s WHERE position = 5", (value,))
    with pytest.raises(IntegrityError) as found:
        filled.verify()
    assert found.value.position == 5


def test_a_deleted_row_is_found(durable: Stores, filled: EventStore) -> None:
    durable.execute("DELETE FROM eventstore_event WHERE position = 4", ())
    with pytest.raises(IntegrityError) as found:
        filled.verify()
    assert found.value.position == 4


def test_a_cut_off_end_is_found(durable: Stores, filled: EventStore) -> None:
    """The head row still says how far the log went."""
    durable.execute("DELETE FROM eventstore_event WHERE position > 7", ())
    with pytest.raises(IntegrityError) as found:
        filled.verify()
    assert found.value.position == 8


def test_swapped_rows_are_found(durable: Stores, filled: EventStore) -> None:
    for old, new in ((2, 100), (3, 2), (100, 3)):
        durable.execute("UPDATE eventstore_event SET position = %s WHERE position = %s", (new, old))
    with pytest.raises(IntegrityError) as found:
        filled.verify()
    assert found.value.position == 2


def test_readers_get_all_that_is_good_before_the_damage(
    durable: Stores, filled: EventStore
) -> None:
    """Undecodable bytes at 5: a reader sees 1 to 4, then is told where and why it ends."""
    durable.execute("UPDATE eventstore_event SET data = %s WHERE position = 5", (b"\xff",))
    assert [event.position for event in filled.read_all(0, 100)] == [1, 2, 3, 4]
    with pytest.raises(IntegrityError) as found:
        filled.read_all(4, 100)
    assert found.value.position == 5


def test_a_foreign_lock_is_store_busy_and_passes(database: Path) -> None:
    """While somebody holds the file appends are refused as busy; reads and later appends work."""
    options = connections["default"].settings_dict["OPTIONS"]
    before = dict(options)
    options["init_command"] = before["init_command"].replace("timeout=5000", "timeout=200")
    store = DjangoEventStore(ManualClock())
    intruder = sqlite3.connect(database, isolation_level=None)
    try:
        store.append(append("tenant-acme", 0, created()))
        intruder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable) as refused:
            store.append(append("tenant-acme", 1, changed()))
        assert refused.value.code == "store_busy"
        assert len(store.read_all(0, 10)) == 1
        intruder.execute("ROLLBACK")
        assert store.append(append("tenant-acme", 1, changed())).position == 2
    finally:
        options.update(before)
        intruder.close()
        store.close()


def test_a_full_disk_is_store_full_and_passes(database: Path) -> None:
    """As by SQLITE_FULL (here: a page limit); once there is room appends go on, nothing is lost."""
    store = DjangoEventStore(ManualClock())
    store.append(append("tenant-acme", 0, created()))
    raw = store._writer._session._raw  # type: ignore[union-attr]
    raw.execute(f"PRAGMA max_page_count = {raw.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreUnavailable) as refused:
        for _ in range(100):
            store.append(append("tenant-acme", None, *[changed()] * 100))
    assert refused.value.code == "store_full"
    good = store.verify()
    assert store.append(append("tenant-acme", None, changed())).position == good.position + 1
    store.close()


def test_a_connection_that_failed_is_not_used_again(database: Path) -> None:
    """After anything but a busy file the handle is closed: a failed fsync must not be retried."""
    store = DjangoEventStore(ManualClock())
    store.append(append("tenant-acme", 0, created()))
    first = store._writer._session
    first._raw.close()  # type: ignore[union-attr]
    with pytest.raises(StoreUnavailable) as refused:
        store.append(append("tenant-acme", 1, changed()))
    assert refused.value.code == "store_error"
    assert store.append(append("tenant-acme", 1, changed())).position == 2
    assert store._writer._session is not first
    store.close()


@pytest.mark.postgres
def test_a_held_head_row_is_store_busy_within_the_lock_timeout(postgres: Stores) -> None:
    """Somebody stopped while it holds the head row: others are refused after 2 s, then go on."""
    store = postgres.open()
    store.append(append("tenant-acme", 0, created()))
    name = connections["default"].settings_dict["NAME"]
    with psycopg.connect(f"host=127.0.0.1 user=postgres dbname={name}") as holder:
        holder.execute("SELECT * FROM eventstore_head FOR UPDATE")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable) as refused:
            store.append(append("tenant-acme", 1, changed()))
        assert refused.value.code == "store_busy" and time.monotonic() - started < 4
    assert store.append(append("tenant-acme", 1, changed())).position == 2


@pytest.mark.postgres
def test_a_restarted_server_is_found_again(postgres: Stores) -> None:
    """Every connection is cut: one answer each may be an error, the next ones are right."""
    store = postgres.open()
    store.append(append("tenant-acme", 0, created()))
    assert store.head().position == 1
    with psycopg.connect("host=127.0.0.1 user=postgres dbname=postgres", autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
            (connections["default"].settings_dict["NAME"],),
        )
    for attempt in (store.head, lambda: store.append(append("tenant-acme", None, changed()))):
        with pytest.raises(StoreUnavailable):
            attempt()
    assert store.append(append("tenant-acme", None, changed())).position == 2
    assert store.head().position == 2
    connections["default"].close()
