import math

import pytest

from controlplane.placement.demand import RECENT_S, Demand, Weights

DAY = 86_400.0
ONLY_MINUTES = Weights((0.0, 1.0, 0.0, 0.0, 0.0))
ONLY_DAYTIME = Weights((0.0,) * 5, daytime=1.0)
ONLY_FOLLOWING = Weights((0.0,) * 5, following=(1.0, 0.0))


def asked(*requests: tuple[str, float]) -> Demand:
    demand = Demand()
    for model, at in requests:
        demand.note(model, at)
    return demand


def test_a_rate_fades_with_its_time_constant():
    demand = asked(("a", 0.0), ("a", 80.0), ("b", 0.0))
    unit = 60 / RECENT_S[1]
    at_80, at_160 = (demand.rates(at, ONLY_MINUTES) for at in (80.0, 160.0))
    assert at_80["a"] == pytest.approx((1 + math.exp(-1)) * unit)
    assert at_160["a"] == pytest.approx(at_80["a"] / math.e)
    assert at_160["b"] == pytest.approx(math.exp(-2) * unit)


def test_what_was_never_asked_for_has_no_rate():
    assert Demand().rates(5.0, ONLY_MINUTES, {"a": 3.0}) == {}


def test_a_model_is_expected_at_the_time_of_day_at_which_it_was_asked_for():
    demand = Demand()
    for day in range(5):
        demand.note("morning", day * DAY + 9 * 3600)
        demand.note("evening", day * DAY + 20 * 3600)
    rates = [demand.rates(5 * DAY + hour * 3600, ONLY_DAYTIME) for hour in (9, 20, 3)]
    assert rates[0]["morning"] > 0 == rates[0]["evening"]
    assert rates[1]["evening"] > 0 == rates[1]["morning"]
    assert rates[2] == {"morning": 0, "evening": 0}


def test_midnight_has_neighbours_on_both_sides():
    demand = asked(("late", 23.9 * 3600), ("early", DAY + 0.1 * 3600))
    at_midnight = demand.rates(2 * DAY + 60, ONLY_DAYTIME)
    assert at_midnight["early"] > at_midnight["late"] > 0


def test_what_followed_is_expected_again():
    pairs = [(model, 100.0 * i) for i, model in enumerate("abxabxabxab")]
    demand = asked(*pairs, ("a", 5_000.0))
    rates = demand.rates(5_000.0, ONLY_FOLLOWING)
    assert rates["b"] > 10 * rates["x"] > 0
    assert rates["a"] < rates["b"]


def test_a_forecast_counts_for_the_model_that_it_is_for():
    demand = asked(("a", 0.0), ("b", 0.0))
    weights = Weights((0.0,) * 5, forecast=2.0)
    assert demand.rates(1.0, weights, {"a": 3.0}) == {"a": 6.0, "b": 0.0}


def test_a_month_of_requests_keeps_every_number_small():
    demand = Demand()
    for number in range(20_000):
        demand.note(f"m{number % 3}", number * 120.0)
    terms = demand.terms(20_000 * 120.0, {})
    assert all(0 <= term < 100 for one in terms.values() for term in one)
