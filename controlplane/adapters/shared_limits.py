"""Each tenant's rate and open requests over all gateways, kept in Redis.

The arithmetic is that of ``dispatch.admit``, in one script that Redis runs alone: buckets are
filled, asked and emptied in one round trip, by Redis' own clock, so two gateways can neither both
take the last token nor disagree about the time. What is refused takes nothing::

    engine:limits:{acme}   hash: requests, tokens, at    gone after 90 s: then the buckets are full
    engine:open:{acme}     sorted set: request -> when its lease ends

An open request holds a lease of a minute, renewed while it runs: a gateway that dies frees its
tenants' places within that. Without Redis the declared policy holds (``ENGINE_LIMITS_FALLBACK``):
``local``, each gateway limits by itself as if it were alone, so N gateways admit up to N times the
rate; or ``refuse``, 503 until Redis is back. It is tried again every second.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from controlplane.application.inference import Job
from controlplane.application.limits import (
    DEFAULT_LIMITS,
    TenantLimits,
    TierLimits,
    refusal,
    too_many_open,
)
from controlplane.application.refused import Refused
from controlplane.dispatch.admit import Admission, Buckets, admit, admitted

TIMEOUT_S = 0.25
RETRY_S = 1.0
LEASE_S = 60
KEPT_S = 90
LOCAL, REFUSE = "local", "refuse"
POLICIES = (LOCAL, REFUSE)

log = structlog.get_logger("limits")

# KEYS: buckets, open. ARGV: requests and tokens a minute, tokens asked, most open, request, lease,
# seconds to keep. Answers {1 admitted | 0 no rate | -1 too many open, requests, tokens}.
TAKE = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local most_requests, most_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local asked = tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return {-1, '0', '0'} end
local kept = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local requests, tokens = most_requests, most_tokens
if kept[3] then
  local minutes = math.max(0, now - tonumber(kept[3])) / 60
  requests = math.min(most_requests, tonumber(kept[1]) + minutes * most_requests)
  tokens = math.min(most_tokens, tonumber(kept[2]) + minutes * most_tokens)
end
if requests < 1 or tokens < asked then
  return {0, string.format('%.6f', requests), string.format('%.6f', tokens)}
end
requests, tokens = requests - 1, tokens - asked
redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', requests),
           'tokens', string.format('%.6f', tokens), 'at', string.format('%.6f', now))
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[6]), ARGV[5])
redis.call('EXPIRE', KEYS[2], 2 * tonumber(ARGV[6]))
return {1, string.format('%.6f', requests), string.format('%.6f', tokens)}
"""

# KEYS as above. ARGV: request, tokens not used, tokens a minute, requests to return and a minute.
GIVE_BACK = """
redis.call('ZREM', KEYS[2], ARGV[1])
local kept = redis.call('HMGET', KEYS[1], 'tokens', 'requests')
if kept[1] then
  local tokens = math.min(tonumber(ARGV[3]), tonumber(kept[1]) + tonumber(ARGV[2]))
  local requests = math.min(tonumber(ARGV[5]), tonumber(kept[2]) + tonumber(ARGV[4]))
  redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens),
             'requests', string.format('%.6f', requests))
end
"""

# KEYS: open. ARGV: lease, requests that still run.
RENEW = """
local clock = redis.call('TIME')
local ends = tonumber(clock[1]) + tonumber(clock[2]) / 1e6 + tonumber(ARGV[1])
for place = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[place]) end
redis.call('EXPIRE', KEYS[1], 2 * tonumber(ARGV[1]))
"""


class SharedLimits:
    """``inference.Limits`` for many gateways. Call ``renew`` well within ``LEASE_S``."""

    def __init__(
        self,
        url: str,
        monotonic: Callable[[], float] = time.monotonic,
        tiers: Mapping[str, TierLimits] = DEFAULT_LIMITS,
        policy: str = LOCAL,
        on_change: Callable[[bool], None] = lambda is_shared: None,
    ) -> None:
        self._redis = Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection that was closed meanwhile
        )
        self._take = self._redis.register_script(TAKE)
        self._give_back = self._redis.register_script(GIVE_BACK)
        self._renew = self._redis.register_script(RENEW)
        self._local = TenantLimits(monotonic, tiers)
        self._monotonic, self._tiers = monotonic, tiers
        self._policy, self._on_change = policy, on_change
        self._down_until = 0.0
        self._shared: dict[str, str] = {}  # request -> tenant, of those that Redis admitted
        self._returning: set[asyncio.Task[None]] = set()
        self.is_shared = True

    async def take(self, job: Job) -> Admission:
        if self._monotonic() < self._down_until:
            return await self._without(job)
        tier = self._tier(job)
        asked = job.reserved_prompt_tokens + job.max_output_tokens
        try:
            status, requests, tokens = await self._ask(job, tier, asked)
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)
            return await self._without(job)
        self._found()
        if status < 0:
            raise too_many_open(tier, job)
        buckets = Buckets(float(requests), float(tokens), 0.0)
        if status == 0:
            raise refusal(admit(buckets, tier.rate, asked, 0.0), asked)
        self._shared[job.request_id] = job.tenant_id
        return admitted(buckets, tier.rate)

    async def _ask(self, job: Job, tier: TierLimits, asked: int) -> Any:
        rate = tier.rate
        most = tier.most_open(job.priority)
        limits = (rate.requests_per_minute, rate.tokens_per_minute, asked, most)
        arguments: list[str | float] = [*limits, job.request_id, LEASE_S, KEPT_S]
        answer = await self._take(keys=_keys(job.tenant_id), args=arguments)
        return int(answer[0]), answer[1], answer[2]

    async def _without(self, job: Job) -> Admission:
        if self._policy == REFUSE:
            text = "The rate limits cannot be checked now."
            raise Refused("overloaded", text, retry_after=RETRY_S)
        return await self._local.take(job)

    def give_back(self, job: Job, num_tokens: int, was_refused: bool = False) -> None:
        if self._shared.pop(job.request_id, None) is None:
            self._local.give_back(job, num_tokens, was_refused)
            return
        unused = max(0, job.reserved_prompt_tokens + job.max_output_tokens - num_tokens)
        task = asyncio.ensure_future(self._return(job, unused, int(was_refused)))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, job: Job, unused: int, requests: int) -> None:
        """If Redis is away, the lease ends by itself and the tokens are lost to the minute."""
        rate = self._tier(job).rate
        most = (rate.tokens_per_minute, requests, rate.requests_per_minute)
        arguments: list[str | float] = [job.request_id, unused, *most]
        try:
            await self._give_back(keys=_keys(job.tenant_id), args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)

    async def renew(self) -> None:
        """Keep the places of what still runs."""
        if not self._shared:
            return
        of_tenant: defaultdict[str, list[str]] = defaultdict(list)
        for request_id, tenant_id in self._shared.items():
            of_tenant[tenant_id].append(request_id)
        try:
            for tenant_id, requests in of_tenant.items():
                await self._renew(keys=_keys(tenant_id)[1:], args=[LEASE_S, *requests])
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        self._down_until = self._monotonic() + RETRY_S
        if self.is_shared:
            self.is_shared = False
            log.warning("limits are not shared", policy=self._policy, error=type(error).__name__)
            self._on_change(False)

    def _found(self) -> None:
        if not self.is_shared:
            self.is_shared = True
            log.info("limits are shared again")
            self._on_change(True)

    def _tier(self, job: Job) -> TierLimits:
        return self._tiers.get(job.tier) or self._tiers["standard"]

    async def close(self) -> None:
        if self._returning:
            await asyncio.wait(self._returning, timeout=TIMEOUT_S)
        await self._redis.aclose()


def _keys(tenant_id: str) -> list[str]:
    """Both on one node of a cluster: what stands in braces is what is hashed."""
    return [f"engine:limits:{{{tenant_id}}}", f"engine:open:{{{tenant_id}}}"]
