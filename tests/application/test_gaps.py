"""Why a version runs nowhere, and whether waiting helps: of what the planner left, and untried."""

import pytest

from controlplane.application.gaps import FORGOTTEN_S, NEVER_HEALS, gap_of, tried
from controlplane.dispatch.resolve import Catalog
from controlplane.domain import node as nodes
from controlplane.domain.model import ModelRegistered, ModelVersionAdded, ModelVersionRetired
from controlplane.domain.node import DeviceInfo
from controlplane.domain.version_spec import VersionSpec
from controlplane.entrypoints.openai.nodes import FleetPlacer
from tests.application.test_fleet_state import Log


def huge(log: Log, gpu_memory: int = 1 << 45, **fields: int) -> None:
    spec = VersionSpec(version="v1", source="simulated://huge", gpu_memory=gpu_memory, **fields)
    log.add("model-huge", ModelRegistered("huge", 0.0), ModelVersionAdded("huge", spec, 0.0))


def fail(log: Log, code: str) -> None:
    """Its only replica fails to load, and the planner sees it."""
    replica_id = log.plan()
    now = log.clock.now()
    event = nodes.ReplicaFailed("n1", replica_id, "m@v1", code, "", now)  # type: ignore[arg-type]
    log.add("node-n1", event)
    log.reconciler.step()
    log.follower.catch_up()


def test_a_failed_load_is_tried_again_and_the_wait_counts_it() -> None:
    log = Log()
    fail(log, "out_of_memory")
    gap = gap_of(log.state, "m@v1", log.clock.now())
    assert gap is not None and "last with out_of_memory" in gap.reason
    assert (gap.lasts, gap.retry_s) == (False, 10.0)
    log.clock.advance(4)
    placer = FleetPlacer(log.state, log.loads, log.clock)
    loading = log.state.wait_s("m@v1", log.clock.now())
    assert loading is not None and placer.wait_s("m@v1") == pytest.approx(loading + 6.0)
    log.clock.advance(60)
    assert gap_of(log.state, "m@v1", log.clock.now()) == gap._replace(retry_s=0.0)
    loads(log)
    assert gap_of(log.state, "m@v1", log.clock.now()) is None, "its worker may have been killed"


def test_a_load_after_two_failures_counts_as_the_third_until_it_is_ready() -> None:
    log = Log()
    for _ in range(2):
        fail(log, "out_of_memory")
    gap = gap_of(log.state, "m@v1", log.clock.now())
    assert gap is not None and (gap.num_failures, gap.keeps_failing, gap.retry_s) == (2, True, 20.0)
    log.clock.advance(60)
    loads(log)
    assert gap_of(log.state, "m@v1", log.clock.now()) == gap._replace(retry_s=0.0)
    log.clock.advance(FORGOTTEN_S)
    assert gap_of(log.state, "m@v1", log.clock.now()) is None, "that was long ago"


def loads(log: Log, node_id: str = "n1") -> None:
    event = nodes.ReplicaStateChanged(node_id, log.plan(), "m@v1", "loading", log.clock.now())  # type: ignore[arg-type]
    log.add(f"node-{node_id}", event)


def test_a_first_load_and_one_whose_node_is_away_are_no_gap() -> None:
    log = Log()
    loads(log)
    assert gap_of(log.state, "m@v1", log.clock.now()) is None
    fail(log, "out_of_memory")
    assert gap_of(log.state, "m@v1", log.clock.now()) is not None
    log.add("node-n1", nodes.NodeSuspected("n1", 5.0, log.clock.now()))  # type: ignore[arg-type]
    assert gap_of(log.state, "m@v1", log.clock.now()) is None, "another node may load it"


def test_one_replica_that_loads_for_the_first_time_may_be_waited_for() -> None:
    """It was placed on another node after the failure, which says nothing of that one."""
    log = Log()
    fail(log, "out_of_memory")
    device = (DeviceInfo(0, "cpu", "device", 4096),)
    log.add("node-n2", nodes.NodeJoined("n2", "b1", "z", device, 0.0))  # type: ignore[arg-type]
    log.plan()
    (moved,) = log.state.assignments_of("m@v1")
    assert moved.node_id == "n2" and gap_of(log.state, "m@v1", log.clock.now()) is None


def test_a_load_that_got_room_at_last_is_its_first() -> None:
    log = Log()
    said = (log.plan(), "m@v1", nodes.WAITING, "insufficient_memory", "", 60.0)
    overdue = nodes.ReplicaOverdue("n1", *said, log.clock.now())  # type: ignore[arg-type]
    log.add("node-n1", overdue)
    assert log.state.nodes["n1"].failures
    loads(log)
    assert gap_of(log.state, "m@v1", log.clock.now()) is None


@pytest.mark.parametrize("code", sorted(NEVER_HEALS))
def test_a_fault_of_the_files_or_the_specification_lasts(code: str) -> None:
    log = Log()
    fail(log, code)
    gap = gap_of(log.state, "m@v1", log.clock.now())
    assert gap is not None and gap.lasts and f"last with {code}" in gap.reason


def test_what_no_device_can_hold_lasts_before_and_after_it_is_planned() -> None:
    log = Log()
    huge(log, min_replicas=0)
    untried = tried(log.state, "huge@v1", log.clock.now())
    assert untried is not None and untried.lasts
    assert "huge@v1" in untried.reason and untried.reason.endswith("1 too small even when empty.")
    assert gap_of(log.state, "huge@v1", log.clock.now()) is None
    other = Log()
    huge(other, min_replicas=1)
    other.plan()
    assert gap_of(other.state, "huge@v1", other.clock.now()) == untried


def test_what_an_empty_device_could_hold_may_find_room() -> None:
    """Full now, or on a node that is not heard: both may change."""
    log = Log()
    log.plan()
    huge(log, 4000, min_replicas=1)
    log.plan()
    gap = gap_of(log.state, "huge@v1", log.clock.now())
    assert gap is not None and (gap.lasts, gap.retry_s) == (False, None)
    assert tried(log.state, "huge@v1", log.clock.now()) is None
    large = (DeviceInfo(0, "cpu", "device", 1 << 46),)
    joined = nodes.NodeJoined("n2", "b1", "z", large, 0.0)  # type: ignore[arg-type]
    silent = nodes.NodeSuspected("n2", 5.0, 1.0)  # type: ignore[arg-type]
    log.add("node-n2", joined, silent)
    spec = VersionSpec(version="v2", source="simulated://huge", gpu_memory=1 << 45)
    log.add("model-huge", ModelVersionAdded("huge", spec, 2.0))
    assert tried(log.state, "huge@v2", log.clock.now()) is None


def test_what_has_a_place_is_not_tried_on_paper() -> None:
    """Its device has shrunk since: that is the planner's to find."""
    log = Log()
    log.plan()
    small = (DeviceInfo(0, "cpu", "device", 10),)
    log.add("node-n1", nodes.NodeJoined("n1", "b1", "z", small, 0.0))  # type: ignore[arg-type]
    assert tried(log.state, "m@v1", log.clock.now()) is None
    log.reconciler.step()
    log.follower.catch_up()
    assert tried(log.state, "m@v1", log.clock.now()) is not None


def test_a_fleet_without_nodes_rules_nothing_out() -> None:
    log = Log()
    log.state.nodes.clear()
    assert tried(log.state, "m@v1", log.clock.now()) is None
    assert tried(log.state, "unknown@v1", log.clock.now()) is None


def test_what_was_tried_is_tried_again_once_the_fleet_has_changed() -> None:
    log = Log()
    huge(log, min_replicas=0)
    placer = FleetPlacer(log.state, log.loads, log.clock)
    first = placer.tried("huge@v1")
    assert first is not None and placer.tried("huge@v1") is first
    large = (DeviceInfo(0, "cpu", "device", 1 << 46),)
    log.add("node-n2", nodes.NodeJoined("n2", "b1", "z", large, 0.0))  # type: ignore[arg-type]
    assert placer.tried("huge@v1") is None


def test_a_retired_version_is_refused_in_the_words_of_an_absent_one() -> None:
    log = Log()
    placer = FleetPlacer(log.state, log.loads, log.clock)
    assert placer.gone("m@v1") is None
    log.add("model-m", ModelVersionRetired("m", "v1", 1.0))
    gone, absent = placer.gone("m@v1"), placer.gone("m@v7")
    assert gone is not None and absent is not None
    assert (gone.code, gone.message) == (
        "model_not_found",
        "The model 'm@v1' does not exist or you do not have access to it.",
    )
    assert absent.message == gone.message.replace("v1", "v7")
    assert not Catalog().is_live("m@v1")
