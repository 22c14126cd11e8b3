"""Events and inference requests, page by page and batch by batch."""

from typing import Any

from django.db.models import Q, QuerySet

from controlplane import bootstrap
from controlplane.adapters.eventstore.models import Event
from controlplane.adapters.ledger.models import Attempt, Head, InferenceRequest
from controlplane.application.ports import EventMeta, RecordedEvent
from controlplane.domain import money
from controlplane.domain.errors import NotFound
from controlplane.domain.event_types import decode
from controlplane.entrypoints.rest.events import event_json

Json = dict[str, Any]


# --- events -----------------------------------------------------------------------------------
def events(query: Json, tenant_id: str | None) -> list[Json]:
    """One page, from ``after`` on: upwards, or downwards with ``order=desc``."""
    found = Event.objects.filter(
        **{name: query[name] for name in ("stream", "type", "actor") if name in query}
    )
    if tenant_id is not None:
        found = found.filter(stream=f"tenant-{tenant_id}")
    descending = query["order"] == "desc"
    if "after" in query:
        beyond = "position__lt" if descending else "position__gt"
        found = found.filter(**{beyond: query["after"]})
    ordered = found.order_by("-position" if descending else "position")
    return [event_json(_recorded(row)) for row in ordered[: query["limit"]]]


def _recorded(row: Event) -> RecordedEvent:
    data = bytes(row.data)
    meta = EventMeta(row.actor, row.correlation_id, row.causation_id, row.address, row.reason)
    return RecordedEvent(
        position=row.position,
        stream=row.stream,
        version=row.version,
        type=row.type,
        schema_version=row.schema_version,
        data=data,
        meta=meta,
        recorded_at=row.recorded_at,
        hash=bytes(row.hash),
        event=decode(row.type, row.schema_version, data),
    )


# --- requests ---------------------------------------------------------------------------------
def requests(query: Json, tenant_id: str | None) -> list[Json]:
    """Newest first; ``after`` is the ``id`` of the last one on the page before."""
    found = _of_tenant(tenant_id)
    if "tenant" in query:
        found = found.filter(tenant_id=query["tenant"])
    if "request_id" in query:
        found = found.filter(request_id=query["request_id"])
    if "model" in query:
        name = query["model"]
        found = found.filter(
            Q(version_id=name) | Q(requested_model=name) | Q(version_id__startswith=f"{name}@")
        )
    if "outcome" in query:
        found = found.filter(outcome="" if query["outcome"] == "running" else query["outcome"])
    if "after" in query:
        found = found.filter(pk__lt=query["after"])
    return [request_json(row) for row in found.order_by("-pk")[: query["limit"]]]


def inference_request(request_id: str, tenant_id: str | None) -> Json:
    row = _of_tenant(tenant_id).filter(request_id=request_id).first()
    if row is None:
        raise NotFound("request", request_id)
    return request_json(row)


def _of_tenant(tenant_id: str | None) -> "QuerySet[InferenceRequest]":
    """The one way to the ledger's rows: whoever is confined reaches no others."""
    every = InferenceRequest.objects.all()
    return every if tenant_id is None else every.filter(tenant_id=tenant_id)


_ALWAYS = (
    "request_id",
    "position",
    "tenant_id",
    "subject",
    "end_user",
    "endpoint",
    "requested_model",
    "route",
    "arm",
    "version_id",
    "latency_class",
    "num_prompt_tokens",
    "max_output_tokens",
)
_AT_THE_END = (
    "node_id",
    "replica_id",
    "num_cached_tokens",
    "num_output_tokens",
    "ttft_ms",
    "queue_ms",
    "duration_ms",
    "finish_reason",
    "error_code",
    "attempts",
)


_PRICES = ("price_input", "price_cached_input", "price_output")


def request_json(row: InferenceRequest) -> Json:
    """What the terminal record says is null while the request runs."""
    ended = bool(row.outcome)
    return {
        "id": row.pk,
        **{name: getattr(row, name) for name in _ALWAYS},
        **{name: getattr(row, name) if ended else None for name in _AT_THE_END},
        **{name: money.price_text(getattr(row, name)) for name in _PRICES},
        "price": money.amount_text(row.price) if ended else None,
        "outcome": row.outcome or "running",
        "started_at": row.at,
        "finished_at": row.ended_at,
    }


def attempts(request_id: str, tenant_id: str | None) -> list[Json]:
    """In the order they began; none while the request runs."""
    row = _of_tenant(tenant_id).filter(request_id=request_id).first()
    if row is None:
        raise NotFound("request", request_id)
    if row.position is None:
        return []
    found = Attempt.objects.filter(position=row.position).order_by("started_at", "choice")
    return list(found.values(*_ATTEMPT))


_ATTEMPT = (
    "choice",
    "attempt",
    "node_id",
    "replica_id",
    "outcome",
    "error_code",
    "num_cached_tokens",
    "num_output_tokens",
    "queue_ms",
    "started_at",
    "duration_ms",
)


# --- export -----------------------------------------------------------------------------------
def export_head(what: str) -> int:
    """Last position of the log, or of the ledger's terminal records."""
    if what == "events":
        return bootstrap.event_store().head().position
    return Head.objects.values_list("position", flat=True).first() or 0
