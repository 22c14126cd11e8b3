"""Through the whole gateway: one tenant's flood, another's single request."""

import asyncio
import time
from typing import Any

import httpx

from controlplane.domain.version_spec import VersionSpec
from tests.openai.stack import GIB, Stack

NARROW = VersionSpec(
    version="v1",
    source="simulated://narrow?step_ms=20&prefill_tps=1000000",
    gpu_memory=GIB // 16,
    max_batch=2,
    max_prompt_tokens=512,
    max_output_tokens=512,
)
NUM_FLOOD, FLOOD_TOKENS = 40, 50  # two at once, a second each: a line of twenty seconds


def asked(max_tokens: int) -> dict[str, Any]:
    return {"model": "narrow", "prompt": "Go on", "max_tokens": max_tokens}


def test_a_flood_of_one_tenant_does_not_hold_up_another(stack: Stack, key: str) -> None:
    """The other's request has the next slot: no more than a slot's turn of the flood ends before
    it does; and the answer says how long it waited."""
    stack.add_version("narrow", NARROW)
    stack.place("narrow", NARROW, "n1")
    stack.wait_for("narrow", key)
    asyncio.run(_flood(f"{stack.gateway.url}/v1/completions", key, stack.keys["other"]))


async def _flood(url: str, key: str, other: str) -> None:
    limits = httpx.Limits(max_connections=NUM_FLOOD + 1)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def ask(token: str, max_tokens: int) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            return await client.post(url, json=asked(max_tokens), headers=headers)

        flood = [asyncio.ensure_future(ask(key, FLOOD_TOKENS)) for _ in range(NUM_FLOOD)]
        try:
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            ended, began = sum(one.done() for one in flood), time.monotonic()
            answer = await ask(other, 2)
            waited = time.monotonic() - began
            assert answer.status_code == 200
            assert sum(one.done() for one in flood) - ended <= 2 * NARROW.max_batch
            assert 0 <= int(answer.headers["x-engine-queue-ms"]) <= 1000 * waited
        finally:
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
