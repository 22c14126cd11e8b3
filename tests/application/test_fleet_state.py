"""Who can be routed to, who must still acknowledge, and which of two planners wins."""

import pytest
from msgspec.structs import replace

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.fleet import (
    Delivery,
    DesiredNode,
    DeviceLoad,
    FleetLoads,
    NodeLoad,
    ReplicaLoad,
)
from controlplane.application.fleet_state import AGED_S, LOSE_S, FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import Append, EventMeta
from controlplane.application.project import LogFollower
from controlplane.application.publish import OVERDUE_S, Publisher, desired_nodes
from controlplane.application.reconcile import Reconciler, inputs_of, snapshot
from controlplane.domain import node as nodes
from controlplane.domain.model import (
    ModelRegistered,
    ModelVersionAdded,
    ModelVersionRetired,
    ModelVersionScaled,
)
from controlplane.domain.node import DeviceInfo
from controlplane.domain.routing import RoutingWeightsSet, Weights
from controlplane.domain.version_spec import VersionSpec

SPEC = VersionSpec(version="v1", source="simulated://m", gpu_memory=1000, max_batch=4)


class Log:
    """A log with one node and one model, and everything that is folded from it."""

    def __init__(self, kind: str = "cpu", memory: int = 4096) -> None:
        self.clock = ManualClock()
        self.store = MemoryEventStore(self.clock)
        self.state, self.loads = FleetState(), FleetLoads()
        self.follower = LogFollower(self.store, 0, self.state.apply)
        self.handler = CommandHandler(self.store, self.clock)
        self.reconciler = Reconciler(self.handler, self.clock, self.state, self.loads)
        device = DeviceInfo(0, kind, "device", memory)
        self.add("node-n1", nodes.NodeJoined("n1", "b1", "z", (device,), 0.0))
        self.add("model-m", ModelRegistered("m", 0.0), ModelVersionAdded("m", SPEC, 0.0))

    def add(self, stream: str, *events: object) -> None:
        self.store.append(Append(stream, None, events, EventMeta("user:ann")))  # type: ignore[arg-type]
        self.follower.catch_up()

    def plan(self) -> str:
        """Place what is missing; the id of the one replica."""
        self.reconciler.step()
        self.follower.catch_up()
        return next(iter(self.state.placement.assignments))

    def ready(self, replica_id: str) -> None:
        event = nodes.ReplicaBecameReady(
            "n1", replica_id, "m@v1", 0, 1, 2, 3, 0.5, "", 1.0  # type: ignore[arg-type]
        )  # fmt: skip
        self.add("node-n1", event)

    def hear(
        self,
        seq: int = 1,
        acked: tuple[int, int] = (1, 1),
        replica_id: str = "",
        num_local: dict[str, int] | None = None,
        prefixes: dict[str, bytes] | None = None,
    ) -> None:
        device = DeviceLoad(0, 0.5, 1000, 4096, 0, 60.0, 0.0)
        figures = ReplicaLoad(replica_id, "m@v1", 0, "ready", 2, 1, 30, 64, 16, 900.0, 0.02,
                              5, 5, 0, 0, 0.0)  # fmt: skip
        found = prefixes or {}
        load = NodeLoad("n1", "b1", seq, 0.0, *acked, False, (device,), (figures,), found)
        self.loads.record(load, self.clock.monotonic(), num_local)


def test_a_candidate_carries_what_its_node_said() -> None:
    log = Log()
    replica_id = log.plan()
    assert log.state.candidates("m@v1", log.loads, 0.0)[0].state == "pending"
    log.ready(replica_id)
    log.hear(replica_id=replica_id)
    log.clock.advance(2)
    (view,) = log.state.candidates("m@v1", log.loads, log.clock.monotonic(), {replica_id: 3})
    assert (view.state, view.node_status, view.age_s) == ("ready", "ready", 2.0)
    assert (view.utilization, view.temperature_c, view.memory_free_bytes) == (0.5, 60.0, 3096)
    assert (view.num_running, view.num_waiting, view.num_local, view.max_batch) == (2, 1, 3, 4)
    assert (view.num_blocks, view.prefill_tokens_per_s, view.decode_step_s) == (64, 900.0, 0.02)
    assert log.state.num_ready("m@v1") == 1


def test_a_candidate_carries_what_this_gateway_knows_of_it() -> None:
    """Its own requests there, now and when the telemetry came, what of the prompt is cached, and
    how far away the node is."""
    log = Log()
    log.state.zone = "eu/r1"
    replica_id = log.plan()
    log.ready(replica_id)
    log.hear(replica_id=replica_id, num_local={replica_id: 5})
    local, tokens, cached = ({replica_id: number} for number in (3, 40, 64))
    (view,) = log.state.candidates("m@v1", log.loads, 0.0, local, tokens, cached)
    assert (view.num_local, view.num_local_then, view.num_local_tokens) == (3, 5, 40)
    assert (view.num_cached_tokens, view.zone_hops) == (64, 2)  # z is no part of eu


def test_an_age_is_never_more_than_a_tenth_of_a_second_too_young() -> None:
    """Views are not made anew for each request, and yet a silent node is soon ruled out."""
    log = Log()
    replica_id = log.plan()
    log.ready(replica_id)
    log.hear(replica_id=replica_id)
    for seconds in (0.0, 0.05, 0.12, 3.0, 7.0):
        now = log.clock.monotonic() + seconds
        (view,) = log.state.candidates("m@v1", log.loads, now)
        assert view.age_s is not None and seconds - AGED_S < view.age_s <= seconds


# --- how long until a model answers -----------------------------------------------------------
def said(log: Log, replica_id: str, tier: str, wait_s: float, state: str = "ready") -> None:
    """What its node tells of a replica that it keeps off the device."""
    figures = ReplicaLoad(replica_id, "m@v1", 0, state, 0, 0, 0, 0, 16, 0.0, 0.0, 0, 0, 0, 0, 0.0,
                          tier=tier, expected_wait_s=wait_s)  # fmt: skip
    seq = 1 + (known.seq if (known := log.loads.latest("n1")) else 0)
    load = NodeLoad("n1", "b1", seq, 0.0, 1, 1, False, (), (figures,))
    assert log.loads.record(load, log.clock.monotonic())


def test_a_resident_replica_is_not_waited_for() -> None:
    log = Log()
    replica_id = log.plan()
    log.ready(replica_id)
    said(log, replica_id, "resident", 0.0)
    assert log.state.wait_s("m@v1", 10.0, log.loads) is None


@pytest.mark.parametrize(("tier", "wait_s"), [("host", 0.05), ("storage", 7.5)])
def test_a_parked_replica_is_waited_for_as_long_as_its_node_says(tier: str, wait_s: float) -> None:
    """By its node's word it is ready; only who asks without telemetry takes that for here."""
    log = Log()
    replica_id = log.plan()
    log.ready(replica_id)
    said(log, replica_id, tier, wait_s)
    assert log.state.wait_s("m@v1", 10.0, log.loads) == wait_s
    assert log.state.wait_s("m@v1", 10.0) is None
    said(log, replica_id, "resident", 0.0)
    assert log.state.wait_s("m@v1", 10.0, log.loads) is None, "it was swapped in"


def two_parked() -> tuple[Log, str, str]:
    """One replica on each of two nodes; n2 says nothing yet."""
    log = Log()
    log.add("model-m", ModelVersionScaled("m", "v1", 2, 2, 1.0))
    device = DeviceInfo(0, "cpu", "device", 4096)
    log.add("node-n2", nodes.NodeJoined("n2", "b2", "z", (device,), 2.0))  # type: ignore[arg-type]
    log.plan()
    by_node = {one.node_id: name for name, one in log.state.placement.assignments.items()}
    for node_id, name in by_node.items():
        about = (node_id, name, "m@v1", 0, 1, 2, 3, 0.5, "", 1.0)
        log.add(f"node-{node_id}", nodes.ReplicaBecameReady(*about))  # type: ignore[arg-type]
    return log, by_node["n1"], by_node["n2"]


def parked_on_n2(log: Log, replica_id: str, wait_s: float) -> None:
    figures = ReplicaLoad(replica_id, "m@v1", 0, "ready", 0, 0, 0, 0, 16, 0.0, 0.0, 0, 0, 0, 0, 0.0,
                          tier="host", expected_wait_s=wait_s)  # fmt: skip
    load = NodeLoad("n2", "b2", 1, 0.0, 1, 1, False, (), (figures,))
    assert log.loads.record(load, log.clock.monotonic())


def test_of_parked_replicas_the_soonest_counts_and_a_resident_one_before_all() -> None:
    log, first, second = two_parked()
    said(log, first, "storage", 8.0)
    parked_on_n2(log, second, 0.25)
    assert log.state.wait_s("m@v1", 10.0, log.loads) == 0.25
    said(log, first, "resident", 0.0)
    assert log.state.wait_s("m@v1", 10.0, log.loads) is None


def test_one_that_is_parked_is_sooner_than_one_that_loads() -> None:
    log, first, second = two_parked()
    log.add("node-n2", nodes.ReplicaStateChanged("n2", second, "m@v1", "loading", 10.0))  # type: ignore[arg-type]
    said(log, first, "host", 0.5)
    assert log.state.wait_s("m@v1", 10.0, log.loads) == 0.5


def test_what_is_warm_and_was_never_loaded_is_waited_for_as_its_node_expects() -> None:
    """It is pending, and yet its node takes requests for it; one placed as resident it does not,
    and that one is waited for as for any load."""
    log = Log()
    replica_id = log.plan()
    changed = nodes.ReplicaStateChanged("n1", replica_id, "m@v1", "pending", 10.0)  # type: ignore[arg-type]
    log.add("node-n1", changed)
    said(log, replica_id, "storage", 4.0, "pending")
    as_any_load = log.state.wait_s("m@v1", 10.0)
    assert as_any_load is not None and as_any_load > 4.0
    assert log.state.wait_s("m@v1", 10.0, log.loads) == as_any_load
    placed = log.state.placement
    warm = {name: replace(one, tier="warm") for name, one in placed.assignments.items()}
    state = FleetState.restored(
        log.state.catalog, replace(placed, assignments=warm), log.state.nodes, log.state.scaling,
        log.state.load_seconds, log.state.routing, log.state.position,
    )  # fmt: skip
    assert state.wait_s("m@v1", 10.0, log.loads) == 4.0


def test_a_parked_replica_that_failed_is_not_waited_for() -> None:
    log = Log()
    replica_id = log.plan()
    log.ready(replica_id)
    failed = nodes.ReplicaFailed("n1", replica_id, "m@v1", "load_failed", "", 9.0)  # type: ignore[arg-type]
    log.add("node-n1", failed)
    said(log, replica_id, "storage", 0.5, "failed")
    wait_s = log.state.wait_s("m@v1", 10.0, log.loads)
    assert wait_s is not None and wait_s > 0.5


def test_the_word_of_a_suspect_node_is_not_counted_on_for_a_parked_replica_either() -> None:
    log = Log()
    replica_id = log.plan()
    log.ready(replica_id)
    said(log, replica_id, "host", 0.05)
    log.add("node-n1", nodes.NodeSuspected("n1", 7.0, 9.0))  # type: ignore[arg-type]
    wait_s = log.state.wait_s("m@v1", 10.0, log.loads)
    assert wait_s is not None and wait_s > LOSE_S


def test_weights_are_those_that_were_set_last() -> None:
    log = Log()
    assert log.state.routing.weights == Weights()
    more = Weights(beta=2.0)
    log.add("routing-weights", RoutingWeightsSet(Weights(), more, 1.0))
    assert log.state.routing.weights == more


def test_caches_are_known_where_there_is_a_choice() -> None:
    """Of replicas on the device; a lone replica's is never asked for."""
    log = Log()
    first = log.plan()
    log.hear(replica_id=first, prefixes={first: bytes(8)})
    assert log.state.prefix_caches("m@v1", log.loads, 0.0) == []
    log.add("model-m", ModelVersionScaled("m", "v1", 2, 2, 1.0))
    device = DeviceInfo(0, "cpu", "device", 4096)
    log.add("node-n2", nodes.NodeJoined("n2", "b1", "z", (device,), 2.0))  # type: ignore[arg-type]
    log.plan()
    (cache,) = log.state.prefix_caches("m@v1", log.loads, 0.0)
    assert (cache.replica_id, cache.block_size, cache.mask) == (first, 16, 63)


def test_what_no_decision_names_is_never_routed_to() -> None:
    """After a partition heals the old replica still says ready; only the new one counts."""
    log = Log()
    old = log.plan()
    log.add("node-n1", nodes.NodeLost("n1", 15.0, 1.0))  # type: ignore[arg-type]
    device = DeviceInfo(0, "cpu", "device", 4096)
    log.add("node-n2", nodes.NodeJoined("n2", "b1", "z", (device,), 2.0))  # type: ignore[arg-type]
    new = log.plan()
    log.add("node-n1", nodes.NodeRecovered("n1", "b1", 3.0))  # type: ignore[arg-type]
    log.ready(old)
    assert [v.replica_id for v in log.state.candidates("m@v1", log.loads, 0.0)] == [new]
    assert new != old and log.state.num_ready("m@v1") == 0


def test_of_two_planners_one_wins_and_the_other_plans_again() -> None:
    """Both plan from the same version; the loser notices, and then finds nothing to do."""
    log = Log()
    state = FleetState()
    follower = LogFollower(log.store, 0, state.apply)
    follower.catch_up()
    handler = CommandHandler(log.store, log.clock)
    second = Reconciler(handler, log.clock, state, FleetLoads())
    assert log.reconciler.step() is True
    assert second.step() is False and second.num_conflicts == 1
    follower.catch_up()
    assert second.step() is False and second.num_conflicts == 1
    assert len(state.placement.assignments) == 1


def test_a_retired_version_is_stopped_and_a_gpu_keeps_a_reserve() -> None:
    log = Log()
    replica_id = log.plan()
    log.add("model-m", ModelVersionRetired("m", "v1", 1.0))
    log.reconciler.step()
    log.follower.catch_up()
    assert replica_id not in log.state.placement.assignments
    gpu = Log(kind="cuda", memory=3 * 1024**3)
    device = snapshot(gpu.state, inputs_of(gpu.state, gpu.loads, 0.0), 0.0).nodes[0].devices[0]
    assert device.capacity_bytes == 1024**3


class Bus:
    """Remembers what was delivered; may already hold something."""

    def __init__(self) -> None:
        self.held: dict[str, DesiredNode] = {}

    async def deliver(self, node: DesiredNode) -> Delivery:
        held = self.held.get(node.node_id)
        if held and (held.epoch, held.drain, held.replicas) == (
            node.epoch, node.drain, node.replicas
        ):  # fmt: skip
            return Delivery(held.epoch, held.generation, False)
        self.held[node.node_id] = node
        return Delivery(node.epoch, node.generation, True)


async def test_a_node_is_told_once_and_watched_until_it_acknowledges() -> None:
    log, bus = Log(), Bus()
    log.plan()
    publisher = Publisher(bus, log.clock, log.state, log.loads, epoch=3)
    assert await publisher.step() == 1 and await publisher.step() == 0
    told = bus.held["n1"]
    assert (told.epoch, told.generation, told.replicas[0].spec) == (3, 1, SPEC)
    log.clock.advance(OVERDUE_S)
    log.hear(seq=1, acked=(2, 1))
    assert publisher.unacknowledged() == {"n1": OVERDUE_S}, "an older epoch is no answer"
    log.hear(seq=2, acked=(3, 1))
    assert publisher.unacknowledged() == {}


async def test_an_unchanged_node_keeps_its_generation() -> None:
    """Decisions about others do not make it acknowledge anything."""
    log, bus = Log(), Bus()
    log.plan()
    publisher = Publisher(bus, log.clock, log.state, log.loads, epoch=1)
    await publisher.step()
    other = VersionSpec(version="v1", source="simulated://big", gpu_memory=10**9)
    log.add("model-big", ModelRegistered("big", 0.0), ModelVersionAdded("big", other, 0.0))
    log.plan()  # a decision: big fits nowhere
    log.clock.advance(60)
    assert await publisher.step() == 0
    assert bus.held["n1"].generation == 1 and log.state.placement.generation == 2
    log.hear(acked=(1, 1))
    assert publisher.unacknowledged() == {}


async def test_what_the_bus_lost_is_written_again() -> None:
    log, bus = Log(), Bus()
    log.plan()
    publisher = Publisher(bus, log.clock, log.state, log.loads, epoch=1, verify_s=5)
    await publisher.step()
    bus.held.clear()
    assert await publisher.step() == 0, "not looked at yet"
    log.clock.advance(5)
    assert await publisher.step() == 1
    bus.held.clear()
    publisher.verify_soon()
    assert await publisher.step() == 1


def test_a_lost_node_is_told_to_run_nothing_and_nobody_waits_for_it() -> None:
    log = Log()
    log.plan()
    log.add("node-n1", nodes.NodeLost("n1", 15.0, 1.0))  # type: ignore[arg-type]
    log.reconciler.step()
    log.follower.catch_up()
    assert desired_nodes(log.state, 1)[0].replicas == ()


def test_idleness_is_time_without_tokens() -> None:
    log = Log()
    log.hear(seq=1, replica_id="r")
    log.clock.advance(60)
    assert log.loads.idle_s("r", log.clock.monotonic()) == 60
    assert log.loads.idle_s("unknown", log.clock.monotonic()) == 0
