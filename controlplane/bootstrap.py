"""The only place that chooses adapters: builds each process from its parts."""

import asyncio
from functools import cache

from django.conf import settings

from controlplane.adapters.access.issuers import read_issuers
from controlplane.adapters.access.jwt_tokens import JwtVerifier
from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.natsbus.connection import connect
from controlplane.adapters.natsbus.subscriber import NodeSubscriber
from controlplane.adapters.readmodel.projector import Projector
from controlplane.application.fleet import OnLoad
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import Clock, EventStore


@cache
def clock() -> Clock:
    return SystemClock()


@cache
def event_store() -> EventStore:
    """The process's one store: what its threads append at once is committed together."""
    return DjangoEventStore(clock())


@cache
def command_handler() -> CommandHandler:
    return CommandHandler(event_store(), clock())


@cache
def jwt_verifier() -> JwtVerifier:
    """Of the web process; remembers keys and tokens."""
    return JwtVerifier(read_issuers(settings.JWT_ISSUERS))


def projector() -> Projector:
    """Writes the read model; for one thread at a time."""
    return Projector(event_store())


def ledger() -> LedgerStore:
    """A gateway's ledger, with a writer thread and a connection of its own."""
    return LedgerStore()


async def listen_to_nodes(on_load: OnLoad) -> None:
    """Call ``on_load`` for each telemetry message until cancelled; waits for a bus that is down."""
    bus = await connect(settings.NATS_URL, settings.NATS_CREDS, "web")
    try:
        await NodeSubscriber(bus, on_load).start()
        await asyncio.Event().wait()
    finally:
        await bus.close()
