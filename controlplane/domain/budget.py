"""Budgets of a tenant, and the one rule of which apply: **every budget that matches must hold**.

A budget limits tokens (prompt and output together) or money (picodollars, see ``money``) per
calendar period in UTC. Its scope says what it matches: all of the tenant's requests, those of one
key (the ``subject`` of a record: a key's id, ``jwt:<sub>`` or ``user:<name>``, so that a key and a
JWT are limited alike), or those that one model serves, in any of its versions. Worked example::

    all    tenant            1,000,000 tokens a month
    ci     key    4f2a…         10,000 tokens a day
    big    model  zen-72b      50.00 USD in total

    key 4f2a… asks zen-7b     all and ci must hold
    jwt:ann asks zen-72b      all and big must hold

There is no order among them and none overrides another, so adding a budget never allows more. A
limit of 0 is a limit: nothing is admitted. A tenant without budgets is not limited. A model is
named by its own name: a record counts for the model that served it, whatever route or alias the
request named.

**Reset.** What a budget had counted when it was reset is forgiven for the rest of that period:
``forgiven`` is taken off what was spent in the period that ``forgiven_at`` lies in. The counters
themselves stay what they are, the sums of the records.
"""

import re
from datetime import date, timedelta
from functools import lru_cache

import msgspec

from controlplane.domain.errors import Invalid
from controlplane.domain.ids import checked_name
from controlplane.domain.money import amount_text, parse_amount

PERIODS = ("day", "month", "total")
UNITS = ("tokens", "money")
SCOPES = ("tenant", "key", "model")
MAX_BUDGETS = 100  # of one tenant; all are looked at for each of its requests
_TOKENS = re.compile(r"[0-9]{1,40}", re.ASCII)
_MOST = {"tokens": 2**62, "money": 10**24}  # 10²⁴ picodollars are a million million dollars


class Budget(msgspec.Struct, frozen=True):
    """``limit`` and ``forgiven`` in tokens or picodollars; ``target`` is empty for the tenant."""

    budget_id: str
    scope: str
    target: str
    unit: str
    limit: int
    period: str
    forgiven: int = 0
    forgiven_at: float = 0.0


def check_budget(budget: Budget) -> None:
    """Raise Invalid ``invalid_budget`` (or ``invalid_name``) for the first rule it breaks."""
    checked_name(budget.budget_id, "budget_id")
    for param, allowed in (("scope", SCOPES), ("unit", UNITS), ("period", PERIODS)):
        if getattr(budget, param) not in allowed:
            raise Invalid("invalid_budget", f"{param} is one of {', '.join(allowed)}.", param)
    if not 0 <= budget.limit < _MOST[budget.unit]:
        most = amount_in(budget.unit, _MOST[budget.unit])
        told = f"limit is 0 or more {budget.unit}, and below {most}."
        raise Invalid("invalid_budget", told, "limit")
    if (budget.scope == "tenant") != (budget.target == "") or len(budget.target) > 255:
        text = "target names the key or the model, and is empty for the tenant."
        raise Invalid("invalid_budget", text, "target")


def applies(budget: Budget, subject: str, model: str) -> bool:
    """Whether a request of ``subject`` that ``model`` serves must fit this budget."""
    match budget.scope:
        case "key":
            return budget.target == subject
        case "model":
            return budget.target == model
    return True


def parse_limit(unit: str, text: str) -> int:
    """``"1000"`` tokens, or ``"12.50"`` of money in picodollars; raises Invalid."""
    if unit == "money":
        return parse_amount(text, "limit")
    if not _TOKENS.fullmatch(text):
        raise Invalid("invalid_budget", "A number of tokens is written in 1 to 40 digits.", "limit")
    return int(text)


def amount_in(unit: str, value: int) -> str:
    """As people write it: what ``parse_limit`` reads."""
    return amount_text(value) if unit == "money" else str(value)


def day_of(at: float) -> str:
    """The UTC date of ``at`` (Unix seconds): ``day_of(0) == "1970-01-01"``."""
    return _date(int(at // 86_400))


@lru_cache(64)
def _date(days: int) -> str:
    return (date(1970, 1, 1) + timedelta(days)).isoformat()


def period_start(period: str, at: float) -> str:
    """First day of the ``day``, ``month`` or ``total`` period that ``at`` lies in."""
    day = day_of(at)
    return {"day": day, "month": f"{day[:7]}-01"}.get(period, "")


def counted(budget: Budget, start: str, spent: int) -> int:
    """What counts of ``spent`` since ``start``, the first day of a period: not what is forgiven."""
    if period_start(budget.period, budget.forgiven_at) != start:
        return spent
    return max(0, spent - budget.forgiven)
