"""The only place that chooses adapters: builds each process from its parts."""

from functools import cache

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.readmodel.projector import Projector
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


def projector() -> Projector:
    """Writes the read model; for one thread at a time."""
    return Projector(event_store())


def ledger() -> LedgerStore:
    """A gateway's ledger, with a writer thread and a connection of its own."""
    return LedgerStore()
