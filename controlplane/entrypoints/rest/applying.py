"""The catalog file against the log: tried as a whole first, then one command after another."""

import time
from functools import partial
from typing import Any

from rest_framework.request import Request

from controlplane import bootstrap
from controlplane.application import catalog_file
from controlplane.application.configuration import Configuration, configuration
from controlplane.application.handle import Handled
from controlplane.application.order import Order
from controlplane.application.ports import EventMeta
from controlplane.domain import model, retention, route, routing
from controlplane.domain.capture import CaptureCommand
from controlplane.domain.decider import Decider, Event, fold
from controlplane.domain.ids import version_id
from controlplane.domain.policy import WRITE, allowed
from controlplane.domain.tenant import SetBudget
from controlplane.entrypoints.rest import reading, referring, spending
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.security import principal_in
from controlplane.entrypoints.rest.sources import Selection, Source
from controlplane.entrypoints.rest.writing import Write, handle
from controlplane.projections.catalog import Model
from controlplane.projections.routes import Route
from controlplane.projections.tenants import ApiKey, Tenant


def state_of(decider: Decider[Any], target: str) -> Any:
    return bootstrap.command_handler().state(decider, decider.stream(target))[1]


def planned(text: str) -> tuple[list[Order], list[list[Event]]]:
    """The orders of a file and what each would append; raises DomainError for the first mistake."""
    orders = catalog_file.orders(catalog_file.parse(text), state_of, time.time())
    events = catalog_file.preview(orders, state_of)
    for order in orders:
        referring.require_free_name(order.command)
    _require_catalog(orders, events)
    _require_models(orders, events)
    return orders, events


def _require_catalog(orders: list[Order], events: list[list[Event]]) -> None:
    """Raise DomainError if an arm that changes names a version which it may not, or a version
    that is retired is an arm still, each as it is once the whole file is applied."""
    coming = _coming(orders)
    for order, changes in zip(orders, events, strict=True):
        if changes and isinstance(order.command, route.CreateRoute | route.ChangeArms):
            referring.require_versions((arm.version_id for arm in order.command.arms), coming)
        elif changes and isinstance(order.command, model.RetireVersion):
            referring.require_unrouted(order.command, coming=coming)


def _coming(orders: list[Order]) -> referring.Coming:
    commands = [order.command for order in orders]
    return referring.Coming(
        tasks={
            version_id(one.name, one.spec.version): one.spec.task
            for one in commands
            if isinstance(one, model.AddVersion)
        },
        retired=frozenset(
            version_id(one.name, one.version)
            for one in commands
            if isinstance(one, model.RetireVersion)
        ),
        arms={
            one.name: one.arms
            for one in commands
            if isinstance(one, route.CreateRoute | route.ChangeArms)
        },
    )


def _require_models(orders: list[Order], events: list[list[Event]]) -> None:
    """Raise Invalid if a budget that changes is of a model neither known nor of this file."""
    new = {order.target for order in orders if isinstance(order.command, model.RegisterModel)}
    for order, changes in zip(orders, events, strict=True):
        if not changes or not isinstance(order.command, SetBudget):
            continue
        if order.command.budget.target not in new:
            spending.require_model(order.command.budget)


def apply(request: Request, query: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``(body, position)``. With an Idempotency-Key every command has its own, derived from it."""
    orders, would_be = planned(str(request.data))
    _require_rights(request, orders)
    if query["dry_run"] == "true":
        results = [
            _dry_receipt(order, events) for order, events in zip(orders, would_be, strict=True)
        ]
        return _body(results, dry_run=True), reading.head()
    results, position = [], reading.head()
    for index, order in enumerate(orders):
        write = Write(order.decider, order.target, order.command)
        done = handle(request, write, query.get("reason", ""), dry_run=False, part=str(index))
        results.append(write.receipt(done))
        position = max(position, done.position)
    return _body(results, dry_run=False), position


def _require_rights(request: Request, orders: list[Order]) -> None:
    """A file changes nothing that its sender could not change by hand."""
    for order in orders:
        resource = _resource_of(order)
        if not allowed(principal_in(request), WRITE, resource):
            raise Problem(403, "forbidden", f"This file changes a {resource}, which you may not.")


def _resource_of(order: Order) -> str:
    """What the order by itself would be a write of."""
    if isinstance(order.command, SetBudget):
        return "budget"
    return "text" if isinstance(order.command, CaptureCommand) else order.decider.category


def apply_locally(text: str, meta: EventMeta, dry_run: bool) -> list[tuple[str, list[Event]]]:
    """For ``manage.py apply``: ``(stream, events)`` of every order."""
    orders, would_be = planned(text)
    streams = [order.stream for order in orders]
    if dry_run:
        return list(zip(streams, would_be, strict=True))
    handler = bootstrap.command_handler()
    return [
        (stream, list(handler.handle(order.decider, stream, order.command, meta).events))
        for stream, order in zip(streams, orders, strict=True)
    ]


def exported(source: Source, upto: int | None = None) -> Configuration:
    """What is configured now, from the log's own state, or with ``source`` as of ``upto``."""
    then = state_of if upto is None else partial(_state_at, upto)
    live_keys = Selection({"revoked": False})
    return configuration(
        source.select(Tenant),
        source.select(ApiKey, live_keys),
        {row.name: then(model.DECIDER, row.name) for row in source.select(Model)},
        {row.name: then(route.DECIDER, row.name) for row in source.select(Route)},
        then(routing.DECIDER, routing.NAME).weights,
        {kind: then(retention.DECIDER, kind) for kind in retention.KINDS},
    )


def _state_at(upto: int, decider: Decider[Any], target: str) -> Any:
    stream = bootstrap.event_store().read_stream(decider.stream(target))
    return fold(decider, (one.event for one in stream if one.position <= upto))


def _dry_receipt(order: Order, events: list[Event]) -> dict[str, Any]:
    stream = order.stream
    version, _ = bootstrap.command_handler().state(order.decider, stream)
    write = Write(order.decider, order.target, order.command)
    return write.receipt(Handled(tuple(events), version, 0), dry_run=True)


def _body(results: list[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    changed = sum(result["changed"] for result in results)
    return {"dry_run": dry_run, "changed": changed, "results": results}
