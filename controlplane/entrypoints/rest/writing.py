"""The conventions of every write, in one place: If-Match, Idempotency-Key, dry run, receipt.

A write is one command to one aggregate. ``perform`` reads the conventions from the request, hands
the command over and renders the receipt; a view only says which command::

    command = DrainNode(node_id, reason, now=time.time())
    return perform(request, Write(node.DECIDER, node_id, command))
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import msgspec
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import bootstrap
from controlplane.application.handle import Handled, scoped
from controlplane.application.ports import EventMeta, Idempotency, StoredResponse
from controlplane.domain.audit import redacted
from controlplane.domain.decider import Command, Decider
from controlplane.domain.errors import VersionConflict
from controlplane.entrypoints.rest import auditing
from controlplane.entrypoints.rest.events import unrecorded
from controlplane.entrypoints.rest.fields import Choice, Query, Reason
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.security import principal_in

_ETAG = re.compile(r'(?:W/)?"([0-9]{1,18})"', re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
MAX_REASON = 500

Extra = Callable[[Handled], dict[str, Any]]


class WriteQuery(Query):
    dry_run = Choice(("true", "false"), required=False, default="false")
    reason = Reason()


def meta_of(request: Request, reason: str = "") -> EventMeta:
    """Of the authenticated caller; ``reason`` empty: what the header says."""
    why = redacted(reason or reason_header(request))
    return auditing.meta(request, principal_in(request).actor, why)


def reason_header(request: Request) -> str:
    """``X-Reason``, for the audit: what a body's ``reason`` says, where a call has no body. In
    UTF-8, percent-encoded or plain."""
    text = unquote(request.headers.get("X-Reason", "")).strip()
    if len(text) > MAX_REASON or _UNPRINTABLE.search(text):
        raise Problem(400, "invalid_reason", f"A reason is at most {MAX_REASON} characters.")
    return text


def query_of(request: Request, serializer: type[Query]) -> dict[str, Any]:
    """The validated query string; raises for an unknown, repeated or malformed parameter."""
    for name, values in request.query_params.lists():
        if len(values) > 1:
            raise Problem(400, "unknown_filter", f"'{name[:100]}' is given more than once.")
    checked = serializer(data=request.query_params.dict())
    checked.is_valid(raise_exception=True)
    return dict(checked.validated_data)


def body_of(request: Request, serializer: type[Any]) -> dict[str, Any]:
    """The validated body; a request without one counts as ``{}``."""
    checked = serializer(data=request.data if request.data != "" else {})
    checked.is_valid(raise_exception=True)
    return dict(checked.validated_data)


def expected_version(request: Request) -> int | None:
    """What If-Match demands; None without the header, or with ``*``."""
    header = request.headers.get("If-Match", "").strip()
    if header in ("", "*"):
        return None
    match = _ETAG.fullmatch(header)
    if match is None:
        raise Problem(400, "invalid_if_match", 'If-Match is an ETag like "17", or *.')
    return int(match[1])


def idempotency_of(request: Request, part: str = "") -> Idempotency | None:
    """The caller's key, bound to the caller and the address, and the hash of what it asks."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise Problem(
            400, "invalid_idempotency_key", "An Idempotency-Key is 1 to 255 printable characters."
        )
    scope = (principal_in(request).actor, str(request.method), request.path, key, part)
    return Idempotency(_digest(scope), _digest(request.data))


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


@dataclass(frozen=True)
class Write:
    """One command to one aggregate; ``target`` is the aggregate's id.

    ``extra`` adds fields to the receipt; it must be a function of what was handled alone, since
    its result is stored with the events and replayed to whoever sends the same key again.
    """

    decider: Decider[Any]
    target: str
    command: Command
    reason: str = ""
    status: int = 200
    extra: Extra | None = None
    causation_id: str = ""

    def receipt(self, handled: Handled, dry_run: bool = False) -> dict[str, Any]:
        return {
            "id": self.target,
            "version": handled.version,
            "changed": bool(handled.events),
            "dry_run": dry_run,
            "events": [unrecorded(event) for event in handled.events],
            **(self.extra(handled) if self.extra else {}),
        }

    def stored(self, handled: Handled) -> tuple[int, bytes]:
        return self.status, msgspec.json.encode(self.receipt(handled))


def perform(request: Request, write: Write) -> HttpResponseBase:
    """Carry the command out and answer with its receipt, or with the one of the first time."""
    query = query_of(request, WriteQuery)
    dry_run = query["dry_run"] == "true"
    handled = handle(request, write, query.get("reason", ""), dry_run)
    if dry_run:
        body = write.receipt(handled, dry_run=True)
        return Response(body, headers={"ETag": f'"{handled.version}"'})
    return receipt_response(write, handled)


def receipt_response(write: Write, handled: Handled, **shown_once: Any) -> HttpResponseBase:
    """The receipt of a command carried out. ``shown_once`` is in no stored answer."""
    if handled.stored is not None:
        return _replayed(handled.stored)
    response = Response({**write.receipt(handled), **shown_once}, status=write.status)
    response["ETag"] = f'"{handled.version}"'
    response["X-Log-Position"] = str(handled.position)
    return response


def handle(request: Request, write: Write, reason: str, dry_run: bool, part: str = "") -> Handled:
    """The command through the handler; a stale If-Match is a 412 with the version now."""
    try:
        return bootstrap.command_handler().handle(
            write.decider,
            write.decider.stream(write.target),
            write.command,
            replace(meta_of(request, write.reason or reason), causation_id=write.causation_id),
            expected_version=expected_version(request),
            idempotency=None if dry_run else idempotency_of(request, part),
            response=write.stored,
            dry_run=dry_run,
        )
    except VersionConflict as error:
        if "If-Match" not in request.headers:
            raise
        headers = {"ETag": f'"{error.actual}"'}
        stale = Problem(412, error.code, error.message, headers)
        stale.recorded = error.recorded
        raise stale from None


def replayed(request: Request) -> HttpResponseBase | None:
    """The first answer to this request's Idempotency-Key, if there was one."""
    key = scoped(idempotency_of(request), meta_of(request))
    stored = bootstrap.event_store().stored_response(key.key) if key else None
    return _replayed(stored) if stored and key and stored.body_hash == key.body_hash else None


def _replayed(stored: StoredResponse) -> HttpResponse:
    response = HttpResponse(stored.body, status=stored.status, content_type="application/json")
    response["X-Log-Position"] = str(stored.position)
    response["Idempotent-Replayed"] = "true"
    return response
