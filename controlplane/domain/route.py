"""A route: a public name served by weighted arms, each a model version. Stream ``route-<name>``."""

import msgspec
from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import VersionId, checked_name


class Arm(msgspec.Struct, frozen=True):
    """One alternative: ``name`` stays while weights change, so users stay with it."""

    name: str
    version_id: VersionId
    weight: float


# --- events -----------------------------------------------------------------------------------
class RouteCreated(Event, frozen=True, tag_field="type", tag="RouteCreated"):
    name: str
    arms: tuple[Arm, ...]
    sticky: bool
    at: float


class RouteArmsChanged(Event, frozen=True, tag_field="type", tag="RouteArmsChanged"):
    name: str
    arms: tuple[Arm, ...]
    sticky: bool
    at: float


class RouteDeleted(Event, frozen=True, tag_field="type", tag="RouteDeleted"):
    name: str
    at: float


RouteEvent = RouteCreated | RouteArmsChanged | RouteDeleted


# --- state ------------------------------------------------------------------------------------
class Route(State, frozen=True):
    exists: bool = False
    arms: tuple[Arm, ...] = ()
    sticky: bool = True


def evolve(route: Route, event: RouteEvent) -> Route:
    match event:
        case RouteCreated(arms=arms, sticky=sticky) | RouteArmsChanged(arms=arms, sticky=sticky):
            return replace(route, exists=True, arms=arms, sticky=sticky)
        case RouteDeleted():
            return replace(route, exists=False)
    return route


# --- commands ---------------------------------------------------------------------------------
class CreateRoute(Command, frozen=True):
    name: str
    arms: tuple[Arm, ...]
    sticky: bool
    now: float


class ChangeArms(Command, frozen=True):
    name: str
    arms: tuple[Arm, ...]
    sticky: bool
    now: float


class DeleteRoute(Command, frozen=True):
    name: str
    now: float


RouteCommand = CreateRoute | ChangeArms | DeleteRoute


# --- decisions --------------------------------------------------------------------------------
def decide(route: Route, command: RouteCommand) -> list[Event]:
    match command:
        case CreateRoute(name, arms, sticky, now):
            checked_name(name)
            check_arms(arms)
            if route.exists and (route.arms, route.sticky) == (arms, sticky):
                return []
            if route.exists:
                raise Conflict("route_exists", f"Route '{name}' exists already.")
            return [RouteCreated(name, arms, sticky, now)]
        case ChangeArms(name, arms, sticky, now):
            _require(route, name)
            check_arms(arms)
            if (route.arms, route.sticky) == (arms, sticky):
                return []
            return [RouteArmsChanged(name, arms, sticky, now)]
        case DeleteRoute(name, now):
            return [RouteDeleted(name, now)] if route.exists else []
    raise AssertionError(command)


def check_arms(arms: tuple[Arm, ...]) -> None:
    """Raise Invalid ``invalid_route`` unless weights are finite, >= 0 and sum above 0."""
    if not 1 <= len(arms) <= 32:
        raise Invalid("invalid_route", "A route has 1 to 32 arms.", "arms")
    if len({arm.name for arm in arms}) != len(arms):
        raise Invalid("invalid_route", "Arm names are unique within a route.", "arms")
    for arm in arms:
        checked_name(arm.name, "arms")
        if not 0 <= arm.weight <= 1e6:  # refuses NaN and the infinities too
            raise Invalid("invalid_route", "A weight is from 0 to 1,000,000.", "arms")
    if sum(arm.weight for arm in arms) <= 0:
        raise Invalid("invalid_route", "At least one weight is above 0.", "arms")


def _require(route: Route, name: str) -> None:
    if not route.exists:
        raise NotFound("route", name)


DECIDER = Decider("route", Route(), decide, evolve)
