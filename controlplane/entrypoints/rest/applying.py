"""The catalog file against the log: tried as a whole first, then one command after another."""

import time
from typing import Any

from rest_framework.request import Request

from controlplane import bootstrap
from controlplane.application import catalog_file
from controlplane.application.catalog_file import FileOrder
from controlplane.application.handle import Handled
from controlplane.application.ports import EventMeta
from controlplane.domain import model, route
from controlplane.domain.decider import Decider, Event
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.writing import Write, handle


def state_of(decider: Decider[Any], target: str) -> Any:
    return bootstrap.command_handler().state(decider, decider.stream(target))[1]


def planned(text: str) -> tuple[list[FileOrder], list[list[Event]]]:
    """The orders of a file and what each would append; raises DomainError for the first mistake."""
    orders = catalog_file.orders(catalog_file.parse(text), state_of, time.time())
    events = catalog_file.preview(orders, state_of)
    for order in orders:
        reading.require_free_name(order.command)
    return orders, events


def apply(request: Request, query: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``(body, position)``. With an Idempotency-Key every command has its own, derived from it."""
    orders, would_be = planned(str(request.data))
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


def apply_locally(text: str, meta: EventMeta, dry_run: bool) -> list[tuple[str, list[Event]]]:
    """For ``manage.py apply``: ``(stream, events)`` of every order."""
    orders, would_be = planned(text)
    streams = [order.decider.stream(order.target) for order in orders]
    if dry_run:
        return list(zip(streams, would_be, strict=True))
    handler = bootstrap.command_handler()
    return [
        (stream, list(handler.handle(order.decider, stream, order.command, meta).events))
        for stream, order in zip(streams, orders, strict=True)
    ]


def export() -> str:
    """The present catalog as YAML, from the log's own state."""
    models = {name: state_of(model.DECIDER, name) for name in reading.model_names()}
    routes = {name: state_of(route.DECIDER, name) for name in reading.route_names()}
    return catalog_file.export(models, routes)


def _dry_receipt(order: FileOrder, events: list[Event]) -> dict[str, Any]:
    stream = order.decider.stream(order.target)
    version, _ = bootstrap.command_handler().state(order.decider, stream)
    write = Write(order.decider, order.target, order.command)
    return write.receipt(Handled(tuple(events), version, 0), dry_run=True)


def _body(results: list[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    changed = sum(result["changed"] for result in results)
    return {"dry_run": dry_run, "changed": changed, "results": results}
