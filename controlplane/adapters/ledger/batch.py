"""What one transaction of the ledger does: settle, then check budgets and admit.

Settling first frees what the batch's own admissions may need. A worked example, budget 100 tokens
a month, 60 spent, one live reservation of 30, and in one batch ``settle(live, used 10)``,
``admit(a, asks 20)``, ``admit(b, asks 20)``::

    settle    spent 60 + 10 = 70, reserved 30 - 30 = 0
    a         70 + 0 + 20 <= 100    admitted, reserved 20
    b         70 + 20 + 20 > 100    BudgetExceeded(limit 100, spent 70, reserved 20, asked 20)

Another gateway's batch waits at BEGIN IMMEDIATE (SQLite) or at the tenant's advisory lock
(PostgreSQL), so each check sees every earlier reservation and K requests on R gateways overrun a
budget by nothing.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

from controlplane.adapters.ledger.statements import Statements
from controlplane.application.failpoints import passing
from controlplane.application.ports import BudgetExceeded, Intent, Terminal
from controlplane.domain import money
from controlplane.domain.money import Price


class Cursor(Protocol):
    """The part of a DB-API cursor that both drivers share."""

    def execute(self, sql: Any, parameters: Any = ..., /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


def day_of(at: float) -> str:
    """The UTC date of ``at`` (Unix seconds): ``day_of(0) == "1970-01-01"``."""
    return _date(int(at // 86_400))


@lru_cache(64)
def _date(days: int) -> str:
    return (date(1970, 1, 1) + timedelta(days)).isoformat()


def period_start(period: str, at: float) -> str:
    """First day of the ``day``, ``month`` or ``total`` period that ``at`` lies in."""
    day = day_of(at)
    return {"day": day, "month": f"{day[:7]}-01"}.get(period, "")


def asked_tokens(intent: Intent) -> int:
    return intent.num_prompt_tokens + intent.max_output_tokens


def settle_all(cursor: Cursor, sql: Statements, terminals: Sequence[Terminal]) -> set[str]:
    """Complete the live requests among ``terminals``; the ids of those completed here."""
    wanted = {terminal.request_id: terminal for terminal in terminals}
    cursor.execute(sql.unsettled, (_json(list(wanted)),))
    live: list[Any] = msgspec.json.decode(cursor.fetchall()[0][0])
    if not live:
        return set()
    cursor.execute(sql.take_positions, (len(live),))
    first = cursor.fetchall()[0][0] - len(live) + 1
    passing("settle.positions")
    ended = [_ended(row, wanted[row[0]]) for row in live]
    rows = [_terminal_row(one, first + i) for i, one in enumerate(ended)]
    cursor.execute(sql.settle, (_json(rows),))
    passing("settle.rows")
    cursor.execute(sql.add_usage, (_json(_usage_rows(ended)),))
    passing("settle.usage")
    return {row[0] for row in live}


class _Ended(NamedTuple):
    """A live request's intent, as far as it counts now, its end, and what it costs."""

    tenant_id: str
    day: str
    version_id: str
    terminal: Terminal
    price: int


def _ended(row: Sequence[Any], terminal: Terminal) -> _Ended:
    _, tenant, day, version, *price = row
    prompt, output = terminal.num_prompt_tokens, terminal.num_output_tokens
    cost = money.cost(Price(*price), prompt, terminal.num_cached_tokens, output)
    return _Ended(tenant, day, version, terminal, cost)


def admit_all(
    cursor: Cursor, sql: Statements, intents: Sequence[Intent]
) -> list[BudgetExceeded | None]:
    """Insert those that fit their budget; for each intent None, or why not."""
    budgets = _read_budgets(cursor, sql, intents)
    outcomes = [_check(intent, budgets) for intent in intents]
    rows = [_intent_row(i) for i, refusal in zip(intents, outcomes, strict=True) if not refusal]
    passing("admit.checked")
    if rows:
        cursor.execute(sql.insert_intents, (_json(rows),))
        passing("admit.rows")
    return outcomes


def _read_budgets(
    cursor: Cursor, sql: Statements, intents: Sequence[Intent]
) -> dict[tuple[str, str], list[int]]:
    """(tenant, first day of the period) -> [spent, reserved], locked in one global order."""
    keys = {_budget_key(intent) for intent in intents if intent.budget_tokens is not None}
    if sql.lock_tenant:
        for tenant in sorted({tenant for tenant, _ in keys}):
            cursor.execute(sql.lock_tenant, (tenant,))
    found = {}
    for tenant, start in sorted(keys):
        cursor.execute(sql.budget, (tenant, start, tenant))
        found[tenant, start] = [int(value) for value in cursor.fetchone()]
    return found


def _budget_key(intent: Intent) -> tuple[str, str]:
    return intent.tenant_id, period_start(intent.budget_period, intent.at)


def _check(intent: Intent, budgets: dict[tuple[str, str], list[int]]) -> BudgetExceeded | None:
    asked = asked_tokens(intent)
    if intent.budget_tokens is not None:
        spent, reserved = budgets[_budget_key(intent)]
        if spent + reserved + asked > intent.budget_tokens:
            return BudgetExceeded(intent.budget_tokens, spent, reserved, asked)
    for (tenant, _), figures in budgets.items():
        if tenant == intent.tenant_id:
            figures[1] += asked
    return None


def _intent_row(intent: Intent) -> tuple[Any, ...]:
    return (
        intent.request_id,
        intent.tenant_id,
        intent.subject,
        intent.endpoint,
        intent.requested_model,
        intent.route,
        intent.arm,
        intent.version_id,
        intent.latency_class,
        intent.num_prompt_tokens,
        intent.max_output_tokens,
        asked_tokens(intent),
        intent.at,
        day_of(intent.at),
        intent.gateway,
        *msgspec.structs.astuple(intent.price),
    )


def _terminal_row(ended: _Ended, position: int) -> tuple[Any, ...]:
    terminal = ended.terminal
    return (
        terminal.request_id,
        position,
        terminal.outcome,
        terminal.finish_reason,
        terminal.error_code,
        terminal.node_id,
        terminal.replica_id,
        terminal.num_prompt_tokens,
        terminal.num_cached_tokens,
        terminal.num_output_tokens,
        ended.price,
        terminal.ttft_ms,
        terminal.queue_ms,
        terminal.duration_ms,
        terminal.at,
        terminal.attempts,
    )


def _usage_rows(ended: Sequence[_Ended]) -> list[tuple[Any, ...]]:
    """Per (tenant, day, version), sorted so that two gateways lock rows in the same order."""
    totals: dict[tuple[str, str, str], Counter[str]] = {}
    for one in ended:
        total = totals.setdefault((one.tenant_id, one.day, one.version_id), Counter())
        total["requests"] += 1
        total["prompt"] += one.terminal.num_prompt_tokens
        total["output"] += one.terminal.num_output_tokens
        total["price"] += one.price
    return [
        (*key, total["requests"], total["prompt"], total["output"], *money.split(total["price"]))
        for key, total in sorted(totals.items())
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
