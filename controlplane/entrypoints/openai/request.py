"""One HTTP request at the edge: its headers, its bounded body, and how it is answered.

Nothing of the body is read before the caller is known, and never more than the limit: a false or
missing Content-Length changes nothing, since the bytes are counted as they come.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from controlplane.application.refused import Refused
from controlplane.entrypoints.openai.errors import Headers, encode_error, headers_of, status_of
from controlplane.entrypoints.openai.server import CONNECTION, EXCHANGE, Exchange

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
JSON_TYPE = (b"content-type", b"application/json")
CORS: Headers = [  # bearer tokens only, no cookies: any page may ask with a token that it has
    (b"access-control-allow-origin", b"*"),
    (
        b"access-control-expose-headers",
        b"x-request-id, retry-after, x-engine-node, x-engine-model-version, x-engine-request-id",
    ),
]
_SINGLE = frozenset({b"authorization", b"host", b"content-length", b"content-type"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client closed the connection before it had sent its request."""


class Request:
    """``headers`` maps lower-case names to the first value of each."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.headers: dict[bytes, bytes] = {}
        self.has_repeated_header = False
        for name, value in scope["headers"]:
            if name in self.headers:
                self.has_repeated_header |= name in _SINGLE
            else:
                self.headers[name] = value
        named = self.headers.get(b"x-request-id", b"")
        self.own_id = request_id
        self.request_id = named.decode() if _REQUEST_ID.fullmatch(named) else request_id
        self.started = False
        state = scope.get("state", {})
        self.connection: Any = state.get(CONNECTION)
        is_usual = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self.exchange: Exchange | None = state.get(EXCHANGE) if is_usual else None

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    # --- the connection -------------------------------------------------------------------------
    def when_lost(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call ``callback`` if the client goes; what is returned takes that back."""
        if self.connection is not None:
            self.connection.on_lost = callback
            if self.connection.transport.is_closing():
                callback()
            return self._forget_callback
        return asyncio.ensure_future(self._watch(callback)).cancel

    def _forget_callback(self) -> None:
        self.connection.on_lost = None

    async def _watch(self, callback: Callable[[], object]) -> None:
        """The same on any ASGI server."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        callback()

    @property
    def is_behind(self) -> bool:
        """Whether the client may have to read before more can be sent."""
        return self.exchange is None or self.exchange.is_behind

    def abort(self) -> None:
        """Drop the connection of a client that does not read."""
        if self.connection is not None:
            self.connection.abort()

    # --- in -------------------------------------------------------------------------------------
    async def json_body(self) -> bytes:
        """The body of a JSON request; raises Refused, ClientGone."""
        kind = self.headers.get(b"content-type", b"application/json").partition(b";")[0]
        if kind.strip().lower() != b"application/json":
            raise Refused("unsupported_media_type", "Send application/json.")
        encoding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            raise Refused("unsupported_encoding", "Send the body without a content encoding.")
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        body = self.exchange.take_body() if self.exchange else None
        if body is not None:
            return self._checked(body)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await self.receive()
                if message["type"] == "http.request" and not message.get("more_body"):
                    return self._checked(bytes(message.get("body", b"")))
                return await self._long_body(message)
        except TimeoutError as error:
            raise Refused("request_timeout", "The body did not come in time.") from error

    async def _long_body(self, message: Message) -> bytes:
        chunks, size = [], 0
        while True:
            if message["type"] != "http.request":
                raise ClientGone
            chunks.append(bytes(message.get("body", b"")))
            size += len(chunks[-1])
            if size > MAX_BODY_BYTES:
                raise _too_large()
            if not message.get("more_body"):
                return self._checked(b"".join(chunks))
            message = await self.receive()

    def _checked(self, body: bytes) -> bytes:
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        return body

    # --- out ------------------------------------------------------------------------------------
    async def respond(
        self,
        status: int,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        content_type: tuple[bytes, bytes] = JSON_TYPE,
    ) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        headers = [content_type, length, *headers]
        if status == 200 and self.exchange is not None:
            self.started = True
            await self.exchange.whole(self._with_own(headers), body)
            return
        await self._start(status, headers)
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, headers: Headers) -> None:
        """Begin a stream; ``write`` and ``end`` send its pieces."""
        if self.exchange is None:
            await self._start(200, headers)
        else:
            self.started = True
            self.exchange.begin(self._with_own(headers))

    async def write(self, chunk: bytes) -> None:
        """Send a piece of a stream; waits while the client is behind."""
        if self.exchange is None:
            await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
        else:
            await self.exchange.write(chunk)

    async def end(self, chunk: bytes) -> None:
        """Send the last piece of a stream."""
        if self.exchange is None:
            await self.send({"type": "http.response.body", "body": chunk})
        else:
            await self.exchange.end(chunk)

    def _with_own(self, headers: Headers) -> Headers:
        own = (b"x-request-id", self.request_id.encode())
        return [*headers, own, *CORS] if b"origin" in self.headers else [*headers, own]

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        headers = self._with_own(headers)
        if self.scope["http_version"] == "1.0" and b"content-length" not in dict(headers):
            self._send_unchunked()
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def _send_unchunked(self) -> None:
        """HTTP/1.0 has no chunks, which uvicorn sends all the same: the end of such a body is the
        end of the connection. (Each piece is announced as all that is left, to satisfy uvicorn.)
        """
        if self.connection is None:
            return
        cycle, send = self.connection.cycle, self.send
        cycle.chunked_encoding = False

        async def unchunked(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        self.send = unchunked

    async def refuse(self, error: Refused, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send the error envelope; an unread body ends the connection."""
        extra = [*headers_of(error), *headers]
        if error.code in ("body_too_large", "request_timeout"):
            extra.append((b"connection", b"close"))
        await self.respond(status_of(error), encode_error(error, self.request_id), extra)


def _too_large() -> Refused:
    return Refused("body_too_large", f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")


def host_is_allowed(host: bytes, allowed: Sequence[str]) -> bool:
    """Whether a Host header names one of ``allowed``; ``*`` allows all, ``.x`` also subdomains."""
    if "*" in allowed:
        return True
    name = host.decode("latin-1").lower()
    if name.endswith("]") or ":" not in name:
        bare = name
    else:
        bare, _, port = name.rpartition(":")
        if not port.isdigit():
            return False
    return any(
        bare == pattern or (pattern.startswith(".") and bare.endswith(pattern))
        for pattern in allowed
    )
