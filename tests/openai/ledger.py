"""What the ledger says, read from the database as an auditor would."""

import sqlite3
from typing import Any

from controlplane.dispatch.record import Dispatch, decode
from tests.openai.stack import Stack


def _query(stack: Stack, sql: str, *parameters: Any) -> list[dict[str, Any]]:
    connection = sqlite3.connect(stack.directory / "engine.sqlite3", timeout=10)
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute(sql, parameters)]
    finally:
        connection.close()


def requests_of(stack: Stack, tenant: str) -> list[dict[str, Any]]:
    return _query(stack, "SELECT * FROM ledger_request WHERE tenant_id = ? ORDER BY id", tenant)


def record_of(stack: Stack, request_id: str) -> dict[str, Any]:
    (row,) = _query(stack, "SELECT * FROM ledger_request WHERE request_id = ?", request_id)
    return row


def attempts_of(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    sql = "SELECT * FROM ledger_attempt WHERE request_id = ? ORDER BY choice, attempt"
    return _query(stack, sql, request_id)


def dispatches_of(stack: Stack, request_id: str) -> list[Dispatch]:
    """Why its replicas were chosen, as far as that was kept."""
    sql = "SELECT data FROM ledger_dispatch WHERE request_id = ? ORDER BY id"
    return [decode(row["data"]) for row in _query(stack, sql, request_id)]


def usage_of(stack: Stack, tenant: str) -> int:
    """All tokens a tenant has used."""
    sql = "SELECT SUM(num_prompt_tokens + num_output_tokens) AS n FROM ledger_usage"
    return int(
        _query(stack, f"{sql} WHERE tenant_id = ? AND scope = 'tenant'", tenant)[0]["n"] or 0
    )
