"""What one transaction of the ledger does: settle, then check budgets and admit.

Settling first frees what the batch's own admissions may need; see ``budgets`` for the check.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from controlplane.adapters.ledger.budgets import (
    Accounts,
    Cursor,
    asked_price,
    asked_tokens,
    model_of,
)
from controlplane.adapters.ledger.statements import Statements
from controlplane.application.capture import EncryptedText
from controlplane.application.failpoints import passing
from controlplane.application.ports import BudgetExceeded, Intent, Terminal
from controlplane.dispatch import record
from controlplane.domain import money
from controlplane.domain.budget import day_of
from controlplane.domain.money import Price


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
    tries = [row for i, one in enumerate(ended) for row in _attempt_rows(one.terminal, first + i)]
    if tries:
        cursor.execute(sql.insert_attempts, (_json(tries),))
    for i, one in enumerate(ended):
        for dispatch in one.terminal.dispatches:
            data = record.encode(dispatch).decode()
            cursor.execute(sql.insert_dispatch, (one.terminal.request_id, first + i, data))
        if one.terminal.text is not None:
            _keep_text(cursor, sql, one.terminal.text, one, first + i)
    return {row[0] for row in live}


def _keep_text(
    cursor: Cursor, sql: Statements, text: EncryptedText, ended: "_Ended", position: int
) -> None:
    """Statements of their own, so that other requests' rows are none the longer for it."""
    about = (ended.terminal.request_id, ended.tenant_id, position, text.generation)
    cursor.execute(sql.insert_text, (*about, text.nonce, text.ciphertext, ended.terminal.at))
    cursor.execute(sql.hash_text, (text.hash, ended.terminal.request_id))
    passing("settle.text")


class _Ended(NamedTuple):
    """A live request's intent, as far as it counts now, its end, and what it costs."""

    tenant_id: str
    day: str
    subject: str
    version_id: str
    terminal: Terminal
    price: int


def _ended(row: Sequence[Any], terminal: Terminal) -> _Ended:
    _, tenant, day, subject, version, *price = row
    prompt, output = terminal.num_prompt_tokens, terminal.num_output_tokens
    cost = money.cost(Price(*price), prompt, terminal.num_cached_tokens, output)
    return _Ended(tenant, day, subject, version, terminal, cost)


def admit_all(
    cursor: Cursor, sql: Statements, intents: Sequence[Intent]
) -> list[BudgetExceeded | None]:
    """Insert those that fit their budgets; for each intent None, or why not."""
    accounts = Accounts(cursor, sql, intents)
    outcomes = [accounts.admit(intent) for intent in intents]
    rows = [_intent_row(i) for i, refusal in zip(intents, outcomes, strict=True) if not refusal]
    passing("admit.checked")
    if rows:
        cursor.execute(sql.insert_intents, (_json(rows),))
        passing("admit.rows")
    return outcomes


def _intent_row(intent: Intent) -> tuple[Any, ...]:
    return (
        intent.request_id,
        intent.tenant_id,
        intent.subject,
        intent.end_user,
        intent.endpoint,
        intent.requested_model,
        intent.route,
        intent.arm,
        intent.version_id,
        intent.latency_class,
        intent.num_prompt_tokens,
        intent.max_output_tokens,
        asked_tokens(intent),
        asked_price(intent),
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


def _attempt_rows(terminal: Terminal, position: int) -> list[tuple[Any, ...]]:
    return [
        (
            terminal.request_id,
            position,
            one.choice,
            one.attempt,
            one.node_id,
            one.replica_id,
            one.outcome,
            one.error_code,
            one.num_cached_tokens,
            one.num_output_tokens,
            one.queue_ms,
            one.started_at,
            one.duration_ms,
        )
        for one in terminal.tries
    ]


def _usage_rows(ended: Sequence[_Ended]) -> list[tuple[Any, ...]]:
    """Per tenant, scope, target and day, sorted so that two gateways lock rows in one order."""
    totals: dict[tuple[str, str, str, str], Counter[str]] = {}
    for one in ended:
        model = model_of(one.version_id)
        for scope, target in (("tenant", ""), ("key", one.subject), ("model", model)):
            total = totals.setdefault((one.tenant_id, scope, target, one.day), Counter())
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
