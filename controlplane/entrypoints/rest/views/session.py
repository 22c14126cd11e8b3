"""Logging in and out, and the state of the installation."""

import math
import time

from django.conf import settings
from django.contrib.auth import authenticate, login, logout
from django.contrib.auth.models import User
from django.middleware.csrf import get_token
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.access import users
from controlplane.entrypoints.rest import auditing, reading
from controlplane.entrypoints.rest.documenting import read, write
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.security import Open, principal_in
from controlplane.entrypoints.rest.serializers import tenants as shapes
from controlplane.entrypoints.rest.views.base import ApiView
from controlplane.entrypoints.rest.writing import body_of, query_of


class Session(ApiView):
    """Open on purpose: whoever logs in is nobody yet."""

    permission_classes = (Open,)

    def get_authenticators(self) -> list[BaseAuthentication]:
        """None for logging in: whoever has a stale session must be able to log in again. A page
        of another origin cannot send JSON without a preflight, which is never answered."""
        logging_in = self.request is not None and self.request.method == "POST"
        return [] if logging_in else super().get_authenticators()

    @read("session_retrieve", shapes.SessionSerializer, Query)
    def get(self, request: Request) -> Response:
        return Response(_session(request))

    @write(
        "session_create", shapes.LoginOrder, response=shapes.SessionSerializer, conventions=False
    )
    def post(self, request: Request) -> Response:
        body = body_of(request, shapes.LoginOrder)
        user = _check_password(request, body["username"], body["password"])
        login(request._request, user)
        username = user.get_username()
        auditing.signed_in(auditing.meta(request, f"user:{username}"), username, "password")
        request.auth = users.principal_of(user)
        request.user = user
        return Response(_session(request))

    @write("session_delete", status=204, response=None, conventions=False)
    def delete(self, request: Request) -> Response:
        logout(request._request)
        return Response(status=204)


class SignInMethods(ApiView):
    """Open on purpose: the login page shows them to whoever is nobody yet."""

    permission_classes = (Open,)
    authentication_classes = ()

    @read("session_methods", shapes.SignInMethodsSerializer, Query)
    def get(self, request: Request) -> Response:
        query_of(request, Query)
        env = settings.ENV
        found = [{"name": env.oidc_name, "url": "/sso/oidc/login/"}] if env.oidc_issuer else []
        return Response({"methods": found})


class Status(ApiView):
    resource = "status"

    @read("status_retrieve", shapes.StatusSerializer, Query)
    def get(self, request: Request) -> Response:
        query_of(request, Query)
        return Response(reading.status(time.time()))


def _check_password(request: Request, username: str, password: str) -> User:
    """The user; after five failures this name waits, told so before any password is checked."""
    address, now = str(request.META.get("REMOTE_ADDR", "")), time.time()
    wait = users.seconds_until_login(username, address, now)
    if wait > 0:
        retry = {"Retry-After": str(math.ceil(wait))}
        raise Problem(429, "too_many_failures", "Too many failed logins; wait.", retry)
    user = authenticate(request._request, username=username, password=password)
    if not isinstance(user, User) or users.principal_of(user) is None:
        users.note_failed_login(username, address, now)
        _note_refusal(request, username)
        raise Problem(401, "invalid_credentials", "User name or password is wrong.")
    users.note_login(username, address)
    return user


def _note_refusal(request: Request, username: str) -> None:
    """Only of a name that exists: what people type there is sometimes their password."""
    actor = f"user:{username}" if users.role_of(username) else "anonymous"
    refusal = ("SignIn", "session", "invalid_credentials", "User name or password is wrong.")
    auditing.refuse(auditing.meta(request, actor), *refusal)


def _session(request: Request) -> dict[str, str]:
    if request.auth is None:
        raise NotAuthenticated("Nobody is logged in.")
    principal = principal_in(request)
    return {
        "username": principal.actor.partition(":")[2],
        "role": principal.role,
        "tenant_id": principal.tenant_id,
        "csrf_token": get_token(request._request),
    }
