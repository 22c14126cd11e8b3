"""What a tenant's budgets count, now or at a moment of the past: spent, reserved and remaining.

In the past, days long gone come from the roll-up, which is by the day of admission; of the two days
up to the moment the requests themselves are read, since one that was admitted yesterday may have
ended after it. Nothing runs for longer than a day.
"""

from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet, Sum

from controlplane.adapters.ledger.budgets import model_of
from controlplane.adapters.ledger.models import InferenceRequest, Usage
from controlplane.domain import money
from controlplane.domain.budget import Budget, amount_in, applies, counted, day_of, period_start
from controlplane.domain.errors import Invalid, NotFound
from controlplane.entrypoints.rest import moments, reading
from controlplane.entrypoints.rest.reading import Found, Json, Page, budget_json, tenant_row
from controlplane.entrypoints.rest.sources import DatabaseSource, Source, page
from controlplane.projections.catalog import Alias, Model
from controlplane.projections.routes import Route
from controlplane.projections.tenants import ApiKey

_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Moment:
    """``at`` in Unix seconds; in the ``past``, the ledger is turned back to it."""

    at: float
    past: bool = False


def budgets(source: Source, tenant_id: str, query: Json, moment: Moment) -> Page:
    found = [one for one in tenant_row(source, tenant_id).budgets if _concerns(one, query)]
    count, rows = page(found, query)
    held = _held(tenant_id, moment) if rows else []
    return count, [_figures(tenant_id, one, held, moment) for one in rows]


def _concerns(budget: Budget, query: Json) -> bool:
    """Without a model (or a subject) in question, every model's (key's) budgets are shown."""
    if budget.scope == "key" and "subject" not in query:
        return "model" not in query
    if budget.scope == "model" and "model" not in query:
        return True
    return applies(budget, query.get("subject", ""), query.get("model", ""))


def budget(source: Source, tenant_id: str, budget_id: str, moment: Moment) -> Found:
    row = tenant_row(source, tenant_id)
    found = _of_name(row.budgets, budget_id)
    return Found(_figures(tenant_id, found, _held(tenant_id, moment), moment), row.version)


def spent_now(tenant_id: str, budget_id: str, now: float) -> int:
    """All that was spent in the budget's present period, the forgiven included."""
    found = _of_name(tenant_row(DatabaseSource(), tenant_id).budgets, budget_id)
    return _spent(tenant_id, found, period_start(found.period, now), Moment(now))


def require_target(tenant_id: str, budget: Budget) -> None:
    """Raise Invalid ``invalid_budget`` for a budget of a model or a key that there is not."""
    if budget.scope == "key":
        _require_key(tenant_id, budget)
    require_model(budget)


def _require_key(tenant_id: str, budget: Budget) -> None:
    """A key of the tenant, revoked or not; who comes with a JWT or a login has no row to look up.

    A file is not held to it: it brings its models along, but no key, and must apply elsewhere."""
    key_id = budget.target
    if not key_id or key_id.startswith(("jwt:", "user:")):
        return
    reading.wait_for(reading.head())  # a key that its caller has just issued must be known
    row = DatabaseSource().get(ApiKey, key_id)
    if row is None or row.tenant_id != tenant_id:
        text = f"There is no key '{key_id}' that the budget '{budget.budget_id}' could count."
        raise Invalid("invalid_budget", text, "target")


def require_model(budget: Budget) -> None:
    """Raise Invalid ``invalid_budget`` for a budget of a model that there is not: it would count
    nothing. So would one of a route or an alias, since records count for the model that serves."""
    if budget.scope != "model" or not budget.target:
        return
    reading.wait_for(reading.head())  # a model that its caller has just registered must be known
    source, name = DatabaseSource(), budget.target
    if source.get(Model, name) is not None:
        return
    text = f"There is no model '{name}' that the budget '{budget.budget_id}' could count."
    if alias := source.get(Alias, name):
        text = f"'{name}' is an alias; a budget names the model itself, here '{alias.model}'."
    elif route := source.get(Route, name):
        models = ", ".join(sorted({model_of(arm.version_id) for arm in route.arms}))
        text = f"'{name}' is a route; a budget names a model that it leads to: {models}."
    raise Invalid("invalid_budget", text, "target")


def _of_name(budgets: tuple[Budget, ...], budget_id: str) -> Budget:
    for one in budgets:
        if one.budget_id == budget_id:
            return one
    raise NotFound("budget", budget_id)


def _figures(tenant_id: str, budget: Budget, held: list[Any], moment: Moment) -> Json:
    start = period_start(budget.period, moment.at)
    total = _spent(tenant_id, budget, start, moment)
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


def _spent(tenant_id: str, budget: Budget, start: str, moment: Moment) -> int:
    rows = Usage.objects.filter(
        tenant_id=tenant_id, scope=budget.scope, target=budget.target, day__gte=start
    )
    if not moment.past:
        return _sum(budget, rows)
    yesterday = day_of(moment.at - _DAY_SECONDS)
    return _sum(budget, rows.filter(day__lt=yesterday)) + sum(
        price if budget.unit == "money" else prompt + output
        for subject, version, day, prompt, output, price in _recent(tenant_id, moment)
        .filter(ended_at__lte=moment.at)
        .exclude(outcome="")
        .values_list(
            "subject", "version_id", "day", "num_prompt_tokens", "num_output_tokens", "price"
        )
        if day >= max(start, yesterday) and applies(budget, subject, model_of(version))
    )


def _recent(tenant_id: str, moment: Moment) -> QuerySet[InferenceRequest]:
    """Admitted within the two days up to the moment, found by the order of ids."""
    first = moments.last_request_until(moment.at - 2 * _DAY_SECONDS, slack=False)
    last = moments.last_request_until(moment.at)
    return InferenceRequest.objects.filter(
        tenant_id=tenant_id, pk__gte=first, pk__lte=last, at__lte=moment.at
    )


def _sum(budget: Budget, rows: QuerySet[Usage]) -> int:
    if budget.unit == "money":
        sums = rows.aggregate(milli=Sum("price_milli"), pico=Sum("price_pico"))
        return money.join(sums["milli"] or 0, sums["pico"] or 0)
    sums = rows.aggregate(prompt=Sum("num_prompt_tokens"), output=Sum("num_output_tokens"))
    return int((sums["prompt"] or 0) + (sums["output"] or 0))


def _held(tenant_id: str, moment: Moment) -> list[Any]:
    if moment.past:
        live = _recent(tenant_id, moment).filter(Q(outcome="") | Q(ended_at__gt=moment.at))
    else:
        live = InferenceRequest.objects.filter(tenant_id=tenant_id, outcome="")
    return list(
        live.values_list("subject", "version_id", "day", "reserved_tokens", "reserved_price")
    )
