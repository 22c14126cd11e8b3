"""A port for the machines that watch a process: /metrics, /livez, /readyz, and nothing else.

Answers GET with ``Connection: close`` and reads no body: what a process without a web framework
needs, in the event loop that it has anyway.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus

MAX_HEAD_BYTES = 8192
HEAD_DEADLINE_S = 5.0

Page = Callable[[], Awaitable[tuple[int, str, bytes]]]  # -> status, content type, body


class Probes:
    """``pages``: path -> what to answer."""

    def __init__(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the bound port (0 asks for a free one)."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_DEADLINE_S)
            writer.write(_encode(*await self._answer(head)))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return  # whoever sends no request in time gets no answer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            return json_page({"error": "only GET is served here"}, 405)
        page = self._pages.get(words[1].split(b"?", 1)[0].decode("latin-1"))
        return await page() if page else json_page({"error": "no such page"}, 404)


def json_page(body: dict[str, object], status: int = 200) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()


def _encode(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
