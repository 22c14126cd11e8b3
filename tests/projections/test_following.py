"""Following the log: every event once, in order, up to the first that cannot be trusted."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.ports import (
    Append,
    EventMeta,
    IntegrityError,
    RecordedEvent,
    StoreUnavailable,
)
from controlplane.application.project import LiveRows, LogFollower
from controlplane.projections.fold import STATE, fold_rows, state_hash
from tests.projections.history import random_history

META = EventMeta("user:ada")


def filled(num_events: int) -> MemoryEventStore:
    store = MemoryEventStore(ManualClock())
    fill(store, num_events)
    return store


def fill(store: MemoryEventStore, num_events: int, seed: int = 1) -> None:
    for stream, event in random_history(seed, num_events):
        store.append(Append(stream, None, [event], META))


def test_a_follower_sees_what_there_was_and_what_comes() -> None:
    store, seen = filled(20), []
    follower = LogFollower(store, 5, lambda event: seen.append(event.position), 0.005)
    follower.start()
    assert seen == list(range(6, 23))
    fill(store, 20)
    assert follower.wait_for(store.head().position, timeout=5)
    follower.stop()
    assert seen == list(range(6, store.head().position + 1))


def test_waiting_for_what_does_not_come_ends_in_time() -> None:
    follower = LogFollower(filled(3), 0, lambda event: None, 0.005)
    follower.start()
    started = time.monotonic()
    assert not follower.wait_for(10**6, timeout=0.1)
    assert time.monotonic() - started < 2
    follower.stop()


@dataclass
class Damaged:
    """A store whose event at ``position`` was edited; the hash was not."""

    store: MemoryEventStore
    position: int

    def read_all(self, after: int, limit: int, upto: int | None = None) -> list[RecordedEvent]:
        return [
            replace(event, stream="edited") if event.position == self.position else event
            for event in self.store.read_all(after, limit, upto)
        ]


@pytest.mark.parametrize("after", [0, 4])
def test_a_follower_stops_at_a_broken_chain(after: int) -> None:
    seen: list[int] = []
    store: Any = Damaged(filled(20), 9)
    follower = LogFollower(store, after, lambda event: seen.append(event.position))
    with pytest.raises(IntegrityError) as found:
        follower.catch_up()
    assert found.value.position == 9
    assert 9 not in seen


def test_a_running_follower_says_why_it_stopped() -> None:
    store = filled(3)
    damaged: Any = Damaged(store, 20)
    follower = LogFollower(damaged, 0, lambda event: None, 0.005)
    follower.start()
    fill(store, 30)
    assert not follower.wait_for(20, timeout=0.5)
    assert isinstance(follower.failure, IntegrityError)
    follower.stop()


@dataclass
class Unreachable:
    """A store that cannot be read the first ``failures`` times it is asked."""

    store: MemoryEventStore
    failures: int

    def read_all(self, after: int, limit: int, upto: int | None = None) -> list[RecordedEvent]:
        if after and self.failures:
            self.failures -= 1
            raise StoreUnavailable("store_error", "gone")
        return self.store.read_all(after, limit, upto)


def test_a_store_that_comes_back_is_followed_on() -> None:
    """An outage ends nothing: the follower tries again until it can read."""
    store = filled(3)
    flaky: Any = Unreachable(store, 0)
    follower = LogFollower(flaky, 0, lambda event: None, 0.005)
    follower.start()
    flaky.failures = 1
    fill(store, 5)
    assert follower.wait_for(store.head().position, timeout=10)
    assert flaky.failures == 0 and follower.failure is None
    follower.stop()


def test_rows_kept_live_equal_rows_folded_afresh() -> None:
    """Pushed one by one while others read, or folded at once: the same state."""
    store = filled(100)
    live = LiveRows(store, poll_seconds=0.005)
    live.start()
    fill(store, 100, seed=2)
    assert live.follower.wait_for(store.head().position, timeout=5)
    live.stop()
    fresh = fold_rows(store.read_all(0, 10_000), STATE)
    assert state_hash(live.rows, STATE) == state_hash(fresh, STATE)
