"""What a route may and may not become."""

import pytest

from controlplane.domain import route
from controlplane.domain.decider import Event
from controlplane.domain.route import (
    Arm,
    ChangeArms,
    CreateRoute,
    DeleteRoute,
    RouteArmsChanged,
    RouteCreated,
    RouteDeleted,
)
from tests.domain.samples import ARMS, V1
from tests.domain.scenario import Scenario

R = "chat"
CREATED = RouteCreated(R, ARMS, True, 1.0)
DELETED = RouteDeleted(R, 3.0)


def given(*events: Event) -> Scenario:
    return Scenario(route.DECIDER, events)


def test_creating_the_same_route_again_changes_nothing() -> None:
    given().when(CreateRoute(R, ARMS, True, 1.0)).then(CREATED)
    given(CREATED).when(CreateRoute(R, ARMS, True, 2.0)).then_nothing()
    given(CREATED).when(CreateRoute(R, ARMS, False, 2.0)).then_refused("route_exists")
    given().when(CreateRoute("a b", ARMS, True, 1.0)).then_refused("invalid_name")


def test_a_deleted_route_may_be_created_anew() -> None:
    given(CREATED).when(DeleteRoute(R, 3.0)).then(DELETED)
    given(CREATED, DELETED).when(DeleteRoute(R, 4.0)).then_nothing()
    given(CREATED, DELETED).when(CreateRoute(R, ARMS, True, 4.0)).then(
        RouteCreated(R, ARMS, True, 4.0)
    )
    given(CREATED, DELETED).when(ChangeArms(R, ARMS, True, 4.0)).then_refused("route_not_found")


def test_arms_are_changed_as_a_whole() -> None:
    """Changing to what is there already is harmless; changing only ``sticky`` is a change."""
    given(CREATED).when(ChangeArms(R, ARMS, True, 2.0)).then_nothing()
    given(CREATED).when(ChangeArms(R, ARMS, False, 2.0)).then(RouteArmsChanged(R, ARMS, False, 2.0))
    given().when(ChangeArms(R, ARMS, True, 2.0)).then_refused("route_not_found")


@pytest.mark.parametrize(
    "arms",
    [
        (),
        tuple(Arm(f"a{index}", V1, 1.0) for index in range(33)),
        (Arm("a", V1, 1.0), Arm("a", V1, 1.0)),
        (Arm("a", V1, 0.0), Arm("b", V1, 0.0)),
        (Arm("a", V1, -0.1),),
        (Arm("a", V1, float("nan")),),
        (Arm("a", V1, float("inf")),),
        (Arm("a", V1, 1e7),),
    ],
)
def test_arms_without_a_sound_share_are_refused(arms: tuple[Arm, ...]) -> None:
    """Weights are finite, from 0 up, not all 0; names are unique; at most 32 arms."""
    given().when(CreateRoute(R, arms, True, 1.0)).then_refused("invalid_route")
    given(CREATED).when(ChangeArms(R, arms, True, 2.0)).then_refused("invalid_route")


def test_an_arm_may_be_switched_off() -> None:
    off = (Arm("a", V1, 1.0), Arm("b", V1, 0.0))
    given(CREATED).when(ChangeArms(R, off, True, 2.0)).then(RouteArmsChanged(R, off, True, 2.0))
