"""Streams of a vLLM server over its Unix socket, read by one thread for all of them.

Everything here speaks HTTP/1.1 with ``Connection: close``: the request says where its answer ends,
and closing the connection is how vLLM is told that nobody waits any more. What arrives is put into
one queue as plain values, which the engine's thread takes out::

    engine thread                          client thread (asyncio)
    open("r1", {"prompt": [1, 9], ...})    POST /v1/completions
                                           data: {"choices": [...]}      -> ("r1", Chunk)
                                           data: {"usage": ...}          -> ("r1", Usage)
                                           data: [DONE]                  -> ("r1", Done)
    close("r1")                            the connection is closed; vLLM forgets the request

Each stream ends with exactly one Done or Failed, unless it was closed. A stream that ends without
``[DONE]``, says what is no JSON, or answers anything but 200 has failed.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 4 << 20
CONNECT_S = 10.0
HEAD_S = 5.0  # for /health and /metrics: the whole answer


class Logprobs(msgspec.Struct, frozen=True):
    """Of each token, the chosen one first; tokens are named as ``token_id:42``."""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk, as far as it is read."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Of the whole request, once it has ended."""

    completion_tokens: int
    prompt_tokens: int
    prompt_tokens_details: Details | None = None

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were found in its cache."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class ServerError(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ServerError | str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The stream has ended as it should."""


@dataclass(frozen=True, slots=True)
class Failed:
    """``code``: engine_lost (the connection broke), stream_corrupt, invalid_request."""

    code: str
    message: str


Event = Chunk | Done | Failed
_chunks = msgspec.json.Decoder(Chunk)


class Client:
    """Connections to one server. ``events`` holds (request id, event) in order of arrival."""

    def __init__(self, socket: Path, key: str) -> None:
        self._socket, self._key = str(socket), key
        self.events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name="vllm client").start()

    # --- from any thread --------------------------------------------------------------------
    def open(self, request_id: str, body: dict[str, Any]) -> None:
        """Start a stream."""
        self._loop.call_soon_threadsafe(self._open, request_id, msgspec.json.encode(body))

    def close(self, request_id: str) -> None:
        """End a stream; nothing that it says comes any more, but for what is queued already."""
        self._loop.call_soon_threadsafe(self._close, request_id)

    def get(self, path: str, then: Callable[[int, str], None]) -> None:
        """GET ``path``; ``then(status, body)`` is called in the client's thread, status 0 if the
        server does not answer."""
        self._loop.call_soon_threadsafe(self._get, path, then)

    def is_ready(self) -> bool:
        """Whether the server says that it is healthy."""
        answer = asyncio.run_coroutine_threadsafe(self._fetch("/health"), self._loop)
        return answer.result()[0] == 200

    def stop(self) -> None:
        """End every stream and the thread."""
        self._loop.call_soon_threadsafe(self._stop)

    # --- the client's thread ----------------------------------------------------------------
    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.1, self._loop.stop)

    def _open(self, request_id: str, body: bytes) -> None:
        task = self._loop.create_task(self._stream(request_id, body))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def _close(self, request_id: str) -> None:
        if task := self._tasks.get(request_id):
            task.cancel()

    def _get(self, path: str, then: Callable[[int, str], None]) -> None:
        task = self._loop.create_task(self._fetch(path))
        task.add_done_callback(lambda done: None if done.cancelled() else then(*done.result()))

    async def _stream(self, request_id: str, body: bytes) -> None:
        try:
            async for event in self._events(body):
                self.events.put((request_id, event))
            self.events.put((request_id, Done()))
        except _Broken as broken:
            self.events.put((request_id, broken.failed))
        except (OSError, EOFError, TimeoutError) as error:
            text = f"the connection broke: {type(error).__name__}"
            self.events.put((request_id, Failed("engine_lost", text)))
        except (ValueError, asyncio.LimitOverrunError) as error:
            text = f"the answer is no stream of completions: {type(error).__name__}"
            self.events.put((request_id, Failed("stream_corrupt", text)))

    async def _events(self, body: bytes) -> AsyncIterator[Chunk]:
        reader, writer = await self._send("POST", "/v1/completions", body)
        try:
            status, chunked = await _head(reader)
            if status != 200:
                raise _Broken(_refusal(status, await reader.read(MAX_LINE_BYTES)))
            async for data in _data(_parts(reader, chunked)):
                if data == b"[DONE]":
                    return
                yield _chunk(data)
            raise EOFError
        finally:
            writer.close()

    async def _send(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.wait_for(
            asyncio.open_unix_connection(self._socket, limit=MAX_LINE_BYTES), CONNECT_S
        )
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: vllm\r\nConnection: close\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer

    async def _fetch(self, path: str) -> tuple[int, str]:
        with suppress(OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            return await asyncio.wait_for(self._fetch_now(path), HEAD_S)
        return 0, ""

    async def _fetch_now(self, path: str) -> tuple[int, str]:
        reader, writer = await self._send("GET", path)
        try:
            status, chunked = await _head(reader)
            parts = [part async for part in _parts(reader, chunked)]
            return status, b"".join(parts).decode()
        finally:
            writer.close()


class _Broken(Exception):
    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body is chunked; raises ValueError for what is no HTTP."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    first, *fields = head.split("\r\n")
    version, status, *_ = [*first.split(" ", 2), "", ""]
    if not version.startswith("http/1."):
        raise ValueError("no HTTP")
    return int(status), any(
        field.startswith("transfer-encoding:") and "chunked" in field for field in fields
    )


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body in pieces; raises EOFError if it ends too early."""
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if size > MAX_LINE_BYTES:
            raise ValueError("too large a chunk")
        yield (await reader.readexactly(size + 2))[:-2]


async def _data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What the ``data:`` lines of a stream of server-sent events hold."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("too long a line")
        for line in _payloads(lines):
            yield line


def _payloads(lines: list[bytes]) -> Iterator[bytes]:
    return (line[5:].strip() for line in lines if line.startswith(b"data:"))


def _chunk(data: bytes) -> Chunk:
    """Raises ValueError for what is none, and _Broken for an error that vLLM reports."""
    chunk = _chunks.decode(data)
    if chunk.error is not None:
        error = chunk.error
        said = error if isinstance(error, ServerError) else ServerError()
        raise _Broken(_failed(said.code or 500, said))
    return chunk


def _refusal(status: int, body: bytes) -> Failed:
    with suppress(ValueError):
        error = msgspec.json.decode(body, type=Chunk).error
        if isinstance(error, ServerError):
            return _failed(status, error)
    return _failed(status, ServerError())


def _failed(status: int, error: ServerError) -> Failed:
    """Without vLLM's message, which may quote the prompt."""
    if 400 <= status < 500 and status != 401:
        named = f" ({error.param})" if error.param else ""
        return Failed("invalid_request", f"vLLM refused the request{named}: {error.type or status}")
    return Failed("engine_lost", f"vLLM answered {status} {error.type}".strip())
