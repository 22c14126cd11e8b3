"""The contract of ``ports.Ledger``, on SQLite and on PostgreSQL."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from controlplane.adapters.ledger.reaper import Reaper
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.capture import EncryptedText
from controlplane.application.orphans import Answers, Produced
from controlplane.application.ports import AuditUnavailable, Intent
from controlplane.domain import money
from controlplane.domain.money import Price
from tests.contracts.ledgers import AT, PRICE, NoNodes, an_end, an_intent, query, sqlite_settings


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
        " WHERE tenant_id = %s AND scope = 'tenant'",
        intent.tenant_id,
    ) == [(1, 40, 10)]


async def test_a_text_is_on_record_with_its_end_or_not_at_all(
    ledger: LedgerStore, alias: str
) -> None:
    """In one transaction with the terminal record, which holds its hash; a second end has none."""
    silent, spoken = an_intent(), an_intent()
    text = EncryptedText(3, b"n" * 12, bytes(range(256)))
    for intent in (silent, spoken):
        await ledger.admit(intent)
    await asyncio.gather(ledger.settle(an_end(silent)), ledger.settle(an_end(spoken, text=text)))
    assert await ledger.settle(an_end(silent, text=text)) is False
    records = "SELECT text_hash FROM ledger_request WHERE request_id = %s"
    assert await query(alias, records, silent.request_id) == [("",)]
    assert await query(alias, records, spoken.request_id) == [(text.hash,)]
    kept = await query(
        alias,
        "SELECT request_id, generation, nonce, ciphertext FROM ledger_text WHERE tenant_id = %s",
        spoken.tenant_id,
    )
    assert [(*row[:2], bytes(row[2]), bytes(row[3])) for row in kept] == [
        (spoken.request_id, 3, text.nonce, text.ciphertext)
    ]


async def test_settling_an_unknown_request_does_nothing(ledger: LedgerStore) -> None:
    """There is no terminal record without an intent."""
    assert await ledger.settle(an_end(an_intent())) is False


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
    """Of the tenant, of each key and of each model: every total is the sum of its records."""
    intents = [
        an_intent(tenant_id="sum", subject=f"k{i % 4}", version_id=f"m{i % 3}@v{i % 2}")
        for i in range(30)
    ]
    await asyncio.gather(*(ledger.admit(intent) for intent in intents))
    ends = [an_end(intent, num_output_tokens=i) for i, intent in enumerate(intents)]
    await asyncio.gather(*(ledger.settle(end) for end in ends))
    totals = "COUNT(*), SUM(num_prompt_tokens), SUM(num_output_tokens), SUM(price)"
    of_tenant = "FROM ledger_request WHERE tenant_id = 'sum'"
    records = {
        "tenant": await query(alias, f"SELECT '', {totals} {of_tenant}"),
        "key": await query(alias, f"SELECT subject, {totals} {of_tenant} GROUP BY 1 ORDER BY 1"),
        "model": await query(
            alias, f"SELECT substr(version_id, 1, 2), {totals} {of_tenant} GROUP BY 1 ORDER BY 1"
        ),
    }
    for scope, expected in records.items():
        usage = await query(
            alias,
            "SELECT target, num_requests, num_prompt_tokens, num_output_tokens,"
            " price_milli * 1000000000 + price_pico"
            " FROM ledger_usage WHERE tenant_id = 'sum' AND scope = %s ORDER BY target",
            scope,
        )
        assert usage == expected, scope
    assert [len(rows) for rows in records.values()] == [1, 4, 3]


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
        alias,
        "SELECT price_milli, price_pico FROM ledger_usage"
        " WHERE tenant_id = 'rich' AND scope = 'key'",
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
    return Reaper(store, gateway, "host-a", clock, lambda: live, NoNodes())


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


class ToldFleet:
    """``orphans.Nodes`` that answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers = Answers(is_complete=False)
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def close(self, gateway: str, request_ids: Sequence[str]) -> Answers:
        self.asked.append((gateway, tuple(request_ids)))
        if self.meanwhile is not None:
            await self.meanwhile()
        return self.answers


def produced(tokens: int) -> Produced:
    return Produced("n1", -1, 1, "m.1", tokens, 0, "cancelled", "", None, 20.0, 4.0)


async def _dies(ledger: LedgerStore, alias: str, gateway: str) -> tuple[Intent, Intent]:
    """A gateway that is gone, and two requests that it had noted 7 tokens of."""
    insert = "INSERT INTO ledger_gateway (gateway, host, pid, beat) VALUES (%s, %s, %s, 0)"
    await query(alias, insert, gateway, "host-a", 2**22 - 3)
    one, two = an_intent(gateway=gateway), an_intent(gateway=gateway)
    for intent in (one, two):
        await ledger.admit(intent)
    await ledger.progress({one.request_id: 7, two.request_id: 7})
    return one, two


async def _code_of(alias: str, intent: Intent) -> str:
    sql = "SELECT error_code FROM ledger_request WHERE request_id = %s"
    return str((await query(alias, sql, intent.request_id))[0][0])


async def test_the_nodes_counts_close_a_dead_gateways_requests(
    ledger: LedgerStore, alias: str
) -> None:
    """What one node is sure of at once, the rest as noted once the others were silent too long."""
    one, two = await _dies(ledger, alias, "gw-told")
    clock, fleet = ManualClock(), ToldFleet()
    fleet.answers = Answers({one.request_id: [produced(23)]}, is_complete=False)
    reaper = Reaper(ledger, "gw-f", "host-a", clock, lambda: (), fleet)
    assert await reaper.start() >= 1
    assert await _end_of(alias, one) == ("unknown", 40, 23)
    closed: list[int] = []
    while not closed or not closed[-1]:
        clock.time += 5
        closed.append(await reaper.beat())
    assert closed[:-1] == [0, 0, 0, 0]  # 25 s
    assert await _end_of(alias, two) == ("unknown", 40, 7)
    codes = [await _code_of(alias, one), await _code_of(alias, two)]
    assert codes == ["gateway_lost", "gateway_lost_unconfirmed"]
    asked = [set(ids) for gateway, ids in fleet.asked if gateway == "gw-told"]
    assert asked == [{one.request_id, two.request_id}] + [{two.request_id}] * 5
    known = "SELECT gateway FROM ledger_gateway WHERE gateway = 'gw-told'"
    assert await query(alias, known) == []
    tries = "SELECT node_id, num_output_tokens FROM ledger_attempt WHERE request_id = %s"
    assert await query(alias, tries, one.request_id) == [("n1", 23)]
    await reaper.stop()


async def test_two_reapers_close_a_request_once(ledger: LedgerStore, alias: str) -> None:
    """Both ask and both close, at the same time."""
    one, two = await _dies(ledger, alias, "gw-twice")
    fleet = ToldFleet()
    fleet.answers = Answers({i.request_id: [produced(9)] for i in (one, two)})
    names = ("gw-g", "gw-h")
    reapers = [Reaper(ledger, n, "host-a", ManualClock(), lambda: (), fleet) for n in names]
    assert sum(await asyncio.gather(*(one.start() for one in reapers))) == 2
    assert await _end_of(alias, one) == await _end_of(alias, two) == ("unknown", 40, 9)
    for reaper in reapers:
        await reaper.stop()


async def test_a_gateway_that_wakes_while_the_nodes_are_asked_keeps_its_requests(
    ledger: LedgerStore, alias: str
) -> None:
    """It was only paused: its beat has moved, so it settles them itself, once."""
    one, two = await _dies(ledger, alias, "gw-woken")
    clock, fleet = ManualClock(), ToldFleet()
    fleet.answers = Answers({one.request_id: [produced(23)]})
    woken = Reaper(ledger, "gw-woken", "host-a", clock, lambda: (), fleet)
    fleet.meanwhile = woken.register
    reaper = Reaper(ledger, "gw-i", "host-a", clock, lambda: (), fleet)
    assert await reaper.start() == 0
    fleet.meanwhile = None
    assert await reaper.beat() == 0
    assert await ledger.settle(an_end(one, num_output_tokens=24)) is True
    assert await _end_of(alias, one) == ("ok", 40, 24)
    assert (await _end_of(alias, two))[0] == ""
    assert await ledger.settle(an_end(two)) is True
    await woken.stop()
    await reaper.stop()


async def test_a_gateway_that_settles_while_the_nodes_are_asked_wins(
    ledger: LedgerStore, alias: str
) -> None:
    """The reaper finds nothing left to close, and usage counts the request once."""
    one, two = await _dies(ledger, alias, "gw-quick")
    fleet = ToldFleet()
    fleet.answers = Answers({i.request_id: [produced(23)] for i in (one, two)})
    fleet.meanwhile = lambda: ledger.settle(an_end(one, num_output_tokens=24))
    reaper = Reaper(ledger, "gw-j", "host-a", ManualClock(), lambda: (), fleet)
    assert await reaper.start() == 1
    assert await _end_of(alias, one) == ("ok", 40, 24)
    assert await _end_of(alias, two) == ("unknown", 40, 23)
    assert await ledger.settle(an_end(two)) is False
    await reaper.stop()


async def test_without_a_store_nothing_is_admitted(tmp_path: Path) -> None:
    """The caller is told AuditUnavailable, and soon."""
    connections.databases["nowhere"] = sqlite_settings(tmp_path / "absent")
    store = LedgerStore("nowhere")
    began = time.monotonic()
    with pytest.raises(AuditUnavailable):
        await store.admit(an_intent())
    await store.close()
    del connections.databases["nowhere"]
    assert time.monotonic() - began < 5
