"""Alive, ready, measured and documented.

``/livez`` and ``/readyz`` are open on purpose: a supervisor has no account, and they say nothing
but yes or no. The schema, its page and ``/metrics`` need a principal that may read the status.
"""

from typing import Any, ClassVar
from urllib.parse import quote

from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.http import require_safe
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest
from rest_framework.exceptions import NotAuthenticated
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.adapters.store_writes import why_unwritable
from controlplane.application.ports import StoreUnavailable
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.security import is_open

_HEAD = Gauge("engine_log_head", "Position of the last event in the log.")
_LAG = Gauge("engine_projection_lag_events", "Events not projected yet.", ["projection"])


class ForPeople(APIView):
    """A browser without a login is sent to it and comes back; whoever asks for data gets a 401."""

    def handle_exception(self, exc: Exception) -> HttpResponseBase:  # type: ignore[override]
        wants_page = "text/html" in self.request.headers.get("Accept", "")
        if isinstance(exc, NotAuthenticated) and wants_page:
            return HttpResponseRedirect(f"/login?next={quote(self.request.path)}")
        return super().handle_exception(exc)


class FormatByQuery(DefaultContentNegotiation):
    """``?format=json`` or ``yaml``, which is easier to give to a tool than an Accept header."""

    def select_renderer(
        self, request: Request, renderers: Any, format_suffix: str | None = None
    ) -> Any:
        wanted = format_suffix or request.query_params.get("format")
        if wanted and wanted not in {one.format for one in renderers}:
            raise Problem(400, "invalid_parameter", "format is json or yaml.")
        return super().select_renderer(request, renderers, wanted)


class Schema(ForPeople, SpectacularAPIView):
    resource = "status"
    content_negotiation_class = FormatByQuery


class Docs(ForPeople, SpectacularSwaggerSplitView):
    resource = "status"


class Metrics(APIView):
    """Prometheus' text format."""

    resource: ClassVar[str] = "status"
    schema = None

    def get(self, request: Request) -> HttpResponse:
        head = reading.head()
        _HEAD.set(head)
        _LAG.labels("readmodel").set(max(0, head - reading.position()))
        return HttpResponse(generate_latest(), content_type=CONTENT_TYPE_LATEST)


@is_open
@require_safe
def livez(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n", content_type="text/plain")


@is_open
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """200 if the log can be read and written, and the read model is not far behind it."""
    checks = readiness()
    ready = all(checks.values())
    return JsonResponse({"ready": ready, "checks": checks}, status=200 if ready else 503)


def readiness() -> dict[str, bool]:
    writable = {"store_writable": not why_unwritable()}
    try:
        lag = reading.head() - reading.position()
    except (StoreUnavailable, Error):
        return {"log": False, "read_model": False, **writable}
    return {"log": True, "read_model": lag < reading.MAX_LAG_EVENTS, **writable}
