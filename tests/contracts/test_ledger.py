"""The contract of ``ports.Ledger``, on SQLite and on PostgreSQL."""

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

from controlplane.adapters.ledger.batch import period_start
from controlplane.adapters.ledger.reaper import Reaper
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.ports import AuditUnavailable, BudgetExceeded, Intent, Terminal
from controlplane.domain import money
from controlplane.domain.money import Price

POSTGRES = {"host": "127.0.0.1", "port": 5432, "user": "postgres", "dbname": "postgres"}
DEFAULTS = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "CONN_MAX_AGE": 0, "TIME_ZONE": None}
AT = 1_700_000_000.0
PRICE = Price(input=150_000, cached_input=75_000, output=600_000)


def _sqlite(folder: Path) -> dict[str, Any]:
    settings = dict(connections.databases["default"])
    options = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 5,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
    }
    return settings | {"NAME": str(folder / "ledger.sqlite3"), "OPTIONS": options}


def _postgres(name: str) -> dict[str, Any]:
    engine = {"ENGINE": "django.db.backends.postgresql", "NAME": name, "USER": "postgres"}
    options = {"OPTIONS": {"options": "-c lock_timeout=2s"}}
    return dict(connections.databases["default"]) | engine | options | {"HOST": "127.0.0.1"}


def _administer(statement: str) -> None:
    try:
        with psycopg.connect(**POSTGRES, autocommit=True, connect_timeout=3) as connection:
            connection.execute(statement)
    except psycopg.OperationalError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs PostgreSQL on 127.0.0.1:5432, user postgres, no password: {error}")


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
        _administer(f"CREATE DATABASE {name}")
        connections.databases[alias] = _postgres(name)
    else:
        connections.databases[alias] = _sqlite(tmp_path_factory.mktemp("ledger"))
    with django_db_blocker.unblock():
        call_command("migrate", "ledger", database=alias, verbosity=0)
        yield alias
        connections[alias].close()
    del connections[alias], connections.databases[alias]
    if request.param == "postgresql":
        _administer(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def ledger(alias: str) -> AsyncIterator[LedgerStore]:
    store = LedgerStore(alias)
    yield store
    await store.close()


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
        endpoint="chat",
        requested_model="m",
        route="",
        arm="",
        version_id="m@v1",
        latency_class="standard",
        num_prompt_tokens=40,
        max_output_tokens=60,
        budget_tokens=None,
        budget_period="month",
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


async def test_an_admitted_request_has_its_intent_on_record(
    ledger: LedgerStore, alias: str
) -> None:
    """When admit returns, another connection sees the intent with its reservation, and no end."""
    intent = an_intent()
    await ledger.admit(intent)
    rows = await query(
        alias,
        "SELECT tenant_id, reserved_tokens, day, outcome, position FROM ledger_request"
        " WHERE request_id = %s",
        intent.request_id,
    )
    assert rows == [(intent.tenant_id, 100, "2023-11-14", "", None)]


async def test_a_terminal_record_is_written_exactly_once(ledger: LedgerStore, alias: str) -> None:
    """The first end stands, a second one changes nothing and says so; usage counts it once."""
    intent = an_intent()
    await ledger.admit(intent)
    assert await ledger.settle(an_end(intent)) is True
    assert await ledger.settle(an_end(intent, outcome="unknown", num_output_tokens=99)) is False
    assert await query(
        alias,
        "SELECT outcome, num_output_tokens FROM ledger_request WHERE request_id = %s",
        intent.request_id,
    ) == [("ok", 10)]
    assert await query(
        alias,
        "SELECT num_requests, num_prompt_tokens, num_output_tokens FROM ledger_usage"
        " WHERE tenant_id = %s",
        intent.tenant_id,
    ) == [(1, 40, 10)]


async def test_settling_an_unknown_request_does_nothing(ledger: LedgerStore) -> None:
    """There is no terminal record without an intent."""
    assert await ledger.settle(an_end(an_intent())) is False


async def test_200_concurrent_requests_on_a_budget_for_10_admit_exactly_10(alias: str) -> None:
    """On two gateways at once, the sum of the admitted never passes the budget."""
    stores = [LedgerStore(alias), LedgerStore(alias)]
    tenant = f"t{uuid.uuid4().hex[:8]}"
    intents = [an_intent(tenant_id=tenant, budget_tokens=1000) for _ in range(200)]
    results = await asyncio.gather(
        *(stores[i % 2].admit(intent) for i, intent in enumerate(intents)), return_exceptions=True
    )
    for store in stores:
        await store.close()
    assert Counter(type(result) for result in results) == {type(None): 10, BudgetExceeded: 190}


async def test_a_refusal_prints_its_numbers_and_consumes_nothing(
    ledger: LedgerStore, alias: str
) -> None:
    """Limit, spent, reserved and asked are those of the moment of the check."""
    intent = an_intent(budget_tokens=240)
    tenant = intent.tenant_id
    await ledger.admit(intent)
    await ledger.settle(an_end(intent))
    await ledger.admit(an_intent(tenant_id=tenant, budget_tokens=240))
    with pytest.raises(BudgetExceeded) as refused:
        await ledger.admit(an_intent(tenant_id=tenant, budget_tokens=240))
    error = refused.value
    assert (error.limit, error.spent, error.reserved, error.asked) == (240, 50, 100, 100)
    assert await query(
        alias, "SELECT COUNT(*) FROM ledger_request WHERE tenant_id = %s", tenant
    ) == [(2,)]


async def test_settling_frees_what_was_reserved_but_not_used(ledger: LedgerStore) -> None:
    """After 50 of 100 reserved tokens were used, 50 are free again."""
    first = an_intent(budget_tokens=150)
    await ledger.admit(first)
    second = an_intent(tenant_id=first.tenant_id, budget_tokens=150)
    with pytest.raises(BudgetExceeded):
        await ledger.admit(second)
    await ledger.settle(an_end(first))
    await ledger.admit(second)


async def test_a_budget_counts_its_own_period(ledger: LedgerStore) -> None:
    """What was spent last month counts in a total budget and not in a monthly one."""
    old = an_intent()
    await ledger.admit(old)
    await ledger.settle(an_end(old))
    later = {"tenant_id": old.tenant_id, "at": AT + 40 * 86400, "budget_tokens": 140}
    with pytest.raises(BudgetExceeded):
        await ledger.admit(an_intent(**later, budget_period="total"))
    await ledger.admit(an_intent(**later, budget_period="month"))


def test_a_period_begins_at_midnight_utc() -> None:
    """Day, month and total, at 2023-11-14 22:13 UTC."""
    starts = [period_start(period, AT) for period in ("day", "month", "total")]
    assert starts == ["2023-11-14", "2023-11-01", ""]


async def test_a_budget_of_zero_admits_nothing(ledger: LedgerStore) -> None:
    """Zero is a budget; only None is none."""
    with pytest.raises(BudgetExceeded):
        await ledger.admit(an_intent(budget_tokens=0))


async def test_a_refused_row_does_not_fail_its_neighbours(ledger: LedgerStore) -> None:
    """A duplicate request id is refused; those committed together with it are admitted."""
    twice = an_intent()
    await ledger.admit(twice)
    results = await asyncio.gather(
        *(ledger.admit(intent) for intent in (an_intent(), twice, an_intent())),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), AuditUnavailable, type(None)]


async def test_terminal_records_are_numbered_without_a_gap(alias: str) -> None:
    """Two gateways that settle at once take consecutive positions."""
    stores = [LedgerStore(alias), LedgerStore(alias)]
    intents = [an_intent() for _ in range(60)]
    pairs = [(stores[i % 2], intent) for i, intent in enumerate(intents)]
    await asyncio.gather(*(store.admit(intent) for store, intent in pairs))
    await asyncio.gather(*(store.settle(an_end(intent)) for store, intent in pairs))
    for store in stores:
        await store.close()
    rows = await query(alias, "SELECT position FROM ledger_request WHERE position IS NOT NULL")
    assert sorted(position for (position,) in rows) == list(range(1, len(rows) + 1))


async def test_usage_equals_the_sum_of_the_records(ledger: LedgerStore, alias: str) -> None:
    """Every total is the sum of the request records it stands for."""
    intents = [an_intent(tenant_id="sum", version_id=f"m@v{i % 3}") for i in range(30)]
    await asyncio.gather(*(ledger.admit(intent) for intent in intents))
    ends = [an_end(intent, num_output_tokens=i) for i, intent in enumerate(intents)]
    await asyncio.gather(*(ledger.settle(end) for end in ends))
    totals = "COUNT(*), SUM(num_prompt_tokens), SUM(num_output_tokens)"
    records = await query(
        alias,
        f"SELECT version_id, {totals} FROM ledger_request WHERE tenant_id = 'sum'"
        " GROUP BY version_id ORDER BY version_id",
    )
    usage = await query(
        alias,
        "SELECT version_id, num_requests, num_prompt_tokens, num_output_tokens"
        " FROM ledger_usage WHERE tenant_id = 'sum' ORDER BY version_id",
    )
    assert records == usage and len(usage) == 3


async def test_a_record_says_what_the_request_cost(ledger: LedgerStore, alias: str) -> None:
    """At the price it was admitted under, exactly; nothing while it runs, and never null."""
    intent = an_intent()
    row = "SELECT price, price_input, price_cached_input, price_output FROM ledger_request"
    one = f"{row} WHERE request_id = %s"
    await ledger.admit(intent)
    assert await query(alias, one, intent.request_id) == [(0, 150_000, 75_000, 600_000)]
    await ledger.settle(an_end(intent, num_cached_tokens=30, num_output_tokens=7))
    due = 10 * 150_000 + 30 * 75_000 + 7 * 600_000
    assert await query(alias, one, intent.request_id) == [(due, 150_000, 75_000, 600_000)]


async def test_the_total_price_is_the_sum_of_the_records(ledger: LedgerStore, alias: str) -> None:
    """To the picodollar, though the sum has long left 64 bits."""
    dear = Price(money.MAX_PRICE, 0, money.MAX_PRICE)
    intents = [an_intent(tenant_id="rich", price=dear) for _ in range(30)]
    await asyncio.gather(*(ledger.admit(intent) for intent in intents))
    ends = [an_end(intent, num_output_tokens=2**32 + i) for i, intent in enumerate(intents)]
    await asyncio.gather(*(ledger.settle(end) for end in ends))
    records = await query(alias, "SELECT price FROM ledger_request WHERE tenant_id = 'rich'")
    due = [money.cost(dear, 40, 0, 2**32 + i) for i in range(30)]
    assert sorted(price for (price,) in records) == due
    [(milli, pico)] = await query(
        alias, "SELECT price_milli, price_pico FROM ledger_usage WHERE tenant_id = 'rich'"
    )
    assert money.join(int(milli), int(pico)) == sum(due) > 2**63


class ManualClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.time = AT

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def a_reaper(store: LedgerStore, gateway: str, clock: ManualClock, *live: str) -> Reaper:
    return Reaper(store, gateway, "host-a", clock, lambda: live)


async def _end_of(alias: str, intent: Intent) -> tuple[Any, ...]:
    (row,) = await query(
        alias,
        "SELECT outcome, num_prompt_tokens, num_output_tokens FROM ledger_request"
        " WHERE request_id = %s",
        intent.request_id,
    )
    return tuple(row)


async def test_a_silent_gateways_requests_end_as_unknown(ledger: LedgerStore, alias: str) -> None:
    """After 15 s without a beat; billed are the noted tokens, and nothing without one."""
    clock = ManualClock()
    mine, lost = a_reaper(ledger, "gw-a", clock), a_reaper(ledger, "gw-b", clock)
    await mine.start()
    await lost.start()
    noted, silent = an_intent(gateway="gw-b"), an_intent(gateway="gw-b")
    await ledger.admit(noted)
    await ledger.admit(silent)
    await ledger.progress({noted.request_id: 7})
    closed = []
    for _ in range(4):
        closed.append(await mine.beat())
        clock.time += 5
    assert closed == [0, 0, 0, 2]
    assert await _end_of(alias, noted) == ("unknown", 40, 7)
    due = 40 * PRICE.input + 7 * PRICE.output
    priced = "SELECT price FROM ledger_request WHERE request_id = %s"
    assert await query(alias, priced, noted.request_id) == [(due,)]
    assert await _end_of(alias, silent) == ("unknown", 0, 0)
    assert await ledger.settle(an_end(noted)) is False
    await mine.stop()


async def test_a_beating_gateway_keeps_its_requests(ledger: LedgerStore, alias: str) -> None:
    """However long a request runs, and whatever wall clock its gateway shows."""
    clock, theirs = ManualClock(), ManualClock()
    theirs.time -= 3600
    mine = a_reaper(ledger, "gw-c", clock)
    intent = an_intent(gateway="gw-d")
    other = a_reaper(ledger, "gw-d", theirs, intent.request_id)
    await mine.start()
    await other.start()
    await ledger.admit(intent)
    for _ in range(6):
        await mine.beat()
        await other.beat()
        clock.time += 10
    assert await _end_of(alias, intent) == ("", 40, 0)
    await mine.stop()
    await other.stop()


async def test_start_up_closes_what_a_dead_process_of_this_host_left(
    ledger: LedgerStore, alias: str
) -> None:
    """Its pid is gone, so nobody waits for the silence."""
    intent = an_intent(gateway="gw-dead")
    await query(
        alias,
        "INSERT INTO ledger_gateway (gateway, host, pid, beat) VALUES (%s, %s, %s, 0)",
        "gw-dead",
        "host-a",
        2**22 - 3,
    )
    await ledger.admit(intent)
    reaper = a_reaper(ledger, "gw-new", ManualClock())
    assert await reaper.start() >= 1
    assert (await _end_of(alias, intent))[0] == "unknown"
    await reaper.stop()


async def test_a_request_its_own_gateway_forgot_is_closed_after_a_minute(
    ledger: LedgerStore, alias: str
) -> None:
    """An admission that was given up while it waited leaves no reservation behind."""
    clock = ManualClock()
    forgotten, served = an_intent(gateway="gw-e"), an_intent(gateway="gw-e")
    reaper = a_reaper(ledger, "gw-e", clock, served.request_id)
    await reaper.start()
    await ledger.admit(forgotten)
    await ledger.admit(served)
    assert await reaper.beat() == 0
    clock.time += 61
    assert await reaper.beat() == 1
    assert (await _end_of(alias, forgotten))[0] == "unknown"
    assert (await _end_of(alias, served))[0] == ""
    await reaper.stop()


async def test_without_a_store_nothing_is_admitted(tmp_path: Path) -> None:
    """The caller is told AuditUnavailable, and soon."""
    connections.databases["nowhere"] = _sqlite(tmp_path / "absent")
    store = LedgerStore("nowhere")
    began = time.monotonic()
    with pytest.raises(AuditUnavailable):
        await store.admit(an_intent())
    await store.close()
    del connections.databases["nowhere"]
    assert time.monotonic() - began < 5
