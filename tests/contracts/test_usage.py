"""Every total equals the sum of its records, and a check finds the one that does not."""

import asyncio
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.adapters.ledger import reconcile, rollup
from controlplane.adapters.ledger.models import Check, Rollup
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.ports import Attempt, Intent
from controlplane.dispatch.record import decode, recompute
from controlplane.domain import money
from controlplane.domain.money import Price
from tests.contracts.ledgers import AT, a_name, an_end, an_intent, in_thread, query

GOLDEN = Path(__file__).parents[1] / "dispatch" / "golden" / "dispatch_1.json"


async def run_requests(ledger: LedgerStore, tenant: str, seed: int, count: int) -> list[Intent]:
    """Of many kinds, some of which fail or are still running."""
    choose = random.Random(seed)
    intents = [
        an_intent(
            tenant_id=tenant,
            subject=choose.choice(["k1", "jwt:ann"]),
            end_user=choose.choice(["", "u1"]),
            version_id=choose.choice(["m@v1", "m@v2", "n@v1"]),
            route=(route := choose.choice(["", "chat"])),
            arm=route and choose.choice(["a", "b"]),
            at=AT + choose.random() * 90_000,
            price=Price(money.MAX_PRICE - choose.randint(0, 9), 7, choose.randint(0, 10**9)),
        )
        for _ in range(count)
    ]
    await asyncio.gather(*(ledger.admit(intent) for intent in intents))
    ended = intents[: count - count // 5]
    ends = [
        an_end(
            intent, num_output_tokens=choose.randint(0, 2**32),
            num_cached_tokens=choose.randint(0, 40),
            outcome=choose.choice(["ok", "cancelled", "error"]),
        )
        for intent in ended
    ]  # fmt: skip
    await asyncio.gather(*(ledger.settle(end) for end in ends))
    return ended


async def test_roll_ups_by_anything_are_the_sums_of_the_records(
    ledger: LedgerStore, alias: str
) -> None:
    """Tenant, key, user, version, arm and hour; records that run are in none."""
    tenant = a_name()
    ended = await run_requests(ledger, tenant, 1, 60)
    await in_thread(alias, lambda: rollup.catch_up_all(alias))
    for columns in ("tenant_id", "subject", "end_user", "version_id", "route, arm"):
        records = await query(
            alias,
            f"SELECT {columns}, COUNT(*), SUM(num_prompt_tokens), SUM(num_output_tokens),"
            " SUM(price / 1000000000) * 1.0"
            f" FROM ledger_request WHERE tenant_id = %s AND outcome <> '' GROUP BY {columns}"
            f" ORDER BY {columns}",
            tenant,
        )
        totals = await query(
            alias,
            f"SELECT {columns}, SUM(num_requests), SUM(num_prompt_tokens), SUM(num_output_tokens)"
            f" FROM ledger_rollup WHERE tenant_id = %s GROUP BY {columns} ORDER BY {columns}",
            tenant,
        )
        assert [tuple(row[:-1]) for row in records] == [tuple(row) for row in totals], columns
    prices = await query(alias, "SELECT price FROM ledger_request WHERE tenant_id = %s", tenant)
    rows = Rollup.objects.using(alias).filter(tenant_id=tenant)
    due = sum(price for (price,) in prices)
    assert (await in_thread(alias, lambda: rollup.total(rows)))["price"] == due > 2**63
    hours = await query(
        alias, "SELECT DISTINCT hour FROM ledger_rollup WHERE tenant_id = %s", tenant
    )
    assert {hour for (hour,) in hours} == {int(intent.at / 3600) for intent in ended}


async def test_a_record_is_added_once_by_however_many_and_in_steps(
    ledger: LedgerStore, alias: str
) -> None:
    tenant = a_name()
    ended = await run_requests(ledger, tenant, 2, 20)
    steps = [in_thread(alias, lambda: rollup.catch_up(7, alias)) for _ in range(6)]
    await asyncio.gather(*steps)
    await in_thread(alias, lambda: rollup.catch_up_all(alias))
    count = "SELECT SUM(num_requests) FROM ledger_rollup WHERE tenant_id = %s"
    assert await query(alias, count, tenant) == [(len(ended),)]


async def test_the_check_agrees_and_says_what_it_looked_at(ledger: LedgerStore, alias: str) -> None:
    await run_requests(ledger, a_name(), 3, 40)
    await in_thread(alias, lambda: rollup.catch_up_all(alias))
    result = await in_thread(alias, lambda: reconcile.check(alias))
    ((ended, last),) = await query(
        alias, "SELECT COUNT(*), MAX(position) FROM ledger_request WHERE outcome <> ''"
    )
    assert result.differences == ()
    assert (result.num_records, result.position) == (ended, last) and result.num_totals > 5
    await in_thread(alias, lambda: reconcile.keep(result, AT, alias))
    kept = await in_thread(alias, lambda: Check.objects.using(alias).get())
    assert (kept.at, kept.num_records, kept.num_differences) == (AT, ended, 0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE ledger_rollup SET num_output_tokens = num_output_tokens + 1", "num_output_tokens"),
        ("UPDATE ledger_rollup SET price_pico = price_pico - 1", "price is"),
        ("DELETE FROM ledger_rollup", "num_requests is 0"),
        ("UPDATE ledger_usage SET num_prompt_tokens = num_prompt_tokens + 1", "usage"),
        ("UPDATE ledger_request SET num_cached_tokens = num_cached_tokens + 1", "num_cached"),
        ("DELETE FROM ledger_request", "its records sum to 0"),
    ],
)
async def test_the_check_names_what_differs(
    ledger: LedgerStore, alias: str, damage: str, said: str
) -> None:
    """Whether a total or a record was changed; and rebuilding from the records mends roll-ups."""
    tenant = a_name()
    await run_requests(ledger, tenant, 4, 10)
    await in_thread(alias, lambda: rollup.catch_up_all(alias))
    await query(alias, f"{damage} WHERE tenant_id = %s", tenant)
    result = await in_thread(alias, lambda: reconcile.check(alias))
    assert result.differences and all(tenant in one for one in result.differences)
    assert any(said in one for one in result.differences), result.differences
    await query(alias, "DELETE FROM ledger_request WHERE tenant_id = %s", tenant)
    await query(alias, "DELETE FROM ledger_usage WHERE tenant_id = %s", tenant)
    await in_thread(alias, lambda: rollup.rebuild(alias))
    assert (await in_thread(alias, lambda: reconcile.check(alias))).differences == ()


async def test_a_check_hinders_no_admission(ledger: LedgerStore, alias: str) -> None:
    """While its snapshot is open, requests begin and end."""
    opened, done = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        with reconcile._snapshot(alias) as fetch:
            fetch("SELECT COUNT(*) FROM ledger_request")
            loop.call_soon_threadsafe(opened.set)
            asyncio.run_coroutine_threadsafe(done.wait(), loop).result(10)

    holding = asyncio.create_task(in_thread(alias, hold))
    await opened.wait()
    intent = an_intent()
    await asyncio.wait_for(ledger.admit(intent), 2)
    assert await asyncio.wait_for(ledger.settle(an_end(intent)), 2)
    done.set()
    await holding


async def test_every_attempt_is_a_row_of_its_own(ledger: LedgerStore, alias: str) -> None:
    """Written with the terminal record, and not at all for one that had ended before."""
    intent = an_intent()
    lost = Attempt(0, 1, "n1", "m.v1.g1.0", "error", "node_lost", 0, 0, None, AT, 5.0)
    served = Attempt(0, 2, "n2", "m.v1.g1.1", "ok", "", 3, 10, 1.5, AT + 0.25, 20.0)
    await ledger.admit(intent)
    assert await ledger.settle(an_end(intent, attempts=2, tries=(lost, served)))
    assert not await ledger.settle(an_end(intent, tries=(lost,)))
    rows = await query(
        alias,
        "SELECT attempt, node_id, outcome, error_code, num_cached_tokens, num_output_tokens,"
        " queue_ms, started_at, duration_ms FROM ledger_attempt WHERE request_id = %s"
        " AND position = (SELECT position FROM ledger_request WHERE request_id = %s)"
        " ORDER BY attempt",
        intent.request_id,
        intent.request_id,
    )
    assert [tuple(row) for row in rows] == [
        (1, "n1", "error", "node_lost", 0, 0, None, AT, 5.0),
        (2, "n2", "ok", "", 3, 10, 1.5, AT + 0.25, 20.0),
    ]


async def test_why_a_replica_was_chosen_lies_beside_the_attempts(
    ledger: LedgerStore, alias: str
) -> None:
    """To the last bit; not at all of a request that had ended before."""
    intent, golden = an_intent(), GOLDEN.read_bytes().rstrip()
    one = decode(golden)
    await ledger.admit(intent)
    assert await ledger.settle(an_end(intent, dispatches=(one, replace(one, attempt=3))))
    assert not await ledger.settle(an_end(intent, dispatches=(one,)))
    rows = await query(
        alias,
        "SELECT data FROM ledger_dispatch WHERE request_id = %s AND position ="
        " (SELECT position FROM ledger_request WHERE request_id = %s) ORDER BY id",
        intent.request_id,
        intent.request_id,
    )
    assert rows[0][0].encode() == golden
    assert decode(rows[1][0]) == replace(one, attempt=3)
    assert len(rows) == 2 and recompute(decode(rows[0][0])) == ()
