"""What else must be true of a sound store: sums equal their records, and SQLite's file is whole."""

from collections.abc import Iterator
from typing import Any

from django.db import DatabaseError, connections

from controlplane.adapters.ledger.models import Checkpoint
from controlplane.application.proving import Finding
from controlplane.application.records import REQUESTS
from controlplane.domain.money import join

_KEYS = "tenant_id, day"
_SUMMED = (
    f"SELECT {_KEYS}, count(*), sum(num_prompt_tokens), sum(num_output_tokens),"
    " sum(price / 1000000000), sum(price % 1000000000)"  # as ``money.split``: sums do not overflow
    f" FROM ledger_request WHERE outcome <> '' GROUP BY {_KEYS}"
)
_KEPT = (
    f"SELECT {_KEYS}, num_requests, num_prompt_tokens, num_output_tokens, price_milli, price_pico"
    " FROM ledger_usage WHERE scope = 'tenant'"
)


def usage_findings(alias: str = "default") -> Iterator[Finding]:
    """Usage rows that are not the sum of their ended requests; none once requests are archived."""
    archived = Checkpoint.objects.using(alias).filter(log=REQUESTS).exclude(archive="")
    if archived.exists():
        return
    with connections[alias].cursor() as cursor:
        cursor.execute(_SUMMED)
        summed = {_usage(row) for row in cursor.fetchall()}
        cursor.execute(_KEPT)
        kept = {_usage(row) for row in cursor.fetchall()}
    for one in sorted(summed ^ kept)[:1]:
        detail = "the usage kept is not the sum of the requests"
        yield Finding(REQUESTS, 0, "/".join(one[:2]), "usage", detail)


def _usage(row: Any) -> tuple[Any, ...]:
    """(tenant, day, requests, prompt tokens, output tokens, picodollars)."""
    *keys, milli, pico = row
    return (*keys[:2], *map(int, keys[2:]), join(int(milli), int(pico)))


def file_findings(alias: str = "default") -> Iterator[Finding]:
    """SQLite's own check of its pages and indexes; PostgreSQL has checksums of its own."""
    if connections[alias].vendor != "sqlite":
        return
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("PRAGMA integrity_check(1)")
            said = str(cursor.fetchone()[0])
    except DatabaseError as error:
        said = str(error)
    if said != "ok":
        yield Finding("database", 0, "", "file", said)
