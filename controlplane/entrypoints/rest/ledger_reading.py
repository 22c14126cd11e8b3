"""Events and inference requests, page by page and batch by batch."""

from typing import Any

from django.db.models import Q, QuerySet

from controlplane import bootstrap
from controlplane.adapters.eventstore.models import Event
from controlplane.adapters.ledger.models import Attempt, Head, InferenceRequest
from controlplane.adapters.readmodel.models import Version
from controlplane.application.ports import EventMeta, RecordedEvent
from controlplane.domain import money
from controlplane.domain.errors import NotFound
from controlplane.domain.event_types import decode
from controlplane.entrypoints.rest import moments
from controlplane.entrypoints.rest.events import event_json

Json = dict[str, Any]
Requests = QuerySet[InferenceRequest]


# --- events -----------------------------------------------------------------------------------
def events(query: Json, tenant_id: str | None) -> list[Json]:
    """One page, from ``after`` on: upwards, or downwards with ``order=desc``."""
    stream = query.get("stream")
    if tenant_id is not None:
        own = f"tenant-{tenant_id}"
        if stream not in (None, own):
            return []
        stream = own
    equal = {name: query[name] for name in ("type", "actor") if name in query}
    low, high = 0, _END  # positions beyond low and below high
    if "as_of" in query:
        high = moments.position_of(query["as_of"]) + 1
    if "after" in query and query["order"] == "desc":
        high = min(high, query["after"])
    elif "after" in query:
        low = query["after"]
    found = _within(stream, low, high).filter(**equal)
    rows = (found.reverse() if query["order"] == "desc" else found)[: query["limit"]]
    return [event_json(_recorded(row)) for row in rows]


_END = 2**62


def _within(stream: str | None, low: int, high: int) -> QuerySet[Event]:
    """In order. A stream is read by its versions, which have the order of its positions: that is
    the index there is, where an order by position has to sort the stream or read the log."""
    if stream is None:
        return Event.objects.filter(position__gt=low, position__lt=high).order_by("position")
    mine = Event.objects.filter(stream=stream).order_by("version")
    if low > 0:
        mine = mine.filter(version__gt=moments.version_until(stream, low))
    if high < _END:
        mine = mine.filter(version__lte=moments.version_until(stream, high - 1))
    return mine


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
    moment = moments.moment_of(query["as_of"]) if "as_of" in query else None
    found = _as_of(_of_tenant(tenant_id), moment)
    if "tenant" in query:
        found = found.filter(tenant_id=query["tenant"])
    if "request_id" in query:
        found = found.filter(request_id=query["request_id"])
    if "outcome" in query:
        found = _that_ended(found, query["outcome"], moment)
    if "after" in query:
        found = found.filter(pk__lt=query["after"])
    newest = _newest(found, _names(query["model"]) if "model" in query else [{}], query["limit"])
    return [request_json(row, moment) for row in newest]


def inference_request(request_id: str, tenant_id: str | None, as_of: str | None = None) -> Json:
    moment = moments.moment_of(as_of) if as_of else None
    row = _of_tenant(tenant_id).filter(request_id=request_id).first()
    if row is None or (moment is not None and row.at > moment):
        raise NotFound("request", request_id)
    return request_json(row, moment)


def _as_of(found: Requests, moment: float | None) -> Requests:
    if moment is None:
        return found
    return found.filter(pk__lte=moments.last_request_until(moment), at__lte=moment)


def _that_ended(found: Requests, outcome: str, moment: float | None) -> Requests:
    """Those of an outcome; as of a moment, whatever ended later was running."""
    if outcome != "running":
        ended = found.filter(outcome=outcome)
        return ended if moment is None else ended.filter(ended_at__lte=moment)
    if moment is None:
        return found.filter(outcome="")
    return found.filter(Q(outcome="") | Q(ended_at__gt=moment))


def _names(model: str) -> list[Json]:
    """What a request about ``model`` (a version id or a name that is asked for) has: a filter each,
    so that each can use its index, where one OR of them has to read the whole ledger."""
    versions = Version.objects.filter(model=model).values_list("version_id", flat=True)
    return [{"requested_model": model}, *({"version_id": one} for one in {model, *versions})]


def _newest(found: Requests, filters: list[Json], limit: int) -> list[InferenceRequest]:
    """The newest of all that pass one of ``filters``."""
    rows = {row.pk: row for one in filters for row in found.filter(**one).order_by("-pk")[:limit]}
    return [rows[pk] for pk in sorted(rows, reverse=True)[:limit]]


def _of_tenant(tenant_id: str | None) -> Requests:
    """The one way to the ledger's rows: whoever is confined reaches no others."""
    every = InferenceRequest.objects.all()
    return every if tenant_id is None else every.filter(tenant_id=tenant_id)


_ALWAYS = (
    "request_id",
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
    "position",
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


def request_json(row: InferenceRequest, moment: float | None = None) -> Json:
    """What the terminal record says is null while the request runs, or ran at ``moment``."""
    ended = bool(row.outcome) and (moment is None or (row.ended_at or 0.0) <= moment)
    return {
        "id": row.pk,
        **{name: getattr(row, name) for name in _ALWAYS},
        **{name: getattr(row, name) if ended else None for name in _AT_THE_END},
        **{name: money.price_text(getattr(row, name)) for name in _PRICES},
        "price": money.amount_text(row.price) if ended else None,
        "outcome": row.outcome if ended else "running",
        "started_at": row.at,
        "finished_at": row.ended_at if ended else None,
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
