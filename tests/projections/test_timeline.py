"""The state as of any position is the fold up to there, with snapshots or without."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import bootstrap
from controlplane.adapters.readmodel import timeline as timelines
from controlplane.adapters.readmodel.models import Snapshot
from controlplane.adapters.readmodel.projector import Projector
from controlplane.adapters.readmodel.timeline import RowsFolding, Timeline
from controlplane.application.ports import Append, EventMeta, EventStore
from controlplane.projections.fold import STATE, Folder, fold_rows, state_hash
from tests.projections.history import random_history

NUM_EVENTS, EVERY = 240, 50


@pytest.fixture
def store(database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventStore]:
    """A log of 242 events; a snapshot is due every 50."""
    monkeypatch.setattr(timelines, "INTERVAL", EVERY)
    monkeypatch.setattr(timelines, "READ_BATCH", 10)
    store = bootstrap.event_store()
    for stream, event in random_history(11, NUM_EVENTS):
        store.append(Append(stream, None, [event], EventMeta("user:ada")))
    yield store
    store.close()


def timeline(store: EventStore) -> Timeline[Folder]:
    return Timeline(store, RowsFolding())


def hash_at(store: EventStore, position: int) -> str:
    return RowsFolding().digest(timeline(store).at(position))


def folded(store: EventStore, position: int) -> str:
    return state_hash(fold_rows(store.read_all(0, position), STATE), STATE)


def kept() -> list[int]:
    return list(Snapshot.objects.order_by("position").values_list("position", flat=True))


def test_every_position_has_the_state_that_its_prefix_folds_to(store: EventStore) -> None:
    """Downwards, upwards, and again: with no snapshot, and with all of them."""
    for position in (242, 0, 1, 49, 50, 51, 149, 150, 200, 241, 242):
        assert hash_at(store, position) == folded(store, position), position
    assert kept() == [50, 100, 150, 200]


def test_following_the_log_leaves_snapshots_behind(store: EventStore) -> None:
    """And so does a rebuild; each with the hash of the state it holds."""
    projector = Projector(store)
    while projector.catch_up(25) < store.head().position:
        pass
    left = kept()
    assert left == [50, 100, 150, 200]
    for found in Snapshot.objects.all():
        assert found.state_hash == folded(store, found.position)
    Snapshot.objects.all().delete()
    Projector(store).rebuild()
    assert Snapshot.objects.exists()


def spoil(**fields: object) -> None:
    Snapshot.objects.filter(position=150).update(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"made_by": "tenants:0"},
        {"log_hash": b"\1" * 32},
        {"body": b"not even compressed"},
        {"body": zlib.compress(b"\xc1")},
        {"body": zlib.compress(b"\x80")},
        {"state_hash": "0" * 64},
    ],
    ids=["other code", "other log", "damaged", "not a state", "another state", "another hash"],
)
def test_a_snapshot_that_is_not_what_it_says_is_passed_over(
    store: EventStore, fields: dict[str, object]
) -> None:
    hash_at(store, 242)
    spoil(**fields)
    assert hash_at(store, 160) == folded(store, 160)
    assert hash_at(store, 242) == folded(store, 242)


def test_the_nearest_snapshot_is_what_is_folded_on(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one interval of events is read, however long the log."""
    hash_at(store, 242)
    num_read = 0
    read_all = type(store).read_all

    def counted(self: EventStore, after: int, limit: int, upto: int | None = None) -> list[object]:
        nonlocal num_read
        events = read_all(self, after, limit, upto)
        num_read += len(events)
        return events  # type: ignore[return-value]

    monkeypatch.setattr(type(store), "read_all", counted)
    one = timeline(store)
    one.at(199)
    assert num_read <= EVERY
    before = num_read
    one.at(199)
    assert num_read == before
