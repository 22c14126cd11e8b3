"""May this request go on: the model's own limits, and the tenant's rate by tier.

A tenant has two **token buckets**, one counting requests and one counting tokens (prompt plus the
most it may generate). A bucket holds at most one minute's worth, so the burst is proportional to
the tier, and fills steadily. State and time go in, state and decision come out::

    free tier, 60 requests a minute: capacity 60, one more each second
    59.5 left, a request asks 1             -> admitted, 58.5 left
    0.4 left                                -> refused, nothing taken, retry after 0.6 s

``retry_after`` is the time after which this very request would be admitted if nobody else came.
What was reserved and not generated is given back by ``give_back``. Rejected: a sliding window of
timestamps (memory grows with the rate, and it answers "when" no better).
"""

import msgspec

from controlplane.dispatch.refusals import InvalidRequest
from controlplane.domain.version_spec import VersionSpec

MAX_CHOICES = 8


# --- the tenant's rate ------------------------------------------------------------------------
class Rate(msgspec.Struct, frozen=True):
    """Limits of one tier."""

    requests_per_minute: float
    tokens_per_minute: float


DEFAULT_RATES = {
    "free": Rate(60, 20_000),
    "standard": Rate(600, 200_000),
    "premium": Rate(60_000, 20_000_000),
}


class Buckets(msgspec.Struct, frozen=True):
    """What is left of both, as of ``at`` (monotonic seconds)."""

    requests: float
    tokens: float
    at: float


class Admission(msgspec.Struct, frozen=True):
    """``buckets`` is the state to keep, unchanged in content if refused.

    ``code`` is "" if admitted, else rate_limit_exceeded (with the seconds to wait) or
    request_too_large (more tokens than the tier ever allows at once: waiting does not help).
    ``reset_*`` are seconds until the bucket is full again.
    """

    admitted: bool
    buckets: Buckets
    code: str = ""
    limited_by: str = ""
    retry_after: float | None = None
    limit_requests: int = 0
    limit_tokens: int = 0
    remaining_requests: int = 0
    remaining_tokens: int = 0
    reset_requests: float = 0.0
    reset_tokens: float = 0.0


def full(rate: Rate, now: float) -> Buckets:
    """A new tenant's buckets."""
    return Buckets(rate.requests_per_minute, rate.tokens_per_minute, now)


def admit(buckets: Buckets, rate: Rate, num_tokens: int, now: float) -> Admission:
    """Take one request and ``num_tokens`` tokens, both or neither."""
    filled = refill(buckets, rate, now)
    if num_tokens > rate.tokens_per_minute:
        return _answer(filled, rate, False, "request_too_large", "tokens", None)
    wait_requests = max(0.0, 1 - filled.requests) / rate.requests_per_minute * 60
    wait_tokens = max(0.0, num_tokens - filled.tokens) / rate.tokens_per_minute * 60
    wait = max(wait_requests, wait_tokens)
    if wait > 0:
        by = "requests" if wait_requests >= wait_tokens else "tokens"
        return _answer(filled, rate, False, "rate_limit_exceeded", by, wait)
    return admitted(Buckets(filled.requests - 1, filled.tokens - num_tokens, filled.at), rate)


def admitted(taken: Buckets, rate: Rate) -> Admission:
    """The answer to a request that has been taken from the buckets."""
    return _answer(taken, rate, True)


def give_back(
    buckets: Buckets, rate: Rate, num_tokens: int, now: float, num_requests: int = 0
) -> Buckets:
    """Return tokens that were reserved and not used, and the request itself if it was refused
    after all; never beyond the capacity."""
    filled = refill(buckets, rate, now)
    tokens = min(rate.tokens_per_minute, filled.tokens + max(0, num_tokens))
    requests = min(rate.requests_per_minute, filled.requests + num_requests)
    return Buckets(requests, tokens, filled.at)


def refill(buckets: Buckets, rate: Rate, now: float) -> Buckets:
    """The state at ``now``. A changed tier cuts what is above its capacity."""
    minutes = max(0.0, now - buckets.at) / 60
    return Buckets(
        min(rate.requests_per_minute, buckets.requests + minutes * rate.requests_per_minute),
        min(rate.tokens_per_minute, buckets.tokens + minutes * rate.tokens_per_minute),
        max(now, buckets.at),
    )


def _answer(
    buckets: Buckets, rate: Rate, admitted: bool, code: str = "", by: str = "",
    retry_after: float | None = None,
) -> Admission:  # fmt: skip
    missing_requests = rate.requests_per_minute - buckets.requests
    missing_tokens = rate.tokens_per_minute - buckets.tokens
    return Admission(
        admitted=admitted,
        buckets=buckets,
        code=code,
        limited_by=by,
        retry_after=retry_after,
        limit_requests=int(rate.requests_per_minute),
        limit_tokens=int(rate.tokens_per_minute),
        remaining_requests=int(buckets.requests),
        remaining_tokens=int(buckets.tokens),
        reset_requests=missing_requests / rate.requests_per_minute * 60,
        reset_tokens=missing_tokens / rate.tokens_per_minute * 60,
    )


# --- the model's limits -----------------------------------------------------------------------
class Asked(msgspec.Struct, frozen=True):
    """``max_tokens`` None means: fill the context."""

    num_prompt_tokens: int
    max_tokens: int | None = None
    num_choices: int = 1


def context_length(spec: VersionSpec, max_model_len: int) -> int:
    """Tokens that prompt and output may have together: the version's own limit, or that of the
    loaded model (``max_model_len``, 0 if not known) where it is smaller."""
    return min(spec.max_model_len, max_model_len or spec.max_model_len)


def output_limit(spec: VersionSpec, asked: Asked, max_model_len: int = 0) -> int:
    """The most tokens each choice may generate, within the ``context_length``; raises
    InvalidRequest."""
    context = context_length(spec, max_model_len)
    _check_choices(spec, asked.num_choices)
    prompt = asked.num_prompt_tokens
    if prompt < 1:
        raise InvalidRequest("empty_prompt", "The prompt has no tokens.", "prompt")
    if prompt > min(spec.max_prompt_tokens, context - 1):
        longest = min(spec.max_prompt_tokens, context - 1)
        raise InvalidRequest(
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens, of which a prompt may use "
            f"{longest}; yours has {prompt} tokens.",
            "messages",
        )
    longest = min(spec.max_output_tokens, context - prompt)
    if asked.max_tokens is None:
        return longest
    if not 1 <= asked.max_tokens <= longest:
        raise InvalidRequest(
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens; after {prompt} prompt "
            f"tokens max_tokens is from 1 to {longest}, not {asked.max_tokens}.",
            "max_tokens",
        )
    return asked.max_tokens


def _check_choices(spec: VersionSpec, num_choices: int) -> None:
    most = min(MAX_CHOICES, spec.max_batch)
    if not 1 <= num_choices <= most:
        raise InvalidRequest("invalid_parameter", f"n is from 1 to {most}.", "n")
