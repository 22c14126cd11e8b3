"""The same load without a gateway: generations sent to a node over the bus, and timed there.

What the gateway adds is the difference to this: bus, agent and engine are the same, admission,
ledger, tokenizer and HTTP are left out.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from controlplane.adapters.natsbus.connection import connect
from controlplane.adapters.natsbus.transport import Generate, Sampling, Transport
from controlplane.entrypoints.openai.encoding import Encoder
from controlplane.entrypoints.openai.parameters import ChatMessage
from tests.benchmarks.http_load import Result, pauses
from tests.openai.stack import Stack

NODE = "n1"


class Direct:
    """Starts generations on one node; ``result`` as the HTTP load has it."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self._name = transport, name

    async def generate(
        self, replica_id: str, prompt: tuple[int, ...], max_tokens: int, result: Result
    ) -> None:
        """One generation, to its end; raises RuntimeError if it fails."""
        began = time.perf_counter()
        heard_at = 0.0
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def sink(delta: Any) -> None:
            nonlocal heard_at
            now = time.perf_counter()
            if delta.index and delta.token_ids:
                result.gaps.append(now - heard_at)
            elif delta.token_ids and began >= result.since:
                result.first.append(now - began)
            heard_at = now
            if delta.finish_reason:
                ended.set_result(delta.finish_reason)

        order = Generate(
            request_id=f"direct-{uuid.uuid4().hex}",
            gateway=self._name,
            replica_id=replica_id,
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        await self.transport.generate(NODE, order, sink)
        if await asyncio.wait_for(ended, 60) != "length":
            raise RuntimeError(f"{order.request_id} did not run to its end")

    async def encode(self, version_id: str, question: str) -> tuple[int, ...]:
        """The prompt that the gateway makes of it."""
        bundle = await self.transport.tokenizer(version_id)
        assert bundle is not None
        encoder = Encoder(bundle)  # type: ignore[arg-type]  # frozen, which the protocol is not
        return await encoder.chat([ChatMessage("user", question)], 2048)

    async def burst(
        self, replica_id: str, prompt: tuple[int, ...], count: int, max_tokens: int
    ) -> Result:
        """``count`` generations at once."""
        result = Result()
        await asyncio.gather(
            *(self.generate(replica_id, prompt, max_tokens, result) for _ in range(count))
        )
        return result

    async def steady(
        self,
        replica_id: str,
        prompt: tuple[int, ...],
        lengths: Sequence[int],
        warm_up: float,
        seconds: float,
        most_pause_s: float,
    ) -> Result:
        """As ``http_load.steady``: one endless sequence of generations for each length."""
        began = time.perf_counter()
        result = Result(since=began + warm_up)

        async def keep(number: int, max_tokens: int) -> None:
            await asyncio.sleep(warm_up * number / len(lengths) / 2)
            for pause in pauses(number, most_pause_s):
                if time.perf_counter() > result.since + seconds:
                    break
                await self.generate(replica_id, prompt, max_tokens, result)
                await asyncio.sleep(pause)

        await asyncio.gather(*(keep(number, length) for number, length in enumerate(lengths)))
        return result


@asynccontextmanager
async def direct(stack: Stack) -> AsyncIterator[Direct]:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    bus = await connect(stack.nats.url, stack.nats.control_creds, "bench", timeout_s=10)
    transport = Transport(bus, name, time.monotonic)
    await transport.start()
    try:
        yield Direct(transport, name)
    finally:
        await bus.close()
