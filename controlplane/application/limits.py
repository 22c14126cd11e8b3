"""Each tenant's rate and open requests in this process; the arithmetic is ``dispatch.admit``. For
many gateways there is ``adapters.shared_limits``.

What a request may at most use is taken at admission and what it did not use is given back at its
end, so a tenant that asks for long answers and gets short ones is not slowed down for it.

Of a tenant's open requests a quarter is kept for models that are not best effort, so that a flood
of best-effort work never locks a tenant out of its own important models. With 32 at most::

    24 open, all best effort    another best-effort one is refused, a normal one is let in
    20 best effort, 12 high     nobody is let in
"""

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from controlplane.application.inference import Job
from controlplane.application.refused import Refused
from controlplane.dispatch.admit import DEFAULT_RATES, Admission, Buckets, Rate, admit, full
from controlplane.dispatch.admit import give_back as returned

BEST_EFFORT_KEEPS = 4  # every fourth place is not for best effort


class TierLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``max_open``: requests of one tenant in flight at once, over all gateways that share their
    limits, else in each. ``weight``: where tenants of one latency class wait for the same engine,
    one of weight 4 gets four times the tokens of one of weight 1; 0 stands for the tier's own."""

    requests_per_minute: float
    tokens_per_minute: float
    max_open: int
    weight: float = 0.0

    @property
    def rate(self) -> Rate:
        return Rate(self.requests_per_minute, self.tokens_per_minute)

    def most_open(self, priority: str) -> int:
        """Requests that may be open when one for a version of ``priority`` comes."""
        kept = self.max_open // BEST_EFFORT_KEEPS if priority == "best-effort" else 0
        return self.max_open - kept


_OPEN = {"free": 32, "standard": 512, "premium": 4096}
_WEIGHTS = {"free": 1.0, "standard": 2.0, "premium": 4.0}
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # what nodes take
DEFAULT_LIMITS = {
    tier: TierLimits(rate.requests_per_minute, rate.tokens_per_minute, _OPEN[tier], _WEIGHTS[tier])
    for tier, rate in DEFAULT_RATES.items()
}


def parse_limits(text: str) -> Mapping[str, TierLimits]:
    """The defaults, with the tiers that ``text`` (JSON) names replaced; raises ValueError."""
    given = msgspec.json.decode(text, type=dict[str, TierLimits]) if text else {}
    return DEFAULT_LIMITS | {tier: _weighted(tier, limits) for tier, limits in given.items()}


def _weighted(tier: str, limits: TierLimits) -> TierLimits:
    weight = limits.weight or _WEIGHTS.get(tier, 1.0)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight of tier {tier!r} is from {MIN_WEIGHT} to {MAX_WEIGHT:g}")
    return msgspec.structs.replace(limits, weight=weight)


class TenantLimits:
    """``inference.Limits``. A tier without limits of its own has those of ``standard``."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        tiers: Mapping[str, TierLimits] = DEFAULT_LIMITS,
    ) -> None:
        self._monotonic, self._tiers = monotonic, tiers
        self._buckets: dict[str, Buckets] = {}
        self._open: Counter[str] = Counter()

    async def take(self, job: Job) -> Admission:
        tier = self._tier(job)
        most = tier.most_open(job.priority)
        if self._open[job.tenant_id] >= most:
            raise too_many_open(tier, job)
        rate, now = tier.rate, self._monotonic()
        buckets = self._buckets.get(job.tenant_id) or full(rate, now)
        asked = job.reserved_prompt_tokens + job.max_output_tokens
        admission = admit(buckets, rate, asked, now)
        self._buckets[job.tenant_id] = admission.buckets
        if not admission.admitted:
            raise refusal(admission, asked)
        self._open[job.tenant_id] += 1
        return admission

    def give_back(self, job: Job, num_tokens: int, was_refused: bool = False) -> None:
        self._open[job.tenant_id] -= 1
        unused = job.reserved_prompt_tokens + job.max_output_tokens - num_tokens
        buckets = self._buckets[job.tenant_id]
        self._buckets[job.tenant_id] = returned(
            buckets, self._tier(job).rate, unused, self._monotonic(), int(was_refused)
        )

    def _tier(self, job: Job) -> TierLimits:
        return self._tiers.get(job.tier) or self._tiers["standard"]


def too_many_open(tier: TierLimits, job: Job) -> Refused:
    """Of a request beyond ``most_open``."""
    most = tier.most_open(job.priority)
    text = f"{most} requests of this tenant are open; wait for one to end."
    if most < tier.max_open:
        text = (
            f"{most} or more requests of this tenant are open, of {tier.max_open}; the rest is "
            "kept for models that are not best effort. Wait for one to end."
        )
    return Refused("rate_limit_exceeded", text, retry_after=1)


def refusal(admission: Admission, asked: int) -> Refused:
    """Of an admission that was not."""
    if admission.retry_after is None:
        return Refused(
            admission.code,
            f"The request may use {asked} tokens, and the tier allows {admission.limit_tokens} a "
            "minute; send less, or ask for fewer with max_tokens.",
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
