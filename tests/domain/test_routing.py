"""The weights of routing: what may be said, and that saying it again changes nothing."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import routing
from controlplane.domain.routing import RoutingWeightsSet, SetRoutingWeights, Weights
from tests.domain.scenario import Scenario

MORE = replace(Weights(), beta=2.0)
SET = RoutingWeightsSet(Weights(), MORE, 1.0)


def given(*events: routing.RoutingEvent) -> Scenario:
    return Scenario(routing.DECIDER, events)


def test_what_is_named_changes_and_the_rest_stays() -> None:
    given().when(SetRoutingWeights({"beta": 2.0}, 1.0)).then(SET)
    hot = replace(MORE, t_safe=70.0, omega=(0.25, 0.25, 0.25, 0.25))
    given(SET).when(
        SetRoutingWeights({"t_safe": 70.0, "omega": (0.25, 0.25, 0.25, 0.25)}, 2.0)
    ).then(RoutingWeightsSet(MORE, hot, 2.0))


def test_what_is_so_already_changes_nothing() -> None:
    given().when(SetRoutingWeights({}, 1.0)).then_nothing()
    given(SET).when(SetRoutingWeights({"beta": 2.0}, 2.0)).then_nothing()


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": -1.0},
        {"gamma": float("inf")},
        {"beta": float("nan")},
        {"prefix": 1.5},
        {"hop_s": -0.1},
        {"stale_s": 1.0},
        {"t_safe": 83.0},
        {"t_max": 75.0},
        {"omega": (0.5, 0.5, 0.5, -0.5)},
        {"omega": (0.3, 0.3, 0.3, 0.3)},
        {"delta": 1.0},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    given().when(SetRoutingWeights(changes, 1.0)).then_refused("invalid_weight")
