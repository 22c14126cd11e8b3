"""Every refusal as ``application/problem+json`` (RFC 9457) with a stable ``code``.

``detail`` is for people and never carries a stack, a path, an address or SQL.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, JsonResponse
from rest_framework import exceptions
from rest_framework.response import Response

from controlplane.adapters.eventstore.connect import unavailable
from controlplane.adapters.failed_sync import leave_if_failed
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.strict_json import BadJson
from controlplane.domain.errors import DomainError, VersionConflict
from controlplane.domain.event_types import UnknownEvent
from controlplane.entrypoints.rest.rendering import JSONRenderer

logger = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    409: "Conflict",
    412: "Precondition failed",
    413: "Body too large",
    415: "Unsupported media type",
    422: "Unprocessable",
    429: "Too many requests",
    431: "Header fields too large",
    500: "Internal error",
    503: "Unavailable",
    507: "Insufficient storage",
}
_KIND_STATUS = {"invalid": 400, "not_found": 404, "conflict": 409, "forbidden": 403}
_CODE_STATUS = {"invalid_route": 422, "idempotency_mismatch": 422, "unsupported_combination": 422}
_STORE_STATUS = {"store_full": 507}
_DRF_CODES = {
    "not_authenticated": "not_authenticated",
    "authentication_failed": "invalid_token",
    "permission_denied": "forbidden",
    "parse_error": "invalid_json",
    "unsupported_media_type": "unsupported_media_type",
}


_FIELD_CODES = {"not_a_list": "invalid_type", "max_length": "too_long"}


class Problem(Exception):
    """A refusal of the REST surface itself. ``recorded``: it stands in the log already."""

    recorded = False

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers = dict(headers or {})


def problem_body(
    status: int,
    code: str,
    detail: str,
    request_id: str = "",
    errors: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    return {
        "type": "about:blank",
        "title": TITLES.get(status, "Error"),
        "status": status,
        "code": code,
        "detail": detail,
        "request_id": request_id,
        "errors": errors or [],
    }


def exception_handler(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's hook: any exception of a view becomes a problem; an unforeseen one a logged 500."""
    leave_if_failed(error)
    request_id = getattr(context["request"], "request_id", "")
    status, code, detail, headers = _describe(error)
    errors = _field_errors(error)
    if errors:
        code, detail = _first(errors)
    body = problem_body(status, code, detail, request_id, errors)
    if status >= 500 and code == "internal_error":
        logger.error("request %s failed", request_id, exc_info=error)
    context["request"].accepted_renderer = JSONRenderer()  # the schema's own would write YAML
    context["request"].accepted_media_type = JSONRenderer.media_type  # unset if it was refused
    response = Response(body, status=status, content_type=PROBLEM_TYPE, headers=headers)
    response["X-Request-Id"] = request_id
    return response


def said(error: Exception) -> tuple[int, str, str]:
    """``(status, code, detail)`` of the problem that ``error`` becomes."""
    status, code, detail, _ = _describe(error)
    errors = _field_errors(error)
    return (status, *(_first(errors) if errors else (code, detail)))


def _first(errors: list[dict[str, str]]) -> tuple[str, str]:
    return errors[0]["code"], _headline(errors[0])


def _headline(error: dict[str, str]) -> str:
    """The sentence with the field it is about: a client may show ``detail`` and nothing else."""
    name = error["pointer"].strip("/").replace("/", ".")
    named = name.rpartition(".")[2] in error["detail"]
    return error["detail"] if named else f"{name}: {error['detail']}"


def _describe(error: BaseException) -> tuple[int, str, str, dict[str, str]]:
    """``(status, code, detail, headers)`` of any exception."""
    match error:
        case Problem():
            return error.status, error.code, error.detail, error.headers
        case BadJson():
            return 400, error.code, error.detail, {}
        case VersionConflict():
            return 409, error.code, error.message, {"ETag": f'"{error.actual}"'}
        case DomainError():
            status = _CODE_STATUS.get(error.code, _KIND_STATUS.get(error.kind, 400))
            return status, error.code, error.message, {}
        case StoreUnavailable():
            retry = {"Retry-After": str(max(1, round(error.retry_after)))}
            detail = _NO_SPACE if error.code == "store_full" else _STORE_DETAIL
            return _STORE_STATUS.get(error.code, 503), error.code, detail, retry
        case OperationalError() | InterfaceError():
            return _describe(unavailable(error))
        case IntegrityError():
            return 503, "integrity_error", f"{_DAMAGED} {error.position}.", {}
        case UnknownEvent():
            return 503, "unknown_event", _TOO_NEW, {"Retry-After": "60"}
        case Http404():
            return 404, "not_found", "There is nothing here.", {}
        case PermissionDenied():
            return 403, "forbidden", "Not allowed.", {}
        case exceptions.APIException():
            return _describe_drf(error)
    return 500, "internal_error", "Something failed on our side; it is logged.", {}


_DAMAGED = "What was projected before is served; the log is damaged at position"
_TOO_NEW = "The log holds an event of a newer release, which this one cannot read."
_STORE_DETAIL = "The log cannot be written now; nothing was changed. Try again."
_NO_SPACE = "There is no space left for the log; nothing was changed. Free some, then try again."


def _describe_drf(error: exceptions.APIException) -> tuple[int, str, str, dict[str, str]]:
    headers = {}
    if (authenticate := getattr(error, "auth_header", None)) is not None:
        headers["WWW-Authenticate"] = authenticate
    codes = error.get_codes()
    code = codes if isinstance(codes, str) else str(error.default_code)
    detail = error.detail if isinstance(error.detail, str) else "The request is not valid."
    return error.status_code, _DRF_CODES.get(code, code), str(detail), headers


def _field_errors(error: Exception) -> list[dict[str, str]]:
    if isinstance(error, exceptions.ValidationError):
        return list(_flatten(error.detail, ""))
    if isinstance(error, DomainError) and error.param:
        pointer = "/" + error.param.replace(".", "/")
        return [{"pointer": pointer, "detail": error.message, "code": error.code}]
    return []


def _flatten(detail: Any, pointer: str) -> Iterator[dict[str, str]]:
    """DRF's nested errors as JSON pointers: ``{"arms": {0: {"weight": […]}}}`` → /arms/0/weight."""
    if isinstance(detail, Mapping):
        for key, item in detail.items():
            yield from _flatten(item, pointer if key == "non_field_errors" else f"{pointer}/{key}")
    elif isinstance(detail, list):
        for index, item in enumerate(detail):
            nested = isinstance(item, Mapping | list)
            yield from _flatten(item, f"{pointer}/{index}" if nested else pointer)
    else:
        code = _FIELD_CODES.get(detail.code, detail.code)
        yield {"pointer": pointer, "detail": str(detail), "code": code}


def django_problem(status: int, code: str, detail: str, request: HttpRequest) -> JsonResponse:
    """The same envelope outside DRF."""
    request_id = getattr(request, "request_id", "")
    return JsonResponse(
        problem_body(status, code, detail, request_id), status=status, content_type=PROBLEM_TYPE
    )


def bad_request(request: HttpRequest, exception: Exception) -> JsonResponse:
    return django_problem(400, "bad_request", "The request is not valid.", request)


def csrf_failure(request: HttpRequest, reason: str = "") -> JsonResponse:
    return django_problem(403, "csrf_failed", "Send the CSRF token as X-CSRFToken.", request)


def server_error(request: HttpRequest) -> JsonResponse:
    """What failed outside a view, such as a session that is saved after it."""
    status, code, detail, headers = _describe(sys.exc_info()[1] or Exception())
    response = django_problem(status, code, detail, request)
    for name, value in headers.items():
        response.headers[name] = value
    return response
