"""Both ends of the bus, opened with the product's credentials, for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from controlplane.adapters.natsbus.connection import Bus, connect, ensure_buckets
from controlplane.adapters.natsbus.credentials import node_inbox
from gpuagent.wire import subjects
from tests.natsserver import NatsServer


@asynccontextmanager
async def control(server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connect(server.url, server.control_creds, "control", timeout_s=10)
    try:
        await ensure_buckets(bus)
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def node(server: NatsServer, node_id: str) -> AsyncIterator[Bus]:
    creds = server.node_creds(node_id)
    bus = await connect(
        server.url, creds, node_id, node_inbox(node_id), 10, subjects.NODE_JETSTREAM
    )
    try:
        yield bus
    finally:
        await bus.close()


async def until(true: Callable[[], object], seconds: float = 30, what: str = "") -> None:
    """Wait until ``true()``; fails after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)
