"""A load generator on bare asyncio protocols, so that the client is not what is measured.

One connection carries one request at a time and is kept alive. Requests are bytes made beforehand;
of a response only what is needed is looked at: where it ends, when tokens came, and how many its
usage reports.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_FIRST = re.compile(rb'"content": ?"[^"]')
_END = b"data: [DONE]"


@dataclass
class Result:
    """Seconds; of streams ``first`` is the time to the first token, ``gaps`` those between the
    later arrivals of one stream. What is begun, or comes, before ``since`` is not counted."""

    latency: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    since: float = 0.0
    num_words: int = 0  # of the simulated model, each one token, that came after ``since``
    num_errors: int = 0
    seconds: float = 0.0
    sample_error: str = ""

    @property
    def rps(self) -> float:
        return len(self.latency) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def request_bytes(path: str, key: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class _Connection(asyncio.Protocol):
    """Sends the same request again and again until told to stop."""

    def __init__(self, request: bytes, result: Result, *, is_stream: bool) -> None:
        self._request, self._result, self._is_stream = request, result, is_stream
        self._buffer = bytearray()
        self._began = self._heard_at = 0.0
        self._has_first = False
        self.remaining: int | None = None
        self.pauses: Iterator[float] | None = None  # seconds before each further request
        self.until = float("inf")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def begin(self) -> None:
        self._buffer.clear()
        self._has_first = False
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._is_stream:
            self._note_tokens(data)
        if self._is_complete():
            self._finish()

    def _note_tokens(self, data: bytes) -> None:
        now, result = time.perf_counter(), self._result
        if self._has_first:
            result.gaps.append(now - self._heard_at)
        elif _FIRST.search(self._buffer):
            self._has_first = True
            if self._began >= result.since:
                result.first.append(now - self._began)
        self._heard_at = now
        if now >= result.since:
            result.num_words += data.count(b"tok") - data.count(b"token")

    def _is_complete(self) -> bool:
        if self._is_stream and self._buffer.startswith(b"HTTP/1.1 200"):
            return self._buffer.endswith(b"0\r\n\r\n") and _END in self._buffer[-200:]
        end = self._buffer.find(b"\r\n\r\n")
        length = _LENGTH.search(self._buffer, 0, end + 2) if end > 0 else None
        return length is not None and len(self._buffer) >= end + 4 + int(length[1])

    def _finish(self) -> None:
        result = self._result
        if self._buffer.startswith(b"HTTP/1.1 200") and b'"error"' not in self._buffer[-600:]:
            result.latency.append(time.perf_counter() - self._began)
            counts = _TOKENS.findall(self._buffer)
            result.num_tokens += int(counts[-1]) if counts else 0
        else:
            result.num_errors += 1
            result.sample_error = bytes(self._buffer[-400:]).decode(errors="replace")
        self._next()

    def _next(self) -> None:
        if self.remaining is not None:
            self.remaining -= 1
        if time.perf_counter() >= self.until or self.remaining == 0:
            self._stop()
        elif self.pauses is not None:
            asyncio.get_running_loop().call_later(next(self.pauses), self.begin)
        else:
            self.begin()

    def _stop(self) -> None:
        self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._result.num_errors += 1
            self._result.sample_error = f"connection lost: {error}"
            self.done.set_result(None)


def pauses(number: int, most_s: float) -> Iterator[float]:
    """Endless random pauses of up to ``most_s`` seconds, the same for the same stream."""
    draw = random.Random(number)
    while True:
        yield draw.random() * most_s


async def steady(
    port: int, requests: Sequence[bytes], warm_up: float, seconds: float, most_pause_s: float
) -> Result:
    """Streams that are replaced as they end: one connection for each of ``requests``, begun over
    ``warm_up`` seconds and then measured for ``seconds``, without those that still run after.

    A replacement comes after a random pause. One that came at once would always hit the beginning
    of an engine's step, and whatever delays it by less than a step would cost nothing.
    """
    loop, result = asyncio.get_running_loop(), Result()
    began = time.perf_counter()
    result.since = began + warm_up
    connections = []
    for number, request in enumerate(requests):
        _, connection = await loop.create_connection(
            lambda request=request: _Connection(request, result, is_stream=True),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        connection.until = result.since + seconds
        connection.pauses = pauses(number, most_pause_s)
        loop.call_later(warm_up * number / len(requests) / 2, connection.begin)
        connections.append(connection)
    await asyncio.sleep(result.since + seconds - time.perf_counter())
    result.seconds = time.perf_counter() - result.since
    measured = replace(result, first=[*result.first], gaps=[*result.gaps])
    await asyncio.gather(*(connection.done for connection in connections))
    measured.num_errors = result.num_errors
    return measured


async def run(
    port: int,
    request: bytes,
    num_connections: int,
    *,
    seconds: float | None = None,
    num_each: int | None = None,
    is_stream: bool = False,
    most_pause_s: float = 0.0,
) -> Result:
    """Closed loop: every connection for ``seconds``, or ``num_each`` requests on each; with random
    pauses of up to ``most_pause_s`` in between."""
    loop, result = asyncio.get_running_loop(), Result()
    connections = [
        (
            await loop.create_connection(
                lambda: _Connection(request, result, is_stream=is_stream), "127.0.0.1", port
            )
        )[1]
        for _ in range(num_connections)
    ]
    began = time.perf_counter()
    for number, connection in enumerate(connections):
        connection.pauses = pauses(number, most_pause_s) if most_pause_s else None
        connection.until = began + seconds if seconds else float("inf")
        connection.remaining = num_each
        connection.begin()
    await asyncio.gather(*(connection.done for connection in connections))
    result.seconds = time.perf_counter() - began
    return result
