"""Moves that were asked for are one ordinary decision, carried on by the very reconciler."""

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane import bootstrap
from controlplane.adapters.packing import solve
from controlplane.application import repack
from controlplane.application.ports import CONTROLLER, EventStore
from controlplane.application.replay import replay_all
from controlplane.domain import model, node
from controlplane.domain.errors import VersionConflict
from controlplane.domain.ids import NodeId
from controlplane.domain.placement import PlanInputs
from controlplane.domain.version_spec import VersionSpec
from tests.application.test_replay import GIB, Fleet


@pytest.fixture
def store(database: Path) -> EventStore:
    return bootstrap.event_store()


def with_holes(store: EventStore) -> Fleet:
    """Two nodes of one device, 4 GiB of ten taken on each; a model of 8 GiB fits on neither."""
    life = Fleet(store, 0)
    for name in ("n1", "n2", "n3"):
        life.add(f"node-{name}", node.NodeLost(NodeId(name), 15.0, 0.0))
    for number in range(5):
        life.add(f"model-m{number}", model.ModelVersionRetired(f"m{number}", "v1", 0.0))
    device = (node.DeviceInfo(0, "simulated", "GPU", 10 * GIB),)
    for at, name, size in (("k1", "a", 4), ("", "filler", 5), ("k2", "b", 4), ("", "c", 8)):
        if at:
            life.add(f"node-{at}", node.NodeJoined(NodeId(at), "b", "z", device, 0.0))
        if name == "c":
            life.add("model-filler", model.ModelVersionRetired("filler", "v1", 0.0))
        spec = VersionSpec(version="v1", source="simulated://m", gpu_memory=size * GIB)
        life.add(f"model-{name}", model.ModelRegistered(name, 0.0))
        life.add(f"model-{name}", model.ModelVersionAdded(name, spec, 0.0))
        step(life)
    return life


def step(life: Fleet) -> None:
    """The controller decides, and its nodes load what they should."""
    life.reconciler.step()
    life.follower.catch_up()
    for one in life.state.placement.assignments.values():
        if life.state.replica_state(one) != "ready":
            about = (one.node_id, one.replica_id, one.version_id, one.device_index)
            life.add(f"node-{one.node_id}", node.ReplicaBecameReady(*about, 1, 1, 1, 1.0, "", 0.0))


def placed(life: Fleet) -> dict[str, str]:
    return {one.version_id: one.node_id for one in life.state.placement.assignments.values()}


def test_a_model_fits_after_the_moves(store: EventStore) -> None:
    life = with_holes(store)
    step(life)
    assert life.state.placement.unplaced[0].version_id == "c@v1"
    assert placed(life) == {"a@v1": "k1", "b@v1": "k2"}
    made = repack.preview(life.state, PlanInputs(), solve, 4, life.clock.now())
    assert (len(made.repack.moves), made.num_unplaced) == (1, 1)
    assert repack.start(made, bootstrap.command_handler(), CONTROLLER, life.clock.now())
    life.follower.catch_up()
    for _ in range(3):
        step(life)
    assert life.state.placement.unplaced == ()
    found = placed(life)
    assert found["a@v1"] == found["b@v1"] != found["c@v1"]
    asked = [done for done in replay_all(store) if done.planner == repack.BY_REPACK]
    assert len(asked) == 1 and not asked[0].comparable
    assert all(done.equal for done in replay_all(store) if done.comparable)


def test_a_placement_that_changed_since_is_not_overwritten(store: EventStore) -> None:
    life = with_holes(store)
    step(life)
    made = repack.preview(life.state, PlanInputs(), solve, 4, life.clock.now())
    assert repack.start(made, bootstrap.command_handler(), CONTROLLER, life.clock.now())
    with pytest.raises(VersionConflict):
        repack.start(made, bootstrap.command_handler(), CONTROLLER, life.clock.now())


def test_nothing_to_gain_is_no_decision(store: EventStore) -> None:
    life = Fleet(store, 0)
    made = repack.preview(life.state, PlanInputs(), solve, 4, life.clock.now())
    assert made.repack.moves == ()
    assert repack.start(made, bootstrap.command_handler(), CONTROLLER, life.clock.now()) is None


def test_the_command_previews_and_starts(store: EventStore) -> None:
    step(with_holes(store))
    call_command("repack", "--moves", "4", stdout=(out := StringIO()))
    assert "1 move of 4.0 GiB: room for 1 of 1 missing replica, and" in out.getvalue()
    assert "started" not in out.getvalue()
    before = store.head().position
    call_command("repack", "--apply", "--reason", "c fits nowhere", stdout=(out := StringIO()))
    assert "started as decision dec-" in out.getvalue()
    assert store.head().position == before + 1
    with pytest.raises(CommandError, match="from 1 to 1000"):
        call_command("repack", "--moves", "0")
