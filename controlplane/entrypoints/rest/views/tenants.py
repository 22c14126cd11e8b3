"""Tenants, their budgets, and playground tickets."""

import time
from typing import Any

from django.conf import settings
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.access import tokens
from controlplane.domain import tenant
from controlplane.domain.budget import Budget as BudgetRule
from controlplane.domain.budget import parse_limit
from controlplane.domain.ids import TenantId
from controlplane.entrypoints.rest import moments, reading, spending
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.fields import Order, ReasonOrder
from controlplane.entrypoints.rest.security import principal_in, require_reach
from controlplane.entrypoints.rest.serializers import tenants as shapes
from controlplane.entrypoints.rest.serializers.common import ReadQuery
from controlplane.entrypoints.rest.views.base import ApiView, tenant_filter
from controlplane.entrypoints.rest.writing import Write, body_of, perform, query_of


class Tenants(ApiView):
    resource = "tenant"

    @read("tenants_list", page_of(shapes.TenantSerializer), shapes.TenantQuery)
    def get(self, request: Request) -> Response:
        return self.respond_page(
            request,
            shapes.TenantQuery,
            lambda source, query: reading.tenants(source, query, tenant_filter(request)),
        )

    @write("tenants_create", shapes.TenantOrder, status=201)
    def post(self, request: Request) -> HttpResponseBase:
        body = body_of(request, shapes.TenantOrder)
        tenant_id = TenantId(body["name"])
        command = tenant.CreateTenant(tenant_id, body["name"], body["tier"], time.time())
        order = Write(tenant.DECIDER, tenant_id, command, body.get("reason", ""), status=201)
        return perform(request, order)


class Tenant(ApiView):
    resource = "tenant"

    @read("tenants_retrieve", shapes.TenantSerializer)
    def get(self, request: Request, tenant_id: str) -> Response:
        require_reach(principal_in(request), tenant_id)
        return self.respond_one(request, lambda source: reading.tenant(source, tenant_id))

    @write("tenants_change", shapes.TenantChange)
    def patch(self, request: Request, tenant_id: str) -> HttpResponseBase:
        body = body_of(request, shapes.TenantChange)
        command = tenant.ChangeTier(TenantId(tenant_id), body["tier"], time.time())
        return perform(request, _write(tenant_id, command, body))

    @write("tenants_delete")
    def delete(self, request: Request, tenant_id: str) -> HttpResponseBase:
        return perform(
            request, _write(tenant_id, tenant.DeleteTenant(TenantId(tenant_id), time.time()))
        )


class TenantSuspension(ApiView):
    resource = "tenant"

    @write("tenants_suspend", ReasonOrder)
    def post(self, request: Request, tenant_id: str) -> HttpResponseBase:
        body = body_of(request, ReasonOrder)
        command = tenant.SuspendTenant(TenantId(tenant_id), body["reason"], time.time())
        return perform(request, _write(tenant_id, command, body))


class TenantResumption(ApiView):
    resource = "tenant"

    @write("tenants_resume", ReasonOrder)
    def post(self, request: Request, tenant_id: str) -> HttpResponseBase:
        body = body_of(request, ReasonOrder)
        command = tenant.ResumeTenant(TenantId(tenant_id), time.time())
        return perform(request, _write(tenant_id, command, body))


class Budgets(ApiView):
    resource = "budget"

    @read("budgets_list", page_of(shapes.BudgetSerializer), shapes.BudgetQuery)
    def get(self, request: Request, tenant_id: str) -> Response:
        require_reach(principal_in(request), tenant_id)
        return self.respond_page(
            request,
            shapes.BudgetQuery,
            lambda source, query: spending.budgets(source, tenant_id, query, _moment(query)),
        )


class Budget(ApiView):
    """A change is in effect on every gateway once the answer is there."""

    resource = "budget"

    @read("budgets_retrieve", shapes.BudgetSerializer)
    def get(self, request: Request, tenant_id: str, budget_id: str) -> Response:
        require_reach(principal_in(request), tenant_id)
        at = _moment(query_of(request, ReadQuery))
        return self.respond_one(
            request, lambda source: spending.budget(source, tenant_id, budget_id, at)
        )

    @write("budgets_set", shapes.BudgetOrder)
    def put(self, request: Request, tenant_id: str, budget_id: str) -> HttpResponseBase:
        body = body_of(request, shapes.BudgetOrder)
        names = ("scope", "target", "unit", "period")
        rule = {name: body[name] for name in names}
        limit = parse_limit(body["unit"], body["limit"])
        wanted = BudgetRule(budget_id=budget_id, limit=limit, **rule)
        spending.require_target(tenant_id, wanted)
        command = tenant.SetBudget(TenantId(tenant_id), wanted, time.time())
        return reading.in_effect(perform(request, _write(tenant_id, command, body)))

    @write("budgets_remove")
    def delete(self, request: Request, tenant_id: str, budget_id: str) -> HttpResponseBase:
        command = tenant.RemoveBudget(TenantId(tenant_id), budget_id, time.time())
        return reading.in_effect(perform(request, _write(tenant_id, command)))


class BudgetReset(ApiView):
    resource = "budget"

    @write("budgets_reset", Order)
    def post(self, request: Request, tenant_id: str, budget_id: str) -> HttpResponseBase:
        body = body_of(request, Order)
        spent = spending.spent_now(tenant_id, budget_id, time.time())
        command = tenant.ResetBudget(TenantId(tenant_id), budget_id, spent, time.time())
        return reading.in_effect(perform(request, _write(tenant_id, command, body)))


def _moment(query: dict[str, Any]) -> spending.Moment:
    """Of what moment the figures are to be."""
    if "as_of" in query:
        return spending.Moment(moments.moment_of(query["as_of"]), past=True)
    return spending.Moment(time.time())


class Tickets(ApiView):
    resource = "ticket"

    @write(
        "tickets_create",
        shapes.TicketOrder,
        status=201,
        response=shapes.TicketSerializer,
        conventions=False,
    )
    def post(self, request: Request) -> Response:
        tenant_id = body_of(request, shapes.TicketOrder)["tenant"]
        principal = principal_in(request)
        require_reach(principal, tenant_id)
        reading.require_tenant(tenant_id)
        ticket = tokens.sign_ticket(tenant_id, principal.actor, time.time(), role=principal.role)
        return Response(
            {
                "ticket": ticket.text,
                "expires_at": ticket.expires_at,
                "gateway_url": settings.GATEWAY_URL,
            },
            status=201,
        )


def _write(
    tenant_id: str, command: tenant.TenantCommand, body: dict[str, Any] | None = None
) -> Write:
    return Write(tenant.DECIDER, tenant_id, command, (body or {}).get("reason", ""))
