"""PostgreSQL restarts, or a backend stops while it holds the head row, in a cluster of its own."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import AuditUnavailable, StoreUnavailable
from controlplane.domain.errors import DomainError
from tests.absent import skip_without
from tests.contracts.stores import _server, append, created, django_pointed_at
from tests.contracts.test_ledger import an_end, an_intent
from tests.crash.commands import Order, orders
from tests.crash.places import postgres
from tests.crash.powercut import PreparedPostgres
from tests.crash.workload import send

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]


class Cluster:
    """A running server that can be restarted at once, as after a crash."""

    def __init__(self, folder: Path) -> None:
        self.prepared = PreparedPostgres(folder)
        self.folder = folder
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        where = self.prepared._server(self.folder / "cluster", unsynced=False)
        self._running.enter_context(where)

    def stop(self) -> None:
        """SIGQUIT: every backend ends at once, and nothing is written any more."""
        self._running.close()

    def connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(f"host=127.0.0.1 port={self.prepared.port} user=postgres")


@pytest.fixture
def cluster(database: Path) -> Iterator[Cluster]:
    """Django's default database is on it."""
    _server().close()  # skips where PostgreSQL is not installed
    if os.geteuid() != 0:
        skip_without("root, to start a PostgreSQL cluster of its own as the user postgres")
    with TemporaryDirectory(prefix="engine-cluster-") as folder:  # where the user postgres may go
        cluster = Cluster(Path(folder))
        with django_pointed_at(postgres("postgres", cluster.prepared.port)):
            yield cluster
        cluster.stop()


class Senders:
    """Four threads that send each order again until it is answered."""

    def __init__(self, store: DjangoEventStore, pending: list[Order]) -> None:
        self.handler, self.orders = CommandHandler(store, SystemClock()), pending
        self.answered: dict[str, int] = {}
        self.errors: list[Exception] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(pending[i::4],)) for i in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(20)

    def _work(self, mine: list[Order]) -> None:
        for order in mine:
            while not self._stopping.is_set() and not self._answered(order):
                time.sleep(0.02)

    def _answered(self, order: Order) -> bool:
        try:
            self.answered[order.key] = send(self.handler, order).position
        except DomainError:
            return True  # a refusal is an answer
        except Exception as error:
            self.errors.append(error)
            return False
        return True


def test_after_an_immediate_restart_commands_sent_again_are_applied_once(cluster: Cluster) -> None:
    """What was in flight is unknown and told in a type; the pool heals within 3 s of the start."""
    store = DjangoEventStore(SystemClock())
    senders = Senders(store, orders(3, 2_000, 1.0))
    answered, errors = senders.answered, senders.errors
    for _ in range(3):
        time.sleep(0.3)
        cluster.stop()
        cluster.start()
        healed, before = time.monotonic(), len(answered)
        while len(answered) == before:
            assert time.monotonic() - healed < 3, errors[-3:]
            time.sleep(0.01)
    senders.stop()
    assert errors and {type(error) for error in errors} == {StoreUnavailable}, errors
    store.verify()
    for order in senders.orders:
        if order.key in answered:
            assert send(senders.handler, order).position == answered[order.key]
    log = store.read_all(0, 100_000)
    assert len({(one.stream, one.version) for one in log}) == len(log) == store.head().position
    store.close()


async def test_after_an_immediate_restart_the_ledger_admits_again(cluster: Cluster) -> None:
    """Meanwhile no audit, no service; afterwards the same process goes on."""
    ledger = LedgerStore()
    await ledger.admit(live := an_intent())
    cluster.stop()
    with pytest.raises(AuditUnavailable):
        await ledger.admit(an_intent())
    cluster.start()
    began = time.monotonic()
    while True:
        try:
            await ledger.admit(an_intent())
            break
        except AuditUnavailable:
            assert time.monotonic() - began < 3
            await asyncio.sleep(0.01)
    assert await ledger.settle(an_end(live))
    await ledger.close()


def test_a_stopped_backend_with_the_head_row_makes_others_busy_not_stuck(cluster: Cluster) -> None:
    """Within the lock timeout all are told store_busy, nobody deadlocks; then all goes on."""
    store = DjangoEventStore(SystemClock())
    store.append(append("tenant-acme", 0, created()))
    holder = cluster.connect()
    holder.execute("SELECT * FROM eventstore_head FOR UPDATE")
    backend = holder.info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    codes: list[tuple[str, float]] = []

    def try_it(number: int) -> None:
        began = time.monotonic()
        try:
            store.append(append(f"tenant-{number}", 0, created(f"t{number}")))
            codes.append(("done", 0))
        except StoreUnavailable as error:
            codes.append((error.code, time.monotonic() - began))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert store.head().position == 1  # readers do not wait
    for thread in threads:
        thread.join(20)
    assert {code for code, _ in codes} == {"store_busy"}
    assert max(waited for _, waited in codes) < 4.5  # one lock timeout, or the rest of another's
    os.kill(backend, signal.SIGCONT)
    holder.close()
    assert store.append(append("tenant-umbrella", 0, created("umbrella"))).position == 2
    store.close()
