"""The scheduler's parts: cost line, pace, expected lengths, host memory, queue."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.engine.admission import LengthDistribution, peak_tokens
from gpuagent.engine.batch import Sequence
from gpuagent.engine.pacing import MIN_CHUNK, LinearCost, Pace
from gpuagent.engine.preemption import SwapSpace
from gpuagent.engine.request import LatencyClass
from gpuagent.engine.waiting import WaitingQueue
from tests.engine.drive import request

REALTIME, STANDARD, BATCH = LatencyClass.REALTIME, LatencyClass.STANDARD, LatencyClass.BATCH


def test_the_cost_line_is_found_in_noise_and_follows_a_change():
    noise, cost = random.Random(1), LinearCost()
    for base, slope in ((0.05, 0.002), (0.1, 0.001)):
        for _ in range(200):
            extra = noise.choice([0, 0, 20, 60])
            cost.observe(extra, (base + slope * extra) * noise.uniform(0.95, 1.05))
        assert cost.base == pytest.approx(base, rel=0.15)
        assert cost.per_extra == pytest.approx(slope, rel=0.15)


def test_a_pause_of_the_machine_does_not_spoil_the_cost_line():
    cost = LinearCost()
    for i in range(100):
        cost.observe(i % 3, 0.05 + 0.01 * (i % 3))
    cost.observe(0, 30.0)
    assert cost.base < 0.07


@given(st.integers(1, 2000), st.floats(0.0, 10.0), st.floats(0.0, 1.0), st.integers(0, 64))
def test_the_prompt_budget_stays_within_its_bounds(max_tokens, base, slope, num_decoding):
    pace = Pace(max_tokens, 0.1)
    for extra in (0, 10):
        pace.cost.observe(extra, base + slope * extra)
    budget = pace.prompt_budget(num_decoding)
    assert min(MIN_CHUNK, max_tokens) <= budget <= max_tokens


def test_the_longer_a_request_has_run_the_longer_it_is_expected_to():
    lengths = LengthDistribution()
    for length in [10] * 30 + [100] * 10:
        lengths.record(length)
    assert lengths.expected_remaining(0, 1000) == 32
    assert lengths.expected_remaining(10, 1000) == 90
    assert lengths.expected_remaining(10, 50) == 40, "not beyond what it may"
    assert lengths.expected_remaining(200, 1000) == 200


def test_nothing_is_expected_before_enough_requests_have_ended():
    assert LengthDistribution().expected_remaining(5, 1000) == 0


def test_the_peak_is_that_of_the_worked_example():
    assert peak_tokens([(10, 5), (100, 50), (80, 20)]) == 220


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=8))
def test_the_peak_is_what_stepping_through_time_finds(holdings):
    by_time = [
        sum(own + time for own, remaining in holdings if remaining >= time) for time in range(31)
    ]
    assert peak_tokens(holdings) == max(by_time, default=0)


def test_a_full_host_pool_keeps_nothing_more():
    space = SwapSpace(4)
    first = space.keep(3, 40, 0.0)
    assert first is not None
    assert space.keep(2, 20, 0.0) is None
    space.release(first)
    assert space.keep(2, 20, 0.0) is not None


def test_swapping_is_chosen_by_the_measured_rates():
    space = SwapSpace(100)
    space.cost.observe(10, 0.002)
    assert space.keep(7, 100, 0.0005) is not None
    assert space.keep(7, 100, 0.00001) is None


def waiting(name, arrival, latency_class):
    return Sequence(request(name, [1], latency_class=latency_class), arrival, [1])


def test_the_queue_is_ordered_by_class_then_arrival_and_ages_by_class():
    queue = WaitingQueue()
    for arrival, (name, latency_class) in enumerate(
        [("b", BATCH), ("s", STANDARD), ("t", STANDARD)]
    ):
        queue.add(waiting(name, arrival, latency_class))
    assert queue.first().request_id == "s"
    queue.remove("s")
    queue.add(waiting("earlier", 0.5, STANDARD))
    assert queue.first().request_id == "earlier"
    for _ in range(200):
        queue.age({STANDARD})
    assert queue.first().request_id == "b"
    queue.age({STANDARD, BATCH})
    assert queue.first().request_id == "earlier"
