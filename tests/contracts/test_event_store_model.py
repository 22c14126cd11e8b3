"""Whatever is done to a store in whatever order, it answers like a twenty-line model."""

from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.ports import EventStore, KeyUsed
from controlplane.domain.errors import VersionConflict
from tests.contracts.stores import Stores, append, changed, created

STREAMS = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from(["", "k1", "k2"])
COUNTS = st.integers(0, 3)
_examples = count()


class StoreMachine(RuleBasedStateMachine):
    """The model: the list of (stream, version), each key's position, each lease's holder."""

    def open(self) -> list[EventStore]:
        store = MemoryEventStore(ManualClock())
        return [store, store]

    @initialize()
    def start(self) -> None:
        self.stores = self.open()
        self.base = self.stores[0].head().position
        self.salt = f"{next(_examples)}-"
        self.log: list[tuple[str, int]] = []
        self.keys: dict[str, int] = {}

    def version(self, stream: str) -> int:
        return sum(one == stream for one, _ in self.log)

    @rule(
        which=st.sampled_from([0, 1]),
        stream=STREAMS,
        num=COUNTS,
        off=st.sampled_from([None, 0, 0, 1, -1]),
        key=KEYS,
    )
    def append(self, which: int, stream: str, num: int, off: int | None, key: str) -> None:
        version = self.version(stream)
        expected = None if off is None else version + off
        one = append(self.salt + stream, expected, *[created()] * num, key=key and self.salt + key)
        answer = self._try(which, one)
        if key and key in self.keys:
            assert answer == ("used", self.keys[key])
        elif expected is not None and expected != version:
            assert answer == ("conflict", version)
        else:
            self.log += [(stream, version + index + 1) for index in range(num)]
            assert answer == ("done", self.base + len(self.log), version + num)
            if key:
                self.keys[key] = self.base + len(self.log)

    def _try(self, which: int, one: Any) -> tuple[Any, ...]:
        try:
            done = self.stores[which].append(one)
            return "done", done.position, done.version
        except KeyUsed as used:
            return "used", used.stored.position
        except VersionConflict as conflict:
            return "conflict", conflict.actual

    @rule(which=st.sampled_from([0, 1]), after=st.integers(0, 20), limit=st.integers(1, 5))
    def read(self, which: int, after: int, limit: int) -> None:
        events = self.stores[which].read_all(self.base + after, limit)
        expected = self.log[after : after + limit]
        assert [(event.stream, event.version) for event in events] == [
            (self.salt + stream, version) for stream, version in expected
        ]

    @rule(which=st.sampled_from([0, 1]), stream=STREAMS, after=st.integers(0, 4))
    def replay(self, which: int, stream: str, after: int) -> None:
        found = self.stores[which].replay(self.salt + stream, after)
        assert len(found) == max(0, self.version(stream) - after)

    @rule(which=st.sampled_from([0, 1]))
    def conflicting_neighbour(self, which: int) -> None:
        """A refused append in between leaves no trace."""
        assert self._try(which, append(self.salt + "a", 99, changed()))[0] == "conflict"

    @invariant()
    def head_is_the_number_of_events(self) -> None:
        if hasattr(self, "stores"):
            assert self.stores[1].head().position == self.base + len(self.log)

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.stores[0].verify(self.base)


QUICK = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_memory_store_behaves_like_the_model() -> None:
    _run(StoreMachine, QUICK)


def test_stores_on_disk_behave_like_the_model(durable: Stores) -> None:
    """Two stores on one database, as two processes; each example goes on where the last ended."""
    opened = [durable.open(), durable.open()]

    class OnDisk(StoreMachine):
        def open(self) -> list[EventStore]:
            return opened

    _run(OnDisk, settings(QUICK, max_examples=12))


def _run(machine: type[RuleBasedStateMachine], how: settings) -> None:
    run_state_machine_as_test(machine, settings=how)  # type: ignore[no-untyped-call]
