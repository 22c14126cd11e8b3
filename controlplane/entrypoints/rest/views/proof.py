"""Checkpoints of the sealed logs, proofs about them, and their verification."""

from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import bootstrap
from controlplane.entrypoints.rest import proving
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.security import principal_in
from controlplane.entrypoints.rest.serializers import proof as shapes
from controlplane.entrypoints.rest.views.base import ApiView, cursor_page, tenant_filter
from controlplane.entrypoints.rest.writing import query_of


class Checkpoints(ApiView):
    resource = "checkpoint"

    @read(
        "checkpoints_list",
        page_of(shapes.CheckpointSerializer, counted=False),
        shapes.CheckpointQuery,
    )
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.CheckpointQuery)
        results = proving.checkpoints(query)
        return Response(cursor_page(request, query, results, "size"))


class SealingKeys(ApiView):
    resource = "checkpoint"

    @read("checkpoints_keys", shapes.SealingKeysSerializer, shapes.NoQuery)
    def get(self, request: Request) -> Response:
        query_of(request, shapes.NoQuery)
        return Response({"keys": bootstrap.seal_store().public_keys()})


class Inclusion(ApiView):
    resource = "checkpoint"

    @read("checkpoints_inclusion", shapes.InclusionSerializer, shapes.InclusionQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.InclusionQuery)
        return Response(proving.inclusion(query, tenant_filter(request)))


class Consistency(ApiView):
    resource = "checkpoint"

    @read("checkpoints_consistency", shapes.ConsistencySerializer, shapes.ConsistencyQuery)
    def get(self, request: Request) -> Response:
        return Response(proving.consistency(query_of(request, shapes.ConsistencyQuery)))


class Verification(ApiView):
    resource = "verification"

    @read("verification_retrieve", shapes.VerificationSerializer, shapes.NoQuery)
    def get(self, request: Request) -> Response:
        query_of(request, shapes.NoQuery)
        return Response(proving.verification())

    @write(
        "verification_start",
        status=202,
        response=shapes.VerificationSerializer,
        conventions=False,
    )
    def post(self, request: Request) -> Response:
        proving.verifier.start(principal_in(request).actor)
        return Response(proving.verification(), status=202)
