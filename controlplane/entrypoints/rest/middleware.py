"""Around every HTTP answer: a request id, the checks Django leaves out, and security headers."""

import re
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from controlplane.entrypoints.rest.problems import django_problem

GetResponse = Callable[[HttpRequest], HttpResponseBase]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_NUL = re.compile(r"\x00|%00")


def identify(get_response: GetResponse) -> GetResponse:
    """Take the caller's ``X-Request-Id`` or make one, and refuse what no view should ever see."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        request.request_id = request_id  # type: ignore[attr-defined]
        response = _refusal(request) or get_response(request)
        response["X-Request-Id"] = request_id
        return response

    return middleware


def _refusal(request: HttpRequest) -> HttpResponseBase | None:
    try:
        request.get_host()
    except DisallowedHost:
        return django_problem(400, "bad_host", "This host name is not served here.", request)
    if "\x00" in request.path or _NUL.search(request.META.get("QUERY_STRING", "")):
        return django_problem(400, "invalid_unicode", "An address holds no NUL.", request)
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return django_problem(
            415, "unsupported_encoding", "Send bodies without compression.", request
        )
    return None


def secure(get_response: GetResponse) -> GetResponse:
    """Content-Security-Policy and its kin; ``connect-src`` names the gateway for the playground."""
    policy = _content_security_policy(settings.GATEWAY_URL)

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.setdefault("Content-Security-Policy", policy)
        response.setdefault("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
        if request.path.startswith("/api/"):
            response.setdefault("Cache-Control", "no-store")
            response.setdefault("X-Api-Version", "1")
        return response

    return middleware


def _content_security_policy(gateway_url: str) -> str:
    parts = urlsplit(gateway_url)
    web_socket = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}"
    return "; ".join(
        [
            "default-src 'self'",
            f"connect-src 'self' {parts.scheme}://{parts.netloc} {web_socket}",
            "img-src 'self' data:",
            "style-src 'self' 'unsafe-inline'",
            "script-src 'self'",
            "font-src 'self' data:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        ]
    )
