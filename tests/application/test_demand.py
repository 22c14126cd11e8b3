"""What the controller knows of demand, from the ledger alone: now, expected, after a restart."""

from collections.abc import Mapping

import pytest

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.forecasting import LIVE_REFIT_BINS, Forecaster
from controlplane.application.demand import (
    DAY_S,
    FORECAST_FROM,
    Arrival,
    DemandWatch,
    FirstToken,
)
from tests.application.test_scaling import Ledger

V = "m@v1"
NOW = 20 * DAY_S


class Told:
    """A forecaster that says what it is told to, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Arrival] = []
        self.says: dict[str, float] = {}

    def note(self, model: str, at: float, num: int = 1) -> None:
        self.heard.append(Arrival(at, model))

    def at(self, at: float) -> Mapping[str, float]:
        return self.says


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def clock() -> ManualClock:
    clock = ManualClock()
    clock.advance(NOW - clock.now())
    return clock


def every(seconds: float, until: float, since: float) -> list[Arrival]:
    num = int((until - since) / seconds)
    return [Arrival(since + seconds * (i + 1), V) for i in range(num)]


def test_averages_are_requests_a_minute(ledger: Ledger, clock: ManualClock) -> None:
    """Every 10 s for half an hour is 6 a minute, and 30 in five."""
    ledger.new = every(10.0, NOW, NOW - 1800)
    watch = DemandWatch(ledger, clock)
    watch.watch()
    assert watch.view.demand[V] == pytest.approx(6.0, rel=0.1)
    num, method = watch.view.expected[V]
    assert (num, method) == (pytest.approx(30.0, rel=0.1), "averages")
    assert watch.view.num_since(V, NOW - 60) == 7
    assert watch.view.first_since(V, NOW - 25) == NOW - 20
    clock.advance(1200.0)
    watch.watch()
    assert watch.view.expected[V].num < 1 and watch.view.num_since(V, 0.0) == 0


def test_the_same_hour_of_the_days_before_speaks_for_what_is_seldom_asked_for(
    ledger: Ledger, clock: ManualClock
) -> None:
    hour = int(NOW // 3600)
    ledger.by_hour = {(V, hour - 24): 24, (V, hour - 48): 12, (V, hour - 23): 99}
    watch = DemandWatch(ledger, clock)
    watch.watch()
    assert watch.view.expected[V] == (pytest.approx(18 / 12), "daytime")


def test_a_forecast_speaks_before_the_day_and_after_a_busy_minute(
    ledger: Ledger, clock: ManualClock
) -> None:
    told = Told()
    watch = DemandWatch(ledger, clock, lambda: told)
    ledger.new = every(60.0, NOW, NOW - 600)
    watch.watch()
    told.says = {V: 2.5}
    watch.forecast()
    clock.advance(1.0)
    watch.watch()
    assert watch.view.expected[V] == (12.5, "arima")
    assert len(told.heard) == 10
    told.says = {V: 0.1}
    watch.forecast()
    clock.advance(1.0)
    watch.watch()
    assert watch.view.expected[V].method == "averages"
    assert len(told.heard) == 10, "each is told once"


def test_nothing_is_fitted_before_anything_could_be(ledger: Ledger, clock: ManualClock) -> None:
    def never() -> Told:
        raise AssertionError("statsmodels is loaded for nothing")

    watch = DemandWatch(ledger, clock, never)
    ledger.new = [Arrival(NOW - i, V) for i in range(FORECAST_FROM - 1)]
    watch.watch()
    watch.forecast()
    assert watch.view.expected[V].method == "averages"


def test_who_waits_is_seen_at_once_and_all_else_once_a_second(
    ledger: Ledger, clock: ManualClock
) -> None:
    watch = DemandWatch(ledger, clock)
    assert not watch.watch()
    before = watch.view
    clock.advance(0.25)
    assert not watch.watch() and watch.view is before
    ledger.now_open = {V: 1}
    clock.advance(0.25)
    assert watch.watch() and watch.view.num_open == {V: 1}
    assert watch.view.last_open[V] == NOW + 0.5


def test_first_tokens_are_kept_for_a_minute(ledger: Ledger, clock: ManualClock) -> None:
    ledger.ttft = [FirstToken(V, "standard", NOW, 0.5)]
    watch = DemandWatch(ledger, clock)
    watch.watch()
    assert len(watch.view.ttft[V]) == 1
    clock.advance(61.0)
    watch.watch()
    assert watch.view.ttft == {}


def test_a_restart_knows_what_was_known_before(ledger: Ledger, clock: ManualClock) -> None:
    """ARIMA itself, on a day of every second bin busy: after a quiet bin a busy one is expected,
    and an average would say half of it."""
    bins = [NOW - 300 * (i + 1) for i in range(288)]
    ledger.new = sorted(Arrival(at + 30 * k, V) for at in bins[1::2] for k in range(8))
    watch = DemandWatch(ledger, clock, lambda: Forecaster(LIVE_REFIT_BINS))
    watch.watch()
    watch.forecast()
    clock.advance(1.0)
    watch.watch()
    num, method = watch.view.expected[V]
    assert method == "arima" and num > 6.0
