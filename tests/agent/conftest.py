"""Fixtures of the agent's tests: a bus, a control plane, agents that are always stopped."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.harness import Agent, Control, control
from tests.natsserver import NatsServer, nats  # noqa: F401

StartAgent = Callable[..., Agent]


@pytest.fixture
async def plane(nats: NatsServer) -> AsyncIterator[Control]:  # noqa: F811
    async with control(nats) as driver:
        yield driver


@pytest.fixture
def start_agent(nats: NatsServer, tmp_path: Path) -> Iterator[StartAgent]:  # noqa: F811
    agents: list[Agent] = []

    def start(node_id: str = "n1", *options: str) -> Agent:
        agent = Agent(nats, tmp_path, node_id, *options)
        agents.append(agent)
        agent.start()
        return agent

    yield start
    for agent in agents:
        agent.stop()
