"""The agent's HTTP port: /metrics, /livez, /readyz, and nothing else.

Answers GET with ``Connection: close`` and reads no body, so a server of forty lines is enough.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

MAX_HEAD_BYTES = 8192
HEAD_DEADLINE_S = 5.0

# path -> (status, content type, body)
Answer = tuple[int, str, bytes]
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class HttpServer:
    """Serves a fixed table of paths."""

    def __init__(self, routes: dict[str, Callable[[], Answer]]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the bound port (port 0: a free one)."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_DEADLINE_S)
            writer.write(_response(self._answer(head)))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # whoever sends no request in time gets no answer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> Answer:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or parts[0] != b"GET":
            return json_answer(400, {"error": "only GET is served here"})
        route = self._routes.get(parts[1].split(b"?", 1)[0].decode("latin-1"))
        return route() if route else json_answer(404, {"error": "no such page"})


def json_answer(status: int, body: dict[str, object]) -> Answer:
    return status, "application/json", json.dumps(body).encode()


def _response(answer: Answer) -> bytes:
    status, kind, body = answer
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
