"""Budgets hold to the last token and picodollar, on SQLite and on PostgreSQL.

A request of ``an_intent`` asks for 100 tokens and ends having used 50 of them; at ``PRICE`` that is
at most 42 millionths of a dollar, of which 12 are due.
"""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from controlplane.adapters.ledger.budgets import asked_price
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.ports import BudgetExceeded, Intent
from controlplane.domain.budget import Budget, period_start
from tests.contracts.ledgers import (
    AT,
    a_budget,
    a_name,
    an_end,
    an_intent,
    query,
    set_budgets,
)

DAY = 86_400.0
ASKED, DUE = 42_000_000, 12_000_000  # picodollars of one request: at most, and as it ends


async def refused(ledger: LedgerStore, intent: Intent) -> BudgetExceeded:
    with pytest.raises(BudgetExceeded) as error:
        await ledger.admit(intent)
    return error.value


@pytest.mark.parametrize(("unit", "limit"), [("tokens", 1000), ("money", 10 * ASKED)])
async def test_200_concurrent_requests_on_a_budget_for_10_admit_exactly_10(
    alias: str, unit: str, limit: int
) -> None:
    """On two gateways at once: the admitted use up the budget and never pass it."""
    stores, tenant = [LedgerStore(alias), LedgerStore(alias)], a_name()
    await set_budgets(alias, tenant, a_budget(limit, unit=unit))
    results = await asyncio.gather(
        *(stores[i % 2].admit(an_intent(tenant_id=tenant)) for i in range(200)),
        return_exceptions=True,
    )
    for store in stores:
        await store.close()
    assert Counter(type(result) for result in results) == {type(None): 10, BudgetExceeded: 190}


async def test_a_refusal_prints_its_numbers_and_consumes_nothing(
    ledger: LedgerStore, alias: str
) -> None:
    """Limit, spent, reserved and asked are those of the moment of the check."""
    tenant = a_name()
    await set_budgets(alias, tenant, a_budget(240))
    first = an_intent(tenant_id=tenant)
    await ledger.admit(first)
    await ledger.settle(an_end(first))
    await ledger.admit(an_intent(tenant_id=tenant))
    error = await refused(ledger, an_intent(tenant_id=tenant))
    assert (error.budget.limit, error.spent, error.reserved, error.asked) == (240, 50, 100, 100)
    assert str(error) == "budget 240, spent 50, reserved 100, this request needs 100"
    count = "SELECT COUNT(*) FROM ledger_request WHERE tenant_id = %s"
    assert await query(alias, count, tenant) == [(2,)]


async def test_money_is_reserved_at_its_most_and_captured_as_used(
    ledger: LedgerStore, alias: str
) -> None:
    tenant = a_name()
    await set_budgets(alias, tenant, a_budget(ASKED + DUE, unit="money"))
    first, second = an_intent(tenant_id=tenant), an_intent(tenant_id=tenant)
    assert asked_price(first) == ASKED
    await ledger.admit(first)
    error = await refused(ledger, second)
    assert str(error) == (
        "budget 0.000054, spent 0, reserved 0.000042, this request needs 0.000042"
    )
    await ledger.settle(an_end(first))
    await ledger.admit(second)


async def test_settling_frees_what_was_reserved_but_not_used(
    ledger: LedgerStore, alias: str
) -> None:
    """After 50 of 100 reserved tokens were used, 50 are free again."""
    first = an_intent()
    await set_budgets(alias, first.tenant_id, a_budget(150))
    await ledger.admit(first)
    second = an_intent(tenant_id=first.tenant_id)
    await refused(ledger, second)
    await ledger.settle(an_end(first))
    await ledger.admit(second)


async def test_every_budget_that_matches_must_hold(ledger: LedgerStore, alias: str) -> None:
    """One of the tenant, one of a key, one of a model; a JWT is limited as a key is."""
    tenant = a_name()
    await set_budgets(
        alias,
        tenant,
        a_budget(450),
        a_budget(100, budget_id="ann", scope="key", target="jwt:ann"),
        a_budget(200, budget_id="big", scope="model", target="big"),
    )

    def asks(subject: str, model: str) -> Intent:
        return an_intent(tenant_id=tenant, subject=subject, version_id=f"{model}@v1")

    await ledger.admit(asks("jwt:ann", "small"))
    assert (await refused(ledger, asks("jwt:ann", "small"))).budget.budget_id == "ann"
    await ledger.admit(asks("4f2a", "big"))
    await ledger.admit(asks("jwt:bob", "big"))
    assert (await refused(ledger, asks("jwt:bob", "big"))).budget.budget_id == "big"
    await ledger.admit(asks("jwt:bob", "bigger"))
    assert (await refused(ledger, asks("jwt:bob", "small"))).budget.budget_id == "all"
    assert (await refused(ledger, asks("jwt:ann", "big"))).budget.budget_id == "all"


async def test_a_budget_of_zero_admits_nothing_and_no_budget_everything(
    ledger: LedgerStore, alias: str
) -> None:
    """Zero is a budget; its absence is none."""
    intent = an_intent()
    await set_budgets(alias, intent.tenant_id, a_budget(0))
    await refused(ledger, intent)
    await set_budgets(alias, intent.tenant_id)
    await ledger.admit(intent)


async def test_a_change_holds_in_the_next_admission_of_every_gateway(alias: str) -> None:
    """Nothing is remembered between two transactions: a raise, a cut and a reset hold at once."""
    stores, tenant = [LedgerStore(alias), LedgerStore(alias)], a_name()

    async def admitted() -> list[bool]:
        results = await asyncio.gather(
            *(store.admit(an_intent(tenant_id=tenant)) for store in stores),
            return_exceptions=True,
        )
        return [result is None for result in results]

    await set_budgets(alias, tenant, a_budget(0))
    assert await admitted() == [False, False]
    await set_budgets(alias, tenant, a_budget(200))
    assert await admitted() == [True, True]
    await set_budgets(alias, tenant, a_budget(399))
    assert sorted(await admitted()) == [False, True]
    await set_budgets(alias, tenant, a_budget(1))
    assert await admitted() == [False, False]
    for store in stores:
        await store.close()


async def test_a_reset_forgives_what_was_spent_in_its_period_only(
    ledger: LedgerStore, alias: str
) -> None:
    """The next day starts from nothing anyway; nothing is forgiven twice."""
    tenant = a_name()
    spent = an_intent(tenant_id=tenant)
    await ledger.admit(spent)
    await ledger.settle(an_end(spent))
    daily = a_budget(100, period="day")
    await set_budgets(alias, tenant, daily)
    assert (await refused(ledger, an_intent(tenant_id=tenant))).spent == 50
    await set_budgets(alias, tenant, a_budget(100, period="day", forgiven=50, forgiven_at=AT))
    again = an_intent(tenant_id=tenant)
    await ledger.admit(again)
    await ledger.settle(an_end(again))
    assert (await refused(ledger, an_intent(tenant_id=tenant))).spent == 50
    tomorrow = an_intent(tenant_id=tenant, at=AT + DAY)
    await ledger.admit(tomorrow)
    await ledger.settle(an_end(tomorrow))
    assert (await refused(ledger, an_intent(tenant_id=tenant, at=AT + DAY))).spent == 50


async def test_a_budget_counts_its_own_period(ledger: LedgerStore, alias: str) -> None:
    """What was spent last month counts in a total budget and not in a monthly one."""
    old = an_intent()
    await ledger.admit(old)
    await ledger.settle(an_end(old))
    later: dict[str, Any] = {"tenant_id": old.tenant_id, "at": AT + 40 * DAY}
    await set_budgets(alias, old.tenant_id, a_budget(140, period="total"))
    await refused(ledger, an_intent(**later))
    await set_budgets(alias, old.tenant_id, a_budget(140))
    await ledger.admit(an_intent(**later))


async def test_what_began_yesterday_holds_nothing_of_today(ledger: LedgerStore, alias: str) -> None:
    """Its tokens will be charged to the day it was admitted; that day is still full."""
    old = an_intent()
    await set_budgets(alias, old.tenant_id, a_budget(100, period="day"))
    await ledger.admit(old)
    await ledger.admit(an_intent(tenant_id=old.tenant_id, at=AT + DAY))
    error = await refused(ledger, an_intent(tenant_id=old.tenant_id))
    assert (error.spent, error.reserved) == (0, 200)


def test_a_period_begins_at_midnight_utc() -> None:
    """Day, month and total, at 2023-11-14 22:13 UTC."""
    starts = [period_start(period, AT) for period in ("day", "month", "total")]
    assert starts == ["2023-11-14", "2023-11-01", ""]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_whatever_happens_no_budget_is_passed_and_none_refuses_what_fits(
    alias: str, seed: int
) -> None:
    """Random keys, models, sizes and ends on two gateways, against a model of the rule."""
    choose, tenant = random.Random(seed), a_name()
    stores = [LedgerStore(alias), LedgerStore(alias)]
    budgets = (
        a_budget(900),
        a_budget(400, budget_id="key", scope="key", target="k1"),
        a_budget(10 * ASKED, budget_id="model", scope="model", target="m1", unit="money"),
    )
    await set_budgets(alias, tenant, *budgets)
    used, live = Counter[str](), list[Intent]()
    for _ in range(80):
        if live and choose.random() < 0.5:
            intent = live.pop(choose.randrange(len(live)))
            end = an_end(intent, num_prompt_tokens=40, num_output_tokens=choose.randint(0, 9))
            await choose.choice(stores).settle(end)
            tokens, price = (
                40 + end.num_output_tokens,
                40 * 150_000 + end.num_output_tokens * 600_000,
            )
            for budget in _matching(budgets, intent):
                used[budget.budget_id] += price if budget.unit == "money" else tokens
            continue
        intent = an_intent(
            tenant_id=tenant, subject=f"k{choose.randint(1, 2)}",
            version_id=f"m{choose.randint(1, 2)}@v1", max_output_tokens=choose.randint(1, 60),
        )  # fmt: skip
        fits = all(
            used[one.budget_id] + sum(_most(one, i) for i in live if one in _matching(budgets, i))
            + _most(one, intent) <= one.limit
            for one in _matching(budgets, intent)
        )  # fmt: skip
        try:
            await choose.choice(stores).admit(intent)
            live.append(intent)
            assert fits
        except BudgetExceeded:
            assert not fits
    for store in stores:
        await store.close()


def _matching(budgets: tuple[Budget, ...], intent: Intent) -> list[Budget]:
    names = {"", intent.subject, intent.version_id.removesuffix("@v1")}
    return [one for one in budgets if one.target in names]


def _most(budget: Budget, intent: Intent) -> int:
    if budget.unit == "money":
        return 40 * 150_000 + intent.max_output_tokens * 600_000
    return 40 + intent.max_output_tokens
