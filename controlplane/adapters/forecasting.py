"""Requests in the next five minutes, by ARIMA over the last day (statsmodels).

A model's requests are counted in bins of five minutes. Every ``REFIT_BINS`` an ARIMA(2, 0, 1) is
fitted to the last 24 hours of bins; in between each new bin is only filtered in, which costs
milliseconds where a fit costs tenths of a second. A model that was asked for in fewer than
``MIN_BUSY_BINS`` of those bins gets no forecast: there is too little to fit, and the averages and
the time of day say what can be said of it.

Worked example: a model asked for in every second bin has bins 0 4 0 4 0 4; the fit finds
φ₁ near -1, and after a 4 the forecast is near 0, where any average says 2.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from statsmodels.tools.sm_exceptions import ModelWarning
from statsmodels.tsa.arima.model import ARIMA

BIN_S = 300.0
DAY_BINS = 288
REFIT_BINS = 36
MIN_BUSY_BINS = 8
ORDER = (2, 0, 1)
_MAX_ITERATIONS = 25

Counts = NDArray[np.float64]


class Fitted:
    """Parameters found on one day of one model; they go on being used on later bins."""

    def __init__(self, day: Counts) -> None:
        with warnings.catch_warnings():
            # A fit that stops early still forecasts, only less well.
            warnings.simplefilter("ignore", ModelWarning)
            warnings.simplefilter("ignore", UserWarning)
            self._results = ARIMA(day, order=ORDER, trend="c").fit(
                method_kwargs={"maxiter": _MAX_ITERATIONS}
            )

    def one_step(self, counts: Counts, first: int) -> Counts:
        """For each bin from ``first`` to the one after the last, the forecast from the bins
        before it: shape ``[len(counts) + 1 - first]``, requests a bin, none below zero."""
        filtered = self._results.apply(counts)
        return np.maximum(np.asarray(filtered.predict(first, len(counts))), 0.0)


def fit(day: Counts) -> Fitted | None:
    """None where there is too little to fit."""
    if np.count_nonzero(day) < MIN_BUSY_BINS:
        return None
    try:
        return Fitted(day)
    except np.linalg.LinAlgError:  # e.g. all bins alike
        return None


@dataclass(slots=True)
class _Series:
    """``counts[i]`` is bin ``first + i``; the last one still grows."""

    first: int
    counts: list[float] = field(default_factory=lambda: [0.0])
    fitted: Fitted | None = None
    fitted_at: int = -DAY_BINS

    def upto(self, index: int) -> None:
        self.counts.extend([0.0] * (index - self.first + 1 - len(self.counts)))
        surplus = len(self.counts) - DAY_BINS - 1
        if surplus > 0:
            del self.counts[:surplus]
            self.first += surplus


class Forecaster:
    """Counts requests and forecasts each model's next bin; one thread uses it."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._forecasts: dict[str, float] = {}
        self._made_for = -1

    def note(self, model: str, at: float, num: int = 1) -> None:
        """``num`` requests for ``model`` at ``at``, seconds since the epoch."""
        index = int(at // BIN_S)
        series = self._series.setdefault(model, _Series(index))
        series.upto(index)
        series.counts[-1] += num

    def at(self, at: float) -> Mapping[str, float]:
        """Requests a minute in the bin of ``at``, by model, from the bins before it."""
        index = int(at // BIN_S)
        if index != self._made_for:
            self._made_for = index
            made = {model: self._next(series, index) for model, series in self._series.items()}
            self._forecasts = {
                model: value * 60 / BIN_S for model, value in made.items() if value is not None
            }
        return self._forecasts

    def _next(self, series: _Series, index: int) -> float | None:
        series.upto(index)
        past = np.array(series.counts[:-1])
        if index - series.fitted_at >= REFIT_BINS:
            series.fitted, series.fitted_at = fit(past), index
        if series.fitted is None:
            return None
        return float(series.fitted.one_step(past, len(past))[-1])


class History:
    """A whole trace's forecasts, made in blocks: what ``Forecaster`` would have said, sooner.

    One filter pass over a block gives the forecasts of all of its bins, each from the bins before
    it, where ``Forecaster`` makes a pass for each.
    """

    def __init__(self, requests: Sequence[tuple[float, str]]) -> None:
        self._by_bin: dict[int, dict[str, float]] = defaultdict(dict)
        if not requests:
            return
        first, last = (int(requests[end][0] // BIN_S) for end in (0, -1))
        counts: dict[str, Counts] = defaultdict(lambda: np.zeros(last - first + 1))
        for at, model in requests:
            counts[model][int(at // BIN_S) - first] += 1
        for start in range(REFIT_BINS, last - first + 1, REFIT_BINS):
            for model, series in counts.items():
                self._block(model, series, start, first)

    def at(self, at: float) -> Mapping[str, float]:
        return self._by_bin.get(int(at // BIN_S), {})

    def _block(self, model: str, counts: Counts, start: int, first: int) -> None:
        day = counts[max(0, start - DAY_BINS) : start]
        fitted = fit(day)
        if fitted is None:
            return
        block = counts[max(0, start - DAY_BINS) : start + REFIT_BINS - 1]
        for offset, value in enumerate(fitted.one_step(block, len(day))):
            self._by_bin[first + start + offset][model] = float(value) * 60 / BIN_S
