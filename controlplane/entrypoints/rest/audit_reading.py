"""The admin audit, page by page, newest first, searchable."""

from typing import Any

import msgspec
from django.db.models import Q

from controlplane.adapters.readmodel.models import AuditEntry
from controlplane.domain.money import Price, price_texts
from controlplane.entrypoints.rest import moments

Json = dict[str, Any]
_SHOWN = (
    "position", "at", "actor", "address", "action", "target", "outcome", "code", "detail",
    "reason", "correlation_id", "before", "after", "asked", "undoes",
)  # fmt: skip
_CHANGES = ("before", "after", "asked")
_SEARCHED = ("actor", "address", "action", "target", "code", "detail", "reason")


def entries(query: Json, tenant_id: str | None) -> list[Json]:
    """One page beyond ``after``; of a confined reader only its own tenant's."""
    found = AuditEntry.objects.all()
    if tenant_id is not None:
        found = found.filter(target=f"tenant-{tenant_id}")
    if "as_of" in query:
        found = found.filter(position__lte=moments.position_of(query["as_of"]))
    equal = ("actor", "action", "target", "outcome", "code")
    found = found.filter(**{name: query[name] for name in equal if name in query})
    if "q" in query:
        words = [Q(**{f"{field}__icontains": query["q"]}) for field in _SEARCHED]
        found = found.filter(*[_any(words)])
    for name, lookup in (("since", "at__gte"), ("until", "at__lt"), ("after", "position__lt")):
        if name in query:
            found = found.filter(**{lookup: query[name]})
    rows = found.order_by("-position")[: query["limit"]]
    return [_entry(row) for row in rows]


def _entry(row: AuditEntry) -> Json:
    body = {name: getattr(row, name) for name in _SHOWN}
    return {**body, **{name: _with_prices(body[name]) for name in _CHANGES}}


def _with_prices(changes: Json) -> Json:
    """With each price as the API says it elsewhere: texts, per million tokens."""
    return {name: _readable(name, value) for name, value in changes.items()}


def _readable(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    is_price = name == "price" and value.keys() == set(Price.__struct_fields__)
    return price_texts(msgspec.convert(value, Price)) if is_price else _with_prices(value)


def _any(conditions: list[Q]) -> Q:
    either = Q()
    for condition in conditions:
        either |= condition
    return either
