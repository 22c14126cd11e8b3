"""What each version is being asked for now, and what it will be: kept by the controller.

``watch`` reads the ledger on a thread of its own and leaves a ``DemandView`` behind, a frozen value
that the planner's thread reads; a forecaster is fed on a third. What is expected in the next five
minutes is said by the best that there is for the version::

    arima       bins of 5 minutes of the last 24 h, fitted where a model was busy in 8 of them
    averages    requests a minute lately (80 s and 320 s, the lower), where those say more
    daytime     the mean of the same hour of the days before, in a version seldom asked for

A controller that starts reads the last day again, so nothing but the ledger need be kept.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from controlplane.application.ports import Clock
from controlplane.placement.ahead import worths
from controlplane.placement.demand import Demand, Recent
from controlplane.placement.weights import FITTED

DAY_S = 86_400.0
HISTORY_DAYS = 14
HORIZON_S = 300.0
HOURS_EVERY_S = 300.0
KEEP_S = 900.0  # arrivals one by one
TTFT_S = 60.0  # first tokens
RATES_EVERY_S = 1.0
AVERAGES_S = (80.0, 320.0)
FORECAST_FROM = 8  # requests; below, no model was busy in as many bins as a fit takes


class Arrival(NamedTuple):
    at: float
    version_id: str


class FirstToken(NamedTuple):
    """``at``: of the admission. Seconds."""

    version_id: str
    latency_class: str
    at: float
    ttft_s: float


class Arrivals(Protocol):
    """The ledger as demand reads it: blocking, for one thread."""

    def open(self) -> dict[str, int]:
        """Requests admitted and not ended, by version id."""

    def arrived(self, since: float) -> list[Arrival]:
        """Admitted since the last call, at the first call since ``since``; in order of time."""

    def first_tokens(self) -> list[FirstToken]: ...

    def hours(self, first: int) -> dict[tuple[str, int], int]:
        """Requests by version and hour (since 1970, UTC) from ``first`` on."""


class Forecaster(Protocol):
    """``adapters.forecasting.Forecaster``: for one thread."""

    def note(self, model: str, at: float, num: int = 1) -> None: ...

    def at(self, at: float) -> Mapping[str, float]:
        """Requests a minute in the five minutes of ``at``."""


class Expectation(NamedTuple):
    """Requests within ``HORIZON_S``; ``method``: arima | averages | daytime."""

    num: float
    method: str


@dataclass(frozen=True)
class DemandView:
    """``num_open``: now. ``demand``: requests a minute, the higher of two averages. ``expected``:
    within the horizon. ``rates``: what ranks (see ``placement.demand``). ``last_open``: when a
    request last came or was open. ``arrivals``: times of the last ``KEEP_S``, by version; ``ttft``:
    first tokens of requests of the last ``TTFT_S``."""

    at: float = 0.0
    num_open: Mapping[str, int] = field(default_factory=dict)
    demand: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, Expectation] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    last_open: Mapping[str, float] = field(default_factory=dict)
    arrivals: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ttft: Mapping[str, tuple[FirstToken, ...]] = field(default_factory=dict)

    def rates_asked(self) -> dict[str, float]:
        """Requests a minute for each version: lately, or expected if that is more."""
        expected = {name: one.num for name, one in self.expected.items()}
        return worths(expected, self.demand)

    def num_since(self, version_id: str, at: float) -> int:
        return sum(one >= at for one in self.arrivals.get(version_id, ()))

    def first_since(self, version_id: str, at: float) -> float | None:
        return min((one for one in self.arrivals.get(version_id, ()) if one >= at), default=None)


class DemandWatch:
    """``watch`` on one thread, ``forecast`` on another, ``view`` from any."""

    def __init__(
        self,
        arrivals: Arrivals,
        clock: Clock,
        make_forecaster: Callable[[], Forecaster] | None = None,
    ) -> None:
        self._arrivals, self._clock, self._make = arrivals, clock, make_forecaster
        self._forecaster: Forecaster | None = None
        self.view = DemandView()
        self.num_arrived = 0
        self._demand = Demand()
        self._averages: defaultdict[str, Recent] = defaultdict(lambda: Recent(len(AVERAGES_S)))
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._ttft: deque[FirstToken] = deque()
        self._last_open: dict[str, float] = {}
        self._hours: dict[tuple[str, int], int] = {}
        self._first_hour: dict[str, int] = {}
        self._hours_at = self._rates_at = 0.0
        self._fresh: list[Arrival] = []  # not yet told to the forecaster
        self._lock = threading.Lock()
        self._forecasts: Mapping[str, float] = {}

    def watch(self) -> bool:
        """Read what is new; whether other versions than before have requests open."""
        now = self._clock.now()
        num_open = self._arrivals.open()
        changed = num_open.keys() != self.view.num_open.keys()
        if not changed and now - self._rates_at < RATES_EVERY_S:
            return False
        self._rates_at = now
        self._take_in(now)
        for version_id in num_open:
            self._last_open[version_id] = now
        self.view = self._viewed(now, num_open)
        return changed

    def forecast(self) -> None:
        """Bring the forecasts up to now; takes seconds where models are fitted."""
        if self._make is None or self.num_arrived < FORECAST_FROM:
            return
        if self._forecaster is None:  # only now: what fits models takes 100 MB and seconds to load
            self._forecaster = self._make()
        with self._lock:
            fresh, self._fresh = self._fresh, []
        for arrival in fresh:
            self._forecaster.note(arrival.version_id, arrival.at)
        self._forecasts = dict(self._forecaster.at(self._clock.now()))

    # --- taking in ------------------------------------------------------------------------------
    def _take_in(self, now: float) -> None:
        while arrived := self._arrivals.arrived(now - DAY_S):
            self._note(arrived, now)
        self._ttft.extend(self._arrivals.first_tokens())
        self._ttft = deque(one for one in self._ttft if one.at >= now - TTFT_S)
        for times in self._times.values():
            while times and times[0] < now - KEEP_S:
                times.popleft()
        if now - self._hours_at >= HOURS_EVERY_S:
            self._hours_at = now
            self._read_hours(int(now // 3600) - 24 * HISTORY_DAYS)

    def _read_hours(self, first: int) -> None:
        self._hours = self._arrivals.hours(first)
        self._first_hour = {}
        for version_id, hour in self._hours:
            self._first_hour[version_id] = min(hour, self._first_hour.get(version_id, hour))

    def _note(self, arrived: list[Arrival], now: float) -> None:
        for at, version_id in arrived:
            self._averages[version_id].note(at, AVERAGES_S)
            self._demand.note(version_id, at)
            self._last_open[version_id] = max(at, self._last_open.get(version_id, at))
            if at > now - KEEP_S:
                self._times[version_id].append(at)
        self.num_arrived += len(arrived)
        if self._make is not None:
            with self._lock:
                self._fresh += arrived

    # --- what follows from it -------------------------------------------------------------------
    def _viewed(self, now: float, num_open: Mapping[str, int]) -> DemandView:
        lately = {name: one.rates(now, AVERAGES_S) for name, one in self._averages.items()}
        known = {*lately, *self._first_hour}
        ttft: defaultdict[str, list[FirstToken]] = defaultdict(list)
        for one in self._ttft:
            ttft[one.version_id].append(one)
        return DemandView(
            now,
            num_open,
            {name: max(rates) for name, rates in lately.items()},
            {name: self._expected(name, lately.get(name, [0.0]), now) for name in known},
            self._demand.rates(now, FITTED, self._forecasts),
            dict(self._last_open),
            {name: tuple(times) for name, times in self._times.items() if times},
            {name: tuple(all_of) for name, all_of in ttft.items()},
        )

    def _expected(self, version_id: str, lately: list[float], now: float) -> Expectation:
        minutes = HORIZON_S / 60
        averages = Expectation(min(lately) * minutes, "averages")
        forecast = self._forecasts.get(version_id)
        if forecast is not None:
            return max(Expectation(forecast * minutes, "arima"), averages)
        return max(averages, Expectation(self._same_hour(version_id, now), "daytime"))

    def _same_hour(self, version_id: str, now: float) -> float:
        """Requests within the horizon, as the same hour of the days before had them on average."""
        hour = int(now // 3600)
        counts = [
            self._hours.get((version_id, hour - 24 * day), 0) for day in range(1, HISTORY_DAYS + 1)
        ]
        first = self._first_hour.get(version_id, hour)
        num_days = min(HISTORY_DAYS, max(1, (hour - first) // 24))
        return sum(counts) / num_days * HORIZON_S / 3600
