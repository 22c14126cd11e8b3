"""OpenAPI annotations for views: one line each, the conventions added here."""

from collections.abc import Callable
from typing import Any, TypeVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers

from controlplane.entrypoints.rest.examples import EXAMPLES
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.reference import GROUPS, INTRODUCTION, OPERATIONS
from controlplane.entrypoints.rest.serializers.common import (
    ProblemSerializer,
    ReadQuery,
    ReceiptSerializer,
)

F = TypeVar("F", bound=Callable[..., Any])
Shape = type[serializers.BaseSerializer[Any]]

_PROBLEM = {("4XX", "application/problem+json"): ProblemSerializer}
_DRY_RUN = OpenApiParameter(
    "dry_run", bool, description="Answer with the would-be events and change nothing."
)
_REASON = OpenApiParameter("reason", str, description="Kept in the audit.")
_HEADERS = [
    OpenApiParameter(
        "Idempotency-Key",
        str,
        OpenApiParameter.HEADER,
        description="The same key with the same body gets the first answer again, for 24 h.",
    ),
    OpenApiParameter(
        "If-Match",
        str,
        OpenApiParameter.HEADER,
        description="The ETag last seen; 412 with the current one if it has moved on.",
    ),
]


def read(name: str, response: Any, query: type[Query] = ReadQuery) -> Callable[[F], F]:
    """A GET; ``name`` becomes the operation id, and is told of in ``reference``.
    ``response`` may map (status, type) to shapes."""
    responses = response if isinstance(response, dict) else {200: response}
    return extend_schema(
        **_told(name),
        parameters=[query] if query._declared_fields else [],
        responses={**responses, **_PROBLEM},
    )


def write(
    name: str,
    order: Any = None,
    *,
    status: int = 200,
    response: Any = ReceiptSerializer,
    conventions: bool = True,
) -> Callable[[F], F]:
    """A POST, PUT, PATCH or DELETE; without ``conventions`` it is no command to an aggregate."""
    parameters = [_DRY_RUN, _REASON, *_HEADERS] if conventions else []
    return extend_schema(
        **_told(name),
        request=order,
        examples=EXAMPLES.get(name, []),
        parameters=parameters,
        responses={status: response, **_PROBLEM},
    )


def _told(name: str) -> dict[str, Any]:
    """What the reference says; without a description the summary alone."""
    group, summary, description = OPERATIONS[name]
    return {
        "operation_id": name,
        "tags": [group],
        "summary": summary,
        "description": description or f"{summary}.",
    }


def page_of(item: Shape, counted: bool = True) -> Shape:
    """``{count?, next, previous, results}`` of ``item``."""
    fields: dict[str, Any] = {
        "next": serializers.CharField(allow_null=True),
        "previous": serializers.CharField(allow_null=True),
        "results": item(many=True),
    }
    if counted:
        fields = {"count": serializers.IntegerField(), **fields}
    name = item.__name__.removesuffix("Serializer") + "PageSerializer"
    return type(name, (serializers.Serializer,), fields)


def introduce(result: dict[str, Any], **of: Any) -> dict[str, Any]:
    """A hook of drf-spectacular: what the page begins with, and its groups in their order."""
    result["info"]["description"] = INTRODUCTION
    result["tags"] = [{"name": name, "description": text} for name, text in GROUPS]
    return result


class _BearerScheme(OpenApiAuthenticationExtension):
    target_class = "controlplane.entrypoints.rest.security.BearerAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key, `sk_…`."}


class _CookieScheme(OpenApiAuthenticationExtension):
    target_class = "controlplane.entrypoints.rest.security.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}
