"""Replicas between a version's bounds, forecasts, and what became of loads ahead."""

from controlplane.domain import scaling
from controlplane.domain.decider import fold
from controlplane.domain.ids import VersionId
from controlplane.domain.scaling import (
    Came,
    DemandForecast,
    Expected,
    JudgePreload,
    PreloadJudged,
    Reading,
    RecordForecast,
    ReplicasScaled,
    ScaleReplicas,
)
from tests.domain.scenario import Scenario

V = VersionId("m@v1")
WOKEN = ReplicasScaled(V, 0, 1, "woken", "1 request waits", (), 1.0)
AHEAD = ReplicasScaled(V, 0, 1, "preload", "2 expected", (), 100.0, 400.0)


def given(*events: scaling.ScalingEvent) -> Scenario:
    return Scenario(scaling.DECIDER, events)


def state_of(*events: scaling.ScalingEvent) -> scaling.Scaling:
    return fold(scaling.DECIDER, events)


def test_a_version_has_its_minimum_until_it_is_scaled_and_keeps_its_bounds() -> None:
    assert state_of().num_wanted(V, 0, 2) == 0
    assert state_of(WOKEN).num_wanted(V, 0, 2) == 1
    assert state_of(WOKEN).num_wanted(V, 2, 4) == 2
    assert state_of(WOKEN, ReplicasScaled(V, 1, 4, "queue", "", (), 2.0)).num_wanted(V, 0, 2) == 2


def test_scaling_to_what_there_is_changes_nothing() -> None:
    wake = ScaleReplicas(V, 0, 1, "woken", "1 request waits", (), 1.0)
    given().when(wake).then(WOKEN)
    given(WOKEN).when(wake).then_nothing()
    given().when(ScaleReplicas(V, 1, 1, "queue", "", (), 1.0)).then_nothing()


def test_what_was_too_few_is_remembered_with_its_demand() -> None:
    readings = (Reading("slots_used", 1.2), Reading("demand", 60.0))
    state = state_of(WOKEN, ReplicasScaled(V, 1, 2, "queue", "", readings, 2.0))
    assert state.scales[V].too_few == {1: 60.0}
    assert state_of(WOKEN).scales[V].too_few == {}


def test_one_forecast_an_interval_and_none_of_nothing() -> None:
    expected = (Expected(V, 1.5, "arima"),)
    forecast = DemandForecast(0.0, 300.0, expected)
    given().when(RecordForecast(300.0, expected, (), 0.0)).then(forecast)
    given(forecast).when(RecordForecast(599.0, expected, (), 299.0)).then_nothing()
    given().when(RecordForecast(300.0, (), (), 0.0)).then_nothing()
    came = (Came(V, 1.5, 2),)
    over = DemandForecast(300.0, 600.0, (), came)
    given(forecast).when(RecordForecast(600.0, (), came, 300.0)).then(over)
    given(forecast, over).when(RecordForecast(900.0, (), (), 600.0)).then_nothing()


def test_a_load_ahead_is_judged_once() -> None:
    hit = JudgePreload(V, 2, 30.0, 400.0)
    given(AHEAD).when(hit).then(PreloadJudged(V, 100.0, 2, 30.0, 0.0, 400.0))
    given(AHEAD, PreloadJudged(V, 100.0, 2, 30.0, 0.0, 400.0)).when(hit).then_nothing()
    given().when(hit).then_nothing()
    missed = JudgePreload(V, 0, None, 400.0)
    given(AHEAD).when(missed).then(PreloadJudged(V, 100.0, 0, None, 300.0, 400.0))
