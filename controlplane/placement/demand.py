"""How soon each model will be asked for, from when models were asked for before.

Requests excite requests: who has asked a model once asks again when the answer is read, and people
who use one model turn to another. So the rate at which model m is asked for is written as a Hawkes
process with exponential kernels (Hawkes 1971), plus what time of day and forecast say::

    rate_m(t) = Σ_k  w_k · ema_k,m(t)              requests a minute, averaged over τ_k seconds
              + w_d · daytime_m(t)                 m's share of what was asked at this half hour
              + Σ_l  w_l · Σ_j ema_l,j(t) · P(m|j)    what follows what is being asked now
              + w_f · forecast_m(t)                requests a minute, by ARIMA over 5-minute bins

The first weight is negative: within seconds of a request the same user does not ask again, since
the answer is still being made. A rate is only good for ranking models; it is not calibrated.

Worked example with one time constant of 60 s, one weight of 1 and nothing else::

    a asked at 0 s and 60 s    ema at 60 s: 1 · e^-1 + 1 = 1.37 a minute
    b asked at 0 s only        ema at 60 s: 0.37
    at 120 s                   a 0.50, b 0.14: both fade alike until one is asked again

State is a few floats for each model, and a count for each two that followed each other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

RECENT_S = (20.0, 80.0, 320.0, 2560.0, 691_200.0)
FOLLOWING_S = (60.0, 600.0)
HALF_HOURS = 48
_DAY_S = 86_400.0
_MINUTE_S = 60.0
_FORGET_S = 14 * _DAY_S  # what follows what, and when in the day
_PRIOR = 2.0  # requests that nothing in particular followed


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the terms of ``Demand.terms``, in their order."""

    recent: tuple[float, ...]
    daytime: float = 0.0
    following: tuple[float, ...] = (0.0,) * len(FOLLOWING_S)
    forecast: float = 0.0

    def flat(self) -> tuple[float, ...]:
        return (*self.recent, self.daytime, *self.following, self.forecast)


class Recent:
    """How often one thing happened lately: decayed counts, one for each time constant."""

    __slots__ = ("_at", "_counts")

    def __init__(self, num_constants: int) -> None:
        self._at = 0.0
        self._counts = [0.0] * num_constants

    def note(self, at: float, constants_s: tuple[float, ...]) -> None:
        passed = at - self._at
        self._counts = [
            count * math.exp(-passed / constant) + 1
            for count, constant in zip(self._counts, constants_s, strict=True)
        ]
        self._at = at

    def rates(self, at: float, constants_s: tuple[float, ...]) -> list[float]:
        """Events a minute."""
        passed = at - self._at
        return [
            count * math.exp(-passed / constant) * _MINUTE_S / constant
            for count, constant in zip(self._counts, constants_s, strict=True)
        ]


class Tally:
    """How often each of several things happened, slowly forgotten."""

    __slots__ = ("_at", "_counts", "_total")

    def __init__(self) -> None:
        self._at = self._total = 0.0
        self._counts: dict[str, float] = {}

    def note(self, thing: str, at: float) -> None:
        kept = math.exp((self._at - at) / _FORGET_S)
        self._counts = {known: count * kept for known, count in self._counts.items()}
        self._counts[thing] = self._counts.get(thing, 0.0) + 1
        self._total, self._at = self._total * kept + 1, at

    def count(self, thing: str, at: float) -> float:
        return self._counts.get(thing, 0.0) * math.exp((self._at - at) / _FORGET_S)

    def total(self, at: float) -> float:
        return self._total * math.exp((self._at - at) / _FORGET_S)

    def shares(self, at: float) -> dict[str, float]:
        """Of each thing; together less than 1, the less the less was seen."""
        kept = math.exp((self._at - at) / _FORGET_S)
        scale = kept / (self._total * kept + _PRIOR)
        return {thing: count * scale for thing, count in self._counts.items()}


@dataclass(slots=True)
class Demand:
    """Feed it every request in the order of time; then ask for rates at that time or later."""

    _recent: dict[str, Recent] = field(default_factory=dict)
    _active: dict[str, Recent] = field(default_factory=dict)
    _followers: dict[str, Tally] = field(default_factory=dict)
    _daytime: list[Tally] = field(default_factory=lambda: [Tally() for _ in range(HALF_HOURS)])
    _last: str = ""

    def note(self, model: str, at: float) -> None:
        """``model`` was asked for at ``at``, seconds since the epoch."""
        if model not in self._recent:
            self._recent[model] = Recent(len(RECENT_S))
            self._active[model] = Recent(len(FOLLOWING_S))
            self._followers[model] = Tally()
        self._recent[model].note(at, RECENT_S)
        self._active[model].note(at, FOLLOWING_S)
        self._daytime[_half_hour(at)].note(model, at)
        if self._last:
            self._followers[self._last].note(model, at)
        self._last = model

    def rates(
        self, at: float, weights: Weights, forecasts: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Of every model that was ever asked for; ``forecasts`` are requests a minute."""
        flat = weights.flat()
        return {
            model: sum(weight * term for weight, term in zip(flat, terms, strict=True))
            for model, terms in self.terms(at, forecasts or {}).items()
        }

    def terms(self, at: float, forecasts: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
        """What the weights multiply, by model."""
        following, daytime = self._following(at), self._around(at)
        return {
            model: (
                *recent.rates(at, RECENT_S),
                daytime.get(model, 0.0),
                *following.get(model, _NOTHING),
                forecasts.get(model, 0.0),
            )
            for model, recent in self._recent.items()
        }

    def _following(self, at: float) -> dict[str, list[float]]:
        """Requests a minute that follow what is being asked now, for each time constant."""
        found: dict[str, list[float]] = {}
        for model, active in self._active.items():
            rates = active.rates(at, FOLLOWING_S)
            for follower, share in self._followers[model].shares(at).items():
                terms = found.setdefault(follower, [0.0] * len(FOLLOWING_S))
                for index, rate in enumerate(rates):
                    terms[index] += rate * share
        return found

    def _around(self, at: float) -> dict[str, float]:
        """Each model's share of all requests that fell into this half hour of a day, counting
        half of the neighbouring ones too; a minute."""
        now = _half_hour(at)
        total = 1 + sum(tally.total(at) for tally in self._daytime)
        near = ((now, 1.0), (now - 1, 0.5), ((now + 1) % HALF_HOURS, 0.5))
        return {
            model: sum(part * self._daytime[index].count(model, at) for index, part in near)
            * _MINUTE_S
            / total
            for model in self._recent
        }


_NOTHING = (0.0,) * len(FOLLOWING_S)


def _half_hour(at: float) -> int:
    return int(at % _DAY_S // (_DAY_S / HALF_HOURS))
