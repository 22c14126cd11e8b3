"""One flipped bit of the log, anywhere, is detected and not served: a thousand of them, twice."""

import random
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.project import LogFollower
from controlplane.domain.event_types import UnknownEvent
from tests.contracts.stores import append
from tests.databases import pointed_at
from tests.projections.history import random_history

FLIPS = 1_000
EVENTS = 60
COLUMNS = (
    "position", "stream", "version", "type", "schema_version", "data", "actor", "correlation_id",
    "causation_id", "address", "reason", "recorded_at", "hash",
)  # fmt: skip


def fill(store: DjangoEventStore) -> None:
    for stream, event in random_history(7, EVENTS):
        store.append(append(stream, None, event))


def flipped(value: Any, choose: random.Random) -> Any:
    """``value`` with one bit changed, in the form that SQLite is given it in."""
    if isinstance(value, int):
        return value ^ (1 << choose.randrange(6, 62))  # lower ones would meet another row
    raw = bytearray(struct.pack("<d", value) if isinstance(value, float) else _bytes(value))
    raw[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
    return struct.unpack("<d", raw)[0] if isinstance(value, float) else bytes(raw)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@pytest.mark.timeout(240)
def test_a_flipped_bit_of_a_row_is_found_where_it_is(database: Path) -> None:
    """verify() names the position; a follower has served everything before it and nothing after."""
    store = DjangoEventStore(ManualClock())
    fill(store)
    raw = sqlite3.connect(database, isolation_level=None)
    raw.execute("PRAGMA synchronous=OFF")
    raw.execute("DROP TRIGGER eventstore_event_no_update")
    choose = random.Random(26)
    num_found = 0
    while num_found < FLIPS:
        column, position = choose.choice(COLUMNS), choose.randint(1, EVENTS)
        query = f"SELECT {column} FROM eventstore_event WHERE position = ?"
        (value,) = raw.execute(query, (position,)).fetchone()
        spoilt = flipped(value, choose) if value != "" else ""
        try:
            put(raw, column, position, value, spoilt)
        except sqlite3.IntegrityError:
            continue  # the database itself refuses a NaN, and a stream's version twice
        if spoilt != value:
            check(store, position, column)
            num_found += 1
        put(raw, column, spoilt if column == "position" else position, value, value)
    assert store.verify().position == EVENTS + 2
    raw.close()
    store.close()


def put(raw: sqlite3.Connection, column: str, position: int, before: Any, new: Any) -> None:
    """Into the row that is at ``position``; a text stays one, whatever its bytes are."""
    value = "CAST(? AS TEXT)" if isinstance(before, str) else "?"
    raw.execute(
        f"UPDATE eventstore_event SET {column} = {value} WHERE position = ?", (new, position)
    )


def check(store: DjangoEventStore, position: int, column: str) -> None:
    with pytest.raises(IntegrityError) as found:
        store.verify()
    assert found.value.position == position or column == "position", column
    served: list[int] = []
    follower = LogFollower(store, 0, lambda recorded: served.append(recorded.position))
    with pytest.raises((IntegrityError, UnknownEvent)):
        follower.catch_up()
    assert served == list(range(1, found.value.position)), column


@pytest.mark.timeout(240)
def test_a_flipped_bit_of_the_file_is_never_served(tmp_path: Path, django_db_blocker: Any) -> None:
    """Whatever bit of the file it is: the log reads as it was, or a typed error says no."""
    whole, spoilt = tmp_path / "whole.sqlite3", tmp_path / "spoilt.sqlite3"
    with django_db_blocker.unblock():
        with pointed_at(whole):
            call_command("migrate", "eventstore", verbosity=0)
            store = DjangoEventStore(ManualClock())
            fill(store)
            before = read(store)
            store.close()
            with sqlite3.connect(whole) as raw:
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            raw.close()
        found = {"same": 0, "told": 0}
        with pointed_at(spoilt):
            for seed in range(FLIPS):
                spoil(whole, spoilt, random.Random(seed))
                found[outcome(before)] += 1
    assert found["told"] > FLIPS / 10, found


def spoil(whole: Path, spoilt: Path, choose: random.Random) -> None:
    for suffix in ("-wal", "-shm"):
        spoilt.with_name(spoilt.name + suffix).unlink(missing_ok=True)
    shutil.copy(whole, spoilt)
    with spoilt.open("r+b") as file:
        at = choose.randrange(whole.stat().st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << choose.randrange(8))]))


def outcome(before: list[Any]) -> str:
    store = DjangoEventStore(ManualClock())
    try:
        after = read(store)
    except (IntegrityError, StoreUnavailable, UnknownEvent):
        return "told"
    finally:
        store.close()
    assert after == before
    return "same"


def read(store: DjangoEventStore) -> list[Any]:
    """As a follower reads: to the head of the log, its links checked."""
    served: list[Any] = []
    LogFollower(store, 0, served.append).catch_up()
    assert store.verify().position == len(served)
    return served
