"""Alive, ready, measured and documented.

``/livez`` and ``/readyz`` are open on purpose: a supervisor has no account, and they say nothing
but yes or no. The schema, its page and ``/metrics`` need a principal that may read the status.
"""

from typing import ClassVar

from django.db import Error
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.application.ports import StoreUnavailable
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.security import is_open

_HEAD = Gauge("engine_log_head", "Position of the last event in the log.")
_LAG = Gauge("engine_projection_lag_events", "Events not projected yet.", ["projection"])


class Schema(SpectacularAPIView):
    resource = "status"


class Docs(SpectacularSwaggerSplitView):
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
    """200 if the log can be read and the read model has caught up to within a few seconds."""
    checks = readiness()
    ready = all(checks.values())
    return JsonResponse({"ready": ready, "checks": checks}, status=200 if ready else 503)


def readiness() -> dict[str, bool]:
    try:
        lag = reading.head() - reading.position()
    except (StoreUnavailable, Error):
        return {"log": False, "read_model": False}
    return {"log": True, "read_model": lag < reading.MAX_LAG_EVENTS}
