"""What the GETs of the read model return, as JSON bodies.

A reader that is confined to a tenant passes it as ``tenant_id``; whatever is not theirs is then
absent, with the very answer that an absent thing gets. ``source`` is the read model as it is now,
or as it was (``as_of``).
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as installed_version
from typing import Any

import msgspec
from django.conf import settings
from django.db.models import Count, Q, Sum
from django.db.models.functions import Coalesce
from django.http.response import HttpResponseBase

from controlplane import bootstrap
from controlplane.adapters.access.keys import last_uses
from controlplane.adapters.eventstore.models import Lease
from controlplane.adapters.readmodel.models import Checkpoint
from controlplane.adapters.readmodel.projector import Projector
from controlplane.adapters.store_writes import why_unwritable
from controlplane.application.ports import CONTROLLER_LEASE
from controlplane.domain.budget import Budget, amount_in, applies
from controlplane.domain.errors import NotFound
from controlplane.domain.money import price_texts
from controlplane.domain.policy import Principal
from controlplane.domain.version_spec import VersionSpec
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.sources import (
    DatabaseSource,
    Selection,
    Source,
    model_of,
    page,
    row_of,
)
from controlplane.entrypoints.rest.tiers import by_tier, live_tier
from controlplane.projections.base import Row
from controlplane.projections.catalog import Model, Version
from controlplane.projections.decisions import Decision, DecisionAbout
from controlplane.projections.demand import Forecast, Preload, Scaling
from controlplane.projections.fleet import Node, Replica
from controlplane.projections.routes import Route
from controlplane.projections.standing import Unplaced
from controlplane.projections.tenants import ApiKey, Tenant

Json = dict[str, Any]
Page = tuple[int, list[Json]]

WAIT_SECONDS = 2.0
_PATIENCE_SECONDS = 0.15  # how long the controller has to project before this process does
_POLL_SECONDS = 0.02
MAX_LAG_EVENTS = 1000  # beyond which the read model is too far behind to be called ready


@dataclass(frozen=True)
class Found:
    """One thing: its body, and the version that is its ETag."""

    body: Json
    version: int


# --- positions --------------------------------------------------------------------------------
def head() -> int:
    """Position of the last event in the log."""
    return bootstrap.event_store().head().position


def position() -> int:
    """How far the read model is."""
    found = Checkpoint.objects.values_list("position", flat=True).first()
    return found or 0


def wait_for(min_position: int | None) -> int:
    """The read model's position, once it has reached ``min_position``.

    Raises Problem 400 for a position beyond the log, 503 if the read model does not get there in
    two seconds. A controller that is down does not make writes unreadable: this process projects
    then, which is safe beside any other projector.
    """
    reached = position()
    if min_position is None or reached >= min_position:
        return reached
    if min_position > head():
        raise Problem(400, "invalid_position", "The log does not reach this position yet.")
    started = time.monotonic()
    while (waited := time.monotonic() - started) < WAIT_SECONDS:
        reached = _project() if waited > _PATIENCE_SECONDS else position()
        if reached >= min_position:
            return reached
        time.sleep(_POLL_SECONDS)
    retry = {"Retry-After": "1"}
    raise Problem(503, "projection_behind", "The read model is not there yet.", retry)


def in_effect(response: HttpResponseBase) -> HttpResponseBase:
    """The answer, once the ledger's next transaction, in whichever process, reads the change."""
    if "X-Log-Position" in response:
        wait_for(int(response["X-Log-Position"]))
    return response


_projecting = threading.Lock()


def _project() -> int:
    with _projecting:
        return _projector().catch_up()


@cache
def _projector() -> Projector:
    return bootstrap.projector()


def status(now: float) -> Json:
    reached, last = position(), head()
    lease = Lease.objects.filter(name=CONTROLLER_LEASE, expires_at__gt=now).first()
    return {
        "position": reached,
        "head": last,
        "projection_lag": max(0, last - reached),
        "leader": lease.holder if lease else None,
        "gateway_url": settings.GATEWAY_URL,
        "version": installed_version("engine-controlplane"),
        "cluster_id": settings.CLUSTER_ID,
        "currency": settings.CURRENCY,
        "ready": last - reached < MAX_LAG_EVENTS and not why_unwritable(),
    }


# --- tenants ----------------------------------------------------------------------------------
def tenants(source: Source, query: Json, tenant_id: str | None) -> Page:
    equal = {"tier": query["tier"]} if "tier" in query else {}
    keep = (lambda row: row.tenant_id == tenant_id) if tenant_id else None
    count, rows = page(source.select(Tenant, Selection(equal, keep)), query)
    return count, [_tenant_json(row) for row in rows]


def tenant(source: Source, tenant_id: str) -> Found:
    row = tenant_row(source, tenant_id)
    return Found(_tenant_json(row), row.version)


def _tenant_json(row: Tenant) -> Json:
    shown = {**_json(row), "budgets": [budget_json(one) for one in row.budgets]}
    del shown["text_generation"]  # which key is in use is nobody's business
    return shown


def budget_json(budget: Budget) -> Json:
    """The rule; amounts as people write them."""
    names = ("budget_id", "scope", "target", "unit", "period")
    rule = {name: getattr(budget, name) for name in names}
    return {**rule, "limit": amount_in(budget.unit, budget.limit)}


def require_tenant(tenant_id: str) -> None:
    tenant_row(DatabaseSource(), tenant_id)


def keys(source: Source, tenant_id: str, query: Json) -> Page:
    """``last_used_at`` is known for now only, and null ``as_of`` a time before."""
    budgets = tenant_row(source, tenant_id).budgets
    equal: Json = {"tenant_id": tenant_id}
    if query.get("revoked") is not None:
        equal["revoked"] = query["revoked"] == "true"
    count, rows = page(source.select(ApiKey, Selection(equal)), query)
    used = {} if "as_of" in query else last_uses(tenant_id)
    return count, [_key_json(row, used, budgets) for row in rows]


def _key_json(row: ApiKey, used: dict[str, float], budgets: Iterable[Budget]) -> Json:
    """``applies`` has the budgets of one model too, which only its requests must fit."""
    body = _json(row)
    previous = row.previous_secret_id
    for name in ("secret_id", "previous_secret_id", "previous_until", "revoked_at"):
        del body[name]
    mine = [one for one in budgets if one.scope == "model" or applies(one, row.key_id, "")]
    return {
        **body,
        "last_used_at": used.get(row.secret_id),
        "previous_valid_until": row.previous_until if previous else None,
        "previous_last_used_at": used.get(previous),
        "applies": [budget_json(one) for one in mine],
    }


def tenant_row(source: Source, tenant_id: str) -> Tenant:
    return required(source.get(Tenant, tenant_id), "tenant", tenant_id)


# --- catalog ----------------------------------------------------------------------------------
def models(source: Source, query: Json, reader: Principal) -> Page:
    equal = {"name": query["name"]} if "name" in query else {}
    visible = source.select(Model, Selection(equal, lambda row: _may_use(row, reader)))
    count, rows = page(visible, query)
    versions: defaultdict[str, list[Version]] = defaultdict(list)
    for one in source.select(Version, Selection(order="added_at_position")):
        versions[one.model].append(one)
    standing = _Standing(source)
    return count, [_model_json(row, versions[row.name], reader, standing) for row in rows]


def model(source: Source, name: str, reader: Principal) -> Found:
    row = _model(source, name, reader)
    standing = _Standing(source)
    return Found(_model_json(row, _versions_of(source, name), reader, standing), row.version)


def versions(source: Source, name: str, query: Json, reader: Principal) -> Page:
    _model(source, name, reader)
    count, rows = page(_versions_of(source, name), query)
    standing = _Standing(source)
    return count, [_version_json(row, standing) for row in rows]


def version(source: Source, name: str, version: str, reader: Principal) -> Found:
    """Its ETag is the model's: versions are part of the model's aggregate."""
    owner = _model(source, name, reader)
    row = required(source.get(Version, f"{name}@{version}"), "version", version)
    return Found(_version_json(row, _Standing(source)), owner.version)


def aliases(source: Source, name: str, query: Json, reader: Principal) -> Page:
    row = _model(source, name, reader)
    count, names = page(row.aliases, query)
    return count, [{"alias": alias, "model": name} for alias in names]


def _model(source: Source, name: str, reader: Principal) -> Model:
    row = source.get(Model, name)
    return required(row if row and _may_use(row, reader) else None, "model", name)


def _may_use(row: Model, reader: Principal) -> bool:
    """As the gateway has it; whoever reaches the whole fleet sees all that is in it."""
    return not reader.confined or row.access.allows(reader.tenant_id, reader.role)


def _versions_of(source: Source, name: str) -> list[Version]:
    return source.select(Version, Selection({"model": name}, order="added_at_position"))


class _Standing:
    """In which tiers each version's replicas are; of all versions at once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._wanted: defaultdict[str, list[Replica]] = defaultdict(list)
        for one in source.select(Replica, Selection({"desired": True})):
            self._wanted[one.version_id].append(one)

    def tiers(self, version_id: str) -> Json:
        return dict(by_tier(self._source, self._wanted[version_id]))


def _model_json(
    row: Model, versions: list[Version], reader: Principal, standing: _Standing
) -> Json:
    """As the reader may see it: who else has access is not its business."""
    access = _json(row.access)
    if reader.confined:
        access["tenants"] = [one for one in access["tenants"] if one == reader.tenant_id]
    return {
        "name": row.name,
        "default_version": row.default_version,
        "aliases": list(row.aliases),
        "access": access,
        "versions": [_version_json(one, standing) for one in versions],
        "created_at": row.created_at,
    }


def _version_json(row: Version, standing: _Standing) -> Json:
    counts = ("ready_replicas", "desired_replicas", "stuck_replicas")
    told = ("version_id", "retired", "status", *counts, "reason", "retry_at")
    names = (*VersionSpec.__struct_fields__, *told)
    body = {name: msgspec.to_builtins(getattr(row, name)) for name in names}
    return {**body, **standing.tiers(row.version_id), "price": price_texts(row.price)}


# --- routes -----------------------------------------------------------------------------------
def routes(source: Source, query: Json, reader: Principal) -> Page:
    hidden = _hidden_models(source, reader)
    visible = source.select(Route, Selection(keep=lambda row: not _arms_in(row, hidden)))
    count, rows = page(visible, query)
    return count, [_route_json(row) for row in rows]


def route(source: Source, name: str, reader: Principal) -> Found:
    row = source.get(Route, name)
    seen = row if row and not _arms_in(row, _hidden_models(source, reader)) else None
    found = required(seen, "route", name)
    return Found(_route_json(found), found.version)


def _hidden_models(source: Source, reader: Principal) -> set[str]:
    if not reader.confined:
        return set()
    return {row.name for row in source.select(Model) if not _may_use(row, reader)}


def _arms_in(row: Route, names: set[str]) -> bool:
    return any(arm.version_id.partition("@")[0] in names for arm in row.arms)


def _route_json(row: Route) -> Json:
    body = _json(row)
    del body["version"]
    return body


# --- fleet ------------------------------------------------------------------------------------
def nodes(source: Source, query: Json) -> Page:
    equal: Json = {name: query[name] for name in ("status", "zone") if name in query}
    count, rows = page(source.select(Node, Selection(equal)), query)
    replicas: defaultdict[str, list[Replica]] = defaultdict(list)
    for one in source.select(Replica):
        replicas[one.node_id].append(one)
    gaps = _gaps(source, rows)
    return count, [_node_json(source, row, replicas[row.node_id], gaps) for row in rows]


def node(source: Source, node_id: str) -> Found:
    row = required(source.get(Node, node_id), "node", node_id)
    replicas = source.select(Replica, Selection({"node_id": node_id}))
    return Found(_node_json(source, row, replicas, _gaps(source, [row])), row.version)


def placements(source: Source, query: Json) -> Page:
    names = {"node": "node_id", "version_id": "version_id", "state": "state"}
    equal = {field: query[name] for name, field in names.items() if name in query}
    prefix = f"{query['model']}@" if "model" in query else ""
    selection = Selection(equal, lambda row: row.version_id.startswith(prefix))
    count, rows = page(source.select(Replica, selection), query)
    return count, [_replica_json(source, row) for row in rows]


def _gaps(source: Source, nodes: Sequence[Node]) -> set[str]:
    """The versions of which the last plan found no room for a replica; asked for only if a drain
    may wait for it."""
    if not any(one.draining for one in nodes):
        return set()
    return {one.version_id for one in source.select(Unplaced)}


def _node_json(source: Source, row: Node, replicas: list[Replica], gaps: set[str]) -> Json:
    body = _json(row)
    del body["version"]
    staying = {one.version_id for one in replicas if one.desired} if row.draining else set()
    return {
        **body,
        "drain_waits_for": sorted(staying & gaps),
        "replicas": [_replica_json(source, one) for one in replicas],
    }


def _replica_json(source: Source, row: Replica) -> Json:
    body = _json(row)
    del body["sha256"]
    return {**body, **live_tier(source, row)}


def decisions(query: Json, upto: int) -> list[Json]:
    """Newest first; those about a replica of ``version_id``, if one is given."""
    last = min(upto, query["before"] - 1) if "before" in query else upto
    if "version_id" in query:
        about = model_of(DecisionAbout).objects.filter(
            version_id=query["version_id"], position__lte=last
        )
        wanted = list(
            about.order_by("-position").values_list("position", flat=True)[: query["limit"]]
        )
        found = model_of(Decision).objects.filter(position__in=wanted)
    else:
        found = model_of(Decision).objects.filter(position__lte=last)
    newest = found.order_by("-position").values()[: query["limit"]]
    return [_json(row_of(Decision, values)) for values in newest]


def decision(decision_id: str, upto: int) -> Found:
    """A decision never changes: as of a position before it, it is not there."""
    found = DatabaseSource().get(Decision, decision_id)
    known = found if found and found.position <= upto else None
    row = required(known, "decision", decision_id)
    return Found(_json(row), row.generation)


# --- demand -----------------------------------------------------------------------------------
def scalings(query: Json, upto: int) -> list[Json]:
    return _newest(Scaling, ("version_id", "code"), query, upto)


def forecasts(query: Json, upto: int) -> list[Json]:
    return _newest(Forecast, (), query, upto)


def preloads(query: Json, upto: int) -> list[Json]:
    return _newest(Preload, ("version_id", "outcome"), query, upto)


def scaling_before(version_id: str, position: int) -> Json | None:
    """What last changed the version's number of replicas before ``position``."""
    newest = scalings({"version_id": version_id, "limit": 1}, position)
    return newest[0] if newest else None


def preload_totals(query: Json, upto: int) -> Page:
    """Added up by version, over all that was judged up to a position."""
    equal = {"version_id": query["version_id"]} if "version_id" in query else {}
    judged = model_of(Preload).objects.filter(position__lte=upto, **equal)
    by_version = judged.values("version_id").order_by("version_id")
    totals = by_version.annotate(
        num_hits=Count("position", filter=Q(outcome="hit")),
        num_wasted=Count("position", filter=Q(outcome="wasted")),
        num_missed=Count("position", filter=Q(outcome="missed")),
        ahead_s=Coalesce(Sum("ahead_s"), 0.0),
        wasted_s=Sum("wasted_s"),
    )
    count, rows = page(list(totals), query)
    return count, list(rows)


def _newest(table: type[Row], filters: Iterable[str], query: Json, upto: int) -> list[Json]:
    """Rows of a history, newest first, as of a position."""
    last = min(upto, query["before"] - 1) if "before" in query else upto
    equal = {name: query[name] for name in filters if name in query}
    found = model_of(table).objects.filter(position__lte=last, **equal)
    newest = found.order_by("-position").values()[: query["limit"]]
    return [_json(row_of(table, values)) for values in newest]


# --- helpers ----------------------------------------------------------------------------------
def required(row: Any, what: str, name: str) -> Any:
    if row is None:
        raise NotFound(what, name)
    return row


def _json(row: Row | msgspec.Struct) -> Json:
    body: Json = msgspec.to_builtins(row)
    return body
