"""What a tenant's budgets count as of now: spent, reserved and remaining.

``as_of`` shows the budgets of then with the figures of now: it does not turn the ledger back.
"""

from typing import Any

from django.db.models import Sum

from controlplane.adapters.ledger.budgets import model_of
from controlplane.adapters.ledger.models import InferenceRequest, Usage
from controlplane.domain import money
from controlplane.domain.budget import Budget, amount_in, applies, counted, period_start
from controlplane.domain.errors import NotFound
from controlplane.entrypoints.rest.reading import Found, Json, Page, budget_json, tenant_row
from controlplane.entrypoints.rest.sources import DatabaseSource, Source, page


def budgets(source: Source, tenant_id: str, query: Json, now: float) -> Page:
    found = [one for one in tenant_row(source, tenant_id).budgets if _concerns(one, query)]
    count, rows = page(found, query)
    held = _held(tenant_id) if rows else []
    return count, [_figures(tenant_id, one, held, now) for one in rows]


def _concerns(budget: Budget, query: Json) -> bool:
    """Without a model (or a subject) in question, every model's (key's) budgets are shown."""
    if budget.scope == "key" and "subject" not in query:
        return "model" not in query
    if budget.scope == "model" and "model" not in query:
        return True
    return applies(budget, query.get("subject", ""), query.get("model", ""))


def budget(source: Source, tenant_id: str, budget_id: str, now: float) -> Found:
    row = tenant_row(source, tenant_id)
    found = _of_name(row.budgets, budget_id)
    return Found(_figures(tenant_id, found, _held(tenant_id), now), row.version)


def spent_now(tenant_id: str, budget_id: str, now: float) -> int:
    """All that was spent in the budget's present period, the forgiven included."""
    found = _of_name(tenant_row(DatabaseSource(), tenant_id).budgets, budget_id)
    return _spent(tenant_id, found, period_start(found.period, now))


def _of_name(budgets: tuple[Budget, ...], budget_id: str) -> Budget:
    for one in budgets:
        if one.budget_id == budget_id:
            return one
    raise NotFound("budget", budget_id)


def _figures(tenant_id: str, budget: Budget, held: list[Any], now: float) -> Json:
    start = period_start(budget.period, now)
    total = _spent(tenant_id, budget, start)
    spent = counted(budget, start, total)
    reserved = sum(
        price if budget.unit == "money" else tokens
        for subject, version, day, tokens, price in held
        if day >= start and applies(budget, subject, model_of(version))
    )
    figures = {
        "spent": spent,
        "reserved": reserved,
        "remaining": max(0, budget.limit - spent - reserved),
        "forgiven": total - spent,
    }
    shown = {name: amount_in(budget.unit, value) for name, value in figures.items()}
    return {**budget_json(budget), **shown}


def _spent(tenant_id: str, budget: Budget, start: str) -> int:
    rows = Usage.objects.filter(
        tenant_id=tenant_id, scope=budget.scope, target=budget.target, day__gte=start
    )
    if budget.unit == "money":
        sums = rows.aggregate(milli=Sum("price_milli"), pico=Sum("price_pico"))
        return money.join(sums["milli"] or 0, sums["pico"] or 0)
    sums = rows.aggregate(prompt=Sum("num_prompt_tokens"), output=Sum("num_output_tokens"))
    return int((sums["prompt"] or 0) + (sums["output"] or 0))


def _held(tenant_id: str) -> list[Any]:
    live = InferenceRequest.objects.filter(tenant_id=tenant_id, outcome="")
    return list(
        live.values_list("subject", "version_id", "day", "reserved_tokens", "reserved_price")
    )
