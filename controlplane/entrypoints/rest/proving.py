"""Proofs about the sealed logs, for the API; and the verification that it can start."""

import threading
from typing import Any

import structlog
from django.db import connections

from controlplane import bootstrap
from controlplane.application.merkle import consistency_proof, inclusion_proof, subtree
from controlplane.application.records import (
    EVENTS,
    NEWEST,
    leaf_function,
    record_bytes,
)
from controlplane.application.seal import Sealed
from controlplane.application.tiles import nodes_in
from controlplane.domain.errors import Invalid, NotFound
from controlplane.entrypoints.rest import ledger_reading
from controlplane.entrypoints.rest.events import visible

Json = dict[str, Any]
log = structlog.get_logger("proving")


def checkpoint_json(sealed: Sealed) -> Json:
    one = sealed.checkpoint
    return {
        "log": one.log,
        "size": one.size,
        "first": one.first,
        "root": one.root.hex(),
        "at": one.at,
        "record": one.record,
        "note": sealed.note,
    }


def checkpoints(query: Json) -> list[Json]:
    found = bootstrap.seal_store().page(
        query.get("log"), query.get("after"), query["limit"], query["order"] == "desc"
    )
    return [checkpoint_json(sealed) for sealed in found]


def inclusion(query: Json, tenant_id: str | None) -> Json:
    """That one record lies under a root; a record that the caller may not see does not exist."""
    name, store = query["log"], bootstrap.seal_store()
    position = _position(query, tenant_id)
    size = _sealed_size(name, query.get("size"))
    if not 0 < position <= size:
        raise Invalid("not_sealed", f"No record {position} in a tree of {size}.", "position")
    covering = store.covering(name, position)
    shape = covering.checkpoint.record if covering else NEWEST[name]
    columns = _columns(name, position, shape, tenant_id)
    nodes = _nodes(name)
    exact = store.checkpoint(name, size)
    return {
        "log": name,
        "position": position,
        "size": size,
        "record": record_bytes(shape, columns).decode(),
        "leaf": leaf_function(shape)(columns).hex(),
        "path": [one.hex() for one in inclusion_proof(nodes, position - 1, size)],
        "root": subtree(nodes, 0, size).hex(),
        "checkpoint": checkpoint_json(exact) if exact else None,
    }


def consistency(query: Json) -> Json:
    name, first = query["log"], query["first"]
    second = _sealed_size(name, query.get("second"))
    if first > second:
        raise Invalid("invalid_size", f"The tree of {second} is older than that of {first}.")
    nodes = _nodes(name)
    return {
        "log": name,
        "first": first,
        "second": second,
        "first_root": subtree(nodes, 0, first).hex(),
        "second_root": subtree(nodes, 0, second).hex(),
        "path": [one.hex() for one in consistency_proof(nodes, first, second)],
    }


def _nodes(name: str) -> Any:
    store = bootstrap.seal_store()
    return nodes_in(lambda *tile: store.tile(name, *tile))


def _sealed_size(name: str, asked: int | None) -> int:
    last = bootstrap.seal_store().last(name)
    sealed = last.checkpoint.size if last else 0
    if asked is not None and not 0 < asked <= sealed:
        raise Invalid("invalid_size", f"The log is sealed up to {sealed}.", "size")
    if not sealed:
        raise Invalid("not_sealed", "Nothing of this log is sealed yet.")
    return asked or sealed


def _position(query: Json, tenant_id: str | None) -> int:
    if "request_id" in query:
        found = ledger_reading.inference_request(query["request_id"], tenant_id)
        if query["log"] == EVENTS or found["position"] is None:
            raise Invalid("not_sealed", "A request is sealed once it has ended.", "request_id")
        return int(found["position"])
    if "position" not in query:
        raise Invalid("required", "Give position, or request_id.", "position")
    return int(query["position"])


def _columns(name: str, position: int, shape: str, tenant_id: str | None) -> Any:
    records = {one.log: one for one in bootstrap.sealed_logs()}[name]
    rows = records.read(position - 1, position, 1, shape)
    if name == EVENTS:
        rows = [columns for columns, _ in rows if visible(columns[1], tenant_id)]
    else:
        rows = [columns for columns in rows if tenant_id in (None, columns[3])]
    if not rows:
        raise NotFound("record", str(position))
    return rows[0]


class _Verifier:
    """One verification at a time in this process, on a thread of its own."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    @property
    def running(self) -> bool:
        return self._busy.locked()

    def start(self, actor: str) -> bool:
        """False if one runs already."""
        if not self._busy.acquire(blocking=False):
            return False
        threading.Thread(target=self._run, args=(actor,), name="verify", daemon=True).start()
        return True

    def _run(self, actor: str) -> None:
        try:
            checked = bootstrap.check_store()
            at = bootstrap.clock().now()
            bootstrap.seal_store().keep_verification(at, actor, checked)
        except Exception as error:
            log.error("verification failed", error=repr(error))
        finally:
            connections.close_all()
            self._busy.release()


verifier = _Verifier()


def verification() -> Json:
    """The last result, and whether one is on its way."""
    none: Json = {"at": None, "actor": None, "intact": None, "logs": [], "finding": None}
    last = bootstrap.seal_store().last_verification()
    missing = {"seconds": None, "records_per_second": None}
    return {"running": verifier.running, **none, **missing, **(last or {})}
