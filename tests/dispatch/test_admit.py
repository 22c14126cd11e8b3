"""Rates by tier and limits per model: refusals cost nothing and say the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch.admit import (
    DEFAULT_RATES,
    Asked,
    Rate,
    admit,
    full,
    give_back,
    output_limit,
    refill,
)
from controlplane.dispatch.refusals import InvalidRequest
from controlplane.domain.version_spec import VersionSpec

FREE = DEFAULT_RATES["free"]


def test_a_minute_admits_the_limit_and_no_more() -> None:
    """60 at once, then one a second."""
    buckets, admitted = full(FREE, 0.0), 0
    for _ in range(100):
        answer = admit(buckets, FREE, 1, 0.0)
        buckets, admitted = answer.buckets, admitted + answer.admitted
    assert admitted == 60
    assert not admit(buckets, FREE, 1, 0.9).admitted
    assert admit(buckets, FREE, 1, 1.0).admitted


def test_tokens_are_counted_too() -> None:
    answer = admit(full(FREE, 0.0), FREE, 15_000, 0.0)
    assert (answer.admitted, answer.remaining_tokens, answer.remaining_requests) == (True, 5000, 59)
    refused = admit(answer.buckets, FREE, 6_000, 0.0)
    assert (refused.code, refused.limited_by) == ("rate_limit_exceeded", "tokens")
    assert refused.retry_after == pytest.approx(3.0)
    assert refused.reset_tokens == pytest.approx(45.0)


def test_more_than_the_tier_ever_allows_is_said_to_be_so() -> None:
    """Waiting would not help, so no retry time is invented."""
    refused = admit(full(FREE, 0.0), FREE, 20_001, 0.0)
    assert (refused.code, refused.retry_after) == ("request_too_large", None)


def test_unused_tokens_come_back_up_to_the_capacity() -> None:
    taken = admit(full(FREE, 0.0), FREE, 10_000, 0.0).buckets
    assert give_back(taken, FREE, 4_000, 0.0).tokens == 14_000
    assert give_back(taken, FREE, 10**9, 0.0).tokens == 20_000
    assert give_back(taken, FREE, -5, 0.0).tokens == 10_000


def test_a_lower_tier_cuts_what_is_left() -> None:
    assert refill(full(DEFAULT_RATES["premium"], 0.0), FREE, 0.0).requests == 60


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    empty = admit(full(Rate(1, 10), 50.0), Rate(1, 10), 10, 50.0).buckets
    assert refill(empty, Rate(1, 10), 10.0) == empty


steps = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400)), min_size=1, max_size=60)


@given(steps)
def test_never_more_than_capacity_plus_refill(asked: list[tuple[float, int]]) -> None:
    """Over any history: admitted <= capacity + rate * elapsed, and refusals change nothing."""
    rate, now = Rate(30, 300), 0.0
    buckets, num_requests, num_tokens = full(rate, 0.0), 0, 0
    for pause, tokens in asked:
        now += pause
        answer = admit(buckets, rate, tokens, now)
        if answer.admitted:
            num_requests, num_tokens = num_requests + 1, num_tokens + tokens
        else:
            assert answer.buckets == refill(buckets, rate, now)
        buckets = answer.buckets
        assert buckets.requests >= 0 and buckets.tokens >= 0
    assert num_requests <= 30 + now / 2 + 1e-6
    assert num_tokens <= 300 + now * 5 + 1e-6


@given(steps)
def test_retry_after_is_the_truth(asked: list[tuple[float, int]]) -> None:
    """Refused now, admitted after exactly that wait, and not clearly earlier."""
    rate, now = Rate(30, 300), 0.0
    buckets = full(rate, 0.0)
    for pause, tokens in asked:
        now += pause
        answer = admit(buckets, rate, tokens, now)
        if not answer.admitted and answer.retry_after is not None:
            assert admit(answer.buckets, rate, tokens, now + answer.retry_after + 1e-6).admitted
            early = now + answer.retry_after * 0.99 - 1e-3
            assert not admit(answer.buckets, rate, tokens, early).admitted
        buckets = answer.buckets


SPEC = VersionSpec(
    version="v1", source="simulated://m", max_prompt_tokens=100, max_output_tokens=50, max_batch=4
)


def test_without_max_tokens_the_context_is_filled() -> None:
    assert output_limit(SPEC, Asked(100)) == 50
    assert output_limit(SPEC, Asked(100), max_model_len=120) == 20


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        (Asked(0), "empty_prompt", "prompt"),
        (Asked(101), "context_length_exceeded", "messages"),
        (Asked(10, 0), "context_length_exceeded", "max_tokens"),
        (Asked(10, -1), "context_length_exceeded", "max_tokens"),
        (Asked(10, 51), "context_length_exceeded", "max_tokens"),
        (Asked(10, 2**31), "context_length_exceeded", "max_tokens"),
        (Asked(10, 5, 0), "invalid_parameter", "n"),
        (Asked(10, 5, 5), "invalid_parameter", "n"),
        (Asked(10, 5, 10**9), "invalid_parameter", "n"),
    ],
)
def test_what_breaks_a_limit_is_refused_by_field(asked: Asked, code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        output_limit(SPEC, asked)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_a_prompt_that_fills_the_loaded_context_is_refused() -> None:
    """The loaded model's own context counts where it is the smaller one."""
    with pytest.raises(InvalidRequest, match="maximum context length is 64 tokens"):
        output_limit(SPEC, Asked(64), max_model_len=64)
    assert output_limit(SPEC, Asked(63), max_model_len=64) == 1
