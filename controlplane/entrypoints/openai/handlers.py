"""The endpoints under ``/v1``: parse, call the serving core, write the answer.

A stream's response begins with its first token, so that an engine that fails before it still gets
a proper status; only after ten silent seconds is it begun early, with a comment to keep proxies
calm. The last chunk, the usage and ``[DONE]`` are written once the request is on record.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from controlplane.application.call import SLOW_READER_S, Call, Part
from controlplane.application.ports import AuditUnavailable, Terminal
from controlplane.application.refused import Refused
from controlplane.application.serve import Serving
from controlplane.entrypoints.openai import answers
from controlplane.entrypoints.openai.embeddings import Vectors, embedding_parameters
from controlplane.entrypoints.openai.errors import Headers
from controlplane.entrypoints.openai.json_object import parse_object
from controlplane.entrypoints.openai.metrics import GatewayMetrics, ModelFigures
from controlplane.entrypoints.openai.orders import OrderDesk, header_class
from controlplane.entrypoints.openai.parameters import (
    Parameters,
    chat_parameters,
    completion_parameters,
)
from controlplane.entrypoints.openai.principals import Authenticator
from controlplane.entrypoints.openai.request import Request

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
GENERATING: dict[str, Callable[[Any], Parameters]] = {
    "chat": chat_parameters,
    "completions": completion_parameters,
}
PARSERS = GENERATING | {"embeddings": embedding_parameters}
MANY_VECTORS = 64
LARGE_BODY_BYTES = 64 * 1024
Batch = list[tuple[Part, Any]]


async def read_parameters(endpoint: str, body: bytes) -> Parameters:
    """Parse and check; a large body in a thread, or eight megabytes would stop every stream for
    a second. A small one takes less than handing it over."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(_read, endpoint, body)
    return _read(endpoint, body)


def _read(endpoint: str, body: bytes) -> Parameters:
    return PARSERS[endpoint](parse_object(body))


class Inference:
    """Chat and text completions, and embeddings, over HTTP."""

    def __init__(
        self,
        serving: Serving,
        desk: OrderDesk,
        authenticator: Authenticator,
        metrics: GatewayMetrics,
    ) -> None:
        self.serving, self.desk = serving, desk
        self.authenticator, self.metrics = authenticator, metrics

    async def chat(self, request: Request) -> None:
        await self._serve(request, "chat")

    async def completions(self, request: Request) -> None:
        await self._serve(request, "completions")

    async def embeddings(self, request: Request) -> None:
        await self._serve(request, "embeddings")

    async def _serve(self, request: Request, endpoint: str) -> None:
        principal = await self.authenticator.from_header(request.headers.get(b"authorization"))
        latency_class = header_class(request.headers.get(b"x-latency-class"))
        parameters = await read_parameters(endpoint, await request.json_body())
        job = await self.desk.job(request.own_id, principal, endpoint, parameters, latency_class)
        call = await self.serving.start(job)
        stop_watching = request.when_lost(call.client_left)
        task = asyncio.current_task()
        assert task is not None
        call.on_cut = task.cancel
        try:
            if parameters.embeds:
                await self._vectors(request, call, parameters)
            elif parameters.stream:
                await self._stream(request, call, parameters.include_usage)
            else:
                await self._whole(request, call)
        except asyncio.CancelledError:
            if not call.was_cut:
                raise
            request.abort()
        finally:
            stop_watching()
            await self.record(call)

    async def record(self, call: Call) -> Terminal | None:
        """The end on record, whichever way the request came to it; once only."""
        try:
            terminal = await call.finish()
        except AuditUnavailable:
            return None  # it stays with the settler, which goes on trying
        if terminal is not None:
            self.metrics.ended(call.job, terminal)
        return terminal

    # --- one body -------------------------------------------------------------------------------
    async def _whole(self, request: Request, call: Call) -> None:
        collector = answers.Collector(call)
        if await self._collected(call, collector.add):
            body = collector.body(call, int(time.time()))
            await request.respond(200, body, _headers(call, self.serving.monotonic()))

    async def _vectors(self, request: Request, call: Call, parameters: Parameters) -> None:
        vectors = Vectors(call, parameters)
        if not await self._collected(call, vectors.add):
            return
        if len(parameters.prompts) > MANY_VECTORS:  # a million numbers stop all streams as text
            body = await asyncio.to_thread(vectors.body, call)
        else:
            body = vectors.body(call)
        await request.respond(200, body, _headers(call, self.serving.monotonic()))

    async def _collected(self, call: Call, add: Callable[[Batch], None]) -> bool:
        """Take in everything, and put it on record; False if the client left. Raises Refused."""
        while not call.is_over:
            add(await call.next())
        if call.client_gone:
            return False
        await self._settled(call)
        if call.error is not None:
            raise call.error
        return True

    async def _settled(self, call: Call) -> None:
        """Like ``record``, but for a client that waits: what is not on record is not complete."""
        try:
            terminal = await call.finish()
        except AuditUnavailable as error:
            call.error = Refused(
                "audit_unavailable", "The end of the request could not be recorded.", retry_after=1
            )
            raise call.error from error
        if terminal is not None:
            self.metrics.ended(call.job, terminal)

    # --- a stream -------------------------------------------------------------------------------
    async def _stream(self, request: Request, call: Call, include_usage: bool) -> None:
        batch = await call.next()
        if call.error is not None and not batch:
            await self._fail_before_start(call)
            return
        headers = SSE_HEADERS + _headers(call, self.serving.monotonic())
        await request.begin(headers)
        writer = answers.ChunkWriter(call, int(time.time()), include_usage=include_usage)
        figures = self.metrics.of(call.job.version_id)
        await TokenStream(request, call, writer, figures, self.serving.monotonic).run(batch)
        if call.client_gone:
            return
        last = await self._ending(request, call, writer)
        await self._end(request, last)

    async def _end(self, request: Request, last: bytes) -> None:
        if not request.is_behind:  # a timer for nothing costs as much as the rest of an ending
            await request.end(last)
            return
        try:
            async with asyncio.timeout(SLOW_READER_S):
                await request.end(last)
        except TimeoutError:
            request.abort()

    async def _fail_before_start(self, call: Call) -> None:
        if call.client_gone:
            return
        await self._settled(call)
        assert call.error is not None
        raise call.error

    async def _ending(self, request: Request, call: Call, writer: answers.ChunkWriter) -> bytes:
        """The last bytes: finish reasons held back until now, usage, or the error; and DONE."""
        with contextlib.suppress(Refused):  # then it is in call.error
            await self._settled(call)
        if call.error is not None:
            return answers.error_event(call.error, request.request_id) + answers.DONE
        last = b"".join(map(writer.finish, call.parts))
        return last + writer.usage(call) + answers.DONE


class TokenStream:
    """Writes deltas as they come, until there are no more.

    A token that finds nothing before it is written by the callback that brought it: waking the
    stream's own task for each one would cost as much again. What ends a choice, fails, or must
    wait for a client that is behind goes the task's way, and then so does all that follows.
    """

    def __init__(
        self,
        request: Request,
        call: Call,
        writer: answers.ChunkWriter,
        figures: ModelFigures,
        monotonic: Callable[[], float],
    ) -> None:
        self._request, self._call, self._writer = request, call, writer
        self._figures, self._monotonic = figures, monotonic
        self._exchange = request.exchange
        self._wrote_at = 0.0

    async def run(self, batch: Batch) -> None:
        call, writer = self._call, self._writer
        while batch or not call.is_over:
            chunk = writer.deltas(batch) if batch else answers.heartbeat(call, self._monotonic())
            if call.num_open and len(call.parts) > 1:
                chunk += writer.finished(batch)
            if chunk:
                call.writing_since = self._note_write()
                await self._request.write(chunk)
                call.writing_since = None
            batch = [] if call.is_over else await self._next()

    async def _next(self) -> Batch:
        if self._exchange is not None:
            self._call.on_delta = self._put
        try:
            return await self._call.next()
        finally:
            self._call.on_delta = None

    def _put(self, part: Part, delta: Any) -> bool:
        """Write one delta; False if it must wait for its turn."""
        exchange = self._exchange
        if exchange is None or exchange.is_behind:
            return False
        chunk = self._writer.deltas(((part, delta),))
        if chunk:
            self._note_write()
            exchange.write_now(chunk)
        return True

    def _note_write(self) -> float:
        now = self._call.written_at = self._monotonic()
        if self._wrote_at:
            self._figures.itl.observe(now - self._wrote_at)
        self._wrote_at = now
        return now


def _headers(call: Call, now: float) -> Headers:
    job = call.job
    target = call.parts[0].target
    return [
        (b"x-engine-node", (target.node_id if target else "").encode()),
        (b"x-engine-model-version", job.version_id.encode()),
        (b"x-engine-request-id", job.request_id.encode()),
        (b"openai-processing-ms", b"%d" % round((now - job.began) * 1000)),
        *_queue_header(call),
        *limit_headers(job.limits),
    ]


def _queue_header(call: Call) -> Headers:
    """How long the engine let the request wait for a slot; nothing if it has not begun."""
    queued = call.parts[0].queue_ms
    return [] if queued is None else [(b"x-engine-queue-ms", b"%d" % round(queued))]


def limit_headers(limits: Any) -> Headers:
    """``x-ratelimit-*`` of an Admission; none if the request never came that far."""
    if limits is None:
        return []
    return [
        (b"x-ratelimit-limit-requests", b"%d" % limits.limit_requests),
        (b"x-ratelimit-limit-tokens", b"%d" % limits.limit_tokens),
        (b"x-ratelimit-remaining-requests", b"%d" % limits.remaining_requests),
        (b"x-ratelimit-remaining-tokens", b"%d" % limits.remaining_tokens),
        (b"x-ratelimit-reset-requests", duration_text(limits.reset_requests)),
        (b"x-ratelimit-reset-tokens", duration_text(limits.reset_tokens)),
    ]


def duration_text(seconds: float) -> bytes:
    """As OpenAI writes it: ``12ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    if seconds < 60:
        return f"{seconds:.3g}s".encode()
    return b"%dm%ds" % divmod(round(seconds), 60)
