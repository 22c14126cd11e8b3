"""Rates over many gateways: as many as the tier says, whoever is asked; and without Redis."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.adapters.shared_limits import LEASE_S, LOCAL, REFUSE, SharedLimits
from controlplane.application.limits import TenantLimits, TierLimits, parse_limits
from controlplane.application.refused import Refused
from tests.absent import skip_without

TIERS = {"standard": TierLimits(600, 60_000, 50)}


class RedisServer:
    """A Redis of this test alone, that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        skip_without("redis-server: apt-get install redis-server")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def two(redis: RedisServer) -> AsyncIterator[list[SharedLimits]]:
    gateways = [SharedLimits(redis.url, time.monotonic, TIERS) for _ in range(2)]
    yield gateways
    for one in gateways:
        await one.close()


def job(
    number: int, tenant: str = "acme", prompt: int = 10, most: int = 10, priority: str = "normal"
) -> Any:
    return SimpleNamespace(
        request_id=f"req-{tenant}-{number}", tenant_id=tenant, tier="standard",
        num_prompt_tokens=prompt, reserved_prompt_tokens=prompt, max_output_tokens=most,
        priority=priority,
    )  # fmt: skip


async def admitted(limits: Any, one: Any) -> bool:
    try:
        await limits.take(one)
    except Refused:
        return False
    limits.give_back(one, one.num_prompt_tokens + one.max_output_tokens)
    return True


async def test_a_full_window_is_usable_to_the_request(two: list[SharedLimits]) -> None:
    """600 of 1,200 asked of two gateways at once, and what the time between refills: within 1 %."""
    began = time.monotonic()
    most = asyncio.Semaphore(40)

    async def ask(number: int) -> bool:
        async with most:
            return await admitted(two[number % 2], job(number))

    answers = await asyncio.gather(*(ask(number) for number in range(1200)))
    refilled = (time.monotonic() - began) * 10
    assert 600 <= sum(answers) <= 606 + refilled


async def test_refusals_consume_nothing(two: list[SharedLimits]) -> None:
    """A thousand of them, and the tokens that were left are all still there."""
    await two[0].take(job(0, prompt=50_000))
    for number in range(1, 1001):
        with pytest.raises(Refused) as refused:
            await two[number % 2].take(job(number, prompt=20_000))
        assert refused.value.code == "rate_limit_exceeded" and refused.value.retry_after > 0
    limits = (await two[1].take(job(2000, prompt=9_000))).remaining_tokens
    assert 960 <= limits <= 5_000


async def test_unused_tokens_come_back_for_all_gateways(two: list[SharedLimits]) -> None:
    one = job(1, prompt=30_000, most=29_000)
    await two[0].take(one)
    assert not await admitted(two[1], job(2, prompt=20_000))
    two[0].give_back(one, 1_000)
    await asyncio.sleep(0.1)
    assert await admitted(two[1], job(3, prompt=50_000))


async def test_what_is_refused_after_all_takes_no_request_either(
    two: list[SharedLimits],
) -> None:
    """By a budget, say: the next one finds the buckets as they were."""
    for limits in (*two, TenantLimits(time.monotonic, TIERS)):
        for number in range(700):
            one = job(number)
            await limits.take(one)
            limits.give_back(one, 0, was_refused=True)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        left = await limits.take(job(1000))
        assert (left.remaining_requests, left.remaining_tokens) == (599, 59_980)
        limits.give_back(job(1000), 0, was_refused=True)
        await asyncio.sleep(0.1)


async def test_open_requests_are_counted_over_all_gateways(two: list[SharedLimits]) -> None:
    open_jobs = [job(number) for number in range(50)]
    for number, one in enumerate(open_jobs):
        await two[number % 2].take(one)
    with pytest.raises(Refused) as refused:
        await two[0].take(job(99))
    assert "50 requests of this tenant are open" in refused.value.message
    assert await admitted(two[0], job(99, tenant="globex"))
    two[0].give_back(open_jobs[0], 1)
    await asyncio.sleep(0.1)
    assert await admitted(two[1], job(100))


async def test_best_effort_work_leaves_a_tenant_room_for_its_other_models(
    two: list[SharedLimits],
) -> None:
    """Of 50 places 12 are kept; whoever counts."""
    for limits in (two[0], TenantLimits(time.monotonic, TIERS)):
        for number in range(38):
            await limits.take(job(number, priority="best-effort"))
        with pytest.raises(Refused, match="38 or more requests of this tenant are open, of 50"):
            await limits.take(job(38, priority="best-effort"))
        for number in range(100, 112):
            await limits.take(job(number, priority="high"))
        with pytest.raises(Refused, match="50 requests of this tenant are open; wait"):
            await limits.take(job(112, priority="high"))


def test_a_tiers_weight_is_its_own_unless_said_and_bounded() -> None:
    def limits(weight: str) -> str:
        rate = '"requests_per_minute": 1, "tokens_per_minute": 1, "max_open": 1'
        return f'{{"premium": {{{rate}{weight}}}, "gold": {{{rate}}}}}'

    assert parse_limits("")["standard"].weight == 2
    read = parse_limits(limits(""))
    assert (read["premium"].weight, read["gold"].weight) == (4, 1)
    assert parse_limits(limits(', "weight": 8'))["premium"].weight == 8
    for weight in ("-1", "0.001", "101"):
        with pytest.raises(ValueError, match="weight of tier 'premium'"):
            parse_limits(limits(f', "weight": {weight}'))


async def test_a_gateway_that_dies_frees_its_places_and_one_that_lives_keeps_them(
    two: list[SharedLimits],
) -> None:
    """By the leases: those that nobody renews end."""
    for number in range(50):
        await two[number % 2].take(job(number))
    client = two[0]._redis
    key = "engine:open:{acme}"
    for member in await client.zrange(key, 0, -1):
        await client.zadd(key, {member: time.time() + 0.3})
    await two[0].renew()
    await asyncio.sleep(0.4)
    left = await client.zcount(key, time.time() + LEASE_S / 2, "+inf")
    assert left == 25 and await admitted(two[1], job(99))


async def test_shared_and_local_limits_answer_alike(two: list[SharedLimits]) -> None:
    """The same headers and refusals, whichever does the counting."""
    local = TenantLimits(time.monotonic, TIERS)
    for number, prompt in enumerate((10, 30_000, 20_000, 20_000, 70_000)):
        answers = []
        for limits in (two[0], local):
            try:
                answer = await limits.take(job(number, prompt=prompt))
                answers.append((answer.limit_requests, answer.remaining_requests, ""))
            except Refused as error:
                answers.append((error.limits.limit_tokens, error.limits.remaining_requests,
                                error.code))  # fmt: skip
        assert answers[0] == answers[1], prompt


@pytest.mark.parametrize("policy", [LOCAL, REFUSE])
async def test_without_redis_the_declared_policy_holds_and_is_said(
    redis: RedisServer, policy: str
) -> None:
    """Local: each gateway counts by itself, up to the rate and no further. Refuse: nobody is
    served. Both end by themselves when Redis is back."""
    said: list[bool] = []
    limits = SharedLimits(redis.url, time.monotonic, TIERS, policy, said.append)
    assert await admitted(limits, job(0)) and limits.is_shared
    redis.stop()
    began = time.monotonic()
    answers = [await admitted(limits, job(number)) for number in range(1, 800)]
    seconds = time.monotonic() - began
    assert seconds < 5 and said == [False] and not limits.is_shared
    expected = 600 + seconds * 10 if policy == LOCAL else 0
    assert abs(sum(answers) - expected) <= 10
    redis.start()
    await asyncio.sleep(1.1)
    assert await admitted(limits, job(1000))
    assert said == [False, True] and limits.is_shared
    await limits.close()
