"""The whole configuration as one file, and its hash: out of one system, into an empty one.

In it are tenants with tier, suspension, budgets and whether their text is captured, models with
versions (retired ones too: their names stay taken), prices, aliases and access, routes, and of the
installation the weights of routing and how long what is kept. Two systems are configured alike when
their hashes are; the hash covers what is configured and nothing that only happened, such as times.

    # Configuration as of log position 812.
    # sha256 5f0c…
    # API keys are named here without their secrets; applying this makes none: issue them anew.
    format: 1
    tenants: …
    models: …
    routes: …
    routing: …
    retention: …
    end: true

``catalog_file`` reads it. What is left out has its default, and a list that is empty is left out;
of the weights all are named once one has another value than at first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

import msgspec
import yaml

from controlplane.application.catalog_file import FORMAT
from controlplane.domain import model, money
from controlplane.domain.budget import Budget, amount_in
from controlplane.domain.model import Model
from controlplane.domain.money import Price
from controlplane.domain.retention import DEFAULT_DAYS, Retention, days_of
from controlplane.domain.route import Route
from controlplane.domain.routing import DEFAULT_WEIGHTS, Weights
from controlplane.domain.version_spec import VersionSpec
from controlplane.projections.tenants import ApiKey, Tenant

_NOTE = "API keys are named here without their secrets; applying this makes none: issue them anew."
_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True)
class Configuration:
    """Plain values: what the file holds between ``format`` and ``end``."""

    tenants: list[dict[str, Any]]
    models: list[dict[str, Any]]
    routes: list[dict[str, Any]]
    routing: dict[str, Any] = field(default_factory=dict)
    retention: dict[str, int | None] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 (hex) of all but the keys, which no file can bring back. The installation's
        own settings count only where they are not those of a new one, so that files without them
        keep their hashes."""
        tenants = [{k: v for k, v in one.items() if k != "keys"} for one in self.tenants]
        own = (self.routing, self.retention)
        parts = (tenants, self.models, self.routes, *(own if any(own) else ()))
        return sha256(_encode(parts)).hexdigest()

    def text(self, position: int) -> str:
        """The file, as of a log position."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        content = {
            "format": FORMAT,
            **{name: lines for name, lines in parts.items() if lines},
            "end": True,
        }
        heading = (
            f"# Configuration as of log position {position}.\n# sha256 {self.digest()}\n# {_NOTE}\n"
        )
        return heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def configuration(
    tenants: Sequence[Tenant],
    keys: Sequence[ApiKey],
    models: Mapping[str, Model],
    routes: Mapping[str, Route],
    weights: Weights,
    retentions: Mapping[str, Retention],
) -> Configuration:
    """From rows and states that belong to one log position."""
    return Configuration(
        [
            _tenant_entry(row, [key for key in keys if key.tenant_id == row.tenant_id])
            for row in sorted(tenants, key=lambda row: row.tenant_id)
        ],
        [entry for name in sorted(models) for entry in _model_entries(name, models[name])],
        [
            {"name": name, "sticky": line.sticky, "arms": msgspec.to_builtins(line.arms)}
            for name, line in sorted(routes.items())
            if line.exists
        ],
        {} if weights == DEFAULT_WEIGHTS else msgspec.to_builtins(weights),
        {
            kind: days_of(kind, state)
            for kind, state in sorted(retentions.items())
            if days_of(kind, state) != DEFAULT_DAYS[kind]
        },
    )


def _tenant_entry(row: Tenant, keys: Sequence[ApiKey]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.tenant_id, "tier": row.tier}
    if row.suspended:
        entry["suspended"] = row.suspended_reason or True
    if row.budgets:
        entry["budgets"] = [_budget_entry(one) for one in row.budgets]
    if row.captures_text:
        entry["captures_text"] = True
    named = [_key_entry(key) for key in sorted(keys, key=lambda key: key.created_at)]
    return entry | ({"keys": named} if named else {})


def _budget_entry(one: Budget) -> dict[str, Any]:
    """Without what was forgiven, which is no configuration."""
    target = {} if one.scope == "tenant" else {"scope": one.scope, "target": one.target}
    limit = amount_in(one.unit, one.limit)
    return {"name": one.budget_id, "limit": limit, "unit": one.unit, "period": one.period, **target}


def _key_entry(key: ApiKey) -> dict[str, Any]:
    models = {"models": list(key.models)} if key.models else {}
    expiry = {} if key.expires_at is None else {"expires_at": key.expires_at}
    return {"name": key.name, "role": key.role, "scopes": list(key.scopes), **models, **expiry}


def _model_entries(name: str, state: Model) -> list[dict[str, Any]]:
    """One for each version; what belongs to the model as a whole stands on the last."""
    entries = [
        _version_entry(
            name, spec, default=spec.version == state.default and version not in state.retired
        )
        | _price_entry(model.price_of(state, version))
        | ({"retired": True} if version in state.retired else {})
        for version, spec in state.versions.items()
    ] or [{"name": name, "version": ""}]
    if state.aliases:
        entries[-1]["aliases"] = sorted(state.aliases)
    if state.access != model.OPEN_ACCESS:
        entries[-1]["access"] = msgspec.to_builtins(state.access)
    return entries


def _version_entry(name: str, spec: VersionSpec, default: bool) -> dict[str, Any]:
    """Every field that differs from its default, in the order of the specification."""
    plain = VersionSpec(version="", source="")
    skipped = ("min_replicas", "max_replicas")
    fields = {
        field: msgspec.to_builtins(getattr(spec, field))
        for field in VersionSpec.__struct_fields__
        if field not in skipped and getattr(spec, field) != getattr(plain, field)
    }
    scale = {"replicas": {"min": spec.min_replicas, "max": spec.max_replicas}}
    return {"name": name, **fields, **scale, **({"default": True} if default else {})}


def _price_entry(price: Price) -> dict[str, Any]:
    """Left out where it is nothing, as the fields that have their defaults are."""
    return {} if price == money.FREE else {"price": money.price_texts(price)}
