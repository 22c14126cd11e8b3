"""The weights by which gateways choose replicas."""

import time

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.domain import routing
from controlplane.entrypoints.rest import routing_reading
from controlplane.entrypoints.rest.documenting import read, write
from controlplane.entrypoints.rest.serializers import routing as shapes
from controlplane.entrypoints.rest.serializers.audit import AsOfQuery
from controlplane.entrypoints.rest.views.base import ApiView
from controlplane.entrypoints.rest.writing import Write, body_of, perform, query_of


class Weights(ApiView):
    resource = "routing"

    @read("routing_weights_retrieve", shapes.RoutingSerializer, AsOfQuery)
    def get(self, request: Request) -> Response:
        found = routing_reading.weights(query_of(request, AsOfQuery).get("as_of"))
        return Response(found.body, headers={"ETag": f'"{found.version}"'})

    @write("routing_weights_change", shapes.RoutingOrder)
    def patch(self, request: Request) -> HttpResponseBase:
        body = body_of(request, shapes.RoutingOrder)
        reason = body.pop("reason", "")
        if "omega" in body:
            body["omega"] = tuple(body["omega"])
        command = routing.SetRoutingWeights(body, time.time())
        return perform(request, Write(routing.DECIDER, routing.NAME, command, reason))
