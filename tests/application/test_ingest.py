"""What follows from reports and from silence: each fact once, none from the dead."""

from msgspec.structs import replace

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.fleet import FleetLoads, NodeLoad, NodeReport, ReplicaReport
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ingest import Heard, Ingest, Timings, conclude
from controlplane.application.project import LogFollower
from controlplane.domain import node as nodes
from controlplane.domain.decider import Event, fold
from controlplane.domain.node import DeviceInfo, Node

DEVICE = DeviceInfo(0, "cpu", "cpu", 4096)


def report(*replicas: ReplicaReport, boot: str = "b1", acked: int = 0, node: str = "n1",
           devices: tuple[DeviceInfo, ...] = (DEVICE,)) -> NodeReport:  # fmt: skip
    return NodeReport(node, boot, 1, acked, "z", devices, replicas)


def load(seq: int = 1, boot: str = "b1", node: str = "n1") -> NodeLoad:
    return NodeLoad(node, boot, seq, 0.0, 1, 0, False, (), ())


def replica(state: str, replica_id: str = "m.v1.g1.0", **more: str | float) -> ReplicaReport:
    return ReplicaReport(replica_id, "m@v1", 0, state, **more)  # type: ignore[arg-type]


def heard(*replicas: ReplicaReport, silent: float = 0.0, **more: object) -> Heard:
    return Heard(silent, load(), report(*replicas, **more))  # type: ignore[arg-type]


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def joined(*events: Event) -> Node:
    return fold(nodes.DECIDER, [nodes.NodeJoined("n1", "b1", "z", (DEVICE,), 0.0), *events])  # type: ignore[arg-type]


def test_a_new_node_joins_with_all_it_says() -> None:
    events = conclude("n1", Node(), heard(replica("ready"), acked=3), 9.0)
    assert names(events) == ["NodeJoined", "NodeAcknowledged", "ReplicaBecameReady"]


def test_nothing_new_is_no_event() -> None:
    """Drawing conclusions is idempotent: fold the events, ask again, get none."""
    said = heard(replica("ready"), replica("loading", "other"), acked=3)
    after = fold(nodes.DECIDER, conclude("n1", Node(), said, 9.0))
    assert conclude("n1", after, said, 10.0) == []


def test_every_change_of_a_replica_is_a_fact() -> None:
    node = joined()
    seen = []
    for state in ("downloading", "loading", "loading", "ready", "failed", "loading", "ready"):
        events = conclude("n1", node, heard(replica(state, code="oom", detail="d")), 1.0)
        node = fold(nodes.DECIDER, events, node)
        seen += names(events)
    seen += names(conclude("n1", node, heard(), 2.0))
    assert seen == [
        "ReplicaStateChanged", "ReplicaStateChanged", "ReplicaBecameReady", "ReplicaFailed",
        "ReplicaStateChanged", "ReplicaBecameReady", "ReplicaStopped",
    ]  # fmt: skip


def test_a_try_that_fails_between_two_reports_is_a_failure_of_its_own() -> None:
    """Both reports say failed; since when tells them apart, and one failure told twice is one."""
    node, counts = joined(), []
    for since in (5.0, 5.0, 15.0, 15.0, 35.0):
        said = heard(replica("failed", code="download_failed", retry_s=10.0, since=since))
        node = fold(nodes.DECIDER, conclude("n1", node, said, since + 1.0), node)
        counts.append(node.failures["m@v1"][1])
    assert counts == [1, 1, 2, 2, 3]


def test_silence_is_suspected_then_lost_then_forgiven() -> None:
    node, seen = joined(), []
    for silent in (0, 5.9, 6, 10, 14.9, 15, 99, 0.1, 0.1):
        events = conclude("n1", node, heard(silent=silent), 1.0)
        node = fold(nodes.DECIDER, events, node)
        seen += [(silent, name) for name in names(events)]
    assert seen == [(6, "NodeSuspected"), (15, "NodeLost"), (0.1, "NodeRecovered")]


def test_a_node_is_lost_even_if_nobody_saw_it_suspect() -> None:
    assert names(conclude("n1", joined(), heard(silent=40), 1.0)) == ["NodeLost"]


def test_the_last_report_of_a_dead_node_proves_nothing() -> None:
    """The bus keeps it; without heartbeats nobody joins, recovers or becomes ready by it."""
    dead = Heard(40, None, report(replica("ready")))
    assert conclude("n1", Node(), dead, 1.0) == []
    lost = joined(nodes.NodeLost("n1", 15.0, 0.0))  # type: ignore[arg-type]
    assert conclude("n1", lost, dead, 1.0) == []


def test_a_restarted_node_is_believed_once_its_own_boot_reports() -> None:
    """Heartbeats of boot b2 with the report of b1: wait. Then it joins anew, replicas afresh."""
    node = joined(nodes.ReplicaStateChanged("n1", "r", "m@v1", "ready", 0.0))  # type: ignore[arg-type]
    assert conclude("n1", node, Heard(0, load(boot="b2"), report(replica("ready"))), 1.0) == []
    fresh = Heard(0, load(boot="b2"), report(replica("loading"), boot="b2"))
    assert names(conclude("n1", node, fresh, 1.0)) == ["NodeJoined", "ReplicaStateChanged"]


def test_other_devices_are_a_new_join() -> None:
    bigger = (DeviceInfo(0, "cpu", "cpu", 8192),)
    assert names(conclude("n1", joined(), heard(devices=bigger), 1.0)) == ["NodeJoined"]


def test_another_engine_is_a_new_join() -> None:
    """An agent restarted with vLLM has another boot id as well; what it has is in the log."""
    said = heard()
    more = replace(said.report, host=nodes.HostInfo(engines=("builtin", "vllm")))
    (event,) = conclude("n1", joined(), Heard(0.0, load(), more), 1.0)[:1]
    assert isinstance(event, nodes.NodeJoined) and event.host.engines == ("builtin", "vllm")


class World:
    """An ingest over a log in memory, and a clock set by hand."""

    def __init__(self, num_nodes: int) -> None:
        self.clock = ManualClock()
        self.store = MemoryEventStore(self.clock)
        self.state = FleetState()
        self.follower = LogFollower(self.store, 0, self.state.apply)
        handler = CommandHandler(self.store, self.clock)
        self.ingest = Ingest(handler, self.clock, self.state, FleetLoads(), Timings())
        self.names = [f"n{n}" for n in range(num_nodes)]
        self.seq = 0
        for name in self.names:
            self.ingest.on_report(report(node=name))
        self.pass_time(0, self.names)

    def pass_time(self, seconds: float, alive: list[str]) -> None:
        """Two-second steps in which the living send heartbeats."""
        while True:
            for name in alive:
                self.seq += 1
                self.ingest.on_load(load(self.seq, node=name))
            self.follower.catch_up()
            self.ingest.step()
            self.follower.catch_up()
            if seconds <= 0:
                return
            self.clock.advance(2)
            seconds -= 2

    def with_status(self, status: str) -> list[str]:
        return [name for name in self.names if self.state.nodes[name].status == status]


def test_one_silent_node_is_lost_in_any_fleet() -> None:
    for size in (1, 2, 10):
        world = World(size)
        world.pass_time(20, world.names[1:])
        assert world.with_status("lost") == ["n0"] and not world.ingest.frozen


def test_a_fifth_may_be_lost_at_once() -> None:
    world = World(10)
    world.pass_time(20, world.names[2:])
    assert world.with_status("lost") == ["n0", "n1"]


def test_when_more_vanish_at_once_nothing_is_lost() -> None:
    """The controller freezes: suspects stay suspects, and all is well when they are heard."""
    world = World(10)
    world.pass_time(60, world.names[3:])
    assert world.with_status("suspect") == ["n0", "n1", "n2"] and world.ingest.frozen
    world.pass_time(4, world.names)
    assert world.with_status("ready") == world.names and not world.ingest.frozen


def test_our_own_deafness_is_nobody_elses_fault() -> None:
    """After a reconnection silence counts from zero."""
    world = World(1)
    world.clock.advance(60)
    world.ingest.listen_anew()
    world.pass_time(0, [])
    assert world.with_status("ready") == ["n0"]
    world.pass_time(20, [])
    assert world.with_status("lost") == ["n0"]


def test_a_repeated_heartbeat_is_no_sign_of_life() -> None:
    """The same number again, from the same boot, is a replay."""
    world = World(1)
    for _ in range(10):
        world.clock.advance(2)
        world.ingest.on_load(load(1, node="n0"))
        world.follower.catch_up()
        world.ingest.step()
    world.follower.catch_up()
    assert world.with_status("lost") == ["n0"]
