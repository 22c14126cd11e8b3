"""Two gateways with one Redis: a tenant's rate is that of its tier, however it spreads its load."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.limits.test_shared import RedisServer
from tests.openai.stack import GatewayProcess, Stack, until

RATE = 300
LIMITS = {"free": {"requests_per_minute": RATE, "tokens_per_minute": 10**9, "max_open": 1000}}
ASKED = {"model": "fast", "prompt": "hi", "max_tokens": 1}


class Pair:
    def __init__(self, gateways: list[GatewayProcess], redis: RedisServer) -> None:
        self.gateways, self.redis = gateways, redis

    def statuses(self, key: str, number: int) -> tuple[Counter[int], float]:
        """Of so many requests, by turns to each gateway; and how long they took."""
        headers = {"Authorization": f"Bearer {key}"}
        began = time.monotonic()
        with httpx.Client(timeout=30, headers=headers) as client, ThreadPoolExecutor(16) as pool:

            def ask(index: int) -> int:
                url = f"{self.gateways[index % 2].url}/v1/completions"
                return client.post(url, json=ASKED).status_code

            found = Counter(pool.map(ask, range(number)))
        return found, time.monotonic() - began


@pytest.fixture(scope="module")
def pair(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    environment = {
        **stack.environment,
        "ENGINE_REDIS_URL": redis.url,
        "ENGINE_TIER_LIMITS": json.dumps(LIMITS),
    }
    gateways = [GatewayProcess(tmp_path_factory.mktemp(n), environment) for n in ("one", "two")]
    try:
        for gateway in gateways:
            gateway.start()
        pair, key = Pair(gateways, redis), stack.keys["acme"]
        # A gateway that has just started has heard of no node yet.
        until(lambda: set(pair.statuses(key, 4)[0]) == {200}, 20, 0.5)
        yield pair
    finally:
        for gateway in gateways:
            gateway.stop()
        redis.stop()


def test_a_full_window_is_usable_to_one_per_cent(stack: Stack, pair: Pair) -> None:
    """The whole minute's worth at once, plus what the time it takes refills; no more, no less."""
    key = stack.add_tenant("window", tier="free")
    found, seconds = pair.statuses(key, 2 * RATE)
    refilled = seconds * RATE / 60
    print(f"{found[200]} of {RATE} (+{refilled:.1f} in {seconds:.1f} s)")  # shown with -rP
    assert set(found) == {200, 429}
    assert RATE * 0.99 + refilled - 1 <= found[200] <= RATE * 1.01 + refilled + 1


def test_without_redis_each_gateway_limits_by_itself_and_says_so(stack: Stack, pair: Pair) -> None:
    """Nobody is refused for it; the metric and the log say that limits are not shared."""
    key = stack.add_tenant("alone", tier="free")
    pair.redis.stop()
    try:
        found, seconds = pair.statuses(key, 3 * RATE)
        refilled = 2 * seconds * RATE / 60
        assert set(found) == {200, 429}
        assert 2 * RATE * 0.98 <= found[200] <= 2 * RATE * 1.02 + refilled + 2
        types = [event.type for event in stack.store.read_stream("limits")]
        assert types == ["LimitsUnshared"] * 2
    finally:
        pair.redis.start()
    again = stack.add_tenant("again", tier="free")

    def are_shared() -> bool:
        """A gateway tries again with the first request a second after it last failed."""
        assert set(pair.statuses(again, 2)[0]) == {200}
        types = [event.type for event in stack.store.read_stream("limits")]
        return types[2:] == ["LimitsShared"] * 2

    until(are_shared, 10, 0.3)
