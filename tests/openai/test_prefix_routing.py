"""The next turn of a conversation goes where its beginning is cached, on real processes."""

import time

import pytest

from controlplane.domain import routing
from controlplane.domain.model import VersionSpec
from controlplane.domain.routing import SetRoutingWeights
from tests.openai.conversations import Turns, converse
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


async def conversations(stack: Stack, prefix: float, seed: int) -> Turns:
    """With the weight, which is an event that the gateway follows."""
    command = SetRoutingWeights({"prefix": prefix}, time.time())
    stack.order(routing.DECIDER, routing.STREAM, command)
    time.sleep(1.0)
    url, key = stack.gateway.url, stack.keys["acme"]
    return await converse(url, key, "chatty", 12, 3, (0.1, 0.4), seed, opening=160)


async def test_a_conversation_stays_with_its_prefix_while_loads_are_alike(
    two_replicas: Stack,
) -> None:
    """Without the term about half of what a turn repeats is on the other replica, as chance has
    it; with it nearly all is found, and turns are the faster."""
    without = await conversations(two_replicas, 0.0, 1)
    with_term = await conversations(two_replicas, 1.0, 2)
    assert with_term.share > 0.8 > without.share + 0.05
