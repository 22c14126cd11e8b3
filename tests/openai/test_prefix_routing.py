"""The next turn of a conversation goes where its beginning is cached, on real processes."""

import asyncio
import time
from typing import Any

import pytest

from controlplane.domain import routing
from controlplane.domain.routing import SetRoutingWeights
from controlplane.domain.version_spec import VersionSpec
from tests.openai.conversations import Turns, apart
from tests.openai.stack import GIB, Stack

SPEC = VersionSpec(
    version="v1",
    source="simulated://chatty?step_ms=5&prefill_tps=3000&blocks=4096",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=4096,
    max_output_tokens=64,
)


@pytest.fixture(scope="module")
def two_replicas(stack: Stack) -> Stack:
    """Of one model, on two nodes."""
    stack.add_version("chatty", SPEC)
    for node_id in ("n1", "n2"):
        if node_id not in stack.agents:
            stack.add_agent(node_id)
        stack.place("chatty", SPEC, node_id)
    stack.wait_for("chatty", stack.keys["acme"])
    return stack


async def second_turns(stack: Stack, prefix: float, seed: int) -> Turns:
    """With the weight, which is an event that the gateway follows."""
    changes: dict[str, Any] = {"prefix": prefix, "beta": 0.0}  # use of seconds ago is no load now
    command = SetRoutingWeights(changes, time.time())
    stack.order(routing.DECIDER, routing.STREAM, command)
    await asyncio.sleep(1.0)
    return await apart(stack.gateway.url, stack.keys["acme"], "chatty", 8, seed)


async def test_conversations_find_their_prefix_again(two_replicas: Stack) -> None:
    """First turns at once are spread over both replicas; of what the second ones repeat nearly all
    is found. How much it is without the term chance decides (``tests.benchmarks.prefix_routing``);
    that it is the term which decides, ``test_placer`` shows."""
    assert (await second_turns(two_replicas, 1.0, 2)).share > 0.7
