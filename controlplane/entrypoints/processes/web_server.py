"""Daphne with the edges it lacks: a cap on bodies, a deadline for headers, a cap on what waits for
a slow reader, and a shutdown that lets running requests finish.

Daphne reads a whole body before it calls the application, answers ``send()`` at once however slow
the reader is, and keeps half-open connections for ever; each of those is memory in a stranger's
hands. uvicorn would wait for slow readers, but the web process is Channels' and its home is here.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from daphne.http_protocol import WebRequest
from daphne.server import Server
from daphne.ws_protocol import WebSocketProtocol
from twisted.internet import reactor

from controlplane.entrypoints.rest.edge import TOO_LARGE
from controlplane.entrypoints.rest.parsing import MAX_BODY_BYTES
from controlplane.entrypoints.rest.problems import PROBLEM_TYPE, problem_body

HEADER_SECONDS = 10
BODY_SECONDS = 30
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES  # of a refused body, read so that the answer arrives
MAX_UNSENT_BYTES = 1024 * 1024
MAX_FRAME_BYTES = 64 * 1024
DRAIN_SECONDS = 5.0


class CappedRequest(WebRequest):
    """Answers 413 as soon as the head promises, or the body brings, more than a body may have.

    Twisted's own timeout begins anew with every byte: a head that comes a line a second would keep
    its connection. Here head and body each have a deadline.
    """

    _parsePOSTFormSubmission = False  # forms are not served; do not read them into memory

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_bytes = 0
        self._refused = False
        clock: Any = reactor  # its interface is declared in a way that mypy cannot read
        self._deadline = clock.callLater(HEADER_SECONDS, self.channel.loseConnection)

    def gotLength(self, length: int | None) -> None:
        """The head is in."""
        if self._deadline.active():
            self._deadline.reset(BODY_SECONDS)
        super().gotLength(min(length or 0, MAX_BODY_BYTES))
        if length is not None and length > MAX_BODY_BYTES:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_BODY_BYTES and not self._refused:
            super().handleContentChunk(data)
        elif not self._refused:
            self._refuse()
        elif self._num_bytes > MAX_DISCARDED_BYTES:
            self.channel.loseConnection()

    def connectionLost(self, reason: Any) -> None:
        self._is_in()
        super().connectionLost(reason)

    def _is_in(self) -> None:
        if self._deadline.active():
            self._deadline.cancel()

    def process(self) -> Any:
        self._is_in()
        return self.channel.loseConnection() if self._refused else super().process()

    def _refuse(self) -> None:
        """Written to the wire by hand: to Daphne the request has not begun."""
        self._refused = True
        status, code, detail = TOO_LARGE
        body = msgspec.json.encode(problem_body(status, code, detail))
        head = (
            f"HTTP/1.1 {status} Body too large\r\nContent-Type: {PROBLEM_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.channel.transport.write(head.encode() + body)


class CappedWebSocket(WebSocketProtocol):
    """Cut off once too much waits unsent; a client that reads never comes near that."""

    def serverSend(self, content: Any, binary: bool = False) -> None:
        if unsent_bytes(self.transport) > MAX_UNSENT_BYTES:
            self.dropConnection(abort=True)
        elif self.state not in (self.STATE_CLOSING, self.STATE_CLOSED):
            super().serverSend(content, binary)

    def serverClose(self, code: int | None = None) -> None:
        """With the standard's own codes too (1001, 1003, 1008), which Daphne's way refuses."""
        self.sendCloseFrame(code=code or 1000)


def log_action(protocol: str, action: str, details: dict[str, Any]) -> None:
    """One line for each answered request; the query is left out, since people put secrets there."""
    if action == "complete":
        path = str(details["path"]).partition("?")[0]
        milliseconds = round(details["time_taken"] * 1000, 1)
        fields = {name: details[name] for name in ("method", "status", "client", "size")}
        structlog.get_logger().info("request", path=path, ms=milliseconds, **fields)


def log_through_structlog() -> None:
    """What Django and other libraries log takes the same form as our own lines.

    Refused requests are in the request's line already, so Django's warnings of them are left out.
    """
    handler = logging.StreamHandler(sys.stderr)
    stages: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    renderer = structlog.get_config()["processors"][-1]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(renderer, foreign_pre_chain=stages))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("django.request").setLevel(logging.ERROR)
    logging.getLogger("daphne").setLevel(logging.WARNING)


def unsent_bytes(transport: Any) -> int:
    """What Twisted holds for a peer that has not read it yet."""
    held = getattr(transport, "dataBuffer", b"")
    return len(held) - getattr(transport, "offset", 0) + getattr(transport, "_tempDataLen", 0)


class WebServer(Server):
    """``on_listening`` gets the bound port; ``on_stop`` ends what the application runs."""

    def __init__(
        self,
        application: Any,
        host: str,
        port: int,
        on_listening: Callable[[int], None],
        on_stop: Callable[[], Any],
    ) -> None:
        super().__init__(
            application,
            endpoints=[f"tcp:port={port}:interface={host.replace(':', chr(92) + ':')}"],
            signal_handlers=False,
            websocket_max_message_size=MAX_FRAME_BYTES,
            websocket_max_frame_size=MAX_FRAME_BYTES,
            application_close_timeout=5,
            server_name="engine",
            action_logger=log_action,
            ready_callable=self._ready,
        )
        self._on_listening, self._on_stop = on_listening, on_stop
        self._ports: list[Any] = []
        self._draining: asyncio.Task[None] | None = None
        self.connections: dict[Any, dict[str, Any]] = {}
        self.failed = False

    def _ready(self) -> None:
        self.http_factory.timeOut = HEADER_SECONDS
        self.http_factory.buildProtocol = self._with_capped_requests(self.http_factory)
        self.ws_factory.protocol = CappedWebSocket
        self.ws_factory.setProtocolOptions(failByDrop=False)  # a close frame says what was wrong
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_event_loop().add_signal_handler(number, self._begin_stop)

    def _with_capped_requests(self, factory: Any) -> Callable[[Any], Any]:
        build = factory.buildProtocol

        def capped(address: Any) -> Any:
            protocol = build(address)
            protocol.requestFactory = CappedRequest
            return protocol

        return capped

    def listen_success(self, port: Any) -> None:
        super().listen_success(port)
        self._ports.append(port)
        self._on_listening(port.getHost().port)

    def listen_error(self, failure: Any) -> None:
        self.failed = True
        super().listen_error(failure)

    # --- stopping -----------------------------------------------------------------------------
    def _begin_stop(self) -> None:
        if self._draining is None:  # a second signal changes nothing
            for port in self._ports:
                port.stopListening()
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Let running requests finish; live sockets are told to go by ``on_stop``."""
        await self._on_stop()
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while self._num_running() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.stop()

    def _num_running(self) -> int:
        details = self.connections.values()
        return sum("disconnected" not in one and "application_instance" in one for one in details)

    def kill_all_applications(self) -> Any:
        """Daphne's own fails on a connection that has no application yet."""
        self.connections = {
            protocol: details
            for protocol, details in self.connections.items()
            if "application_instance" in details
        }
        return super().kill_all_applications()
