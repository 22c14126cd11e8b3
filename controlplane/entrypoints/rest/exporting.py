"""Events and ledger records as files, streamed: for ``exports/audit/`` and ``export_audit``."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from controlplane.adapters.export.formats import CONTENT_TYPES, Export
from controlplane.entrypoints.rest import ledger_reading
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.serializers.audit import EventSerializer, RequestSerializer

MAX_RANGE = 100_000  # positions in one answer over HTTP; the command line has no limit
_BATCH = 1000
COLUMNS = {
    "events": tuple(EventSerializer().fields),
    "requests": tuple(RequestSerializer().fields),
}


def records(what: str, after: int, upto: int, tenant_id: str | None) -> Iterator[dict[str, Any]]:
    """Every record with ``after < position <= upto``, in order, read in batches."""
    while after < upto:
        batch, after = ledger_reading.export_batch(what, after, upto, _BATCH, tenant_id)
        yield from batch


def respond(request: HttpRequest, query: dict[str, Any], tenant_id: str | None) -> HttpResponseBase:
    """The file, or with ``manifest=true`` its manifest. ``upto`` is fixed now, so that both agree
    and whatever is appended meanwhile is left to the next export."""
    what, kind, after = query["what"], query["format"], query["after"]
    last = ledger_reading.export_head(what)
    upto = min(query.get("upto", last), last)
    if upto - after > MAX_RANGE:
        raise Problem(
            400, "range_too_large", f"At most {MAX_RANGE} positions; use after and upto, in steps."
        )
    export = Export(kind, COLUMNS[what])
    chunks = export.chunks(records(what, after, upto, tenant_id))
    if query["manifest"] == "true":
        for _ in chunks:
            pass
        body = {"what": what, "after": after, "upto": upto, **msgspec.to_builtins(export.manifest)}
        return HttpResponse(msgspec.json.encode(body), content_type="application/json")
    name = f"{what}-{after}-{upto}.{kind}"
    return StreamingHttpResponse(
        _asynchronously(chunks) if isinstance(request, ASGIRequest) else chunks,
        content_type=CONTENT_TYPES[kind],
        headers={
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Log-Position": str(upto),
        },
    )


async def _asynchronously(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """One batch at a time off the event loop; Django would read a plain iterator to its end."""
    following = sync_to_async(lambda: next(chunks, b""))
    while chunk := await following():
        yield chunk
