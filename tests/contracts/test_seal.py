"""Sealing, on SQLite and on PostgreSQL: when it happens, what it refuses, and that it lasts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.application.merkle import root_of
from controlplane.application.notes import Signer, note_hash, parse_key, parse_note
from controlplane.application.ports import EventStore, IntegrityError
from controlplane.application.records import (
    EVENTS,
    NEWEST,
    REQUESTS,
    event_leaf,
    leaf_function,
)
from controlplane.application.seal import EventRecords, Sealer, SealingRefused, SealStore
from tests.contracts.stores import Stores, append, created
from tests.contracts.test_event_store_damage import UNGUARD
from tests.proof.filling import fill_ledger

SIGNER = Signer("test", bytes(32))
UNSEALED = {
    "sqlite": ("DROP TRIGGER ledger_checkpoint_no_update",),
    "postgres": ("ALTER TABLE ledger_checkpoint DISABLE TRIGGER ALL",),
}


class Place:
    """A store of events, a ledger, where they are sealed, and the copies."""

    def __init__(self, durable: Stores, folder: Path) -> None:
        self.durable, self.clock = durable, ManualClock()
        self.store: EventStore = durable.open()
        self.seals = DjangoSealStore()
        self.files = CheckpointFiles(folder)
        self.events, self.requests = EventRecords(self.store), RequestRecords()

    def sealer(self, seals: SealStore | None = None) -> Sealer:
        return Sealer("test", seals or self.seals, [SIGNER], self.clock, self.files)

    def append(self, count: int) -> None:
        self.store.append(append("tenant-acme", None, *[created()] * count))

    def sizes(self, log: str = EVENTS) -> list[int]:
        return [one.checkpoint.size for one in self.seals.checkpoints(log, 0, 100)]


@pytest.fixture
def place(durable: Stores, tmp_path: Path) -> Iterator[Place]:
    yield Place(durable, tmp_path / "checkpoints")


def test_a_log_is_sealed_at_a_thousand_records_or_after_a_minute(place: Place) -> None:
    sealer, clock = place.sealer(), place.clock
    assert sealer.step([place.events]) == 0
    place.append(5)
    assert sealer.step([place.events]) == 1  # never sealed before: at once
    place.append(999)
    clock.advance(59.9)
    assert sealer.step([place.events]) == 0
    place.append(1)
    assert sealer.step([place.events]) == 1 and place.sizes() == [5, 1005]
    place.append(3)
    assert sealer.step([place.events]) == 0
    clock.advance(60)
    assert sealer.step([place.events]) == 1 and place.sizes() == [5, 1005, 1008]
    place.append(2500)
    assert sealer.step([place.events]) == 2 and place.sizes()[3:] == [2008, 3008]


def test_a_checkpoint_says_what_the_log_holds(place: Place) -> None:
    """Root, chain, times and links are those computed from the records alone, and it is signed."""
    sealer = place.sealer()
    for count in (3, 700, 999):
        place.append(count)
        sealer.step([place.events], now=True)
    rows = place.store.read_columns(0, 10_000, 10_000)
    leaves = [event_leaf(columns) for columns, _ in rows]
    previous, first = b"", 1
    for sealed in place.seals.checkpoints(EVENTS, 0, 100):
        one = sealed.checkpoint
        assert parse_note(sealed.note).signers([SIGNER.public]) == [SIGNER.public]
        assert one.root == root_of(leaves[: one.size]) and one.chain == rows[one.size - 1][1]
        assert (one.previous, one.first, one.record) == (previous, first, "event/1")
        previous, first = note_hash(sealed.note), one.size + 1
    assert place.sizes() == [3, 703, 1702]
    assert [parse_key(line) for line in place.seals.public_keys()] == [SIGNER.public]


def test_the_ledger_is_sealed_in_the_order_of_its_ends(place: Place) -> None:
    fill_ledger(1500)
    assert place.sealer().step([place.requests], now=True) == 2
    rows = place.requests.read(0, 1500, 2000, NEWEST[REQUESTS])
    leaf = leaf_function(NEWEST[REQUESTS])
    last = place.seals.last(REQUESTS)
    assert last is not None and last.checkpoint.size == 1500 and last.checkpoint.chain == b""
    assert last.checkpoint.root == root_of(map(leaf, rows))


def test_damage_is_never_sealed_over(place: Place) -> None:
    """An event changed before it was sealed: the sealer names it and signs nothing."""
    place.append(5)
    for statement in UNGUARD[place.durable.name]:
        place.durable.execute(statement, ())  # type: ignore[misc]
    place.durable.execute(  # type: ignore[misc]
        "UPDATE eventstore_event SET actor = 'user:eve' WHERE position = 4", ()
    )
    with pytest.raises(IntegrityError) as found:
        place.sealer().step([place.events])
    assert found.value.position == 4 and place.sizes() == []


def test_a_changed_tile_stops_the_sealing(place: Place) -> None:
    place.append(5)
    place.sealer().step([place.events])
    place.durable.execute(  # type: ignore[misc]
        "UPDATE ledger_tile SET hashes = %s WHERE level = 0", (bytes(32 * 5),)
    )
    place.append(5)
    with pytest.raises(SealingRefused):
        place.sealer().step([place.events], now=True)


def test_of_two_sealers_one_seals_and_the_other_goes_on_from_there(place: Place) -> None:
    """Both saw the same last checkpoint; the second one's segment is refused as a whole."""
    place.append(5)

    class Behind(DjangoSealStore):
        """Its first look at the last checkpoint is from before the other sealed."""

        def last(self, log: str) -> Any:
            nonlocal looked
            looked += 1
            return None if looked == 1 else super().last(log)

    looked = 0
    assert place.sealer().step([place.events]) == 1
    place.append(4)
    assert place.sealer(Behind()).step([place.events], now=True) == 1
    assert place.sizes() == [5, 9]


def test_a_clock_set_back_neither_stops_nor_reverses_the_seals(place: Place) -> None:
    place.append(1)
    place.sealer().step([place.events])
    place.clock.advance(-3600)
    place.append(1)
    assert place.sealer().step([place.events]) == 1
    first, second = place.seals.checkpoints(EVENTS, 0, 10)
    assert second.checkpoint.at == first.checkpoint.at


@pytest.mark.parametrize("torn", ["", "engine/ev", "x\n\n\u2014 test abc"])
def test_the_copy_catches_up_after_a_crash(place: Place, torn: str) -> None:
    """A file that is behind, or ends in half a note, holds every checkpoint after one round."""
    sealer = place.sealer()
    for _ in range(3):
        place.append(2)
        sealer.step([place.events], now=True)
    path = place.files.path(EVENTS)
    notes = place.files.notes(EVENTS)
    path.write_text(notes[0] + "\n" + torn)
    assert place.files.bring_up(EVENTS, place.seals) == 2
    assert (
        place.files.notes(EVENTS)
        == notes
        == [one.note for one in place.seals.checkpoints(EVENTS, 0, 10)]
    )
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger_checkpoint SET size = size + 1",
        "UPDATE ledger_checkpoint SET note = 'x'",
        "DELETE FROM ledger_checkpoint",
    ],
)
def test_a_checkpoint_cannot_be_changed_or_deleted(place: Place, statement: str) -> None:
    """The database itself refuses, whoever asks."""
    place.append(1)
    place.sealer().step([place.events])
    with pytest.raises(DatabaseError, match="immutable"):
        place.durable.execute(statement, ())  # type: ignore[misc]
