"""Usage, grouped as one likes: sums over the roll-ups, which are sums over the records.

The answer says up to which terminal record it is complete (``position``), and is brought up to
date before it is given unless the ledger is far ahead. Times are whole hours, UTC; ``since`` and
``until`` are rounded down to one and are in the answer as they were used.
"""

from datetime import UTC, datetime
from typing import Any

from django.db.models import F, QuerySet, Sum, Value
from django.db.models.functions import StrIndex, Substr

from controlplane.adapters.ledger import rollup
from controlplane.adapters.ledger.models import Check, Head, Rollup
from controlplane.domain import money
from controlplane.entrypoints.rest.problems import Problem

Json = dict[str, Any]

GROUPS = ("tenant", "key", "user", "model", "version", "route", "arm", "hour", "day")
MAX_BEHIND = 20_000  # records that are added up before an answer; beyond, the controller is trusted
_FIELDS = {
    "tenant": F("tenant_id"),
    "key": F("subject"),
    "user": F("end_user"),
    "model": Substr("version_id", 1, StrIndex("version_id", Value("@")) - 1),
    "version": F("version_id"),
    "route": F("route"),
    "arm": F("arm"),
    "hour": F("hour"),
    "day": F("hour") / 24,
}
_FILTERS = {"tenant": "tenant_id", "key": "subject", "user": "end_user", "version": "version_id",
            "route": "route", "arm": "arm"}  # fmt: skip


def usage(query: Json, tenant_id: str | None) -> Json:
    """One page of groups, largest first (by time, if that is the first group), and their total."""
    groups = _groups_of(query.get("group_by", "day"))
    since, until = (_hour(query.get(name), name) for name in ("since", "until"))
    rows = _selected(query, since, until, tenant_id)
    position = _up_to_date()
    aliases = {f"by_{name}": _FIELDS[name] for name in groups}
    sums = {f"sum_{name}": Sum(name) for name in rollup.SUMS}
    order = f"-by_{groups[0]}" if groups[0] in ("hour", "day") else "-sum_num_requests"
    found = rows.values(**aliases).annotate(**sums).order_by(order, *aliases)
    start, end = query["offset"], query["offset"] + query["limit"]
    return {
        "position": position,
        "behind": max(0, _ledger_head() - position),
        "since": _time(since),
        "until": _time(until),
        "count": found.count(),
        "total": _shown(rollup.total(rows)),
        "results": [_group_json(groups, dict(row)) for row in found[start:end]],
    }


def _groups_of(text: str) -> list[str]:
    groups = text.split(",")
    if not set(groups) <= set(GROUPS) or len(set(groups)) != len(groups):
        detail = f"group_by is some of {', '.join(GROUPS)}, with commas between."
        raise Problem(400, "invalid_choice", detail)
    return groups


def _hour(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise Problem(400, "invalid_time", f"{name} is a time like 2026-01-31T12:00:00Z.")
    return rollup.hour_of(at.timestamp())


def _time(hour: int | None) -> str | None:
    if hour is None:
        return None
    return datetime.fromtimestamp(hour * 3600, UTC).isoformat().replace("+00:00", "Z")


def _selected(
    query: Json, since: int | None, until: int | None, tenant_id: str | None
) -> "QuerySet[Rollup]":
    """Whoever is confined to a tenant reaches no rows of another."""
    rows = Rollup.objects.all()
    if tenant_id is not None:
        rows = rows.filter(tenant_id=tenant_id)
    for name, field in _FILTERS.items():
        if name in query:
            rows = rows.filter(**{field: query[name]})
    if "model" in query:
        rows = rows.filter(version_id__startswith=f"{query['model']}@")
    if since is not None:
        rows = rows.filter(hour__gte=since)
    return rows if until is None else rows.filter(hour__lt=until)


def _ledger_head() -> int:
    return Head.objects.values_list("position", flat=True).first() or 0


def _up_to_date() -> int:
    return rollup.catch_up(MAX_BEHIND)


def _group_json(groups: list[str], row: Json) -> Json:
    key = {name: row[f"by_{name}"] for name in groups}
    if "hour" in key:
        key["hour"] = _time(key["hour"])
    if "day" in key:
        key["day"] = str(_time(key["day"] * 24))[:10]
    sums = {name: row[f"sum_{name}"] for name in rollup.SUMS}
    return {"group": key, **_shown(rollup.joined(sums))}


def _shown(sums: Json) -> Json:
    return {**sums, "price": money.amount_text(sums["price"])}


def last_check() -> Json | None:
    """What the last check of all totals against the records found; None before the first."""
    row = Check.objects.first()
    names = ("at", "position", "num_records", "num_totals", "num_differences", "differences",
             "seconds")  # fmt: skip
    return None if row is None else {name: getattr(row, name) for name in names}
