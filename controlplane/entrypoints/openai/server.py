"""The HTTP server: uvicorn, with limits on what a client may do before its request is complete.

The protocol also tells a request directly that its client has gone; through ASGI's ``receive``
that takes a task per request, a tenth of the cost of a short one. And an ``Exchange`` writes the
successful answers: the same bytes as uvicorn's ``send``, but head and first bytes in one system
call instead of two, and a token without a message, a coroutine and a task switch on its way.

uvicorn bounds neither the size of a head nor the time it may take. Here a request's head has ten
seconds, a hundred lines and 32 KiB; whoever needs more is cut off. What is no HTTP is answered in
the envelope of every other error, and a handshake that cannot lead to a websocket is an ordinary
request, so that it gets an ordinary answer. uvicorn's ``send`` waits while
a client's buffer is full (64 KiB), which is what keeps a slow reader from costing memory.
"""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from controlplane.application.refused import Refused
from controlplane.entrypoints.openai.errors import encode_error
from controlplane.entrypoints.openai.turns import Turns
from controlplane.entrypoints.openai.ws_protocol import GuardedWebSocket

HEAD_TIMEOUT_S = 10.0
MAX_HEADERS = 100
CONNECTION, EXCHANGE = "engine.connection", "engine.exchange"  # in the scope's state
MAX_HEAD_BYTES = 32 * 1024
MAX_HELD_BYTES = 64 * 1024
DRAIN_S = 5.0
GRACE_S = 7
_WS_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
_BAD_REQUEST = encode_error(Refused("bad_request", "This is not a valid HTTP request."), "")


class Exchange:
    """The answer to one HTTP/1.1 request; only those with status 200 go this way."""

    __slots__ = ("_cycle", "_held")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._held = b""  # the head, until there is something to send with it

    def take_body(self) -> bytes | None:
        """The request's body if all of it has come, as it usually has with the head."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        cycle.message_event.clear()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    async def whole(self, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a complete answer; ``headers`` hold its content-length."""
        head = self._head(headers, b"\r\n")
        if await self._may_write():
            self._cycle.transport.write(head + body)
            self._complete()

    def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin a chunked answer; its head leaves with the first chunk."""
        self._held = self._head(headers, b"transfer-encoding: chunked\r\n\r\n")

    @property
    def is_behind(self) -> bool:
        """The client has not read enough of what was sent before."""
        return self._cycle.flow.write_paused

    def write_now(self, chunk: bytes) -> None:
        """Send a chunk, however far the client is behind."""
        if not self._cycle.disconnected:
            framed = b"%b%x\r\n%b\r\n" % (self._held, len(chunk), chunk)
            self._held = b""
            self._cycle.transport.write(framed)

    async def write(self, chunk: bytes) -> None:
        """Send a chunk once the client has read enough of what was sent before."""
        if await self._may_write():
            self.write_now(chunk)

    async def end(self, chunk: bytes) -> None:
        """Send the last chunk."""
        if await self._may_write():
            last = b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._held, len(chunk), chunk)
            self._cycle.transport.write(last)
            self._complete()

    def _head(self, headers: Sequence[tuple[bytes, bytes]], end: bytes) -> bytes:
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        pairs = [*cycle.default_headers, *headers]
        if HEADER_VALUE_RE.search(b"".join([value for _, value in pairs])):
            raise ValueError("a header's value holds a control character")
        lines = b"".join([b"%b: %b\r\n" % pair for pair in pairs])
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        return STATUS_LINE[200] + lines + close + end

    async def _may_write(self) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        return not cycle.disconnected

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class GuardedProtocol(HttpToolsProtocol):
    """httptools' parser with a deadline and a bound for each request's head."""

    on_lost: Callable[[], object] | None = None  # set by the request that is being served
    _deadline: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    _held = b""  # the beginning of a request that waits for its turn

    def __init__(self, *, turns: Turns, **given: Any) -> None:
        super().__init__(**given)
        self._turns = turns

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_in()
        self._held = b""
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """What begins a request waits for its turn; what goes on with one does not."""
        if self._held:
            self._held += data
            if len(self._held) > MAX_HELD_BYTES:
                self.flow.pause_reading()
        elif self._is_in_head or not (self.cycle is None or self.cycle.response_complete):
            self._read(data)
        else:
            self._held = data
            self._turns.begin(self._read_held)

    def _read_held(self) -> None:
        data, self._held = self._held, b""
        if data:  # else the client has gone meanwhile
            self.flow.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        if self._deadline is not None:  # a head is on its way: it may not grow without end
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self._has_ended(data):
                self._cut()
                return
        super().data_received(data)
        if self._is_in_head and self._deadline is None:  # the usual head comes in one piece
            self._head_bytes = len(data)
            self._expect_head()

    def _has_ended(self, data: bytes) -> bool:
        """Whether the head ends in this piece, of which the rest is body."""
        return data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) >= 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._head_is_in()
        if len(self.headers) > MAX_HEADERS:
            self._cut()
            raise ValueError("too many headers")  # stops the parser
        self.scope["state"][CONNECTION] = self
        super().on_headers_complete()
        self.scope["state"][EXCHANGE] = Exchange(self.cycle)  # its task starts after this

    def send_400_response(self, msg: str) -> None:
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(_BAD_REQUEST)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + _BAD_REQUEST)
        self.transport.close()

    # --- websockets -----------------------------------------------------------------------------
    def _should_upgrade(self) -> bool:
        return super()._should_upgrade() and self.scope["method"] == "GET" and self._is_handshake()

    def _is_handshake(self) -> bool:
        """Whether the websocket's own parser will accept the head."""
        headers = dict(self.headers)
        return (
            headers.get(b"sec-websocket-version") == b"13"
            and _WS_KEY.fullmatch(headers.get(b"sec-websocket-key", b"")) is not None
            and headers.get(b"content-length", b"0") == b"0"
            and b"transfer-encoding" not in headers
        )

    def handle_websocket_upgrade(self) -> None:
        """It has stricter limits on lines; what it cannot read it would keep open for good."""
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, GuardedWebSocket) and not protocol.handshake_initiated:
            self.send_400_response("")

    # --- ends -----------------------------------------------------------------------------------
    def abort(self) -> None:
        """Drop the connection: closing would wait for the client to read what is buffered."""
        self.transport.abort()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._cut)

    def _head_is_in(self) -> None:
        self._is_in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class GatewayServer(uvicorn.Server):
    """Tells the gateway that the end has come before uvicorn begins to wait for its streams."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


def make_server(app: Any, on_exit: Callable[[], None]) -> GatewayServer:
    """Call it in the event loop that will serve."""
    config = uvicorn.Config(
        app,
        http=partial(GuardedProtocol, turns=Turns()),  # type: ignore[arg-type]  # it is only called
        ws=GuardedWebSocket,
        ws_max_size=1024 * 1024,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=2048,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again once it has shut down
    return GatewayServer(config, on_exit)
