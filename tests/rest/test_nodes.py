"""Nodes over REST: one that is gone for good is taken off the list."""

import time

from controlplane import bootstrap
from controlplane.application.ports import CONTROLLER, Append
from controlplane.domain import node, placement
from controlplane.domain.decider import Event
from controlplane.domain.ids import NodeId
from tests.domain.samples import ASSIGNMENT, DEVICES, V1
from tests.rest.conftest import Api, login, position_of
from tests.rest.test_bad_input import problem

N1 = NodeId("n1")
JOINED = node.NodeJoined(N1, "boot-1", "zone-a", DEVICES, 1.0)


def report(*events: Event) -> None:
    command = node.RecordNodeEvents(N1, events, time.time())
    bootstrap.command_handler().handle(node.DECIDER, node.DECIDER.stream(N1), command, CONTROLLER)


def test_a_lost_node_is_removed_and_joins_anew(admin: Api) -> None:
    """One that reports is refused; who may not write nodes too; the history stays."""
    report(JOINED)
    assert problem(admin.delete("nodes/n1/"), 409) == "node_is_ready"
    report(node.NodeLost(N1, 15.0, 2.0))
    assert problem(login("eve", "viewer").delete("nodes/n1/"), 403)
    preview = admin.delete("nodes/n1/?dry_run=true")
    assert [one["type"] for one in preview.json()["events"]] == ["NodeRemoved"]
    done = admin.delete("nodes/n1/", headers={"X-Reason": "scrapped"})
    position = position_of(done)
    assert done.status_code == 200, done.content
    at = f"?min_position={position}"
    assert admin.get(f"nodes/{at}").json()["results"] == []
    assert problem(admin.get(f"nodes/n1/{at}"), 404) == "node_not_found"
    assert problem(admin.delete("nodes/n1/"), 404) == "node_not_found"
    assert admin.get(f"nodes/n1/?as_of={position - 1}").json()["status"] == "lost"
    (event,) = admin.get("events/?type=NodeRemoved").json()["results"]
    assert (event["position"], event["reason"]) == (position, "scrapped")
    undone = admin.post(f"events/{position}/undo/", {})
    assert problem(undone, 409) == "not_undoable" and "agent" in undone.json()["detail"]
    report(JOINED)
    head = bootstrap.event_store().head().position
    assert admin.get(f"nodes/n1/?min_position={head}").json()["status"] == "ready"


def test_a_draining_node_says_why_it_drains_and_what_it_waits_for(admin: Api) -> None:
    started = placement.Started(ASSIGNMENT, "wanted", (), ())
    gap = placement.Unplaced(V1, 1, "insufficient_memory", "1 replica is too large.", ())
    placed = placement.PlacementDecided("d1", 1, (started,), (), (), 2.0)
    full = placement.PlacementDecided("d2", 2, (), (), (gap,), 4.0)
    report(JOINED)
    store = bootstrap.event_store()
    store.append(Append("placement", None, [placed], CONTROLLER))
    drained = position_of(admin.post("nodes/n1/drain/", {"reason": "new driver"}))
    body = admin.get(f"nodes/n1/?min_position={drained}").json()
    assert (body["drain_reason"], body["drain_waits_for"]) == ("new driver", [])
    store.append(Append("placement", None, [full], CONTROLLER))
    at = f"min_position={store.head().position}"
    assert admin.get(f"nodes/n1/?{at}").json()["drain_waits_for"] == [V1]
    (listed,) = admin.get(f"nodes/?{at}").json()["results"]
    assert listed["drain_waits_for"] == [V1]
    ended = position_of(admin.post("nodes/n1/undrain/", {"reason": "done"}))
    assert admin.get(f"nodes/n1/?min_position={ended}").json()["drain_waits_for"] == []
