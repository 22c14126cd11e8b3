"""What every view of the API shares: parse, call, render.

A view's ``resource`` is looked up in the access policy; a view without one answers 403. (Said here
and not at the class, whose docstring would become the description of every operation.)
"""

from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlencode

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.entrypoints.rest import moments, reading
from controlplane.entrypoints.rest.auditing import note_refusal
from controlplane.entrypoints.rest.fields import Query
from controlplane.entrypoints.rest.rendering import AnyAccept
from controlplane.entrypoints.rest.security import principal_in
from controlplane.entrypoints.rest.serializers.common import ReadQuery
from controlplane.entrypoints.rest.sources import Source
from controlplane.entrypoints.rest.writing import query_of

Page = tuple[int, list[dict[str, Any]]]


class ApiView(APIView):
    resource: ClassVar[str] = ""
    content_negotiation_class = AnyAccept

    def handle_exception(self, exc: Exception) -> Response:
        note_refusal(self.request, self, exc)
        return super().handle_exception(exc)

    def position(self, query: dict[str, Any]) -> int:
        """Where the answer stands: at ``as_of``, or as far as the read model is now."""
        if "as_of" in query:
            return moments.position_of(query["as_of"])
        return reading.wait_for(query.get("min_position"))

    def source(self, query: dict[str, Any]) -> tuple[Source, int]:
        reached = reading.wait_for(query.get("min_position"))
        return moments.source_of(query.get("as_of"), reached)

    def respond_one(self, request: Request, find: Callable[[Source], reading.Found]) -> Response:
        """One thing of the read model, with its ETag and the position it was read at."""
        query = query_of(request, ReadQuery)
        source, position = self.source(query)
        found = find(source)
        return Response(
            found.body, headers={"X-Log-Position": str(position), "ETag": f'"{found.version}"'}
        )

    def respond_page(
        self,
        request: Request,
        serializer: type[Query],
        find: Callable[[Source, dict[str, Any]], Page],
    ) -> Response:
        """A page by limit and offset; ``find`` gets the rows' source and the validated query."""
        query = query_of(request, serializer)
        source, position = self.source(query)
        count, results = find(source, query)
        body = counted_page(request, query, count, results)
        return Response(body, headers={"X-Log-Position": str(position)})


def counted_page(
    request: Request, query: dict[str, Any], count: int, results: list[dict[str, Any]]
) -> dict[str, Any]:
    """A page by limit and offset, of ``count`` in all."""
    return {"count": count, **_links(request, query, count), "results": results}


def _links(request: Request, query: dict[str, Any], count: int) -> dict[str, str | None]:
    limit, offset = query["limit"], query["offset"]
    following = offset + limit if offset + limit < count else None
    preceding = max(0, offset - limit) if offset > 0 else None
    return {
        "next": page_link(request, offset=following, limit=limit),
        "previous": page_link(request, offset=preceding, limit=limit),
    }


def page_link(request: Request, **changes: int | None) -> str | None:
    """This address with some parameters changed; None if the first change is None.

    Relative, so that no Host header of a proxy in between ends up in an answer.
    """
    if next(iter(changes.values())) is None:
        return None
    return f"{request.path}?{urlencode({**request.query_params.dict(), **changes})}"


def cursor_page(
    request: Request,
    query: dict[str, Any],
    results: list[dict[str, Any]],
    field: str,
    parameter: str = "after",
) -> dict[str, Any]:
    """A page of what grows with the log: the next one begins beyond the last ``field`` here."""
    is_full = len(results) >= query["limit"]
    following = page_link(request, **{parameter: results[-1][field] if is_full else None})
    return {"next": following, "previous": None, "results": results}


def tenant_filter(request: Request) -> str | None:
    """The tenant whose rows alone exist for this caller; None: all."""
    return principal_in(request).tenant_id or None
