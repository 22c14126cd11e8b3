"""What is written for the audit alone: refusals that never reached a command, users, logins.

The command handler records what it refuses. This records what is refused before it: a body that
is not valid, a role that may not, a thing that is not there. Who is refused all the time is
recorded sixty times a minute and no more, or a wrong script could fill the log.
"""

import threading
import time
from collections import OrderedDict
from typing import Any

from django.http import HttpRequest
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request

from controlplane import bootstrap
from controlplane.adapters.access.users import role_of
from controlplane.application.ports import Append, EventMeta
from controlplane.domain.audit import (
    ACCESS,
    REFUSALS,
    CommandRefused,
    DashboardUserSaved,
    SignedIn,
    TextRead,
    redacted,
)
from controlplane.domain.policy import Principal
from controlplane.entrypoints.rest.problems import said

MAX_A_MINUTE = 60
MAX_TEXT = 500
_MAX_CALLERS = 10_000


class Brake:
    """At most so many a minute of each caller; a fixed window is exact enough for this."""

    def __init__(self, most: int = MAX_A_MINUTE) -> None:
        self._most, self._lock = most, threading.Lock()
        self._counts: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def allows(self, caller: str, now: float) -> bool:
        minute = int(now // 60)
        with self._lock:
            since, count = self._counts.pop(caller, (minute, 0))
            count = count + 1 if since == minute else 1
            self._counts[caller] = (minute, count)
            if len(self._counts) > _MAX_CALLERS:
                self._counts.popitem(last=False)
        return count <= self._most


_brake = Brake()


def note_refusal(request: Request, view: Any, error: Exception) -> None:
    """Record a write that was refused before it became a command. Reads, strangers and faults of
    ours are not orders; what the handler has recorded is not recorded twice."""
    principal = getattr(request, "_auth", None)
    if request.method in SAFE_METHODS or not isinstance(principal, Principal):
        return
    status, code, detail = said(error)
    dry_run = request.query_params.get("dry_run") == "true"
    if status >= 500 or dry_run or getattr(error, "recorded", False):
        return
    command = f"{request.method} {type(view).__name__}"
    target = _target(request, principal, getattr(view, "kwargs", {}))
    refuse(meta(request, principal.actor), command, target, code, detail)


def refuse(meta: EventMeta, command: str, target: str, code: str, detail: str) -> None:
    now = time.time()
    if not _brake.allows(meta.actor + meta.address, now):
        return
    event = CommandRefused(
        command=_kept(command), target=_kept(target), code=code, detail=_kept(detail), at=now
    )
    _append(REFUSALS, event, meta)


def _kept(text: str) -> str:
    return redacted(text)[:MAX_TEXT]


def user_saved(meta: EventMeta, username: str, role: str, tenant_id: str) -> None:
    """Call before the user is saved: the role of before is looked up here."""
    event = DashboardUserSaved(username, role_of(username), role, tenant_id, time.time())
    _append(ACCESS, event, meta)


def signed_in(meta: EventMeta, username: str, method: str) -> None:
    _append(ACCESS, SignedIn(username, method, time.time()), meta)


def text_read(meta: EventMeta, tenant_id: str, request_id: str) -> None:
    _append(ACCESS, TextRead(tenant_id, request_id, time.time()), meta)


def meta(request: Request | HttpRequest, actor: str, reason: str = "") -> EventMeta:
    """Who, from where, why; the request id correlates the events with the logs."""
    return EventMeta(
        actor=actor,
        correlation_id=str(getattr(request, "request_id", "")),
        address=str(request.META.get("REMOTE_ADDR", "")),
        reason=reason,
    )


def _append(stream: str, event: Any, meta: EventMeta) -> None:
    bootstrap.event_store().append(Append(stream, None, [event], meta))


def _target(request: Request, principal: Principal, kwargs: dict[str, Any]) -> str:
    """The tenant's stream where that is what was meant, so that the tenant's own auditor sees it;
    a tenant that the caller does not reach is not told of the caller."""
    tenant_id = str(kwargs.get("tenant_id", ""))
    if tenant_id and principal.reaches(tenant_id):
        return f"tenant-{tenant_id}"
    return str(request.path)
