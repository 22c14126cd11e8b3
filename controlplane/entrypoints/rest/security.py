"""Who is asking, and whether they may. Deny is the default: a view without a rule answers 403."""

import time
from typing import Any, cast

from django.contrib.auth.models import AnonymousUser
from rest_framework.authentication import (
    BaseAuthentication,
    SessionAuthentication,
    get_authorization_header,
)
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, PermissionDenied
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from controlplane.adapters.access.keys import principal_of_key
from controlplane.adapters.access.policy import READ, WRITE, Principal, allowed
from controlplane.adapters.access.users import principal_of
from controlplane.adapters.readmodel.models import Tenant
from controlplane.domain.errors import NotFound
from controlplane.entrypoints.rest.problems import Problem


class KeyAuthentication(BaseAuthentication):
    """``Authorization: Bearer sk_…``; the principal becomes ``request.auth``."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, Principal] | None:
        header = get_authorization_header(request)
        if not header:
            return None
        scheme, _, token = header.partition(b" ")
        principal = None
        if scheme.lower() == b"bearer":
            principal = principal_of_key(token.strip().decode("latin-1"), time.time())
        if principal is None:
            raise AuthenticationFailed("The API key is not valid.")
        if not is_active(principal):
            detail = f"Tenant '{principal.tenant_id}' is suspended."
            raise Problem(403, "tenant_suspended", detail)
        return AnonymousUser(), principal

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="engine"'


def is_active(principal: Principal) -> bool:
    """A suspended tenant's keys open nothing, its own records included."""
    of_tenant = Tenant.objects.filter(tenant_id=principal.tenant_id, suspended=True)
    return not (principal.confined and of_tenant.exists())


class CookieAuthentication(SessionAuthentication):
    """The dashboard's session; writes need the CSRF token in ``X-CSRFToken``."""

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        found = super().authenticate(request)
        if found is None:
            return None
        user, _ = found
        return user, principal_of(user)

    def enforce_csrf(self, request: Request) -> None:
        """The check reads the body, so a refusal of that passes through unchanged."""
        try:
            super().enforce_csrf(request)
        except PermissionDenied:
            raise Problem(403, "csrf_failed", "Send the CSRF token as X-CSRFToken.") from None


class Policy(BasePermission):
    """The view's ``resource``, and read or write by method, looked up in the policy table."""

    def has_permission(self, request: Request, view: object) -> bool:
        resource = getattr(view, "resource", "")
        if request.auth is None:
            raise NotAuthenticated("Log in, or send an API key with an admin scope.")
        action = READ if request.method in SAFE_METHODS else WRITE
        principal = principal_in(request)
        if allowed(principal, action, resource):
            return True
        raise Problem(403, "forbidden", f"{_who(principal)} may not {action} {resource}.")


def _who(principal: Principal) -> str:
    if not principal.role:
        return "An API key without an admin scope"
    reach = f" of tenant '{principal.tenant_id}'" if principal.confined else ""
    return f"Role '{principal.role}'{reach}"


class Open(BasePermission):
    """For everybody, on purpose: logging in, and saying that the process is alive."""

    def has_permission(self, request: Request, view: object) -> bool:
        return True


def principal_in(request: Request) -> Principal:
    return cast(Principal, request.auth)


def require_reach(principal: Principal, tenant_id: str) -> None:
    """Raise the same NotFound as for an absent tenant if the principal cannot see this one."""
    if not principal.reaches(tenant_id):
        raise NotFound("tenant", tenant_id)
