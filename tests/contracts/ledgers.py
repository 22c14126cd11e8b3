"""Databases for the ledger's contract, and requests that begin and end in them."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from django.db import connections

from controlplane.adapters.readmodel.codec import Codec
from controlplane.application.orphans import Answers
from controlplane.application.ports import Intent, Terminal
from controlplane.domain.budget import Budget
from controlplane.domain.money import Price
from controlplane.projections.tenants import Tenant
from tests.absent import skip_without

T = TypeVar("T")
POSTGRES = {"host": "127.0.0.1", "port": 5432, "user": "postgres", "dbname": "postgres"}
DEFAULTS = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "CONN_MAX_AGE": 0, "TIME_ZONE": None}
AT = 1_700_000_000.0
PRICE = Price(input=150_000, cached_input=75_000, output=600_000)


class NoNodes:
    """``orphans.Nodes`` of a fleet without one: all of them have answered."""

    async def close(self, gateway: str, request_ids: Sequence[str]) -> Answers:
        return Answers()


def sqlite_settings(folder: Path) -> dict[str, Any]:
    settings = dict(connections.databases["default"])
    options = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 5,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
    }
    return settings | {"NAME": str(folder / "ledger.sqlite3"), "OPTIONS": options}


def postgres_settings(name: str) -> dict[str, Any]:
    engine = {"ENGINE": "django.db.backends.postgresql", "NAME": name, "USER": "postgres"}
    options = {"OPTIONS": {"options": "-c lock_timeout=2s"}}
    return dict(connections.databases["default"]) | engine | options | {"HOST": "127.0.0.1"}


def administer(statement: str) -> None:
    try:
        with psycopg.connect(**POSTGRES, autocommit=True, connect_timeout=3) as connection:
            connection.execute(statement)
    except psycopg.OperationalError as error:
        skip_without(f"PostgreSQL on 127.0.0.1:5432, user postgres, no password: {error}")


async def in_thread(alias: str, work: Callable[[], T]) -> T:
    """Blocking work of the ORM, with the connections of a thread that is then gone."""

    def run() -> T:
        try:
            return work()
        finally:
            connections[alias].close()

    return await asyncio.to_thread(run)


async def query(alias: str, sql: str, *parameters: Any) -> list[Any]:
    return await asyncio.to_thread(_query, alias, sql, parameters)


def _query(alias: str, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
    """On a connection of this thread, as another process would see it."""
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall() if cursor.description else []
    finally:
        connections[alias].close()


def an_intent(**changes: Any) -> Intent:
    """Asks for 100 tokens: a prompt of 40 and an output of at most 60."""
    intent = Intent(
        request_id=f"req-{uuid.uuid4().hex}",
        tenant_id=f"t{uuid.uuid4().hex[:8]}",
        subject="key",
        end_user="",
        endpoint="chat",
        requested_model="m",
        route="",
        arm="",
        version_id="m@v1",
        latency_class="standard",
        num_prompt_tokens=40,
        max_output_tokens=60,
        price=PRICE,
        at=AT,
        gateway="gw-1",
    )
    return replace(intent, **changes)


def an_end(intent: Intent, **changes: Any) -> Terminal:
    """Ends with 50 tokens used: the prompt's 40 and 10 produced."""
    terminal = Terminal(
        request_id=intent.request_id,
        outcome="ok",
        finish_reason="stop",
        error_code="",
        node_id="n1",
        replica_id="m.v1.g1.0",
        num_prompt_tokens=40,
        num_cached_tokens=0,
        num_output_tokens=10,
        ttft_ms=5.0,
        queue_ms=1.0,
        duration_ms=20.0,
        at=AT + 1,
    )
    return replace(terminal, **changes)


async def set_budgets(alias: str, tenant_id: str, *budgets: Budget) -> None:
    """As the projection of the log leaves them in the read model."""
    await asyncio.to_thread(
        _write_tenant, alias, Tenant(tenant_id, "t", "free", 0.0, 1, budgets=budgets)
    )


def _write_tenant(alias: str, row: Tenant) -> None:
    try:
        with connections[alias].cursor() as cursor:
            Codec(Tenant).write(cursor, (), (row,), connections[alias].vendor)
    finally:
        connections[alias].close()


def a_budget(limit: int, **changes: Any) -> Budget:
    """Of all the tenant's tokens, each month."""
    fields = {"budget_id": "all", "scope": "tenant", "target": "", "unit": "tokens"}
    return Budget(**(fields | {"limit": limit, "period": "month"} | changes))


def a_name() -> str:
    return f"t{uuid.uuid4().hex[:8]}"
