"""From what is asked for to replicas: decisions in the log, and a plan that follows them."""

import pytest

from controlplane.application.demand import Arrival, DemandWatch, FirstToken
from controlplane.application.replay import replay_all
from controlplane.application.scaling import Scaler
from controlplane.domain import node as nodes
from controlplane.domain.model import ModelRegistered, ModelVersionAdded
from controlplane.domain.scaling import DemandForecast, PreloadJudged, ReplicasScaled
from controlplane.domain.version_spec import VersionSpec
from tests.application.test_fleet_state import Log

GIB = 1000  # of the test's node, which has 4096
V = "cold@v1"


class Ledger:
    """``demand.Arrivals`` as a script."""

    def __init__(self) -> None:
        self.now_open: dict[str, int] = {}
        self.new: list[Arrival] = []
        self.ttft: list[FirstToken] = []
        self.by_hour: dict[tuple[str, int], int] = {}

    def open(self) -> dict[str, int]:
        return dict(self.now_open)

    def arrived(self, since: float) -> list[Arrival]:
        new, self.new = self.new, []
        return [one for one in new if one.at >= since]

    def first_tokens(self) -> list[FirstToken]:
        new, self.ttft = self.ttft, []
        return new

    def hours(self, first: int) -> dict[tuple[str, int], int]:
        return {key: num for key, num in self.by_hour.items() if key[1] >= first}


class Fleet(Log):
    """One node; models that are scaled to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.advance(100_000.0)
        self.ledger = Ledger()
        self.watch = DemandWatch(self.ledger, self.clock)
        self.scaler = Scaler(self.handler, self.clock, self.state, self.loads, self.watch)

    def add_model(self, name: str, low: int = 0, high: int = 2, memory: int = GIB) -> None:
        spec = VersionSpec(
            version="v1", source="simulated://m", gpu_memory=memory, max_batch=4,
            min_replicas=low, max_replicas=high,
        )  # fmt: skip
        self.add(f"model-{name}", ModelRegistered(name, 0.0), ModelVersionAdded(name, spec, 0.0))

    def round(self, seconds: float = 1.0) -> None:
        """What the controller does in one; the watch reads at least once a second."""
        self.clock.advance(seconds)
        self.watch.watch()
        self.scaler.step()
        self.follower.catch_up()
        while self.reconciler.step():
            self.follower.catch_up()

    def ask(self, version_id: str, num: int = 1) -> None:
        self.ledger.now_open[version_id] = self.ledger.now_open.get(version_id, 0) + num
        self.ledger.new += [Arrival(self.clock.now(), version_id)] * num

    def answer(self, version_id: str) -> None:
        del self.ledger.now_open[version_id]

    def running(self, version_id: str) -> list[str]:
        return [one.replica_id for one in self.state.assignments_of(version_id)]

    def all_ready(self) -> None:
        for one in list(self.state.placement.assignments.values()):
            if self.state.replica_state(one) != "ready":
                about = ("n1", one.replica_id, one.version_id)
                self.add("node-n1", nodes.ReplicaBecameReady(*about, 0, 1, 2, 3, 0.5, "", 1.0))

    def events(self, kind: type) -> list:
        return [one.event for one in self.store.read_stream("scaling") if type(one.event) is kind]

    def codes(self) -> list[str]:
        return [event.code for event in self.events(ReplicasScaled)]


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.add_model("cold")
    fleet.round()
    return fleet


def test_many_requests_wake_a_version_once_and_idleness_ends_it(fleet: Fleet) -> None:
    assert fleet.running(V) == []
    fleet.ask(V, 3)
    fleet.round(0.1)
    fleet.ask(V, 5)
    fleet.round()
    assert len(fleet.running(V)) == 1 and fleet.codes() == ["woken"]
    fleet.all_ready()
    fleet.answer(V)
    for _ in range(299):
        fleet.round()
    assert fleet.codes() == ["woken"]
    for _ in range(1500):
        fleet.round(1.0)
    assert fleet.codes() == ["woken", "idle"] and fleet.running(V) == []
    woken = fleet.events(ReplicasScaled)[0]
    assert woken.reason == "3 requests came for it, and it is scaled to zero."
    assert {one.name: one.value for one in woken.readings}["num_open"] == 3.0


def test_who_was_refused_at_once_wakes_the_version_too(fleet: Fleet) -> None:
    """Its estimate exceeded the deadline; nothing is open, and yet the model is loaded."""
    fleet.ask(V)
    fleet.answer(V)
    fleet.round()
    assert fleet.codes() == ["woken"]


def test_a_queue_that_lasts_adds_a_replica_and_not_beyond_the_cap(fleet: Fleet) -> None:
    fleet.add_model("busy", low=1, high=1)
    fleet.ask(V, 9)
    for _ in range(40):
        fleet.round()
        fleet.all_ready()
    assert fleet.codes() == ["woken", "queue"]
    assert fleet.state.num_wanted(V, fleet.state.catalog.spec(V)) == 2
    fleet.ask("busy@v1", 99)
    fleet.ask(V, 99)
    for _ in range(40):
        fleet.round()
    assert fleet.codes() == ["woken", "queue"]


def ask_slowly(fleet: Fleet) -> None:
    """Twenty rounds with a first token each that took 2.5 s."""
    for _ in range(20):
        fleet.ledger.ttft.append(FirstToken(V, "standard", fleet.clock.now(), 2.5))
        fleet.round()


def test_slow_first_tokens_count_only_from_when_all_replicas_were_ready(fleet: Fleet) -> None:
    """A request that was held while its model loaded says nothing about how many are needed."""
    fleet.ask(V)
    asked_at = fleet.clock.now()
    fleet.round(30.0)
    fleet.all_ready()
    fleet.ledger.ttft.append(FirstToken(V, "standard", asked_at, 30.0))
    for _ in range(30):
        fleet.round()
    assert fleet.codes() == ["woken"]
    ask_slowly(fleet)
    assert fleet.codes() == ["woken", "ttft"]


def test_first_tokens_count_only_of_who_came_after_a_pile_had_drained(fleet: Fleet) -> None:
    """Nine were held for four slots. Who came while they drained waited behind them, and the number
    of replicas that drained them does."""
    fleet.ask(V, 9)
    fleet.round()
    fleet.all_ready()
    for num_open in (9, 7, 5):
        fleet.ledger.now_open[V] = num_open
        fleet.ledger.ttft.append(FirstToken(V, "standard", fleet.clock.now(), 8.0))
        fleet.round()
    fleet.ledger.now_open[V] = 2
    for _ in range(40):
        fleet.round()
    assert fleet.codes() == ["woken"]
    ask_slowly(fleet)
    assert fleet.codes() == ["woken", "ttft"]


def test_a_number_that_was_left_a_pile_may_be_enough_without_it(fleet: Fleet) -> None:
    """It is not remembered as too few, also by a controller that starts anew."""
    fleet.ask(V, 9)
    for _ in range(30):
        fleet.round()
        fleet.all_ready()
    assert fleet.codes() == ["woken", "queue"]
    assert fleet.state.scaling.scales[V].too_few == {}
    fleet.ledger.now_open[V] = 1
    for _ in range(130):
        fleet.ledger.new.append(Arrival(fleet.clock.now(), V))
        fleet.round()
    assert fleet.codes() == ["woken", "queue", "slack"]
    fleet.ledger.now_open[V] = 9
    for _ in range(30):
        fleet.round()
    assert fleet.codes() == ["woken", "queue", "slack", "queue"]
    assert fleet.state.scaling.scales[V].too_few.keys() == {1}, "nothing was left to it this time"


def test_an_idle_model_leaves_for_one_that_is_asked_for(fleet: Fleet) -> None:
    """4096 hold one of 3000 only; both are scaled to zero when nobody asks."""
    fleet.add_model("large", memory=3000)
    fleet.add_model("other", memory=3000)
    fleet.ask("large@v1")
    fleet.round()
    fleet.all_ready()
    fleet.ask("other@v1")
    for _ in range(3):
        fleet.round()
    assert fleet.running("other@v1") == [], "what is busy stays"
    fleet.answer("large@v1")
    for _ in range(3):
        fleet.round()
    assert fleet.running("large@v1") == [] and len(fleet.running("other@v1")) == 1
    assert fleet.codes() == ["woken", "woken", "displaced"]


def test_what_was_just_woken_does_not_leave_for_what_is_expected(fleet: Fleet) -> None:
    """Its client was refused with a time to come back, so nothing is open for it; the other is
    asked for all the time and fits only in its place."""
    fleet.add_model("large", memory=3000)
    fleet.add_model("other", memory=3000)
    fleet.ledger.new = [Arrival(fleet.clock.now() - 400 + i, "other@v1") for i in range(300)]
    fleet.ask("large@v1")
    fleet.answer("large@v1")
    for _ in range(20):
        fleet.round()
        fleet.all_ready()
    assert fleet.codes() == ["woken"] and len(fleet.running("large@v1")) == 1
    for _ in range(60):
        fleet.round()
    assert fleet.codes()[1:3] == ["displaced", "preload"]
    assert fleet.running("large@v1") == [] and len(fleet.running("other@v1")) == 1


def test_what_is_expected_is_loaded_ahead_and_judged(fleet: Fleet) -> None:
    """Nobody has asked today, but on the days before two did within five minutes at this hour."""
    hour = int(fleet.clock.now() // 3600)
    fleet.ledger.by_hour = {(V, hour - 24): 24, (V, hour - 48): 24}  # two within five minutes
    fleet.round(301.0)
    assert fleet.codes() == ["preload"] and len(fleet.running(V)) == 1
    ahead = fleet.events(ReplicasScaled)[0]
    assert ahead.reason == "2.0 requests for it are expected within 300 s (daytime)."
    forecast = fleet.events(DemandForecast)[-1]
    assert [(one.version_id, one.num_requests, one.method) for one in forecast.expected] == [
        (V, 2.0, "daytime")
    ]
    fleet.all_ready()
    fleet.round(100.0)
    fleet.ask(V)
    fleet.round(1.0)
    fleet.answer(V)
    fleet.round(300.0)
    judged = fleet.events(PreloadJudged)
    assert [(one.num_requests, one.ahead_s, one.wasted_s) for one in judged] == [(1, 100.0, 0.0)]
    assert fleet.codes() == ["preload"]
    came = fleet.events(DemandForecast)[-1].came
    assert [(one.version_id, one.num_requests) for one in came] == [(V, 1)]


def test_a_load_ahead_that_nobody_used_ends(fleet: Fleet) -> None:
    hour = int(fleet.clock.now() // 3600)
    fleet.ledger.by_hour = {(V, hour - 24): 24}
    fleet.round(301.0)
    fleet.ledger.by_hour = {}
    fleet.round(301.0)
    assert fleet.codes() == ["preload", "preload_over"] and fleet.running(V) == []
    assert [one.wasted_s for one in fleet.events(PreloadJudged)] == [301.0]


def test_forecasts_are_few(fleet: Fleet) -> None:
    """One in five minutes at most, and none where nothing was or is expected."""
    for _ in range(900):
        fleet.round()
    assert fleet.events(DemandForecast) == []
    fleet.ask(V, 4)
    for _ in range(900):
        fleet.round()
    assert 1 <= len(fleet.events(DemandForecast)) <= 4


def test_every_placement_replays_bit_for_bit(fleet: Fleet) -> None:
    """What the load asked for is in the log, so the planner sees it again."""
    fleet.ask(V, 9)
    for _ in range(30):
        fleet.round()
        fleet.all_ready()
    replays = list(replay_all(fleet.store))
    assert replays and all(one.equal for one in replays)


def test_a_controller_that_starts_anew_goes_on_from_the_log(fleet: Fleet) -> None:
    fleet.ask(V)
    fleet.round()
    fleet.all_ready()
    again = Scaler(fleet.handler, fleet.clock, fleet.state, fleet.loads, fleet.watch)
    fleet.scaler = again
    for _ in range(10):
        fleet.round()
    assert fleet.codes() == ["woken"]
