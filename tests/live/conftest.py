"""A hub on a store of its own, and clients that speak to it through the real routing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.db import connections

from controlplane import bootstrap
from controlplane.adapters.access import keys, tokens
from controlplane.application.fleet import NodeLoad
from controlplane.application.ports import EventMeta
from controlplane.domain import tenant
from controlplane.domain.ids import KeyId, TenantId
from controlplane.entrypoints.live import routing
from controlplane.entrypoints.live.hub import Hub
from controlplane.entrypoints.rest.edge import EdgeGuard

META = EventMeta(actor="user:test")
HOST = (b"host", b"localhost")


class Fleet:
    """Telemetry by hand: what the bus would deliver."""

    def __init__(self) -> None:
        self.say: Callable[[NodeLoad], None] = lambda load: None
        self.num_listening = 0

    async def listen(self, on_load: Callable[[NodeLoad], None]) -> None:
        self.say, self.num_listening = on_load, self.num_listening + 1
        await asyncio.Event().wait()


class Listener:
    """One connection; ``frames`` of a kind are awaited, the others passed over."""

    def __init__(self, application: Any, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.socket = WebsocketCommunicator(application, path, headers=headers)

    async def connect(self) -> bool:
        connected, _ = await self.socket.connect(timeout=5)
        return connected

    async def send(self, **frame: Any) -> None:
        await self.socket.send_to(text_data=json.dumps(frame))

    async def next(self, *kinds: str, seconds: float = 5.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.01, deadline - time.monotonic())
            frame = json.loads(await self.socket.receive_from(timeout=left))
            if not kinds or frame["type"] in kinds:
                return frame

    async def closed(self, seconds: float = 8.0) -> int:
        while True:
            output = await self.socket.receive_output(timeout=seconds)
            if output["type"] == "websocket.close":
                return int(output["code"])


class Live:
    def __init__(self, hub: Hub, fleet: Fleet) -> None:
        self.hub, self.fleet = hub, fleet
        self.application = EdgeGuard(routing.application(hub), ["localhost"])

    @asynccontextmanager
    async def listener(
        self, token: str = "", path: str = "/ws/live", **headers: str
    ) -> AsyncIterator[Listener]:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        given += [(b"authorization", f"Bearer {token}".encode())] if token else []
        one = Listener(self.application, path, [HOST, *given])
        yield one
        await one.socket.disconnect()

    @asynccontextmanager
    async def subscribed(self, token: str, after: int | None = None) -> AsyncIterator[Listener]:
        async with self.listener(token) as one:
            assert await one.connect()
            await one.send(type="subscribe", after=after)
            yield one


@pytest.fixture
async def live(database: Path) -> AsyncIterator[Live]:
    fleet = Fleet()
    hub = Hub(bootstrap.event_store(), bootstrap.clock(), fleet.listen)
    yield Live(hub, fleet)
    await hub.stop()
    bootstrap.event_store().close()
    await sync_to_async(connections.close_all)()  # of the thread that the next test shares


async def fresh_key(tenant_id: str, *scopes: str) -> str:
    return await asyncio.to_thread(make_key, tenant_id, *scopes)


def make_key(tenant_id: str, *scopes: str) -> str:
    key_id, secret, full = tokens.new_key()
    keys.store_secret(key_id, key_id, secret, tenant_id)
    now, role = time.time(), "admin" if "admin:read" in scopes else "developer"
    command = tenant.IssueApiKey(
        TenantId(tenant_id), KeyId(key_id), "test", secret[-4:], scopes, None, now, role
    )
    order(tenant_id, command)
    return full


def create_tenant(name: str, tier: str = "free") -> int:
    """Returns the position."""
    return order(name, tenant.CreateTenant(TenantId(name), name, tier, time.time()))


def order(name: str, command: tenant.TenantCommand) -> int:
    """Give a tenant's aggregate a command; returns the position."""
    stream = f"tenant-{name}"
    return bootstrap.command_handler().handle(tenant.DECIDER, stream, command, META).position


@pytest.fixture
def operator(database: Path) -> str:
    """A key that may hear everything."""
    create_tenant("operators")
    return make_key("operators", "admin:read")
