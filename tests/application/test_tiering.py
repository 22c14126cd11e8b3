"""The demand shifts: the controller records who changes its tier, and tells the node."""

from controlplane.application.fleet import DeviceLoad, NodeLoad
from controlplane.application.publish import desired_nodes
from controlplane.application.reconcile import Reconciler
from controlplane.application.replay import replay_all
from controlplane.domain.model import ModelRegistered, ModelVersionAdded
from controlplane.domain.placement import PlacementDecided
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.explain import explain
from controlplane.placement.tiering import STAY_S
from tests.application.test_scaling import Fleet


class Shared(Fleet):
    """One device of 4096 whose node keeps 6000 of host memory, and swappable models of 2500."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.rates: dict[str, float] = {}
        self.reconciler = Reconciler(
            self.handler, self.clock, self.state, self.loads, lambda: self.rates
        )
        self.seq = 0
        self.tell(6000)
        self.round()
        for name in names:
            spec = VersionSpec(
                version="v1", source="simulated://m", gpu_memory=2500, residency="swappable"
            )
            added = ModelVersionAdded(name, spec, 0.0)
            self.add(f"model-{name}", ModelRegistered(name, 0.0), added)
        self.round()

    def tell(self, host_bytes: int) -> None:
        self.seq += 1
        device = DeviceLoad(0, 0.5, 1000, 4096, 0, 60.0, 0.0, host_bytes)
        load = NodeLoad("n1", "b1", self.seq, 0.0, 1, 1, False, (device,), ())
        assert self.loads.record(load, self.clock.monotonic())

    def placed(self) -> dict[str, str]:
        return {
            one.version_id.partition("@")[0]: one.tier
            for one in self.state.placement.assignments.values()
            if one.version_id != "m@v1"
        }

    def told(self) -> dict[str, str]:
        (node,) = desired_nodes(self.state, 1)
        return {one.model: one.tier for one in node.replicas if one.model != "m"}

    def decisions(self) -> list[PlacementDecided]:
        return [one.event for one in self.store.read_stream("placement")]  # type: ignore[misc]


def test_tiers_follow_the_demand_and_say_why() -> None:
    """m (1000) must stay; of a, b, c one fits beside it, two in the host, one is in storage."""
    fleet = Shared("a", "b", "c")
    assert fleet.placed() == {"a": "resident", "b": "warm", "c": "storage"}
    assert fleet.told() == {"a": "swappable", "b": "warm", "c": "storage"}
    fleet.rates = {"a@v1": 1.0, "b@v1": 0.5, "c@v1": 9.0}
    fleet.round()
    fleet.round(STAY_S)
    assert fleet.placed() == {"a": "warm", "b": "storage", "c": "resident"}
    assert fleet.told() == {"a": "warm", "b": "storage", "c": "swappable"}
    first, second = (one for one in fleet.decisions() if one.retiered)
    assert not (first.started or first.stopped or second.started or second.stopped)
    assert any(
        sentence.endswith("asked for 9 times a minute, more than b@v1 (0.5) in its place.")
        for sentence in explain(first)
    )
    assert first.inputs is not None
    assert dict(first.inputs.rates) == fleet.rates


def test_the_replicas_themselves_stay_as_they_are() -> None:
    fleet = Shared("a", "b", "c")
    before = set(fleet.state.placement.assignments)
    fleet.rates = {"b@v1": 30.0}
    fleet.round()
    assert fleet.placed()["b"] == "resident"
    assert set(fleet.state.placement.assignments) == before


def test_under_a_demand_that_holds_nothing_more_is_decided() -> None:
    """Nor under one that swings by less than the margin."""
    fleet = Shared("a", "b", "c")
    for number in range(20):
        fleet.rates = {"a@v1": 5.0, "b@v1": 5.0 + (number % 2), "c@v1": 4.0}
        fleet.round(60.0)
    assert [one for one in fleet.decisions() if one.retiered] == []


def test_a_demand_that_swings_to_and_fro_moves_at_most_once_in_the_time_to_stay() -> None:
    fleet = Shared("a", "b")
    for number in range(120):
        fleet.rates = {"a@v1": 9.0 * (number % 2), "b@v1": 9.0 * (1 - number % 2)}
        fleet.round(10.0)
    changes = [one.at for one in fleet.decisions() if one.retiered]
    assert 2 <= len(changes) <= 1200 / STAY_S + 1


def test_every_change_of_tier_replays_bit_for_bit() -> None:
    fleet = Shared("a", "b", "c")
    for number in range(12):
        names = ("a@v1", "b@v1", "c@v1")
        fleet.rates = {name: 7.123456 * (number % 3 == at) for at, name in enumerate(names)}
        fleet.tell(6000 - 1000 * (number % 2))
        fleet.round(STAY_S)
    assert sum(bool(one.retiered) for one in fleet.decisions()) >= 4
    replays = list(replay_all(fleet.store))
    assert all(one.equal and one.comparable for one in replays)


def test_rates_are_of_what_came_and_of_what_is_expected() -> None:
    fleet = Shared("a", "b")
    hour = int(fleet.clock.now() // 3600)
    fleet.ledger.by_hour = {("a@v1", hour - 24): 48}
    fleet.ask("b@v1", 8)
    fleet.round(1.0)
    fleet.round(300.0)
    rates = fleet.watch.view.rates_asked()
    assert rates["a@v1"] == 0.8, "48 at this hour every day"
    assert rates["b@v1"] > 0.2
