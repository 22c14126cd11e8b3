"""The placement stream: decisions only, its version is the generation."""

from controlplane.domain import placement
from controlplane.domain.decider import fold
from controlplane.domain.placement import (
    DecidePlacement,
    PlacementDecided,
    Started,
    Stopped,
    Unplaced,
)
from tests.domain.samples import ASSIGNMENT, REJECTION, V1
from tests.domain.scenario import Scenario

START = Started(ASSIGNMENT, "wanted", (), ())
STOP = Stopped(ASSIGNMENT, "surplus", "")
GAP = Unplaced(V1, 1, "no_memory", "fits nowhere", (REJECTION,))
STARTED = PlacementDecided("d1", 5, (START,), (), (), 1.0)
STOPPED = PlacementDecided("d2", 6, (), (STOP,), (GAP,), 2.0)


def given(*events: PlacementDecided) -> Scenario:
    return Scenario(placement.DECIDER, events)


def test_a_plan_that_changes_something_is_decided() -> None:
    given().when(DecidePlacement("d1", 5, (START,), (), (), 1.0)).then(STARTED)


def test_a_plan_that_changes_nothing_is_no_event() -> None:
    """Neither an empty one nor one that finds the same gaps, whatever their wording."""
    given(STARTED).when(DecidePlacement("d2", 6, (), (), (), 2.0)).then_nothing()
    worded = Unplaced(V1, 1, "no_memory", "still fits nowhere", ())
    given(STOPPED).when(DecidePlacement("d3", 7, (), (), (worded,), 3.0)).then_nothing()


def test_a_gap_that_opens_or_closes_is_a_decision() -> None:
    given(STARTED).when(DecidePlacement("d2", 6, (), (), (GAP,), 2.0)).then(
        PlacementDecided("d2", 6, (), (), (GAP,), 2.0)
    )
    given(STOPPED).when(DecidePlacement("d3", 7, (), (), (), 3.0)).then(
        PlacementDecided("d3", 7, (), (), (), 3.0)
    )


def test_state_is_the_sum_of_all_plans() -> None:
    state = fold(placement.DECIDER, [STARTED])
    assert (state.generation, state.assignments) == (1, {ASSIGNMENT.replica_id: ASSIGNMENT})
    state = fold(placement.DECIDER, [STOPPED], state)
    assert (state.generation, state.assignments, state.unplaced) == (2, {}, (GAP,))
