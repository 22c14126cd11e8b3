"""Each contract runs on every implementation of its port."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from controlplane.application.ports import EventStore
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
