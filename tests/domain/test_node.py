"""What a node's stream says of it, and what may be ordered of it."""

from controlplane.domain import node
from controlplane.domain.decider import Event, fold
from controlplane.domain.ids import NodeId, ReplicaId, VersionId
from controlplane.domain.node import (
    DrainNode,
    Node,
    NodeAcknowledged,
    NodeDrainEnded,
    NodeDrainStarted,
    NodeJoined,
    NodeLost,
    NodeRecovered,
    NodeRemoved,
    NodeSuspected,
    RecordNodeEvents,
    RemoveNode,
    ReplicaBecameReady,
    ReplicaFailed,
    ReplicaStateChanged,
    ReplicaStopped,
    UndrainNode,
)
from tests.domain.samples import DEVICES
from tests.domain.scenario import Scenario

N = NodeId("n1")
R = ReplicaId("smollm2.v1.g1.0")
V = VersionId("smollm2@v1")
JOINED = NodeJoined(N, "boot-1", "zone-a", DEVICES, 1.0)
LOADING = ReplicaStateChanged(N, R, V, "loading", 2.0)
READY = ReplicaBecameReady(N, R, V, 0, 1, 1, 2, 0.5, "", 3.0)
FAILED = ReplicaFailed(N, R, V, "out_of_memory", "", 4.0)


def given(*events: Event) -> Scenario:
    return Scenario(node.DECIDER, events)


def state(*events: Event) -> Node:
    return fold(node.DECIDER, events)


def test_what_the_controller_concluded_is_recorded_as_it_is() -> None:
    given().when(RecordNodeEvents(N, (JOINED, LOADING), 2.0)).then(JOINED, LOADING)
    bad = NodeId("N 1")
    given().when(RecordNodeEvents(bad, (JOINED,), 2.0)).then_refused("invalid_name")


def test_a_drain_starts_and_ends_once() -> None:
    drained = NodeDrainStarted(N, "kernel", 2.0)
    given(JOINED).when(DrainNode(N, "kernel", 2.0)).then(drained)
    given(JOINED, drained).when(DrainNode(N, "again", 3.0)).then_nothing()
    given(JOINED, drained).when(UndrainNode(N, 3.0)).then(NodeDrainEnded(N, 3.0))
    given(JOINED).when(UndrainNode(N, 3.0)).then_nothing()
    given().when(DrainNode(N, "", 2.0)).then_refused("node_not_found")


def test_only_a_node_that_reports_no_more_is_removed_and_it_may_join_again() -> None:
    suspected, lost, removed = (
        NodeSuspected(N, 6.0, 2.0),
        NodeLost(N, 15.0, 3.0),
        NodeRemoved(N, 4.0),
    )
    given(JOINED).when(RemoveNode(N, 4.0)).then_refused("node_is_ready")
    given(JOINED, suspected).when(RemoveNode(N, 4.0)).then(removed)
    given(JOINED, suspected, lost).when(RemoveNode(N, 4.0)).then(removed)
    given(JOINED, lost, removed).when(RemoveNode(N, 5.0)).then_refused("node_not_found")
    drained = NodeDrainStarted(N, "kernel", 2.0)
    assert state(JOINED, drained, lost, removed) == Node()
    again = state(JOINED, drained, lost, removed, JOINED)
    assert (again.status, again.draining) == ("ready", False)


def test_what_was_concluded_of_a_node_before_it_was_removed_is_not_recorded_after() -> None:
    gone = given(JOINED, NodeLost(N, 15.0, 3.0), NodeRemoved(N, 4.0))
    gone.when(RecordNodeEvents(N, (NodeRecovered(N, "boot-1", 5.0),), 5.0)).then_nothing()
    gone.when(RecordNodeEvents(N, (), 5.0)).then_nothing()
    gone.when(RecordNodeEvents(N, (JOINED, LOADING), 5.0)).then(JOINED, LOADING)


def test_a_drain_outlives_restarts_of_the_agent() -> None:
    again = NodeJoined(N, "boot-2", "zone-a", DEVICES, 3.0)
    assert state(JOINED, NodeDrainStarted(N, "", 2.0), again).draining


def test_silence_makes_a_node_suspect_then_lost_then_ready_again() -> None:
    assert state(JOINED, NodeSuspected(N, 6.0, 2.0)).status == "suspect"
    lost = state(JOINED, LOADING, NodeSuspected(N, 6.0, 2.0), NodeLost(N, 15.0, 3.0))
    assert (lost.status, lost.replicas) == ("lost", {})
    assert state(JOINED, NodeLost(N, 15.0, 3.0), NodeRecovered(N, "boot-1", 4.0)).status == "ready"


def test_a_new_boot_has_no_replicas_yet() -> None:
    """The same boot reporting other devices keeps them."""
    assert state(JOINED, READY, NodeJoined(N, "boot-2", "z", DEVICES, 4.0)).replicas == {}
    assert R in state(JOINED, READY, NodeJoined(N, "boot-1", "z", DEVICES, 4.0)).replicas


def test_a_replica_is_followed_from_loading_to_stopped() -> None:
    assert state(JOINED, LOADING).replicas == {R: (V, "loading", 2.0)}
    assert state(JOINED, LOADING, READY).replicas == {R: (V, "ready", 3.0)}
    assert state(JOINED, READY, ReplicaStopped(N, R, V, 4.0)).replicas == {}


def test_failures_are_counted_until_the_version_is_ready() -> None:
    later = ReplicaFailed(N, R, V, "bad_weights", "", 9.0)
    assert state(JOINED, FAILED, later).failures == {V: ("bad_weights", 2, 9.0)}
    assert state(JOINED, FAILED, later, READY).failures == {}


def test_the_acknowledged_generation_is_the_last_reported() -> None:
    assert state(JOINED, NodeAcknowledged(N, 7, 2.0)).acked_generation == 7
