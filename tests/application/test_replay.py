"""A stored decision is decided again, bit for bit, from the log before it and its inputs."""

import random
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from msgspec.structs import replace

from controlplane import bootstrap
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.readmodel import timeline as timelines
from controlplane.application.fleet import DeviceLoad, FleetLoads, NodeLoad, ReplicaLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Append, EventStore
from controlplane.application.project import LogFollower
from controlplane.application.reconcile import Reconciler, snapshot
from controlplane.application.replay import Replay, replay, replay_all
from controlplane.domain import model, node
from controlplane.domain.event_types import encode
from controlplane.domain.ids import NodeId
from controlplane.domain.placement import PlacementDecided, PlanInputs, ScoreTerm
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.plan import PLANNER, REPLAYED

GIB = 2**30


class Fleet:
    """Three nodes, five models and the very reconciler of the product, on a real store; ``live``
    makes things happen to them."""

    def __init__(self, store: EventStore, seed: int) -> None:
        self.store, self.choose, self.clock = store, random.Random(seed), ManualClock()
        self.state, self.loads, self.seq = FleetState(), FleetLoads(), 0
        self.follower = LogFollower(store, 0, self.state.apply)
        handler = CommandHandler(store, self.clock)
        self.reconciler = Reconciler(handler, self.clock, self.state, self.loads)
        for name in ("n1", "n2", "n3"):
            devices = tuple(node.DeviceInfo(i, "cuda", "GPU", 24 * GIB) for i in range(2))
            self.add(f"node-{name}", node.NodeJoined(NodeId(name), "b", f"z-{name}", devices, 0.0))
        for number, priority in enumerate(("high", "normal", "normal", "best-effort", "high")):
            spec = VersionSpec(
                version="v1", source="simulated://m", gpu_memory=(5 + 2 * number) * GIB,
                priority=priority, max_replicas=4,
            )  # fmt: skip
            name = f"m{number}"
            self.add(f"model-{name}", model.ModelRegistered(name, 0.0))
            self.add(f"model-{name}", model.ModelVersionAdded(name, spec, 0.0))

    def add(self, stream: str, event: object) -> None:
        self.store.append(Append(stream, None, [event], CONTROLLER))  # type: ignore[list-item]
        self.follower.catch_up()

    def live(self, rounds: int) -> None:
        for _ in range(rounds):
            self.clock.advance(self.choose.random() * 30)
            self._hear()
            self._happen()
            self.reconciler.step()
            self.follower.catch_up()

    def _hear(self) -> None:
        """Telemetry, which no event records: foreign memory, and who works."""
        self.seq += 1
        for name in self.state.nodes:
            devices = tuple(
                DeviceLoad(i, 0.5, GIB, 24 * GIB, self.choose.choice((0, 0, 3 * GIB, 7 * GIB + 1)),
                           50.0, 0.0)
                for i in range(2)
            )  # fmt: skip
            replicas = tuple(
                ReplicaLoad(one.replica_id, one.version_id, 0, "ready", 0, 0, 1, 1, 16, 1.0, 0.1,
                            self.choose.randrange(3), 0, 0, 0, 0.0)
                for one in self.state.placement.assignments.values() if one.node_id == name
            )  # fmt: skip
            load = NodeLoad(name, "b", self.seq, 0.0, 0, 0, False, devices, replicas)
            self.loads.record(load, self.clock.monotonic())

    def _happen(self) -> None:
        at, name = self.clock.now(), self.choose.choice(list(self.state.nodes))
        stream, kind = f"node-{name}", self.choose.randrange(7)
        placed = list(self.state.placement.assignments.values())
        if kind == 0:
            self.add(stream, node.NodeLost(NodeId(name), 15.0, at))
        elif kind == 1:
            self.add(stream, node.NodeRecovered(NodeId(name), "b", at))
        elif kind == 2:
            drain = self.choose.choice((node.NodeDrainStarted(NodeId(name), "x", at),
                                        node.NodeDrainEnded(NodeId(name), at)))  # fmt: skip
            self.add(stream, drain)
        elif kind == 3:
            number, low = self.choose.randrange(5), self.choose.randrange(4)
            scaled = model.ModelVersionScaled(f"m{number}", "v1", low, 4, at)
            self.add(f"model-m{number}", scaled)
        elif placed:
            one = self.choose.choice(placed)
            about = (one.node_id, one.replica_id, one.version_id)
            event = node.ReplicaBecameReady(*about, one.device_index, 1, 1, 1, 1.0, "", at)
            failed = node.ReplicaFailed(*about, "out_of_memory", "", at)
            self.add(f"node-{one.node_id}", failed if kind == 4 else event)


@pytest.fixture
def store(database: Path, monkeypatch: pytest.MonkeyPatch) -> EventStore:
    monkeypatch.setattr(timelines, "INTERVAL", 40)
    monkeypatch.setattr(timelines, "READ_BATCH", 10)
    return bootstrap.event_store()


@pytest.mark.parametrize("seed", range(4))
def test_every_decision_of_a_random_life_is_decided_again(store: EventStore, seed: int) -> None:
    Fleet(store, seed).live(60)
    done = list(replay_all(store))
    assert len(done) > 15
    assert [one for one in done if not one.equal] == []
    assert all(one.inputs_recorded for one in done)


def decisions(store: EventStore) -> list[object]:
    return [one for one in store.read_all(0, 10_000) if isinstance(one.event, PlacementDecided)]


def again(recorded: object, store: EventStore) -> Replay:
    fleet = bootstrap.fleet_timeline().at(recorded.event.planned_from)  # type: ignore[attr-defined]
    return replay(fleet, recorded)  # type: ignore[arg-type]


def test_a_snapshot_of_the_fleet_makes_no_difference(store: EventStore) -> None:
    """Each from the nearest snapshot, in any order, the latest first."""
    Fleet(store, 5).live(60)
    found = decisions(store)
    assert all(again(one, store).equal for one in reversed(found))
    assert timelines.Snapshot.objects.filter(kind="fleet").count() > 1


def test_the_telemetry_that_was_seen_decides(store: EventStore) -> None:
    """Without the recorded inputs the same fold gives another plan: they are not decoration."""
    Fleet(store, 1).live(60)
    found = decisions(store)
    blind = [replace(one, event=replace(one.event, inputs=None)) for one in found]
    changed = [done for done in (again(one, store) for one in blind) if not done.equal]
    assert changed and not any(done.inputs_recorded for done in changed)


def test_earlier_planners_decide_again_as_they_did(store: EventStore) -> None:
    """Their rules are known, and which of them decided is recorded."""
    fleet = Fleet(store, 1)
    seen = [snapshot(fleet.state, PlanInputs(planner=n), 0.0) for n in range(1, 8)]
    assert [one.keeps_wholes for one in seen] == [True, False, False, True, True, True, True]
    assert [one.keeps_failing for one in seen] == [False] * 5 + [True] * 2
    assert [one.retiers for one in seen] == [False] * 5 + [True] * 2
    assert [one.says_whose for one in seen] == [False] * 6 + [True]
    assert max(REPLAYED) == PLANNER == 7


def test_the_place_of_a_difference_is_named(store: EventStore) -> None:
    Fleet(store, 2).live(5)
    first = next(one for one in decisions(store) if one.event.started)
    start = first.event.started[0]
    best = replace(
        start.candidates[0], terms=(ScoreTerm("fit", 0.123), *start.candidates[0].terms[1:])
    )
    start = replace(start, candidates=(best, *start.candidates[1:]))
    forged = replace(first, event=replace(first.event, started=(start, *first.event.started[1:])))
    (difference,) = again(forged, store).differences
    assert difference.path == "started[0].candidates[0].terms[0].value"
    assert difference.stored == 0.123 and difference.replayed != 0.123


def test_the_command_says_equal_or_where_not(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fleet(store, 3).live(30)
    last = decisions(store)[-1].event
    call_command("replay_decision", last.decision_id, stdout=(out := StringIO()))
    assert "equal, bit for bit" in out.getvalue()
    call_command("replay_decision", "--all", stdout=(out := StringIO()))
    assert out.getvalue().endswith("equal, 0 different, 0 not comparable\n")
    monkeypatch.setattr("controlplane.placement.score.NODE_WEIGHT", -10.0)
    with pytest.raises(CommandError, match="decides otherwise"):
        call_command("replay_decision", "--all", stdout=(out := StringIO()))
    assert "started[0].candidates[0]" in out.getvalue()
    monkeypatch.undo()
    call_command("recompute_decision", last.decision_id, stdout=(out := StringIO()))
    assert "equal, bit for bit" in out.getvalue()
    for wrong in ([], ["--all", "x"], ["nothing"]):
        with pytest.raises(CommandError):
            call_command("replay_decision", *wrong)


def test_an_event_of_before_is_read_and_says_that_it_cannot_prove_anything(
    store: EventStore,
) -> None:
    golden = Path(__file__).parents[1] / "domain" / "golden" / "PlacementDecided.1.json"
    from controlplane.domain.event_types import decode

    old = decode("PlacementDecided", 1, golden.read_bytes())
    assert isinstance(old, PlacementDecided) and old.inputs is None
    assert b'"inputs":null' in encode(old)
