"""The standing check that every total is the sum of its records.

In one snapshot of the database all terminal records are added up again, by SQL and not by the code
that wrote the totals, and compared with what is kept: the roll-ups (``rollup``, up to their
checkpoint) and the counters that budgets are checked by (``Usage``). A difference names its row::

    usage acme key 4f2a 2026-11-29: num_output_tokens is 95, its records sum to 96

Of requests that were archived only the totals are left, so then a total may exceed what its
remaining records sum to, and must not be less.

A snapshot needs no lock: gateways go on admitting and settling meanwhile. It reads every record,
about a second for 300,000 of them, so the controller runs it seldom (see ``PAUSES``). The last
result is kept, and shown on the usage page and at ``/api/v1/usage/check/``.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import connections

from controlplane.adapters.ledger import rollup
from controlplane.adapters.ledger.models import Check
from controlplane.adapters.ledger.rollup import FAILED, KEY, SUMS
from controlplane.adapters.ledger.store import open_raw
from controlplane.application.ports import Clock
from controlplane.domain import money

_log = logging.getLogger(__name__)

PAUSES = 50  # times as long as the last check took, at least EVERY_S: 2 % of one core at most
EVERY_S = 600.0
MAX_NAMED = 20

_FAILED = ", ".join(f"'{outcome}'" for outcome in FAILED)
_SPLIT = "SUM(price / 1000000000), SUM(price % 1000000000)"
_ROLLUP_SUMS = (
    f"COUNT(*), SUM(CASE WHEN outcome IN ({_FAILED}) THEN 1 ELSE 0 END), SUM(num_prompt_tokens),"
    f" SUM(num_cached_tokens), SUM(num_output_tokens), {_SPLIT}"
)
_USAGE_NAMES = tuple(name for name in SUMS if name not in ("num_failed", "num_cached_tokens"))
_HOUR = {"sqlite": "CAST(at / 3600 AS INTEGER)", "postgresql": "FLOOR(at / 3600)::bigint"}
_MODEL = {
    "sqlite": "substr(version_id, 1, instr(version_id || '@', '@') - 1)",
    "postgresql": "split_part(version_id, '@', 1)",
}
_SNAPSHOT = {
    "sqlite": "BEGIN",
    "postgresql": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
}

_USAGE_KEY = ("tenant_id", "scope", "target", "day")
_ARCHIVED = "SELECT COUNT(*) FROM ledger_checkpoint WHERE log = 'requests' AND archive <> ''"

Fetch = Callable[[str], list[Any]]
Totals = dict[tuple[Any, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Result:
    """``position`` is the last terminal record of the roll-ups that were compared."""

    position: int
    num_records: int
    num_totals: int
    differences: tuple[str, ...]
    seconds: float


def check(alias: str = "default") -> Result:
    """Add everything up again and compare; changes nothing."""
    began, vendor = time.perf_counter(), connections[alias].vendor
    with _snapshot(alias) as fetch:
        ((archived,),) = fetch(_ARCHIVED)
        ((position,),) = fetch("SELECT COALESCE(MAX(position), 0) FROM ledger_rollup_head")
        ((num_records,),) = fetch("SELECT COUNT(*) FROM ledger_request WHERE outcome <> ''")
        compare = partial(_compared, fetch, bool(archived))
        rollups = compare("roll-up", KEY, SUMS, _rollup_queries(vendor, position))
        usage = compare("usage", _USAGE_KEY, _USAGE_NAMES, _usage_queries(vendor))
    differences = (*rollups[1], *usage[1])
    took = time.perf_counter() - began
    return Result(int(position), int(num_records), rollups[0] + usage[0], differences, took)


def keep(result: Result, at: float, alias: str = "default") -> None:
    """Make it the last result; ``at`` in Unix seconds."""
    fields = {
        "at": at,
        "position": result.position,
        "num_records": result.num_records,
        "num_totals": result.num_totals,
        "num_differences": len(result.differences),
        "differences": list(result.differences[:MAX_NAMED]),
        "seconds": result.seconds,
    }
    Check.objects.using(alias).update_or_create(pk=1, defaults=fields)


def _rollup_queries(vendor: str, position: int) -> tuple[str, str]:
    columns = ", ".join(_HOUR[vendor] if name == "hour" else name for name in KEY)
    groups = ", ".join(str(index + 1) for index in range(len(KEY)))
    recounted = (
        f"SELECT {columns}, {_ROLLUP_SUMS} FROM ledger_request"
        f" WHERE outcome <> '' AND position <= {position} GROUP BY {groups}"
    )
    return recounted, f"SELECT {', '.join(KEY + SUMS)} FROM ledger_rollup"


def _usage_queries(vendor: str) -> tuple[str, str]:
    """The records are read once, for sums that are as fine as all three scopes together."""
    fine = (
        f"SELECT tenant_id, subject, {_MODEL[vendor]} AS model, day, COUNT(*) AS n,"
        " SUM(num_prompt_tokens) AS prompt, SUM(num_output_tokens) AS output,"
        " SUM(price / 1000000000) AS milli, SUM(price % 1000000000) AS pico"
        " FROM ledger_request WHERE outcome <> '' GROUP BY 1, 2, 3, 4"
    )
    scopes = (("tenant", "''"), ("key", "subject"), ("model", "model"))
    recounted = f"WITH fine AS MATERIALIZED ({fine}) " + " UNION ALL ".join(
        f"SELECT tenant_id, '{scope}', {target}, day,"
        " SUM(n), SUM(prompt), SUM(output), SUM(milli), SUM(pico) FROM fine GROUP BY 1, 2, 3, 4"
        for scope, target in scopes
    )
    kept = f"SELECT tenant_id, scope, target, day, {', '.join(_USAGE_NAMES)} FROM ledger_usage"
    return recounted, kept


def _compared(
    fetch: Fetch,
    archived: bool,
    what: str,
    key: tuple[str, ...],
    sums: tuple[str, ...],
    queries: tuple[str, str],
) -> tuple[int, list[str]]:
    """The number of totals, and a sentence for each figure that differs."""
    figures = (*sums[:-2], "price")
    recounted, kept = (_totals(fetch(query), len(key)) for query in queries)
    found = []
    for row in sorted(recounted.keys() | kept.keys(), key=str):
        due, is_ = (totals.get(row, (0,) * len(figures)) for totals in (recounted, kept))
        name = " ".join([what, *(str(part) for part in row if part != "")])
        found += [
            f"{name}: {figure} is {shown}, its records sum to {right}"
            for figure, shown, right in zip(figures, is_, due, strict=True)
            if (shown < right if archived else shown != right)
        ]
    return len(recounted.keys() | kept.keys()), found


def _totals(rows: list[Any], width: int) -> Totals:
    """By key. The two parts of a price are carried differently, and compared as one figure."""
    totals = {}
    for row in rows:
        *figures, milli, pico = (int(value) for value in row[width:])
        totals[tuple(row[:width])] = (*figures, money.join(milli, pico))
    return totals


@contextmanager
def _snapshot(alias: str) -> Iterator[Fetch]:
    """A function that reads rows, all of one moment, on a connection of its own."""
    raw, vendor = open_raw(alias), connections[alias].vendor
    cursor = raw.cursor()

    def fetch(sql: str) -> list[Any]:
        with connections[alias].wrap_database_errors:  # a damaged file is Django's DatabaseError
            cursor.execute(sql)
            return list(cursor.fetchall())

    try:
        cursor.execute(_SNAPSHOT[vendor])
        yield fetch
    finally:
        raw.rollback()
        raw.close()


class StandingCheck:
    """Rolls usage up and, when it is time, checks it; for one thread."""

    def __init__(self, clock: Clock, alias: str = "default") -> None:
        self._clock, self._alias = clock, alias
        self._next = clock.monotonic()

    def roll_up(self) -> None:
        """Add up the records that ended since."""
        rollup.catch_up_all(self._alias)

    def check_if_due(self) -> None:
        """At the start, then every ten minutes, or less often where a check takes long."""
        if self._clock.monotonic() < self._next:
            return
        result = check(self._alias)
        keep(result, self._clock.now(), self._alias)
        self._next = self._clock.monotonic() + max(EVERY_S, PAUSES * result.seconds)
        if result.differences:
            _log.error("usage differs from its records: %s", "; ".join(result.differences[:3]))
