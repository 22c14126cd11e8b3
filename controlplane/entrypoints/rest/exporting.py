"""Events and ledger records as a file, streamed, and the signed manifest of exactly that file.

The file with its manifest in one folder is an export like any other: ``controlplane.verify``
checks it. ``upto`` is fixed when a request comes, so that both agree if it is given to both.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from controlplane import bootstrap
from controlplane.adapters.export.formats import format_of
from controlplane.application.export_job import FileExport
from controlplane.application.exports import ExportError, Filters
from controlplane.application.ports import IntegrityError
from controlplane.domain.errors import NotFound
from controlplane.domain.event_types import EVENT_TYPES
from controlplane.entrypoints.rest import ledger_reading
from controlplane.entrypoints.rest.problems import Problem

MAX_RANGE = 100_000  # positions in one answer over HTTP; the command line has no limit


def respond(request: HttpRequest, query: dict[str, Any], tenant_id: str | None) -> HttpResponseBase:
    """The file, or with ``manifest=true`` its manifest."""
    what, after = query["what"], query["after"]
    last = ledger_reading.export_head(what)
    upto = min(query.get("upto", last), last)
    if upto - after > MAX_RANGE:
        raise Problem(
            400, "range_too_large", f"At most {MAX_RANGE} positions; use after and upto, in steps."
        )
    export = _export(query, tenant_id, upto)
    if query["manifest"] == "true":
        return _manifest(export)
    chunks = export.chunks()
    return StreamingHttpResponse(
        _asynchronously(chunks) if isinstance(request, ASGIRequest) else chunks,
        content_type=export.content_type,
        headers={
            "Content-Disposition": f'attachment; filename="{export.name}"',
            "X-Log-Position": str(upto),
        },
    )


def _export(query: dict[str, Any], tenant_id: str | None, upto: int) -> FileExport:
    what = query["what"]
    kinds = tuple(filter(None, query.get("type", "").split(",")))
    if tenant_id and not bootstrap.event_store().replay(f"tenant-{tenant_id}"):
        raise NotFound("tenant", tenant_id)
    if what == "events" and not set(kinds) <= EVENT_TYPES.keys():
        raise Problem(400, "invalid_type", "There is no such event type.")
    filters = Filters(query["after"], tenant_id, kinds, query.get("since"), query.get("until"))
    safe = query["formula_safe"] == "true"
    try:
        form = format_of(query["format"], what, safe)
        return FileExport(bootstrap.export_source(what), form, filters, upto, safe)
    except ExportError as error:
        raise Problem(503, "export_unavailable", str(error)) from error


def _manifest(export: FileExport) -> HttpResponse:
    try:
        for _ in export.chunks():
            pass
    except IntegrityError as error:
        raise Problem(503, "not_intact", f"The records are not intact: {error}") from error
    return HttpResponse(export.manifest(), content_type="application/json")


async def _asynchronously(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """One batch at a time off the event loop; Django would read a plain iterator to its end."""
    following = sync_to_async(lambda: next(chunks, b""))
    while chunk := await following():
        yield chunk
