import random

import numpy as np
import pytest

from controlplane.adapters.forecasting import BIN_S, DAY_BINS, Forecaster, History, fit


def alternating(num_bins: int) -> list[tuple[float, str]]:
    """About four requests in every second bin."""
    draw = random.Random(5)
    return [
        (number * BIN_S + second, "a")
        for number in range(0, num_bins, 2)
        for second in sorted(draw.uniform(0, BIN_S - 1) for _ in range(draw.choice((3, 4, 5))))
    ]


def test_a_rhythm_is_forecast_where_an_average_sees_none():
    history = History(alternating(DAY_BINS))
    busy, quiet = (history.at((DAY_BINS - 20 + odd) * BIN_S).get("a", 0.0) for odd in (0, 1))
    assert busy * BIN_S / 60 == pytest.approx(4, abs=1)
    assert quiet * BIN_S / 60 < 1


def test_the_past_is_forecast_as_it_would_have_been_then():
    trace = alternating(100)
    history, live = History(trace), Forecaster()
    for at, model in trace:
        now = live.at(at).get(model, 0.0)
        assert now == pytest.approx(history.at(at).get(model, 0.0), abs=1e-6)
        live.note(model, at)
    assert live.at(trace[-1][0])["a"] > 0


def test_too_little_is_not_fitted():
    day = np.zeros(DAY_BINS)
    day[::60] = 1
    assert fit(day) is None


def test_a_forecast_is_never_below_zero():
    day = np.array([9.0, 0, 0] * 30)
    fitted = fit(day)
    assert fitted is not None
    assert (fitted.one_step(day, 10) >= 0).all()
