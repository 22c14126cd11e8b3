"""Which values of sampling parameters have a meaning, for every engine. No torch."""

import math

from gpuagent.engine.request import RequestRejected, SamplingParams

MAX_LOGPROBS = 20


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestRejected `invalid_sampling` for values without meaning."""
    numbers = [params.temperature, params.top_p, params.min_p, params.repetition_penalty]
    numbers += [params.presence_penalty, params.frequency_penalty]
    biased = [token for token, _ in params.logit_bias]
    problems = {
        "max_tokens must be at least 1": params.max_tokens < 1,
        "numbers must be finite": not all(map(math.isfinite, numbers)),
        "temperature must not be negative": params.temperature < 0,
        "top_p must be in (0, 1]": not 0 < params.top_p <= 1,
        "min_p must be in [0, 1]": not 0 <= params.min_p <= 1,
        "top_k must not be negative": params.top_k < 0,
        "repetition_penalty must be positive": params.repetition_penalty <= 0,
        "stop strings must not be empty": "" in params.stop,
        f"logprobs must be in 0..{MAX_LOGPROBS}": not 0 <= (params.logprobs or 0) <= MAX_LOGPROBS,
        "logit_bias names unknown tokens": any(not 0 <= t < vocab_size for t in biased),
        "logit_bias must be finite": not all(math.isfinite(b) for _, b in params.logit_bias),
    }
    for message, is_wrong in problems.items():
        if is_wrong:
            raise RequestRejected("invalid_sampling", message)
