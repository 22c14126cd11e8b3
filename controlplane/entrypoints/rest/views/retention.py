"""How long what is kept."""

import time

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.domain import retention
from controlplane.entrypoints.rest import retention_reading
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.serializers import retention as shapes
from controlplane.entrypoints.rest.views.base import ApiView
from controlplane.entrypoints.rest.writing import Write, body_of, perform, query_of


class Policies(ApiView):
    resource = "retention"

    @read("retention_list", page_of(shapes.RetentionSerializer, counted=False), Query)
    def get(self, request: Request) -> Response:
        query_of(request, Query)
        results = [body for body, _ in map(retention_reading.policy, retention.KINDS)]
        return Response({"next": None, "previous": None, "results": results})


class Policy(ApiView):
    resource = "retention"

    @read("retention_retrieve", shapes.RetentionSerializer, Query)
    def get(self, request: Request, kind: str) -> Response:
        query_of(request, Query)
        body, version = retention_reading.policy(kind)
        return Response(body, headers={"ETag": f'"{version}"'})

    @write("retention_set", shapes.RetentionOrder)
    def put(self, request: Request, kind: str) -> HttpResponseBase:
        body = body_of(request, shapes.RetentionOrder)
        command = retention.SetRetention(kind, body["days"], time.time())
        return perform(request, Write(retention.DECIDER, kind, command, body.get("reason", "")))
