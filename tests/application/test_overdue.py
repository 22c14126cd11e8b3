"""What is told of as overdue, when, and when not; and what the planner makes of it."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from controlplane.application.fleet import NodeLoad, NodeReport, ReplicaLoad, ReplicaReport
from controlplane.application.ingest import Heard, conclude
from controlplane.application.overdue import DEADLINES, Overdue
from controlplane.application.publish import Late
from controlplane.domain import node as nodes
from controlplane.domain.node import DeviceInfo, HostInfo
from tests.application.test_fleet_state import Log

WAITS = "needs 1000 bytes, 200 of the device are free; memory held by old"


class World:
    """A node, n1, one replica for it, and what n1 says."""

    def __init__(self) -> None:
        self.log = Log()
        self.replica_id = self.log.plan()
        self.report: NodeReport | None = None
        self.late: dict[str, Late] | None = {}
        self.seq = 0
        log = self.log
        self.overdue = Overdue(
            log.handler, log.clock, log.state, log.loads, lambda _: self.report, lambda: self.late
        )

    def say(
        self, state: str, code: str = "", detail: str = "", work: float = 0.0, refusal: str = ""
    ) -> None:
        said = ReplicaReport(self.replica_id, "m@v1", 0, state, code, detail)
        devices = (DeviceInfo(0, "cpu", "device", 4096),)
        self.report = NodeReport("n1", "b1", 1, 1, "z", devices, (said,), HostInfo(), refusal)
        figures = ReplicaLoad(self.replica_id, "m@v1", 0, state, *[0] * 4, 16, 0.0, 0.0,
                              *[0] * 4, 0.0, load_work=work)  # fmt: skip
        self.seq += 1
        load = NodeLoad("n1", "b1", self.seq, 0.0, 1, 1, False, (), (figures,))
        self.log.loads.record(load, self.log.clock.monotonic())
        node, now = self.log.state.nodes["n1"], self.log.clock.now()
        found = conclude("n1", node, Heard(0.0, load, self.report), now)
        if found:
            self.log.add("node-n1", *found)

    def wait(self, seconds: float, every: float = 1.0) -> list[nodes.ReplicaOverdue]:
        """Let time pass, looking every so many seconds; what was told of the replica."""
        before = self.log.state.position
        for _ in range(round(seconds / every)):
            self.log.clock.advance(every)
            self.overdue.step()
            self.log.follower.catch_up()
        events = self.log.store.read_all(before, 1000)
        return [one.event for one in events if isinstance(one.event, nodes.ReplicaOverdue)]

    @property
    def why(self) -> str | None:
        return self.log.state.nodes["n1"].overdue.get(self.replica_id)


@pytest.fixture
def world() -> World:
    return World()


def test_one_that_waits_for_room_is_stuck_with_its_nodes_reason(world: World) -> None:
    """From the deadline on, with how long it has waited; nothing before."""
    world.say("pending", "not_resident", WAITS)
    assert world.wait(59) == [] and world.why is None
    (told,) = world.wait(3)
    assert (told.state, told.code, told.detail) == ("pending", "not_resident", WAITS)
    assert told.waited_s == pytest.approx(60, abs=2)
    assert world.why == "not_resident"
    world.say("loading")
    assert world.why is None, "there was room after all"


def test_waiting_is_told_ever_more_seldom_and_counts_as_failing_there(world: World) -> None:
    world.say("pending", "not_resident", WAITS)
    told = world.wait(24 * 3600, every=30)
    assert [round(one.waited_s, -1) for one in told][:4] == [60, 120, 240, 480]
    assert len(told) <= 32
    assert world.log.state.nodes["n1"].failures["m@v1"][:2] == ("no_room", len(told))


def test_figures_that_change_are_no_news_and_another_reason_is(world: World) -> None:
    world.say("pending", "not_resident", WAITS)
    position = world.log.state.position
    world.say("pending", "not_resident", WAITS.replace("200", "300"))
    assert world.log.state.position == position
    world.say("pending", "waiting", "memory held by old")
    assert world.log.state.position == position + 1
    assert world.log.state.nodes["n1"].codes == {world.replica_id: "waiting"}


def test_a_load_that_goes_on_is_never_stuck_however_long_it_takes(world: World) -> None:
    """Ten hours: its worker works all the time, and each half hour another tenth is done."""
    for tenth in range(20):
        for step in range(18):
            work = 40.0 * (18 * tenth + step)
            world.say("loading", "", f"weights {tenth * 5} %", work)
            assert world.wait(100, every=50) == []


def test_a_load_in_which_nothing_moves_is_stuck_until_something_does(world: World) -> None:
    for _ in range(5):
        world.say("downloading", "", "download 10 %", 7.0)
        assert world.wait(59, every=59) == []
    (told,) = world.wait(120, every=10)
    assert (told.state, told.code) == ("downloading", "no_progress")
    assert told.detail == "Nothing moves. download 10 %"
    assert world.wait(1800, every=30) == [], "once"
    assert "m@v1" not in world.log.state.nodes["n1"].failures, "its node goes on trying"
    world.say("downloading", "", "download 10 %", 9.0)
    world.wait(1)
    assert world.why is None
    assert world.log.state.nodes["n1"].replicas[world.replica_id][1] == "downloading"


def test_a_stage_of_an_hour_is_stuck_though_its_worker_works(world: World) -> None:
    """The worker may be serving others all the while."""
    told = []
    for minute in range(70):
        world.say("loading", "", "weights 0 %", 30.0 * minute)
        told += world.wait(60, every=60)
    assert len(told) == 1 and told[0].waited_s == pytest.approx(DEADLINES.stage_s, abs=60)


def test_a_node_that_says_nothing_of_its_replica(world: World) -> None:
    (told,) = world.wait(61)
    assert (told.state, told.code) == ("", "unreported")


def test_one_that_serves_failed_or_waits_to_be_asked_for_is_not_watched(world: World) -> None:
    for state, code in (("ready", ""), ("failed", "download_failed")):
        world.say(state, code)
        assert world.wait(7200, every=60) == []
    placed = world.log.state.placement.assignments
    placed[world.replica_id] = replace(placed[world.replica_id], tier="warm")
    world.say("pending", "not_resident", WAITS)
    assert world.wait(7200, every=60) == []


# --- nodes ------------------------------------------------------------------------------------
def overdue_of(world: World) -> list[nodes.NodeOverdue]:
    events = world.log.store.read_all(0, 1000)
    return [one.event for one in events if isinstance(one.event, nodes.NodeOverdue)]


def test_a_node_that_accepted_something_newer_is_told_of_with_the_operators_step(
    world: World,
) -> None:
    world.say("ready")
    world.late = {"n1": Late((2, 12), (5, 40), 29.0)}
    world.wait(1)
    assert overdue_of(world) == []
    world.late = {"n1": Late((2, 12), (5, 40), 31.0)}
    world.wait(10)
    (told,) = overdue_of(world)
    assert (told.code, told.epoch, told.generation) == ("refused", 2, 12)
    assert "(5, 40)" in told.reason and "manage.py advance_epoch 5" in told.reason
    world.late = {}
    world.wait(5)
    assert world.log.state.nodes["n1"].late == ""


def test_a_node_of_another_cluster_and_a_silent_one_say_so(world: World) -> None:
    world.say("ready", refusal="cluster 'b' is not 'a'")
    world.late = {"n1": Late((2, 12), (1, 3), 31.0)}
    world.wait(2)
    world.say("ready")
    world.wait(2)
    refused, silent = overdue_of(world)
    assert refused.reason == "It refuses (2, 12): cluster 'b' is not 'a'."
    assert (silent.code, silent.waited_s) == ("silent", 31.0)


# --- what is done about it --------------------------------------------------------------------
def test_one_that_waits_in_vain_moves_once_and_stays_where_it_is(world: World) -> None:
    """n1 has no room though the planner thinks so; n2 joins. One decision, and no way back."""
    world.say("pending", "not_resident", WAITS)
    world.wait(100)
    log = world.log
    log.plan()
    assert log.state.placement.generation == 1, "nowhere else to go: no decision"
    device = DeviceInfo(0, "cpu", "device", 4096)
    log.add("node-n2", nodes.NodeJoined("n2", "b2", "z", (device,), 0.0))  # type: ignore[arg-type]
    moved = log.plan()
    (placed,) = log.state.placement.assignments.values()
    assert placed.node_id == "n2" and log.state.placement.generation == 2
    (stopped,) = [one.event.stopped for one in log.store.read_stream("placement")][1]  # type: ignore[attr-defined]
    assert (stopped.code, stopped.reason) == ("no_room", "n1 has found no room for it.")
    ready = nodes.ReplicaBecameReady("n2", moved, "m@v1", 0, 1, 2, 3, 0.5, "", 1.0)  # type: ignore[arg-type]
    log.add("node-n2", ready)
    for _ in range(20):
        log.clock.advance(300)
        log.plan()
    assert log.state.placement.generation == 2


def test_a_source_that_cannot_be_fetched_takes_no_decision_for_a_try(world: World) -> None:
    """A hundred failures in a row on the only node."""
    log = world.log
    for number in range(1, 101):
        world.say("downloading")
        now = log.clock.now()
        event = nodes.ReplicaFailed("n1", world.replica_id, "m@v1", "download_failed", "", now)  # type: ignore[arg-type]
        log.add("node-n1", event)
        log.plan()
        log.clock.advance(nodes.backoff_s(number))
        log.plan()
    assert log.state.placement.generation == 1
    assert log.state.nodes["n1"].failures["m@v1"][1] == 100


def test_a_nodes_words_are_gathered_once_a_step_for_all_its_replicas(world: World) -> None:
    """And anew in the next one; a node of which nothing is due is not asked at all."""
    world.say("loading", "", "weights 10 %", 7.0)
    log, asked = world.log, list[str]()
    (placed,) = log.state.placement.assignments.values()
    names = [f"{placed.replica_id}{number}" for number in range(50)]
    loading = dict.fromkeys(names, (placed.version_id, "loading"))
    ready = {placed.replica_id: (placed.version_id, "ready")}
    state = SimpleNamespace(
        placement=SimpleNamespace(
            assignments={name: replace(placed, replica_id=name) for name in names}
            | {placed.replica_id: replace(placed, node_id="n2")}
        ),
        nodes={
            "n1": replace(log.state.nodes["n1"], replicas=loading),
            "n2": replace(log.state.nodes["n1"], replicas=ready),
        },
    )

    def report(node_id: str) -> NodeReport | None:
        asked.append(node_id)
        return world.report

    overdue = Overdue(log.handler, log.clock, state, log.loads, report, lambda: None)  # type: ignore
    for _ in range(2):
        overdue.step()
    assert asked == ["n1", "n1"] and overdue._watches.keys() == set(names)
