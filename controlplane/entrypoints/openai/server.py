"""The HTTP server: uvicorn, with limits on what a client may do before its request is complete.

The protocol also tells a request directly that its client has gone; through ASGI's ``receive``
that takes a task per request, a tenth of the cost of a short one.

uvicorn bounds neither the size of a head nor the time it may take. Here a request's head has ten
seconds, a hundred lines and 32 KiB; whoever needs more is cut off. uvicorn's ``send`` waits while
a client's buffer is full (64 KiB), which is what keeps a slow reader from costing memory.
"""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
MAX_HEADERS = 100
CONNECTION = "engine.connection"  # in the scope's state; saves a task per request that waits
MAX_HEAD_BYTES = 32 * 1024
DRAIN_S = 5.0
GRACE_S = 7


class GuardedProtocol(HttpToolsProtocol):
    """httptools' parser with a deadline and a bound for each request's head."""

    on_lost: Callable[[], object] | None = None  # set by the request that is being served
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_in()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None:  # a head is on its way: it may not grow without end
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self._has_ended(data):
                self._cut()
                return
        super().data_received(data)

    def _has_ended(self, data: bytes) -> bool:
        """Whether the head ends in this piece, of which the rest is body."""
        return data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) >= 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._deadline is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_in()
        if len(self.headers) > MAX_HEADERS:
            self._cut()
            raise ValueError("too many headers")  # stops the parser
        self.scope["state"][CONNECTION] = self
        super().on_headers_complete()

    def abort(self) -> None:
        """Drop the connection: closing would wait for the client to read what is buffered."""
        self.transport.abort()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._cut)

    def _head_is_in(self) -> None:
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
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="websockets-sansio",
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
