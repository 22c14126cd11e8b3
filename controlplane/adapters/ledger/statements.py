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

INTENT_COLUMNS = (
    ("request_id", "text"),
    ("tenant_id", "text"),
    ("subject", "text"),
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
    progress: str
    beat: str
    gateways: str
    forget_gateway: str
    orphans: str
    orphans_of_unknown: str


def _names(columns: Columns) -> str:
    return ", ".join(name for name, _ in columns)


def statements(vendor: str) -> Statements:
    """The statements for ``vendor``, ``sqlite`` or ``postgresql`` as Django names them."""
    return _build(sqlite=vendor == "sqlite")


def _build(*, sqlite: bool) -> Statements:
    mark = "?" if sqlite else "%s"
    rows = "json_each(?) AS e" if sqlite else "jsonb_array_elements(%s::jsonb) AS e(value)"
    scalar = "e.value" if sqlite else "e.value #>> '{}'"
    percent = "%" if sqlite else "%%"
    budgets = "json(budgets)" if sqlite else "budgets"
    live = (
        "request_id, tenant_id, day, subject, version_id,"
        " price_input, price_cached_input, price_output"
    )

    def gather(values: str) -> str:
        if sqlite:
            return f"json_group_array(json_array({values}))"
        return f"COALESCE(json_agg(json_build_array({values})), '[]')::text"

    def read(index: int, kind: str) -> str:
        if sqlite:
            return f"json_extract(e.value, '$[{index}]')"
        return f"(e.value ->> {index})::{kind}"

    def fields(columns: Columns) -> str:
        return ", ".join(f"{read(i, kind)} AS {name}" for i, (name, kind) in enumerate(columns))

    keyed = (("request_id", "text"), *TERMINAL_COLUMNS)
    changes = ", ".join(f"{name} = v.{name}" for name, _ in TERMINAL_COLUMNS)
    sums = ", ".join(f"{n} = ledger_usage.{n} + excluded.{n}" for n, _ in USAGE_COLUMNS[4:])
    orphan = "SELECT request_id, progress_tokens, num_prompt_tokens, at FROM ledger_request"
    return Statements(
        begin="BEGIN IMMEDIATE" if sqlite else "BEGIN",
        lock_tenant=None if sqlite else "SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))",
        budgets=f"SELECT {gather('tenant_id, ' + budgets)} FROM readmodel_tenant"
        f" WHERE tenant_id IN (SELECT {scalar} FROM {rows}) AND budgets <> '[]'",
        spent=f"SELECT {gather('i, tokens, milli, pico')} FROM (SELECT {read(0, 'bigint')} AS i,"
        " SUM(u.num_prompt_tokens + u.num_output_tokens) AS tokens,"
        " SUM(u.price_milli) AS milli, SUM(u.price_pico) AS pico"
        f" FROM {rows} JOIN ledger_usage AS u ON u.tenant_id = {read(1, 'text')}"
        f" AND u.scope = {read(2, 'text')} AND u.target = {read(3, 'text')}"
        f" AND u.day >= {read(4, 'text')} GROUP BY 1) AS sums",
        held=f"SELECT {gather('tenant_id, subject, version_id, day, tokens, milli, pico')}"
        " FROM (SELECT tenant_id, subject, version_id, day, SUM(reserved_tokens) AS tokens,"
        " SUM(reserved_price / 1000000000) AS milli,"
        f" SUM(reserved_price {percent} 1000000000) AS pico"
        f" FROM ledger_request WHERE outcome = '' AND tenant_id IN (SELECT {scalar} FROM {rows})"
        " GROUP BY tenant_id, subject, version_id, day) AS sums",
        insert_intents=f"INSERT INTO ledger_request ({_names(INTENT_COLUMNS)}, {', '.join(_BLANK)})"
        f" SELECT {fields(INTENT_COLUMNS)}, {', '.join(_BLANK.values())} FROM {rows}",
        unsettled=f"SELECT {gather(live)} FROM (SELECT {live}"
        f" FROM ledger_request WHERE outcome = '' AND request_id IN (SELECT {scalar} FROM {rows})"
        f" ORDER BY request_id{'' if sqlite else ' FOR UPDATE'}) AS live",
        take_positions=f"INSERT INTO ledger_head (id, position) VALUES (1, {mark})"
        " ON CONFLICT (id) DO UPDATE SET position = ledger_head.position + excluded.position"
        " RETURNING position",
        settle=f"UPDATE ledger_request SET {changes} FROM (SELECT {fields(keyed)} FROM {rows}) AS v"
        " WHERE ledger_request.request_id = v.request_id",
        add_usage=f"INSERT INTO ledger_usage ({_names(USAGE_COLUMNS)})"
        f" SELECT {fields(USAGE_COLUMNS)} FROM {rows} WHERE true"
        f" ON CONFLICT (tenant_id, scope, target, day) DO UPDATE SET {sums}",
        progress="UPDATE ledger_request SET progress_tokens = v.produced FROM (SELECT"
        f" {fields((('request_id', 'text'), ('produced', 'bigint')))} FROM {rows}) AS v"
        " WHERE ledger_request.request_id = v.request_id AND outcome = ''",
        beat="INSERT INTO ledger_gateway (gateway, host, pid, beat)"
        f" VALUES ({mark}, {mark}, {mark}, 1)"
        " ON CONFLICT (gateway) DO UPDATE SET beat = ledger_gateway.beat + 1",
        gateways="SELECT gateway, host, pid, beat FROM ledger_gateway",
        forget_gateway=f"DELETE FROM ledger_gateway WHERE gateway = {mark}",
        orphans=f"{orphan} WHERE outcome = '' AND gateway = {mark}",
        orphans_of_unknown=f"{orphan} WHERE outcome = '' AND gateway NOT IN"
        " (SELECT gateway FROM ledger_gateway)",
    )
