"""Usage, and the last check that it equals its records."""

from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.entrypoints.rest import usage_reading
from controlplane.entrypoints.rest.documenting import read
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.security import principal_in, require_reach
from controlplane.entrypoints.rest.serializers import usage as shapes
from controlplane.entrypoints.rest.views.base import ApiView, tenant_filter
from controlplane.entrypoints.rest.writing import query_of


class Usage(ApiView):
    resource = "usage"

    @read("usage_list", shapes.UsageSerializer, shapes.UsageQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.UsageQuery)
        if "tenant" in query:
            require_reach(principal_in(request), query["tenant"])
        return Response(usage_reading.usage(query, tenant_filter(request)))


class UsageCheck(ApiView):
    resource = "verification"

    @read("usage_check", shapes.LastCheckSerializer, Query)
    def get(self, request: Request) -> Response:
        query_of(request, Query)
        return Response({"last": usage_reading.last_check()})
