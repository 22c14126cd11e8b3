"""Who is asking, and whether they may. Deny is the default: a view without a rule answers 403."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from django.contrib.auth.models import AnonymousUser
from rest_framework.authentication import (
    BaseAuthentication,
    SessionAuthentication,
    get_authorization_header,
)
from rest_framework.exceptions import MethodNotAllowed, NotAuthenticated, PermissionDenied
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from controlplane.adapters.access.users import principal_of
from controlplane.domain.errors import NotFound
from controlplane.domain.policy import ALL_SCOPES, READ, WRITE, Principal, allowed
from controlplane.entrypoints.rest.identity import invalid_token, principal_of_token
from controlplane.entrypoints.rest.problems import Problem

F = TypeVar("F", bound=Callable[..., Any])


class BearerAuthentication(BaseAuthentication):
    """``Authorization: Bearer …``, an API key; the principal becomes ``request.auth``."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, Principal] | None:
        header = get_authorization_header(request)
        if not header:
            return None
        scheme, _, token = header.partition(b" ")
        if scheme.lower() != b"bearer":
            raise invalid_token()
        return AnonymousUser(), principal_of_token(token.strip().decode("latin-1"))

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="engine"'


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
            raise NotAuthenticated("Log in, or send a token that may do this.")
        action = READ if request.method in SAFE_METHODS else WRITE
        principal = principal_in(request)
        if allowed(principal, action, resource):
            return True
        is_served = hasattr(view, str(request.method).lower())
        if not is_served and any(allowed(principal, other, resource) for other in (READ, WRITE)):
            raise MethodNotAllowed(str(request.method))
        raise Problem(403, "forbidden", f"{_who(principal)} may not {action} {resource}.")


def _who(principal: Principal) -> str:
    reach = f" of tenant '{principal.tenant_id}'" if principal.confined else ""
    scopes = "" if principal.scopes == ALL_SCOPES else f" with scope {', '.join(principal.scopes)}"
    return f"Role '{principal.role}'{reach}{scopes}"


class Open(BasePermission):
    """For everybody, on purpose: a view that logs somebody in."""

    def has_permission(self, request: Request, view: object) -> bool:
        return True


def is_open(view: F) -> F:
    """Marks a function that answers everybody, on purpose; a test fails on one without."""
    view.is_open = True  # type: ignore[attr-defined]
    return view


def principal_in(request: Request) -> Principal:
    return cast(Principal, request.auth)


def require_reach(principal: Principal, tenant_id: str) -> None:
    """Raise the same NotFound as for an absent tenant if the principal cannot see this one."""
    if not principal.reaches(tenant_id):
        raise NotFound("tenant", tenant_id)
