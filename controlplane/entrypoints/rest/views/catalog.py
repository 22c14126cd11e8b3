"""Models, versions, aliases, access, routes, and the configuration as a file."""

import time
from typing import Any, ClassVar

import msgspec
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.domain import model, money, route
from controlplane.domain.ids import VersionId
from controlplane.domain.version_spec import VersionSpec
from controlplane.entrypoints.rest import applying, reading, referring
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.fields import Order
from controlplane.entrypoints.rest.parsing import CatalogJSONParser, YamlTextParser
from controlplane.entrypoints.rest.security import principal_in
from controlplane.entrypoints.rest.serializers import catalog as shapes
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReadQuery
from controlplane.entrypoints.rest.views.base import ApiView
from controlplane.entrypoints.rest.writing import Write, WriteQuery, body_of, perform, query_of


class Models(ApiView):
    resource = "model"

    @read("models_list", page_of(shapes.ModelSerializer), shapes.ModelQuery)
    def get(self, request: Request) -> Response:
        return self.respond_page(
            request,
            shapes.ModelQuery,
            lambda source, query: reading.models(source, query, principal_in(request)),
        )

    @write("models_register", shapes.ModelOrder, status=201)
    def post(self, request: Request) -> HttpResponseBase:
        body = body_of(request, shapes.ModelOrder)
        command = model.RegisterModel(body["name"], time.time())
        referring.require_free_name(command)
        return perform(request, _model(body["name"], command, body, status=201))


class Model(ApiView):
    resource = "model"

    @read("models_retrieve", shapes.ModelSerializer)
    def get(self, request: Request, name: str) -> Response:
        return self.respond_one(
            request, lambda source: reading.model(source, name, principal_in(request))
        )


class Versions(ApiView):
    resource = "model"

    @read("versions_list", page_of(shapes.VersionSerializer), ListQuery)
    def get(self, request: Request, name: str) -> Response:
        return self.respond_page(
            request,
            ListQuery,
            lambda source, query: reading.versions(source, name, query, principal_in(request)),
        )

    @write("versions_add", shapes.VersionOrder, status=201)
    def post(self, request: Request, name: str) -> HttpResponseBase:
        body = body_of(request, shapes.VersionOrder)
        fields = {key: value for key, value in body.items() if key != "reason"}
        command = model.AddVersion(name, msgspec.convert(fields, VersionSpec), time.time())
        return perform(request, _model(name, command, body, status=201))


class Version(ApiView):
    resource = "model"

    @read("versions_retrieve", shapes.VersionSerializer)
    def get(self, request: Request, name: str, version: str) -> Response:
        return self.respond_one(
            request, lambda source: reading.version(source, name, version, principal_in(request))
        )


class VersionRetirement(ApiView):
    resource = "model"

    @write("versions_retire", Order)
    def post(self, request: Request, name: str, version: str) -> HttpResponseBase:
        body = body_of(request, Order)
        command = model.RetireVersion(name, version, time.time())
        referring.check(command)
        return perform(request, _model(name, command, body))


class VersionScale(ApiView):
    resource = "model"

    @write("versions_scale", shapes.ScaleOrder)
    def post(self, request: Request, name: str, version: str) -> HttpResponseBase:
        body = body_of(request, shapes.ScaleOrder)
        command = model.ScaleVersion(
            name, version, body["min_replicas"], body["max_replicas"], time.time()
        )
        return perform(request, _model(name, command, body))


class VersionPrice(ApiView):
    resource = "model"

    @write("versions_set_price", shapes.PriceOrder)
    def put(self, request: Request, name: str, version: str) -> HttpResponseBase:
        body = body_of(request, shapes.PriceOrder)
        price = money.parse_prices(body["input"], body.get("cached_input"), body["output"])
        command = model.SetModelPrice(name, version, price, time.time())
        return perform(request, _model(name, command, body))


class DefaultVersion(ApiView):
    resource = "model"

    @write("versions_make_default", Order)
    def post(self, request: Request, name: str, version: str) -> HttpResponseBase:
        body = body_of(request, Order)
        return perform(
            request, _model(name, model.SetDefaultVersion(name, version, time.time()), body)
        )


class Aliases(ApiView):
    resource = "model"

    @read("aliases_list", page_of(shapes.AliasSerializer), ListQuery)
    def get(self, request: Request, name: str) -> Response:
        return self.respond_page(
            request,
            ListQuery,
            lambda source, query: reading.aliases(source, name, query, principal_in(request)),
        )

    @write("aliases_add", shapes.AliasOrder, status=201)
    def post(self, request: Request, name: str) -> HttpResponseBase:
        body = body_of(request, shapes.AliasOrder)
        command = model.AddAlias(name, body["alias"], time.time())
        referring.require_free_name(command)
        return perform(request, _model(name, command, body, status=201))


class Alias(ApiView):
    resource = "model"

    @write("aliases_remove")
    def delete(self, request: Request, name: str, alias: str) -> HttpResponseBase:
        return perform(request, _model(name, model.RemoveAlias(name, alias, time.time())))


class ModelAccess(ApiView):
    resource = "model"

    @write("models_set_access", shapes.AccessOrder)
    def put(self, request: Request, name: str) -> HttpResponseBase:
        body = body_of(request, shapes.AccessOrder)
        tenants, roles = tuple(body.get("tenants", ())), tuple(body.get("roles", ()))
        access = model.Access(body["public"], tenants, roles)
        return perform(request, _model(name, model.ChangeAccess(name, access, time.time()), body))


class Routes(ApiView):
    resource = "route"

    @read("routes_list", page_of(shapes.RouteSerializer), ListQuery)
    def get(self, request: Request) -> Response:
        return self.respond_page(
            request,
            ListQuery,
            lambda source, query: reading.routes(source, query, principal_in(request)),
        )

    @write("routes_create", shapes.RouteOrder, status=201)
    def post(self, request: Request) -> HttpResponseBase:
        body = body_of(request, shapes.RouteOrder)
        command = route.CreateRoute(body["name"], _arms(body), body["sticky"], time.time())
        referring.require_free_name(command)
        return perform(request, _route(body["name"], command, body, status=201))


class Route(ApiView):
    resource = "route"

    @read("routes_retrieve", shapes.RouteSerializer)
    def get(self, request: Request, name: str) -> Response:
        return self.respond_one(
            request, lambda source: reading.route(source, name, principal_in(request))
        )

    @write("routes_change", shapes.RouteChange)
    def put(self, request: Request, name: str) -> HttpResponseBase:
        body = body_of(request, shapes.RouteChange)
        command = route.ChangeArms(name, _arms(body), body["sticky"], time.time())
        return perform(request, _route(name, command, body))

    @write("routes_delete")
    def delete(self, request: Request, name: str) -> HttpResponseBase:
        return perform(request, _route(name, route.DeleteRoute(name, time.time())))


class Apply(ApiView):
    """The configuration as one YAML file, both ways; see ``application.configuration``."""

    resource = "catalog"
    parser_classes: ClassVar[list[type[BaseParser]]] = [YamlTextParser, CatalogJSONParser]  # type: ignore[misc]

    @read("catalog_export", {(200, "application/yaml"): str})
    def get(self, request: Request) -> HttpResponse:
        query = query_of(request, ReadQuery)
        source, position = self.source(query)
        found = applying.exported(source, position if "as_of" in query else None)
        return HttpResponse(
            found.text(position),
            content_type="application/yaml",
            headers={"X-Log-Position": str(position), "X-Configuration-Hash": found.digest()},
        )

    @write(
        "catalog_apply",
        {"application/yaml": str, "application/json": dict[str, Any]},
        response=shapes.AppliedSerializer,
    )
    def post(self, request: Request) -> Response:
        query = query_of(request, WriteQuery)
        body, position = applying.apply(request, query)
        return Response(body, headers={"X-Log-Position": str(position)})


def _model(
    name: str, command: model.ModelCommand, body: dict[str, Any] | None = None, status: int = 200
) -> Write:
    return Write(model.DECIDER, name, command, (body or {}).get("reason", ""), status)


def _route(
    name: str, command: route.RouteCommand, body: dict[str, Any] | None = None, status: int = 200
) -> Write:
    return Write(route.DECIDER, name, command, (body or {}).get("reason", ""), status)


def _arms(body: dict[str, Any]) -> tuple[route.Arm, ...]:
    """Raises Invalid; their number is looked at first, before each costs a look-up."""
    arms = tuple(
        route.Arm(arm["name"], VersionId(arm["version_id"]), arm["weight"]) for arm in body["arms"]
    )
    route.check_arms(arms)
    referring.require_versions(arm.version_id for arm in arms)
    return arms
