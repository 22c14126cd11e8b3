"""Nodes, placements and decisions."""

import time

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import bootstrap
from controlplane.domain import node
from controlplane.domain.ids import NodeId
from controlplane.entrypoints.rest import imagining, reading, repacking, replaying
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.fields import Query, ReasonOrder
from controlplane.entrypoints.rest.serializers import fleet as shapes
from controlplane.entrypoints.rest.serializers.common import ReadQuery
from controlplane.entrypoints.rest.views.base import ApiView, cursor_page
from controlplane.entrypoints.rest.writing import Write, body_of, perform, query_of

SEARCH_S = 5.0  # for the best moves, while the client waits


class Nodes(ApiView):
    resource = "node"

    @read("nodes_list", page_of(shapes.NodeSerializer), shapes.NodeQuery)
    def get(self, request: Request) -> Response:
        return self.respond_page(request, shapes.NodeQuery, reading.nodes)


class Node(ApiView):
    resource = "node"

    @read("nodes_retrieve", shapes.NodeSerializer)
    def get(self, request: Request, node_id: str) -> Response:
        return self.respond_one(request, lambda source: reading.node(source, node_id))

    @write("nodes_remove")
    def delete(self, request: Request, node_id: str) -> HttpResponseBase:
        command = node.RemoveNode(NodeId(node_id), time.time())
        return perform(request, Write(node.DECIDER, node_id, command))


class NodeDrain(ApiView):
    resource = "node"

    @write("nodes_drain", ReasonOrder)
    def post(self, request: Request, node_id: str) -> HttpResponseBase:
        reason = body_of(request, ReasonOrder)["reason"]
        command = node.DrainNode(NodeId(node_id), reason, time.time())
        return perform(request, Write(node.DECIDER, node_id, command, reason))


class NodeUndrain(ApiView):
    resource = "node"

    @write("nodes_undrain", ReasonOrder)
    def post(self, request: Request, node_id: str) -> HttpResponseBase:
        reason = body_of(request, ReasonOrder)["reason"]
        command = node.UndrainNode(NodeId(node_id), time.time())
        return perform(request, Write(node.DECIDER, node_id, command, reason))


class Placements(ApiView):
    resource = "placement"

    @read("placements_list", page_of(shapes.ReplicaSerializer), shapes.PlacementQuery)
    def get(self, request: Request) -> Response:
        return self.respond_page(request, shapes.PlacementQuery, reading.placements)


class PlacementRepack(ApiView):
    resource = "placement"

    @read("placements_repack", shapes.RepackSerializer, shapes.RepackQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.RepackQuery)
        position = reading.wait_for(None)
        made = bootstrap.repack_preview(query["max_moves"], SEARCH_S)
        return Response(repacking.body(made), headers={"X-Log-Position": str(position)})


class PlacementWhatIf(ApiView):
    resource = "placement"

    @read("placements_what_if", shapes.WhatIfSerializer, shapes.WhatIfQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.WhatIfQuery)
        position = self.position(query)
        body = imagining.what_if(query, position if "as_of" in query else None)
        return Response(body, headers={"X-Log-Position": str(body["position"])})


class PlacementExplanation(ApiView):
    resource = "placement"

    @read("placements_explain", shapes.ExplanationSerializer)
    def get(self, request: Request, replica_id: str) -> Response:
        upto = self.position(query_of(request, ReadQuery))
        return self.respond_one(
            request, lambda source: replaying.explained(source, replica_id, upto)
        )


class Decisions(ApiView):
    resource = "decision"

    @read("decisions_list", page_of(shapes.DecisionSerializer, counted=False), shapes.DecisionQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.DecisionQuery)
        position = self.position(query)
        results = reading.decisions(query, position)
        body = cursor_page(request, query, results, "position", "before")
        return Response(body, headers={"X-Log-Position": str(position)})


class Decision(ApiView):
    resource = "decision"

    @read("decisions_retrieve", shapes.OneDecisionSerializer)
    def get(self, request: Request, decision_id: str) -> Response:
        upto = self.position(query_of(request, ReadQuery))
        found = reading.decision(decision_id, upto)
        headers = {"X-Log-Position": str(upto), "ETag": f'"{found.version}"'}
        return Response(found.body | replaying.told(found.body["position"]), headers=headers)


class DecisionReplay(ApiView):
    resource = "decision"

    @read("decisions_replay", shapes.ReplaySerializer, Query)
    def get(self, request: Request, decision_id: str) -> Response:
        query_of(request, Query)
        return Response(replaying.replayed(decision_id, reading.wait_for(None)))
