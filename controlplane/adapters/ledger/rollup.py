"""Usage by hour, key, user, model version and arm: a projection of the terminal records.

The terminal records are numbered without a gap in commit order, so they are followed as the log
is: what lies after the checkpoint is added up, and rows and checkpoint are saved in one
transaction. Every total, of whatever dimensions, is therefore the sum of the records up to the
checkpoint's position, neither more nor less::

    position 7   acme  key 4f2a  smollm2@v1  10:59   40 + 10 tokens
    position 8   acme  key 4f2a  smollm2@v1  11:00   40 +  5 tokens
    rows         (acme, 4f2a, smollm2@v1, hour 10): 50      (…, hour 11): 45      checkpoint 8

All dimensions stand in one table, so that totals by key, by model and by day cannot disagree: they
are sums over the same rows. (A table for each was rejected: it costs a write each, and each can be
wrong by itself.) An hour is a whole number of hours since 1970, UTC, of the time of admission.

Several processes may call ``catch_up``; whoever holds the checkpoint's lock moves it.
"""

from collections import Counter
from typing import Any

from django.db import connections, transaction
from django.db.models import Sum

from controlplane.adapters.ledger.models import (
    Checkpoint,
    Head,
    InferenceRequest,
    Rollup,
    RollupHead,
)
from controlplane.domain import money

BATCH = 5_000
KEY = ("tenant_id", "hour", "subject", "end_user", "version_id", "route", "arm")
SUMS = (
    "num_requests",
    "num_failed",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "price_milli",
    "price_pico",
)
FAILED = ("error", "timeout", "unknown")
_NEEDED = (
    *(name for name in KEY if name != "hour"),
    "at", "outcome", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "price",
)  # fmt: skip
_TABLE = Rollup._meta.db_table
_UPSERT = (
    f"INSERT INTO {_TABLE} ({', '.join(KEY + SUMS)})"
    f" VALUES ({', '.join(['%s'] * len(KEY + SUMS))}) ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = {_TABLE}.{name} + excluded.{name}" for name in SUMS)
)


def hour_of(at: float) -> int:
    """Hours since 1970 at ``at`` (Unix seconds); the same division as the database's."""
    return int(at / 3600)


def catch_up(limit: int = BATCH, alias: str = "default") -> int:
    """Add up at most ``limit`` records in one transaction; the position reached."""
    with transaction.atomic(alias):
        heads = RollupHead.objects.using(alias)
        heads.get_or_create(pk=1)
        before = heads.select_for_update().get(pk=1).position
        last = Head.objects.using(alias).values_list("position", flat=True).first() or 0
        upto = min(before + limit, last)
        if upto > before:
            _add(alias, before, upto)
            heads.filter(pk=1).update(position=upto)
    return upto


def catch_up_all(alias: str = "default") -> int:
    """To the last record there is now; the position reached."""
    before, reached = -1, catch_up(alias=alias)
    while reached != before:
        before, reached = reached, catch_up(alias=alias)
    return reached


class RecordsArchived(Exception):
    """Some records are in an archive: what they summed to is known from the roll-ups alone."""


def rebuild(alias: str = "default") -> int:
    """Throw the rows away and add up every record anew, in one transaction."""
    if Checkpoint.objects.using(alias).filter(log="requests").exclude(archive="").exists():
        raise RecordsArchived("The roll-ups hold requests that were archived; they stay.")
    with transaction.atomic(alias):
        Rollup.objects.using(alias).all().delete()
        RollupHead.objects.using(alias).filter(pk=1).update(position=0)
        return catch_up_all(alias)


def _add(alias: str, after: int, upto: int) -> None:
    records = InferenceRequest.objects.using(alias).filter(position__gt=after, position__lte=upto)
    totals: dict[tuple[Any, ...], Counter[str]] = {}
    for row in records.only(*_NEEDED).iterator(chunk_size=2000):
        total = totals.setdefault(key_of(row), Counter())
        total["num_requests"] += 1
        total["num_failed"] += row.outcome in FAILED
        for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "price"):
            total[name] += getattr(row, name)
    with connections[alias].cursor() as cursor:
        rows = [(*key, *_sums(total)) for key, total in sorted(totals.items())]
        cursor.executemany(_UPSERT, rows)


def key_of(row: InferenceRequest) -> tuple[Any, ...]:
    return tuple(hour_of(row.at) if name == "hour" else getattr(row, name) for name in KEY)


def _sums(total: Counter[str]) -> tuple[int, ...]:
    milli, pico = money.split(total["price"])
    return (*(total[name] for name in SUMS[:-2]), milli, pico)


def total(rows: Any) -> dict[str, int]:
    """Sums over a queryset of roll-ups, the price joined: 0 where there is no row."""
    sums = rows.aggregate(**{name: Sum(name) for name in SUMS})
    return joined({name: value or 0 for name, value in sums.items()})


def joined(sums: dict[str, Any]) -> dict[str, Any]:
    """With one ``price`` (picodollars, of any size) instead of its two parts."""
    others = {name: value for name, value in sums.items() if not name.startswith("price_")}
    return {**others, "price": money.join(int(sums["price_milli"]), int(sums["price_pico"]))}
