"""Whether requests fit their tenants' budgets, within the transaction that admits them.

What applies, what is spent and what is held are all read in that transaction, so a budget that was
changed before it began holds in it, whichever process changed it. (Each gateway's own copy of the
budgets was rejected: a raise would then hold everywhere only once the slowest had followed the
log.) Worked example, a budget of 100 tokens a month of which 60 are spent, one live request that
holds 30, and in one batch ``settle(live, used 10)``, ``admit(a, asks 20)``, ``admit(b, asks 20)``::

    settle    spent 60 + 10 = 70, held 30 - 30 = 0
    a         70 + 0 + 20 <= 100    admitted, holds 20
    b         70 + 20 + 20 > 100    BudgetExceeded(limit 100, spent 70, reserved 20, asked 20)

Another gateway's batch waits at BEGIN IMMEDIATE (SQLite) or at the tenant's advisory lock
(PostgreSQL), so each check sees every earlier reservation, and K requests on R gateways overrun a
budget by nothing. Only tenants that have a budget are locked: where the very first one is set while
a batch is being committed, that batch was admitted before it.

A request is charged to the day it was admitted, so it holds tokens only in periods with that day:
one that runs past midnight takes nothing from the new day's budget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from controlplane.adapters.ledger.statements import Statements
from controlplane.application.ports import BudgetExceeded, Intent
from controlplane.domain import money
from controlplane.domain.budget import Budget, applies, counted, day_of, period_start

_decode_budgets = lru_cache(1024)(msgspec.json.Decoder(tuple[Budget, ...]).decode)


class Cursor(Protocol):
    """The part of a DB-API cursor that both drivers share."""

    def execute(self, sql: Any, parameters: Any = ..., /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


def asked_tokens(intent: Intent) -> int:
    return intent.num_prompt_tokens + intent.max_output_tokens


def asked_price(intent: Intent) -> int:
    """The most the request can cost, in picodollars: nothing cached, all generated."""
    return money.cost(intent.price, intent.num_prompt_tokens, 0, intent.max_output_tokens)


def model_of(version_id: str) -> str:
    return version_id.partition("@")[0]


@dataclass
class Account:
    """One budget in one period, that begins on the day ``start``; figures in the budget's unit."""

    budget: Budget
    start: str
    spent: int = 0
    held: int = 0

    def asked(self, intent: Intent) -> int:
        return asked_price(intent) if self.budget.unit == "money" else asked_tokens(intent)

    def covers(self, intent: Intent) -> bool:
        return applies(self.budget, intent.subject, model_of(intent.version_id))


class Accounts:
    """The accounts of all tenants of a batch that have budgets."""

    def __init__(self, cursor: Cursor, sql: Statements, intents: Sequence[Intent]) -> None:
        budgets = _read_budgets(cursor, sql, {intent.tenant_id for intent in intents})
        self._of = _opened(budgets, intents)
        if self._of:
            _lock(cursor, sql, self._of)
            _read_spent(cursor, sql, self._of)
            _read_held(cursor, sql, self._of)

    def admit(self, intent: Intent) -> BudgetExceeded | None:
        """Hold what the request may at most use, or say which budget it does not fit."""
        concerned = [one for one in self._of.get(intent.tenant_id, ()) if one.covers(intent)]
        for one in concerned:
            asked, now = one.asked(intent), period_start(one.budget.period, intent.at)
            if one.start == now and one.spent + one.held + asked > one.budget.limit:
                return BudgetExceeded(one.budget, one.spent, one.held, asked)
        for one in concerned:
            if one.start <= day_of(intent.at):
                one.held += one.asked(intent)
        return None


_Open = dict[str, list[Account]]


def _read_budgets(
    cursor: Cursor, sql: Statements, tenants: Iterable[str]
) -> dict[str, tuple[Budget, ...]]:
    cursor.execute(sql.budgets, (_json(sorted(tenants)),))
    found: list[tuple[str, msgspec.Raw]] = msgspec.json.decode(
        cursor.fetchall()[0][0], type=list[tuple[str, msgspec.Raw]]
    )
    return {tenant: _decode_budgets(bytes(text)) for tenant, text in found}


def _opened(budgets: dict[str, tuple[Budget, ...]], intents: Sequence[Intent]) -> _Open:
    """One account for each budget and each of its periods in which a request of the batch is."""
    times = {(intent.tenant_id, day_of(intent.at)): intent.at for intent in intents if budgets}
    keys = {
        (tenant, budget, period_start(budget.period, at))
        for (tenant, _), at in times.items()
        for budget in budgets.get(tenant, ())
    }
    opened: _Open = {}
    for tenant, budget, start in sorted(keys, key=lambda key: (key[0], key[1].budget_id, key[2])):
        opened.setdefault(tenant, []).append(Account(budget, start))
    return opened


def _lock(cursor: Cursor, sql: Statements, opened: _Open) -> None:
    """In one order everywhere, or two gateways would wait for one another."""
    if sql.lock_tenant:
        for tenant in sorted(opened):
            cursor.execute(sql.lock_tenant, (tenant,))


def _read_spent(cursor: Cursor, sql: Statements, opened: _Open) -> None:
    accounts = [(tenant, one) for tenant, many in opened.items() for one in many]
    asked = [
        (index, tenant, one.budget.scope, one.budget.target, one.start)
        for index, (tenant, one) in enumerate(accounts)
    ]
    cursor.execute(sql.spent, (_json(asked),))
    for index, tokens, milli, pico in msgspec.json.decode(cursor.fetchall()[0][0]):
        one = accounts[index][1]
        spent = money.join(milli, pico) if one.budget.unit == "money" else tokens
        one.spent = counted(one.budget, one.start, spent)


def _read_held(cursor: Cursor, sql: Statements, opened: _Open) -> None:
    cursor.execute(sql.held, (_json(sorted(opened)),))
    for tenant, subject, version, day, tokens, milli, pico in msgspec.json.decode(
        cursor.fetchall()[0][0]
    ):
        for one in opened[tenant]:
            if one.start <= day and applies(one.budget, subject, model_of(version)):
                one.held += money.join(milli, pico) if one.budget.unit == "money" else tokens


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
