"""API keys of a tenant: issued, rotated, suspended, resumed, revoked."""

import time
from typing import Any

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.access import keys, tokens
from controlplane.domain import tenant
from controlplane.domain.ids import KeyId, TenantId
from controlplane.entrypoints.rest import reading, referring
from controlplane.entrypoints.rest.documenting import page_of, read, write
from controlplane.entrypoints.rest.fields import Order, ReasonOrder
from controlplane.entrypoints.rest.granting import check_grant, check_regrant
from controlplane.entrypoints.rest.security import principal_in, require_reach
from controlplane.entrypoints.rest.serializers import tenants as shapes
from controlplane.entrypoints.rest.views.base import ApiView
from controlplane.entrypoints.rest.writing import (
    Write,
    WriteQuery,
    body_of,
    handle,
    perform,
    query_of,
    receipt_response,
)

OVERLAP_SECONDS = 24 * 3600.0
CLOCK_SKEW_SECONDS = 60.0  # by which a caller's "now" may lie behind


class Keys(ApiView):
    resource = "key"

    @read("keys_list", page_of(shapes.KeySerializer), shapes.KeyQuery)
    def get(self, request: Request, tenant_id: str) -> Response:
        require_reach(principal_in(request), tenant_id)
        return self.respond_page(
            request, shapes.KeyQuery, lambda source, query: reading.keys(source, tenant_id, query)
        )

    @write("keys_issue", shapes.KeyOrder, status=201, response=shapes.IssuedKeySerializer)
    def post(self, request: Request, tenant_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body = body_of(request, shapes.KeyOrder)
        scopes = tuple(body.get("scopes", ("inference",)))
        check_grant(request, body["role"], scopes)
        referring.require_names(body.get("models", ()), principal_in(request))
        key_id, secret, full = tokens.new_key()
        command = tenant.IssueApiKey(
            TenantId(tenant_id),
            KeyId(key_id),
            body["name"],
            secret[-4:],
            scopes,
            body.get("expires_at"),
            time.time(),
            body["role"],
            tuple(body.get("models", ())),
        )
        order = _order(tenant_id, key_id, command, body, status=201)
        return _with_secret(request, order, _Secret(key_id, key_id, secret, full))


class Key(ApiView):
    resource = "key"

    @write("keys_revoke")
    def delete(self, request: Request, tenant_id: str, key_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        command = tenant.RevokeApiKey(TenantId(tenant_id), KeyId(key_id), time.time())
        response = perform(request, Write(tenant.DECIDER, tenant_id, command))
        if "X-Log-Position" in response:
            keys.forget_key(key_id)
        return response


class KeyRotation(ApiView):
    resource = "key"

    @write("keys_rotate", shapes.RotateOrder, response=shapes.IssuedKeySerializer)
    def post(self, request: Request, tenant_id: str, key_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body, now = body_of(request, shapes.RotateOrder), time.time()
        check_regrant(request, tenant_id, key_id)
        secret_id, secret, full = tokens.new_secret(key_id)
        until = body.get("previous_valid_until", now + OVERLAP_SECONDS)
        if until == 0 or now - CLOCK_SKEW_SECONDS <= until < now:
            until = now
        command = tenant.RotateApiKey(
            TenantId(tenant_id), KeyId(key_id), secret_id, secret[-4:], until, now
        )
        order = _order(tenant_id, key_id, command, body, status=200)
        return _with_secret(request, order, _Secret(secret_id, key_id, secret, full))


class KeySuspension(ApiView):
    resource = "key"

    @write("keys_suspend", ReasonOrder)
    def post(self, request: Request, tenant_id: str, key_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body = body_of(request, ReasonOrder)
        reason, now = body["reason"], time.time()
        command = tenant.SuspendApiKey(TenantId(tenant_id), KeyId(key_id), reason, now)
        return perform(request, Write(tenant.DECIDER, tenant_id, command, reason))


class KeyResumption(ApiView):
    resource = "key"

    @write("keys_resume", Order)
    def post(self, request: Request, tenant_id: str, key_id: str) -> HttpResponseBase:
        require_reach(principal_in(request), tenant_id)
        body = body_of(request, Order)
        check_regrant(request, tenant_id, key_id)
        command = tenant.ResumeApiKey(TenantId(tenant_id), KeyId(key_id), time.time())
        return perform(request, Write(tenant.DECIDER, tenant_id, command, body.get("reason", "")))


class _Secret:
    """A secret just made; ``full`` is what its owner is shown once."""

    def __init__(self, secret_id: str, key_id: str, secret: str, full: str) -> None:
        self.secret_id, self.key_id, self.secret, self.full = secret_id, key_id, secret, full


def _order(
    tenant_id: str, key_id: str, command: tenant.KeyCommand, body: dict[str, Any], status: int
) -> Write:
    """The stored answer, which a resend gets, holds no secret."""
    assert isinstance(command, tenant.IssueApiKey | tenant.RotateApiKey)
    shown = {"key_id": key_id, "secret": None, "last4": command.last4}
    reason = body.get("reason", "")
    return Write(tenant.DECIDER, tenant_id, command, reason, status, lambda _: shown)


def _with_secret(request: Request, order: Write, made: _Secret) -> HttpResponseBase:
    """Secret first, event after: see ``keys.store_secret``."""
    query = query_of(request, WriteQuery)
    if query["dry_run"] == "true":
        return perform(request, order)
    keys.store_secret(made.secret_id, made.key_id, made.secret, order.target)
    try:
        handled = handle(request, order, query.get("reason", ""), dry_run=False)
    except Exception:
        keys.forget_secret(made.secret_id)
        raise
    if handled.replayed:
        keys.forget_secret(made.secret_id)
    return receipt_response(order, handled, secret=made.full)
