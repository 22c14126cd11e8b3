"""The event log and the inference ledger, read and exported."""

from contextlib import suppress
from typing import Any

from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.domain.errors import NotFound
from controlplane.entrypoints.rest import (
    audit_reading,
    dispatch_reading,
    exporting,
    ledger_reading,
    moments,
    reading,
    undoing,
)
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.events import visible
from controlplane.entrypoints.rest.fields import Order, Query
from controlplane.entrypoints.rest.security import principal_in, require_reach
from controlplane.entrypoints.rest.serializers import audit as shapes
from controlplane.entrypoints.rest.serializers.dispatch import RequestDispatchSerializer
from controlplane.entrypoints.rest.serializers.proof import SignedManifestSerializer
from controlplane.entrypoints.rest.views.base import ApiView, cursor_page, tenant_filter
from controlplane.entrypoints.rest.writing import body_of, query_of


class Events(ApiView):
    resource = "event"

    @read("events_list", page_of(shapes.EventSerializer, counted=False), shapes.EventQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.EventQuery)
        results = ledger_reading.events(query, tenant_filter(request))
        body = cursor_page(request, query, results, "position")
        shown = ledger_reading.export_head("events")
        if "as_of" in query:
            shown = moments.position_of(query["as_of"])
        return Response(body, headers={"X-Log-Position": str(shown)})


class EventUndo(ApiView):
    """Its policy is that of the thing that was changed; of an event that is not there only whoever
    may change anything is told so."""

    resource = "tenant"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        with suppress(NotFound):
            self.resource = undoing.resource_of(undoing.recorded_at(kwargs["position"]))  # type: ignore[misc]
        super().initial(request, *args, **kwargs)

    @write("events_undo", Order, response=shapes.UndoneSerializer)
    def post(self, request: Request, position: int) -> HttpResponseBase:
        recorded = undoing.recorded_at(position)
        if not visible(recorded.stream, tenant_filter(request)):
            raise NotFound("event", str(position))
        return undoing.undo(request, recorded, body_of(request, Order))


class Audit(ApiView):
    resource = "audit"

    @read("audit_list", page_of(shapes.AuditEntrySerializer, counted=False), shapes.AuditQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.AuditQuery)
        reached = reading.wait_for(query.get("min_position"))
        results = audit_reading.entries(query, tenant_filter(request))
        body = cursor_page(request, query, results, "position")
        return Response(body, headers={"X-Log-Position": str(reached)})


class Requests(ApiView):
    resource = "request"

    @read("requests_list", page_of(shapes.RequestSerializer, counted=False), shapes.RequestQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.RequestQuery)
        if "tenant" in query:
            require_reach(principal_in(request), query["tenant"])
        results = ledger_reading.requests(query, tenant_filter(request))
        return Response(cursor_page(request, query, results, "id"))


class InferenceRequest(ApiView):
    resource = "request"

    @read("requests_retrieve", shapes.RequestSerializer, shapes.AsOfQuery)
    def get(self, request: Request, request_id: str) -> Response:
        as_of = query_of(request, shapes.AsOfQuery).get("as_of")
        found = ledger_reading.inference_request(request_id, tenant_filter(request), as_of)
        return Response(found)


class Attempts(ApiView):
    resource = "request"

    @read("attempts_list", page_of(shapes.AttemptSerializer, counted=False), Query)
    def get(self, request: Request, request_id: str) -> Response:
        query_of(request, Query)
        rows = ledger_reading.attempts(request_id, tenant_filter(request))
        return Response({"next": None, "previous": None, "results": rows})


class RequestDispatch(ApiView):
    resource = "request"

    @read("requests_dispatch", RequestDispatchSerializer, shapes.AsOfQuery)
    def get(self, request: Request, request_id: str) -> Response:
        as_of = query_of(request, shapes.AsOfQuery).get("as_of")
        return Response(dispatch_reading.dispatch(request_id, tenant_filter(request), as_of))


class AuditExport(ApiView):
    resource = "export"

    @read(
        "audit_export",
        {
            (200, "application/json"): SignedManifestSerializer,
            (200, "application/x-ndjson"): str,
            (200, "text/csv"): str,
            (200, "application/vnd.apache.parquet"): OpenApiTypes.BINARY,
        },
        shapes.ExportQuery,
    )
    def get(self, request: Request) -> HttpResponseBase:
        query = query_of(request, shapes.ExportQuery)
        if "tenant" in query:
            require_reach(principal_in(request), query["tenant"])
        return exporting.respond(
            request._request, query, query.get("tenant") or tenant_filter(request)
        )
