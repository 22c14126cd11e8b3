"""Requests in the next five minutes, by ARIMA over the last day (statsmodels).

A model's requests are counted in bins of five minutes. Every ``REFIT_BINS`` (live, every
``LIVE_REFIT_BINS``) an ARIMA(2, 0, 1) is
fitted to the 24 hours before; in between each new bin is only filtered in, which costs
milliseconds where a fit costs tenths of a second. A model that was asked for in fewer than
``MIN_BUSY_BINS`` of those bins gets no forecast: there is too little to fit, and the averages and
the time of day say what can be said of it.

Worked example: a model asked for in every second bin has bins 0 4 0 4 0 4; the fit finds
φ₁ near -1, and after a 4 the forecast is near 0, where any average says 2.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence

# Its matrices are three by three: a second thread only waits, and on a busy machine for long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from statsmodels.tools.sm_exceptions import ModelWarning
from statsmodels.tsa.arima.model import ARIMA

BIN_S = 300.0
DAY_BINS = 288
REFIT_BINS = 72
LIVE_REFIT_BINS = 2
MIN_BUSY_BINS = 8
ORDER = (2, 0, 1)
_MAX_ITERATIONS = 25

Bins = NDArray[np.float64]


class Fitted:
    """Parameters found on one day of one model; they go on being used on later bins."""

    def __init__(self, day: Bins) -> None:
        with warnings.catch_warnings():
            # A fit that stops early still forecasts, only less well.
            warnings.simplefilter("ignore", ModelWarning)
            warnings.simplefilter("ignore", UserWarning)
            self._results = ARIMA(day, order=ORDER, trend="c").fit(
                method_kwargs={"maxiter": _MAX_ITERATIONS}
            )

    def one_step(self, counts: Bins, first: int) -> Bins:
        """For each bin from ``first`` to the one after the last, the forecast from the bins
        before it: shape ``[len(counts) + 1 - first]``, requests a bin, none below zero."""
        filtered = self._results.apply(counts)
        return np.maximum(np.asarray(filtered.predict(first, len(counts))), 0.0)


def fit(day: Bins) -> Fitted | None:
    """None where there is too little to fit."""
    if np.count_nonzero(day) < MIN_BUSY_BINS:
        return None
    try:
        return Fitted(day)
    except np.linalg.LinAlgError:  # e.g. all bins alike
        return None


class Counts:
    """How many requests each model had in each bin, from the first bin on."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.by_model: dict[str, dict[int, int]] = {}

    def note(self, model: str, at: float, num: int = 1) -> None:
        index = int(at // BIN_S)
        self.first = index if self.first is None else self.first
        bins = self.by_model.setdefault(model, {})
        bins[index] = bins.get(index, 0) + num

    def window(self, model: str, start: int, stop: int) -> Bins:
        """Bins [start, stop), but none before the first."""
        bins = self.by_model[model]
        return np.array([float(bins.get(i, 0)) for i in range(self.begin(start), stop)])

    def begin(self, start: int) -> int:
        return start if self.first is None else max(self.first, start)

    def forget_before(self, start: int) -> None:
        for model, bins in self.by_model.items():
            self.by_model[model] = {i: count for i, count in bins.items() if i >= start}


class Forecaster:
    """Counts requests and forecasts each model's present bin; one thread uses it."""

    def __init__(self, refit_bins: int = REFIT_BINS) -> None:
        self._refit_bins = refit_bins
        self._counts = Counts()
        self._block = self._made_for = -1
        self._fitted: dict[str, Fitted] = {}
        self._forecasts: dict[str, float] = {}

    def note(self, model: str, at: float, num: int = 1) -> None:
        """``num`` requests for ``model`` at ``at``, seconds since the epoch."""
        self._counts.note(model, at, num)

    def at(self, at: float) -> Mapping[str, float]:
        """Requests a minute in the bin of ``at``, by model, from the bins before it."""
        index = int(at // BIN_S)
        if index != self._made_for:
            self._made_for = index
            self._refit(index - index % self._refit_bins)
            self._forecasts = {model: self._next(model, index) for model in self._fitted}
        return self._forecasts

    def _refit(self, block: int) -> None:
        if block == self._block:
            return
        self._block = block
        self._counts.forget_before(block - DAY_BINS)
        self._fitted = _fit_all(self._counts, block)

    def _next(self, model: str, index: int) -> float:
        past = self._counts.window(model, self._block - DAY_BINS, index)
        return _a_minute(self._fitted[model].one_step(past, len(past))[-1])


class History:
    """A whole trace's forecasts, made in blocks: what ``Forecaster`` would have said, sooner.

    One filter pass over a block gives the forecasts of all of its bins, each from the bins before
    it, where ``Forecaster`` makes a pass for each.
    """

    def __init__(self, requests: Sequence[tuple[float, str]]) -> None:
        self._by_bin: dict[int, dict[str, float]] = defaultdict(dict)
        counts = Counts()
        for at, model in requests:
            counts.note(model, at)
        if counts.first is None:
            return
        last = int(requests[-1][0] // BIN_S)
        for block in range(counts.first - counts.first % REFIT_BINS, last + 1, REFIT_BINS):
            for model, fitted in _fit_all(counts, block).items():
                self._fill(counts, model, fitted, block)

    def at(self, at: float) -> Mapping[str, float]:
        return self._by_bin.get(int(at // BIN_S), {})

    def _fill(self, counts: Counts, model: str, fitted: Fitted, block: int) -> None:
        start = block - DAY_BINS
        bins = counts.window(model, start, block + REFIT_BINS - 1)
        for offset, value in enumerate(fitted.one_step(bins, block - counts.begin(start))):
            self._by_bin[block + offset][model] = _a_minute(value)


def _fit_all(counts: Counts, block: int) -> dict[str, Fitted]:
    """On the day before ``block``, the models that have enough."""
    days = {model: counts.window(model, block - DAY_BINS, block) for model in counts.by_model}
    fitted = {model: fit(day) for model, day in days.items()}
    return {model: one for model, one in fitted.items() if one is not None}


def _a_minute(value: float) -> float:
    return float(value) * 60 / BIN_S
