"""The weights by which gateways choose replicas: the installation's. Stream ``routing-weights``.

They are the alpha, beta, gamma and the rest of ``dispatch.choose``, which says what each does. A
change is an event, which every gateway follows: the next request is weighed by it, and what was
chosen before keeps the weights that it was chosen by (``dispatch.record``)::

    nothing said                     alpha 1, beta 0.5, gamma 1, a cached prefix counts in full
    SetRoutingWeights(beta 2.0)      RoutingWeightsSet(before beta 0.5, after beta 2.0)
    the same again                   nothing
    SetRoutingWeights(t_safe 90)     refused: it is below t_max, 83
"""

from math import isfinite

import msgspec

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Invalid

NAME = "weights"
STREAM = f"routing-{NAME}"
MAX_WEIGHT = 1000.0
STALE_S = (2.5, 60.0)  # a node is heard every two seconds
MAX_CELSIUS, MAX_HOP_S = 150.0, 10.0


class Weights(msgspec.Struct, frozen=True):
    """``alpha`` per estimated second, ``beta`` in seconds at full utilisation, ``gamma`` per
    second of loading. Omegas are (idle, memory, cool, queue) and sum to 1. ``prefix``: how much of
    what a replica seems to have cached of a prompt is believed, 0 to 1. ``hop_s``: what a level of
    distance between zones costs. Celsius and seconds."""

    alpha: float = 1.0
    beta: float = 0.5
    gamma: float = 1.0
    omega: tuple[float, float, float, float] = (0.3, 0.3, 0.1, 0.3)
    t_safe: float = 75.0
    t_max: float = 83.0
    stale_s: float = 6.0
    prefix: float = 1.0
    hop_s: float = 0.02


DEFAULT_WEIGHTS = Weights()


# --- events -----------------------------------------------------------------------------------
class RoutingWeightsSet(Event, frozen=True, tag_field="type", tag="RoutingWeightsSet"):
    before: Weights
    after: Weights
    at: float


RoutingEvent = RoutingWeightsSet


# --- state ------------------------------------------------------------------------------------
class Routing(State, frozen=True):
    weights: Weights = DEFAULT_WEIGHTS


def evolve(routing: Routing, event: RoutingEvent) -> Routing:
    return Routing(event.after)


# --- commands ---------------------------------------------------------------------------------
class SetRoutingWeights(Command, frozen=True):
    """``changes`` by the names of ``Weights``; what is not named stays."""

    changes: dict[str, float | tuple[float, float, float, float]]
    now: float


# --- decisions --------------------------------------------------------------------------------
def decide(routing: Routing, command: SetRoutingWeights) -> list[Event]:
    unknown = sorted(set(command.changes) - set(Weights.__struct_fields__))
    if unknown:
        raise Invalid("invalid_weight", f"There is no weight {unknown[0]!r}.", "weights")
    after = msgspec.structs.replace(routing.weights, **command.changes)
    check(after)
    if after == routing.weights:
        return []
    return [RoutingWeightsSet(routing.weights, after, command.now)]


def check(weights: Weights) -> None:
    """Raises Invalid, naming the weight."""
    for name in ("alpha", "beta", "gamma"):
        _within(name, getattr(weights, name), 0.0, MAX_WEIGHT)
    _within("prefix", weights.prefix, 0.0, 1.0)
    _within("hop_s", weights.hop_s, 0.0, MAX_HOP_S)
    _within("stale_s", weights.stale_s, *STALE_S)
    _within("t_max", weights.t_max, 1.0, MAX_CELSIUS)
    _within("t_safe", weights.t_safe, 0.0, weights.t_max)
    if weights.t_safe == weights.t_max:
        raise Invalid("invalid_weight", "t_safe is below t_max.", "t_safe")
    for one in weights.omega:
        _within("omega", one, 0.0, 1.0)
    if abs(sum(weights.omega) - 1.0) > 1e-9:
        raise Invalid("invalid_weight", "omega sums to 1.", "omega")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise Invalid("invalid_weight", f"{name} is from {low:g} to {high:g}.", name)


DECIDER = Decider("routing", Routing(), decide, evolve)
