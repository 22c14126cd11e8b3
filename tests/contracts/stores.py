"""Event stores to run the contract on: in memory, on SQLite and on PostgreSQL."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from django.apps import apps
from django.core.management import call_command
from django.db import connections

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.ports import Append, EventMeta, EventStore, Idempotency
from controlplane.domain.decider import Event
from controlplane.domain.tenant import TenantCreated, TenantTierChanged
from tests.absent import skip_without

SERVER = "host=127.0.0.1 port=5432 user=postgres"
META = EventMeta("user:ada", "req-1", "", "10.0.0.1", "because")


@dataclass
class Stores:
    """``open()`` gives one process's store; the memory store has no second process."""

    name: str
    clock: ManualClock
    open: Callable[[], EventStore]
    execute: Callable[[str, tuple[Any, ...]], None] | None = None


@contextmanager
def memory_stores() -> Iterator[Stores]:
    clock = ManualClock()
    store = MemoryEventStore(clock)
    yield Stores("memory", clock, lambda: store)


@contextmanager
def sqlite_stores() -> Iterator[Stores]:
    """On the migrated file that Django's default connection points to."""
    with _django_stores("sqlite") as stores:
        yield stores


@contextmanager
def postgres_stores(name: str) -> Iterator[Stores]:
    """On the migrated scratch database ``name``, emptied."""
    with django_pointed_at(postgres_settings(name)):
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "ALTER TABLE eventstore_event DISABLE TRIGGER ALL;"
                "ALTER TABLE ledger_checkpoint DISABLE TRIGGER ALL;"
                # Not TRUNCATE: new files for each of the tables, synced, take a second.
                f"{''.join(f'DELETE FROM {table};' for table in _tables())}"
                "ALTER TABLE eventstore_event ENABLE TRIGGER ALL;"
                "ALTER TABLE ledger_checkpoint ENABLE TRIGGER ALL"
            )
        with _django_stores("postgres") as stores:
            yield stores


def _tables() -> list[str]:
    owned = (
        apps.get_app_config(label).get_models() for label in ("eventstore", "ledger", "readmodel")
    )
    return [model._meta.db_table for models in owned for model in models]


@contextmanager
def migrated_postgres() -> Iterator[str]:
    """The name of a scratch database with log, ledger, read model and keys; then dropped."""
    name = f"engine_test_{uuid.uuid4().hex[:12]}"
    with scratch_postgres(name):
        with django_pointed_at(postgres_settings(name)):
            for app in ("eventstore", "ledger", "readmodel", "access"):
                call_command("migrate", app, verbosity=0)
        yield name


@contextmanager
def scratch_postgres(name: str) -> Iterator[None]:
    with _server() as server:
        server.execute(f"CREATE DATABASE {name}")
    try:
        yield
    finally:
        with _server() as server:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _server() -> "psycopg.Connection[Any]":
    try:
        return psycopg.connect(SERVER, autocommit=True, connect_timeout=3)
    except psycopg.OperationalError:
        skip_without(
            "PostgreSQL on 127.0.0.1:5432: docker run -p 5432:5432 "
            "-e POSTGRES_HOST_AUTH_METHOD=trust postgres"
        )


def postgres_settings(name: str) -> dict[str, Any]:
    from controlplane.config.settings import _postgres

    return _postgres(f"postgres://postgres@127.0.0.1:5432/{name}")


@contextmanager
def django_pointed_at(settings: dict[str, Any]) -> Iterator[None]:
    """The default database is another server's for the time being, in this thread."""
    before = connections["default"]
    changed = {**before.settings_dict, **settings}
    connections.settings["default"], kept = changed, connections.settings["default"]
    connections["default"] = connections.create_connection("default")
    try:
        yield
    finally:
        connections["default"].close()
        connections.settings["default"] = kept
        connections["default"] = before


@contextmanager
def _django_stores(name: str) -> Iterator[Stores]:
    clock, opened = ManualClock(), []

    def open_store() -> EventStore:
        opened.append(DjangoEventStore(clock))
        return opened[-1]

    def execute(sql: str, params: tuple[Any, ...] = ()) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute(sql, params)

    try:
        yield Stores(name, clock, open_store, execute)
    finally:
        for store in opened:
            store.close()


def created(name: str = "acme") -> TenantCreated:
    return TenantCreated(name, name, "free", 1.0)  # type: ignore[arg-type]


def changed(tier: str = "premium") -> TenantTierChanged:
    return TenantTierChanged("acme", tier, 2.0)  # type: ignore[arg-type]


def append(
    stream: str, expected: int | None, *events: Event, key: str = "", body: bytes = b""
) -> Append:
    idempotency = Idempotency(key, "hash-of-body") if key else None
    return Append(stream, expected, events, META, idempotency, 201, body)
