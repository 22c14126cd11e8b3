"""The policies that ``residency`` compares, and the comparison.

========== =====================================================================
lru        least recently used leaves; loads on demand
ema        by the averages of ``placement.demand`` alone; loads ahead
ema_arima  the same with ARIMA's forecast of the next five minutes
unpriced   all terms, and loads ahead that cost nothing
demand     all terms, and a price for each load: the product's policy
clairvoyant  what is asked for last leaves (Belady 1966): the best that loading on demand can do
========== =====================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from controlplane.placement.demand import Demand, Weights
from controlplane.placement.weights import AVERAGES, AVERAGES_AND_FORECAST, FITTED
from controlplane.simulation.residency import Outcome, Policy, Request, replay

POLICIES = ("lru", "ema", "ema_arima", "unpriced", "demand", "clairvoyant")
Outcomes = dict[str, dict[int, Outcome]]


class Forecasts(Protocol):
    def at(self, at: float) -> Mapping[str, float]:
        """Requests a minute by model, for the bin of ``at`` and from what came before it."""
        ...


class Lru:
    loads_ahead = False

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def note(self, index: int, request: Request) -> None:
        self._last[request.model] = float(index)

    def keep(self, at: float) -> Mapping[str, float]:
        return self._last


class Clairvoyant:
    loads_ahead = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._next = _next_uses(requests)
        self._soonness: dict[str, float] = {}

    def note(self, index: int, request: Request) -> None:
        self._soonness[request.model] = -self._next[index]

    def keep(self, at: float) -> Mapping[str, float]:
        return self._soonness


class ByDemand:
    """By the rates of ``placement.demand``. ``forecasts(at)`` are requests a minute by model."""

    loads_ahead = True

    def __init__(self, weights: Weights, forecasts: Forecasts | None = None) -> None:
        self._weights, self._forecasts = weights, forecasts
        self._demand = Demand()

    def note(self, index: int, request: Request) -> None:
        self._demand.note(request.model, request.at)

    def keep(self, at: float) -> Mapping[str, float]:
        forecasts = self._forecasts.at(at) if self._forecasts else None
        return self._demand.rates(at, self._weights, forecasts)


def compare(
    requests: Sequence[Request],
    forecasts: Forecasts,
    rooms: Sequence[int],
    load_s: float,
) -> Outcomes:
    """Every policy on the same requests, by name and room."""
    return {
        name: replay(
            requests,
            _policy(name, requests, forecasts),
            rooms,
            load_s,
            is_priced=name != "unpriced",
        )
        for name in POLICIES
    }


def _policy(name: str, requests: Sequence[Request], forecasts: Forecasts) -> Policy:
    match name:
        case "lru":
            return Lru()
        case "ema":
            return ByDemand(AVERAGES)
        case "ema_arima":
            return ByDemand(AVERAGES_AND_FORECAST, forecasts)
        case "demand" | "unpriced":
            return ByDemand(FITTED, forecasts)
    return Clairvoyant(requests)


def distance_closed(outcomes: Outcomes, name: str, room: int, since: float = 0.0) -> float:
    """The part of the way from LRU to the clairvoyant optimum; 0 for LRU, 1 for the optimum."""
    rate = {known: by_room[room].hit_rate(since) for known, by_room in outcomes.items()}
    distance = rate["clairvoyant"] - rate["lru"]
    return (rate[name] - rate["lru"]) / distance if distance else 0.0


def table(outcomes: Outcomes) -> list[str]:
    """Lines to print."""
    lines = ["K    policy        warm   cold   wait p50     p99    loads  ahead  wasted"]
    rooms = next(iter(outcomes.values())).keys()
    for room in rooms:
        lines += [_line(room, name, by_room[room]) for name, by_room in outcomes.items()]
    return lines


def _line(room: int, name: str, one: Outcome) -> str:
    waits = f"{one.wait_s(0.5):6.2f} s {one.wait_s(0.99):6.2f} s"
    return (
        f"{room:<4} {name:<12} {one.hit_rate():6.3f} {one.num_cold:6d}   {waits}"
        f" {one.num_loads:6d} {one.num_ahead:6d} {one.wasted_s / 3600:6.1f} h"
    )


def _next_uses(requests: Sequence[Request]) -> list[float]:
    """By request, the index of the next one for the same model."""
    following: dict[str, int] = {}
    found = [0.0] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        model = requests[index].model
        found[index] = following.get(model, 2 * len(requests))
        following[model] = index
    return found
