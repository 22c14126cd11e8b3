"""``/ws/live``: the log and the fleet's telemetry as they happen, for dashboards and scripts.

Who may listen is decided before anything is sent: by the session's cookie (then the Origin must be
this host), by an ``Authorization`` header, or by a first frame ``{"type": "auth", "token": …}``
within five seconds. A token in the address is refused, since addresses land in logs. The hub bars
a listener when the log takes away its key or its tenant's good standing; what is in no log (a
logged-out session, an expired key) is found by asking again every few seconds.

Close codes: 1003 binary, 1008 flooding or not allowed, 4401 not authenticated.
"""

import asyncio
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.utils.crypto import constant_time_compare

from controlplane.adapters.access.users import principal_of
from controlplane.application import strict_json
from controlplane.domain.policy import READ, Principal, allowed
from controlplane.entrypoints.live.hub import Hub, Subscriber, message
from controlplane.entrypoints.rest import identity
from controlplane.entrypoints.rest.problems import Problem

RESOURCE = "event"  # what one must be allowed to read, in the terms of the access policy
AUTH_SECONDS = 5.0
RECHECK_SECONDS = 5.0
MAX_FRAME_CHARACTERS = 4096
MAX_FRAMES_PER_SECOND = 20
UNAUTHENTICATED, REFUSED, NOT_TEXT, GOING_AWAY = 4401, 1008, 1003, 1001


class LiveConsumer(AsyncWebsocketConsumer):
    """One connection. ``hub`` is given with ``as_asgi(hub=…)``."""

    resource = RESOURCE
    channel_layer_alias = "unused"  # everything comes from the hub

    def __init__(self, *args: Any, hub: Hub, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hub = hub
        self._token = ""
        self._principal: Principal | None = None
        self._subscriber: Subscriber | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._frames: list[float] = []
        self._closing = False

    # --- who is there -------------------------------------------------------------------------
    async def connect(self) -> None:
        if carries_token(self.scope):
            return await self.close(REFUSED)
        self._token = bearer(self.scope)
        principal = await self._identify()
        by_cookie = principal is not None and not self._token
        if not same_origin(self.scope, required=by_cookie):
            return await self.close(REFUSED)
        if principal is not None and not allowed(principal, READ, self.resource):
            return await self.close(REFUSED)
        self._principal = principal
        await self.accept()
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _identify(self) -> Principal | None:
        """Who this is by what the connection has shown so far, as of now."""
        if self._token:
            return await database_sync_to_async(principal_of_token)(self._token)
        return await database_sync_to_async(principal_of_session)(self.scope)

    async def _watch(self) -> None:
        """Close unless somebody is known in time and stays known."""
        await asyncio.sleep(AUTH_SECONDS)
        while await self._still_known():
            await asyncio.sleep(RECHECK_SECONDS)
        await self.close(UNAUTHENTICATED)

    async def _still_known(self) -> bool:
        try:
            return self._principal is not None and await self._identify() == self._principal
        except DatabaseError:  # who cannot be identified now may come again
            return False

    async def disconnect(self, code: int) -> None:
        for task in self._tasks:
            task.cancel()
        if self._subscriber is not None:
            self._hub.leave(self._subscriber)

    async def close(self, code: int | None = None, reason: str | None = None) -> None:
        """Whatever still arrives after this is not looked at."""
        self._closing = True
        await super().close(code, reason)

    # --- what it says -------------------------------------------------------------------------
    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if self._closing:
            return
        if text_data is None:
            return await self.close(NOT_TEXT)
        if self._flooding():
            await self._refuse("rate_limited", "Too many frames.")
            return await self.close(REFUSED)
        frame = parse(text_data)
        if frame is None:
            return await self._refuse("invalid_frame", "A frame is a JSON object with a type.")
        await self._act(frame)

    def _flooding(self) -> bool:
        now = time.monotonic()
        self._frames = [at for at in self._frames if at > now - 1.0] + [now]
        return len(self._frames) > MAX_FRAMES_PER_SECOND

    async def _act(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if self._principal is None:
            await self._authenticate(frame)
        elif kind == "subscribe":
            await self._subscribe(frame.get("after"))
        elif kind != "auth":
            await self._refuse("unknown_type", "Frames to send are auth and subscribe.")

    async def _authenticate(self, frame: dict[str, Any]) -> None:
        token = frame.get("token")
        self._token = token if frame["type"] == "auth" and isinstance(token, str) else ""
        principal = await self._identify() if self._token else None
        if principal is None or not allowed(principal, READ, self.resource):
            await self._refuse("invalid_token", "Not authenticated.")
            return await self.close(UNAUTHENTICATED)
        self._principal = principal

    async def _subscribe(self, after: Any) -> None:
        if after is not None and (type(after) is not int or not 0 <= after < 2**63):
            return await self._refuse("invalid_position", "after is a log position, or null.")
        if self._subscriber is not None:
            return await self._refuse("too_many", "This connection has its subscription.")
        principal = self._principal
        assert principal is not None
        telemetry = allowed(principal, READ, "node")
        self._subscriber = Subscriber(principal.tenant_id or None, telemetry, principal.actor)
        self._tasks.append(asyncio.create_task(self._forward(self._subscriber)))
        await self._hub.join(self._subscriber, after)
        if not await self._still_known():  # what came before it joined, the hub did not judge
            await self.close(UNAUTHENTICATED)

    async def _forward(self, subscriber: Subscriber) -> None:
        while (payload := await subscriber.take()) is not None:
            await self.send(text_data=payload)
        await self.close(UNAUTHENTICATED if subscriber.barred else GOING_AWAY)

    async def _refuse(self, code: str, detail: str) -> None:
        await self.send(text_data=message("error", code=code, message=detail))


def principal_of_token(token: str) -> Principal | None:
    try:
        return identity.principal_of_token(token)
    except Problem:
        return None


def principal_of_session(scope: dict[str, Any]) -> Principal | None:
    """Read anew from the database each time; what the scope holds is as old as the connection."""
    session = scope.get("session")
    if session is None or not session.session_key or not session.exists(session.session_key):
        return None
    user = User.objects.filter(pk=session.get(SESSION_KEY)).first()
    known = session.get(HASH_SESSION_KEY, "")
    if user is None or not constant_time_compare(known, user.get_session_auth_hash()):
        return None
    return principal_of(user)


def parse(text: str) -> dict[str, Any] | None:
    """The frame, or None if it is not a JSON object with a string ``type``."""
    try:
        frame = strict_json.parse(text.encode()) if len(text) <= MAX_FRAME_CHARACTERS else None
    except (strict_json.BadJson, UnicodeEncodeError):
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("type"), str) else None


def carries_token(scope: dict[str, Any]) -> bool:
    names = {name.lower() for name in parse_qs(scope.get("query_string", b"").decode("latin-1"))}
    return bool(names & {"token", "access_token", "key", "api_key", "authorization"})


def bearer(scope: dict[str, Any]) -> str:
    scheme, _, token = header(scope, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def same_origin(scope: dict[str, Any], required: bool) -> bool:
    """The page that opened the socket is this host's own. A browser always says the origin, so
    its absence is accepted only where no cookie vouches for the caller."""
    origin = header(scope, b"origin")
    if not origin:
        return not required
    return urlsplit(origin).netloc.lower() == header(scope, b"host").lower()


def header(scope: dict[str, Any], name: bytes) -> str:
    found = (value for key, value in scope["headers"] if key == name)
    return next(found, b"").decode("latin-1")
