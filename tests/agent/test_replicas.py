"""The replica table: states, reasons and backoff."""

import pytest

from gpuagent.agent import ipc
from gpuagent.agent.replicas import ReplicaTable, backoff
from gpuagent.wire.messages import TokenizerBundle
from tests.agent.harness import spec


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.num_changes = 0

    def changed(self) -> None:
        self.num_changes += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> ReplicaTable:
    return ReplicaTable(lambda: clock.now, lambda: clock.now, clock.changed)


def loaded(replica_id: str = "a") -> ipc.Loaded:
    bundle = TokenizerBundle(version_id="m@1", tokenizer_json=b"{}")
    return ipc.Loaded(replica_id, 1, 2, 3, 0.5, "sha", 2048, bundle)


def state(table: ReplicaTable, replica_id: str = "a") -> str:
    replica = table.get(replica_id)
    return replica.state if replica else "gone"


def test_from_start_to_ready_to_gone(table: ReplicaTable, clock: Clock) -> None:
    table.start(spec("a"))
    table.progressed(ipc.Progress("a", "downloading", "download", 0.5))
    assert state(table) == "downloading"
    clock.now += 5
    table.became_ready(loaded())
    status = table.statuses()[0]
    assert (status.state, status.since, status.weights_bytes) == ("ready", 1005.0, 1)
    assert table.refusal("a") == "" and "m@1" in table.bundles
    table.stop("a", drain_s=30)
    assert state(table) == "stopping" and table.refusal("a") == "the replica is stopping"
    table.remove("a")
    assert state(table) == "gone" and not table.bundles


def test_failures_back_off_from_ten_seconds_to_five_minutes() -> None:
    assert [backoff("load_failed", n) for n in (1, 2, 3, 6, 50)] == [10, 20, 40, 300, 300]
    assert [backoff("engine_lost", n) for n in (1, 2, 3, 50)] == [0.5, 1, 2, 300]


def test_a_worker_that_keeps_dying_is_restarted_ever_more_rarely(
    table: ReplicaTable, clock: Clock
) -> None:
    """Unless it ran for a minute in between."""
    waits = []
    for uptime in (1, 1, 1, 100):
        table.start(spec("a"))
        table.became_ready(loaded())
        clock.now += uptime
        table.failed("a", "engine_lost", "signal 9")
        replica = table.get("a")
        assert replica
        waits.append(replica.retry_at - clock.now)
        assert table.statuses()[0].retry_s == waits[-1]
    assert waits == [0.5, 1.0, 2.0, 0.5]


def test_what_fails_while_stopping_is_gone(table: ReplicaTable) -> None:
    table.start(spec("a"))
    table.stop("a", drain_s=30)
    table.failed("a", "engine_lost", "killed")
    assert state(table) == "gone"


def test_a_load_that_ends_while_stopping_does_not_become_ready(table: ReplicaTable) -> None:
    table.start(spec("a"))
    table.stop("a", drain_s=30)
    table.became_ready(loaded())
    assert state(table) == "stopping"


def test_a_refused_replica_causes_no_retry_and_repeats_no_change(
    table: ReplicaTable, clock: Clock
) -> None:
    """Or the reconciler would wake itself for ever."""
    table.refuse(spec("a"), "insufficient_memory", "too big")
    before = clock.num_changes
    table.refuse(spec("a"), "insufficient_memory", "too big")
    assert (clock.num_changes, table.next_retry()) == (before, None)


def test_one_version_keeps_its_tokenizer_while_any_replica_has_it(table: ReplicaTable) -> None:
    for name in "ab":
        table.start(spec(name))
        table.became_ready(loaded(name))
    table.remove("a")
    assert "m@1" in table.bundles
    table.remove("b")
    assert not table.bundles
