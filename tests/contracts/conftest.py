"""Each contract runs on every implementation of its port."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.ports import EventStore
from tests.contracts.ledgers import administer, postgres_settings, sqlite_settings
from tests.contracts.stores import (
    Stores,
    memory_stores,
    migrated_postgres,
    postgres_stores,
    sqlite_stores,
)

POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture(scope="session")
def postgres_name(django_db_blocker) -> Iterator[str]:  # type: ignore[no-untyped-def]
    with django_db_blocker.unblock(), migrated_postgres() as name:
        yield name


@pytest.fixture(params=["memory", "sqlite", POSTGRES])
def stores(request: pytest.FixtureRequest, database: Path) -> Iterator[Stores]:
    with _stores(request, database) as opened:
        yield opened


@pytest.fixture(params=["sqlite", POSTGRES])
def durable(request: pytest.FixtureRequest, database: Path) -> Iterator[Stores]:
    """Those that are on disk, which several processes may open and an intruder may edit."""
    with _stores(request, database) as opened:
        yield opened


@pytest.fixture
def postgres(database: Path, postgres_name: str) -> Iterator[Stores]:
    with postgres_stores(postgres_name) as opened:
        yield opened


@pytest.fixture
def store(stores: Stores) -> EventStore:
    return stores.open()


def _stores(request: pytest.FixtureRequest, database: Path) -> AbstractContextManager[Stores]:
    if request.param == "postgres":
        return postgres_stores(request.getfixturevalue("postgres_name"))
    return memory_stores() if request.param == "memory" else sqlite_stores()


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
def alias(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any
) -> Iterator[str]:
    """A database of its own with the ledger's tables; the name of its Django connection."""
    alias = f"ledger_{request.param}"
    name = f"engine_test_ledger_{uuid.uuid4().hex[:12]}"
    if request.param == "postgresql":
        administer(f"CREATE DATABASE {name}")
        connections.databases[alias] = postgres_settings(name)
    else:
        connections.databases[alias] = sqlite_settings(tmp_path_factory.mktemp("ledger"))
    with django_db_blocker.unblock():
        for app in ("ledger", "readmodel"):
            call_command("migrate", app, database=alias, verbosity=0)
        yield alias
        connections[alias].close()
    del connections[alias], connections.databases[alias]
    if request.param == "postgresql":
        administer(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def ledger(alias: str) -> AsyncIterator[LedgerStore]:
    store = LedgerStore(alias)
    yield store
    await store.close()
