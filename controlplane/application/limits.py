"""Each tenant's rate and open requests in this process; the arithmetic is ``dispatch.admit``.

What a request may at most use is taken at admission and what it did not use is given back at its
end, so a tenant that asks for long answers and gets short ones is not slowed down for it.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from controlplane.application.serve import Job, Refused
from controlplane.dispatch.admit import DEFAULT_RATES, Admission, Buckets, Rate, admit, full
from controlplane.dispatch.admit import give_back as returned

DEFAULT_OPEN = {"free": 32, "standard": 512, "premium": 4096}


class TenantLimits:
    """``serve.Limits``. A tier without a rate of its own has that of ``standard``."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        rates: Mapping[str, Rate] = DEFAULT_RATES,
        max_open: Mapping[str, int] = DEFAULT_OPEN,
    ) -> None:
        self._monotonic, self._rates, self._max_open = monotonic, rates, max_open
        self._buckets: dict[str, Buckets] = {}
        self._open: Counter[str] = Counter()

    def take(self, job: Job) -> Admission:
        most = self._max_open.get(job.tier, self._max_open["standard"])
        if self._open[job.tenant_id] >= most:
            text = f"{most} requests of this tenant are open; wait for one to end."
            raise Refused("rate_limit_exceeded", text, retry_after=1)
        rate, now = self._rate(job), self._monotonic()
        buckets = self._buckets.get(job.tenant_id) or full(rate, now)
        asked = job.num_prompt_tokens + job.max_output_tokens
        admission = admit(buckets, rate, asked, now)
        self._buckets[job.tenant_id] = admission.buckets
        if not admission.admitted:
            raise _refusal(admission, asked)
        self._open[job.tenant_id] += 1
        return admission

    def give_back(self, job: Job, num_tokens: int) -> None:
        self._open[job.tenant_id] -= 1
        unused = job.num_prompt_tokens + job.max_output_tokens - num_tokens
        buckets = self._buckets[job.tenant_id]
        self._buckets[job.tenant_id] = returned(buckets, self._rate(job), unused, self._monotonic())

    def _rate(self, job: Job) -> Rate:
        return self._rates.get(job.tier) or self._rates["standard"]


def _refusal(admission: Admission, asked: int) -> Refused:
    if admission.retry_after is None:
        return Refused(
            admission.code,
            f"The request may use {asked} tokens, and the tier allows {admission.limit_tokens} a "
            "minute; ask for fewer with max_tokens.",
            "max_tokens",
            limits=admission,
        )
    return Refused(
        admission.code,
        f"Rate limit reached for {admission.limited_by}; try again in "
        f"{admission.retry_after:.2f} s.",
        retry_after=admission.retry_after,
        limits=admission,
    )
