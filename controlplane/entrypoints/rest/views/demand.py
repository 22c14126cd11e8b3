"""What was scaled, expected and loaded ahead."""

from collections.abc import Callable
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.documenting import page_of, read
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.serializers import demand as shapes
from controlplane.entrypoints.rest.views.base import ApiView, counted_page, cursor_page
from controlplane.entrypoints.rest.writing import query_of

Find = Callable[[dict[str, Any], int], list[dict[str, Any]]]


class _HistoryView(ApiView):
    resource = "decision"

    def newest(self, request: Request, serializer: type[Query], find: Find) -> Response:
        query = query_of(request, serializer)
        position = self.position(query)
        body = cursor_page(request, query, find(query, position), "position", "before")
        return Response(body, headers={"X-Log-Position": str(position)})


class Scalings(_HistoryView):
    @read("scalings_list", page_of(shapes.ScalingSerializer, counted=False), shapes.ScalingQuery)
    def get(self, request: Request) -> Response:
        return self.newest(request, shapes.ScalingQuery, reading.scalings)


class Forecasts(_HistoryView):
    @read("forecasts_list", page_of(shapes.ForecastSerializer, counted=False), shapes.ForecastQuery)
    def get(self, request: Request) -> Response:
        return self.newest(request, shapes.ForecastQuery, reading.forecasts)


class Preloads(_HistoryView):
    @read("preloads_list", page_of(shapes.PreloadSerializer, counted=False), shapes.PreloadQuery)
    def get(self, request: Request) -> Response:
        return self.newest(request, shapes.PreloadQuery, reading.preloads)


class PreloadTotals(ApiView):
    resource = "decision"

    @read("preloads_totals", page_of(shapes.PreloadTotalSerializer), shapes.PreloadTotalQuery)
    def get(self, request: Request) -> Response:
        query = query_of(request, shapes.PreloadTotalQuery)
        position = self.position(query)
        body = counted_page(request, query, *reading.preload_totals(query, position))
        return Response(body, headers={"X-Log-Position": str(position)})
