"""The ledger's SQL. A whole batch of rows travels as one JSON parameter of one statement.

Thread hand-overs are the reason: SQLite's driver gives up the interpreter lock around every step,
and beside a busy event loop each way back may cost a switch interval. One statement a batch, not
one a row, keeps that to a handful (what is read comes as one JSON text too, since each row fetched
is a step); on PostgreSQL it saves the round trips. The two dialects differ only in how an array
element is read, how an array is made, and in the placeholder::

    SQLite       SELECT json_extract(value, '$[0]'), … FROM json_each(?)
    PostgreSQL   SELECT (value ->> 0)::text, …         FROM jsonb_array_elements(%s::jsonb)
"""

from dataclasses import dataclass
from typing import Any

INTENT_COLUMNS = (
    ("request_id", "text"),
    ("tenant_id", "text"),
    ("subject", "text"),
    ("end_user", "text"),
    ("endpoint", "text"),
    ("requested_model", "text"),
    ("route", "text"),
    ("arm", "text"),
    ("version_id", "text"),
    ("latency_class", "text"),
    ("num_prompt_tokens", "bigint"),
    ("max_output_tokens", "bigint"),
    ("reserved_tokens", "bigint"),
    ("reserved_price", "bigint"),
    ("at", "double precision"),
    ("day", "text"),
    ("gateway", "text"),
    ("price_input", "bigint"),
    ("price_cached_input", "bigint"),
    ("price_output", "bigint"),
)
TERMINAL_COLUMNS = (
    ("position", "bigint"),
    ("outcome", "text"),
    ("finish_reason", "text"),
    ("error_code", "text"),
    ("node_id", "text"),
    ("replica_id", "text"),
    ("num_prompt_tokens", "bigint"),
    ("num_cached_tokens", "bigint"),
    ("num_output_tokens", "bigint"),
    ("price", "bigint"),
    ("ttft_ms", "double precision"),
    ("queue_ms", "double precision"),
    ("duration_ms", "double precision"),
    ("ended_at", "double precision"),
    ("attempts", "bigint"),
)
USAGE_COLUMNS = (
    ("tenant_id", "text"),
    ("scope", "text"),
    ("target", "text"),
    ("day", "text"),
    ("num_requests", "bigint"),
    ("num_prompt_tokens", "bigint"),
    ("num_output_tokens", "bigint"),
    ("price_milli", "bigint"),
    ("price_pico", "bigint"),
)
ATTEMPT_COLUMNS = (
    ("request_id", "text"),
    ("position", "bigint"),
    ("choice", "bigint"),
    ("attempt", "bigint"),
    ("node_id", "text"),
    ("replica_id", "text"),
    ("outcome", "text"),
    ("error_code", "text"),
    ("num_cached_tokens", "bigint"),
    ("num_output_tokens", "bigint"),
    ("queue_ms", "double precision"),
    ("started_at", "double precision"),
    ("duration_ms", "double precision"),
)
_BLANK = {  # the columns a new row has beside its intent; raw SQL sees no ORM default
    "progress_tokens": "0",
    "outcome": "''",
    "finish_reason": "''",
    "error_code": "''",
    "node_id": "''",
    "replica_id": "''",
    "num_cached_tokens": "0",
    "num_output_tokens": "0",
    "price": "0",
    "attempts": "0",
}
Columns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Statements:
    """Everything the writer executes, in one dialect."""

    begin: str
    lock_tenant: str | None
    budgets: str
    spent: str
    held: str
    insert_intents: str
    unsettled: str
    take_positions: str
    settle: str
    add_usage: str
    insert_attempts: str
    insert_dispatch: str
    insert_text: str
    hash_text: str
    progress: str
    beat: str
    gateways: str
    forget_gateway: str
    orphans: str
    orphans_of_unknown: str


def _names(columns: Columns) -> str:
    return ", ".join(name for name, _ in columns)


@dataclass(frozen=True)
class _Dialect:
    """How SQLite and PostgreSQL write the same thing; ``rows`` is the JSON array parameter."""

    sqlite: bool

    @property
    def mark(self) -> str:
        return "?" if self.sqlite else "%s"

    @property
    def rows(self) -> str:
        return "json_each(?) AS e" if self.sqlite else "jsonb_array_elements(%s::jsonb) AS e(value)"

    @property
    def scalars(self) -> str:
        """The array's elements, as texts, to look in."""
        scalar = "e.value" if self.sqlite else "e.value #>> '{}'"
        return f"SELECT {scalar} FROM {self.rows}"

    def read(self, index: int, kind: str) -> str:
        if self.sqlite:
            return f"json_extract(e.value, '$[{index}]')"
        return f"(e.value ->> {index})::{kind}"

    def fields(self, columns: Columns) -> str:
        read = (f"{self.read(i, kind)} AS {name}" for i, (name, kind) in enumerate(columns))
        return ", ".join(read)

    def gather(self, values: str) -> str:
        """All rows as one JSON array of arrays."""
        if self.sqlite:
            return f"json_group_array(json_array({values}))"
        return f"COALESCE(json_agg(json_build_array({values})), '[]')::text"


def statements(vendor: str) -> Statements:
    """The statements for ``vendor``, ``sqlite`` or ``postgresql`` as Django names them."""
    dialect = _Dialect(sqlite=vendor == "sqlite")
    return Statements(**_budgets(dialect), **_records(dialect), **_gateways(dialect))


def _budgets(d: _Dialect) -> dict[str, Any]:
    """See ``budgets``. Amounts are summed in two parts, as ``money`` explains."""
    budgets = "json(budgets)" if d.sqlite else "budgets"
    percent = "%" if d.sqlite else "%%"
    lock = None if d.sqlite else "SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))"
    return {
        "lock_tenant": lock,
        "budgets": f"SELECT {d.gather('tenant_id, ' + budgets)} FROM readmodel_tenant"
        f" WHERE tenant_id IN ({d.scalars}) AND budgets <> '[]'",
        "spent": f"SELECT {d.gather('i, tokens, milli, pico')}"
        f" FROM (SELECT {d.read(0, 'bigint')} AS i,"
        " SUM(u.num_prompt_tokens + u.num_output_tokens) AS tokens,"
        " SUM(u.price_milli) AS milli, SUM(u.price_pico) AS pico"
        f" FROM {d.rows} JOIN ledger_usage AS u ON u.tenant_id = {d.read(1, 'text')}"
        f" AND u.scope = {d.read(2, 'text')} AND u.target = {d.read(3, 'text')}"
        f" AND u.day >= {d.read(4, 'text')} GROUP BY 1) AS sums",
        "held": f"SELECT {d.gather('tenant_id, subject, version_id, day, tokens, milli, pico')}"
        " FROM (SELECT tenant_id, subject, version_id, day, SUM(reserved_tokens) AS tokens,"
        " SUM(reserved_price / 1000000000) AS milli,"
        f" SUM(reserved_price {percent} 1000000000) AS pico"
        f" FROM ledger_request WHERE outcome = '' AND tenant_id IN ({d.scalars})"
        " GROUP BY tenant_id, subject, version_id, day) AS sums",
    }


def _records(d: _Dialect) -> dict[str, Any]:
    live = (
        "request_id, tenant_id, day, subject, version_id,"
        " price_input, price_cached_input, price_output"
    )
    keyed = (("request_id", "text"), *TERMINAL_COLUMNS)
    changes = ", ".join(f"{name} = v.{name}" for name, _ in TERMINAL_COLUMNS)
    sums = ", ".join(f"{n} = ledger_usage.{n} + excluded.{n}" for n, _ in USAGE_COLUMNS[4:])
    produced = d.fields((("request_id", "text"), ("produced", "bigint")))
    return {
        "begin": "BEGIN IMMEDIATE" if d.sqlite else "BEGIN",
        "insert_intents": "INSERT INTO ledger_request"
        f" ({_names(INTENT_COLUMNS)}, {', '.join(_BLANK)})"
        f" SELECT {d.fields(INTENT_COLUMNS)}, {', '.join(_BLANK.values())} FROM {d.rows}",
        "unsettled": f"SELECT {d.gather(live)} FROM (SELECT {live}"
        f" FROM ledger_request WHERE outcome = '' AND request_id IN ({d.scalars})"
        f" ORDER BY request_id{'' if d.sqlite else ' FOR UPDATE'}) AS live",
        "take_positions": f"INSERT INTO ledger_head (id, position) VALUES (1, {d.mark})"
        " ON CONFLICT (id) DO UPDATE SET position = ledger_head.position + excluded.position"
        " RETURNING position",
        "settle": f"UPDATE ledger_request SET {changes}"
        f" FROM (SELECT {d.fields(keyed)} FROM {d.rows}) AS v"
        " WHERE ledger_request.request_id = v.request_id",
        "add_usage": f"INSERT INTO ledger_usage ({_names(USAGE_COLUMNS)})"
        f" SELECT {d.fields(USAGE_COLUMNS)} FROM {d.rows} WHERE true"
        f" ON CONFLICT (tenant_id, scope, target, day) DO UPDATE SET {sums}",
        "insert_attempts": f"INSERT INTO ledger_attempt ({_names(ATTEMPT_COLUMNS)})"
        f" SELECT {d.fields(ATTEMPT_COLUMNS)} FROM {d.rows}",
        "insert_dispatch": "INSERT INTO ledger_dispatch (request_id, position, data)"
        f" VALUES ({', '.join([d.mark] * 3)})",
        "insert_text": "INSERT INTO ledger_text"
        " (request_id, tenant_id, position, generation, nonce, ciphertext, at)"
        f" VALUES ({', '.join([d.mark] * 7)})",
        "hash_text": f"UPDATE ledger_request SET text_hash = {d.mark} WHERE request_id = {d.mark}",
        "progress": "UPDATE ledger_request SET progress_tokens = v.produced"
        f" FROM (SELECT {produced} FROM {d.rows}) AS v"
        " WHERE ledger_request.request_id = v.request_id AND outcome = ''",
    }


def _gateways(d: _Dialect) -> dict[str, Any]:
    orphan = (
        "SELECT request_id, gateway, progress_tokens, num_prompt_tokens, max_output_tokens, at"
        " FROM ledger_request"
    )
    return {
        "beat": "INSERT INTO ledger_gateway (gateway, host, pid, beat)"
        f" VALUES ({d.mark}, {d.mark}, {d.mark}, 1)"
        " ON CONFLICT (gateway) DO UPDATE SET beat = ledger_gateway.beat + 1",
        "gateways": "SELECT gateway, host, pid, beat FROM ledger_gateway",
        "forget_gateway": f"DELETE FROM ledger_gateway WHERE gateway = {d.mark}",
        "orphans": f"{orphan} WHERE outcome = '' AND gateway = {d.mark}",
        "orphans_of_unknown": f"{orphan} WHERE outcome = '' AND gateway NOT IN"
        " (SELECT gateway FROM ledger_gateway)",
    }
