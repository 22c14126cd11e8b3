"""Captured text: whether a tenant's is kept, one request's, and the end of it all."""

import time

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import bootstrap
from controlplane.domain import capture, tenant
from controlplane.domain.ids import TenantId
from controlplane.entrypoints.rest import text_reading
from controlplane.entrypoints.rest.documenting import read, write
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.security import principal_in, require_reach
from controlplane.entrypoints.rest.serializers import tenants as shapes
from controlplane.entrypoints.rest.views.base import ApiView, tenant_filter
from controlplane.entrypoints.rest.writing import Write, body_of, meta_of, perform, query_of


class TextCapture(ApiView):
    resource = "text"

    @write("tenants_capture", shapes.CaptureOrder)
    def put(self, request: Request, tenant_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body = body_of(request, shapes.CaptureOrder)
        order = capture.StartCapture if body["captures_text"] else capture.StopCapture
        command = order(TenantId(tenant_id), time.time())
        return perform(request, Write(tenant.DECIDER, tenant_id, command, body.get("reason", "")))


class TextErasure(ApiView):
    """The key is destroyed when the answer is there."""

    resource = "text"

    @write("tenants_erase_text", shapes.ErasureOrder)
    def post(self, request: Request, tenant_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body = body_of(request, shapes.ErasureOrder)
        command = capture.EraseText(TenantId(tenant_id), time.time())
        response = perform(request, Write(tenant.DECIDER, tenant_id, command, body["reason"]))
        if "X-Log-Position" in response:
            bootstrap.finish_erasure(tenant_id)
        return response


class RequestText(ApiView):
    """Each reading is on record before the text is given."""

    resource = "text"

    @read("requests_text", shapes.RequestTextSerializer, Query)
    def get(self, request: Request, request_id: str) -> Response:
        query_of(request, Query)
        return Response(text_reading.text(request_id, tenant_filter(request), meta_of(request)))
