"""``/ws/v1/stream``: many generations on one connection, as JSON text frames.

::

    client  {"type":"auth","token":"sk_…"}                  unless an Authorization header was sent
    server  {"type":"ready","tenant":"acme"}
    client  {"type":"generate","id":"a","endpoint":"chat","request":{…}}
    server  {"type":"waiting","id":"a","reason":"model_loading","position":1,"expected_s":9.5,…}
    server  {"type":"started","id":"a","request_id":…,"model":…,"version_id":…,"node":…}
    server  {"type":"delta","id":"a","index":0,"text":"Hel","num_tokens":1}
    server  {"type":"waiting","id":"a","reason":"continuation","choice":0,"attempt":2,…}
    client  {"type":"cancel","id":"a"}
    server  {"type":"done","id":"a","finish_reason":"cancelled","usage":{…},"ttft_ms":…,…}

``waiting`` may come again, between deltas, when the replica is gone and none yet continues it.
``done`` is sent once the record is durable. Errors of one generation are an ``error`` frame with
its id; errors of the connection close it: 4401 no authentication in time, 1003 binary, 1007 not
UTF-8, 1008 flooding, 1009 too large. Only ``chat`` and ``completions`` are asked for here: vectors
have no frame, and are HTTP's. A token in the query string is refused with 400 before the
handshake: query strings end in logs. The token is judged anew for each generation: a connection
may outlive the key, the tenant's good standing or the limits with which it began.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from controlplane.application.call import Call
from controlplane.application.ports import AuditUnavailable
from controlplane.application.refused import Refused
from controlplane.entrypoints.openai import answers
from controlplane.entrypoints.openai.errors import body_of, encode_error, status_of
from controlplane.entrypoints.openai.handlers import GENERATING, Batch, Inference
from controlplane.entrypoints.openai.json_object import parse_object
from controlplane.entrypoints.openai.orders import new_request_id
from controlplane.entrypoints.openai.principals import TenantPrincipal, bearer_token
from controlplane.entrypoints.openai.request import Receive, Scope, Send, host_is_allowed

log = structlog.get_logger("gateway")

PATH = "/ws/v1/stream"
AUTH_DEADLINE_S = 5.0
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_OPEN = 64
MAX_ID_CHARS = 64
MESSAGES_PER_SECOND = 100
WARNINGS = 20

_encode = msgspec.json.Encoder().encode


class _Close(Exception):
    """End the connection with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class WebSockets:
    """Accepts connections for the token websocket."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self.num_open = 0

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, allowed_hosts: Sequence[str]
    ) -> None:
        headers = dict(reversed(scope["headers"]))
        await receive()  # websocket.connect
        refusal = _refusal(scope, headers, allowed_hosts)
        if refusal is not None:
            await _deny(send, refusal)
            return
        token = ""
        if b"authorization" in headers:
            try:
                token = bearer_token(headers[b"authorization"])
                await self._inference.authenticator.from_token(token)
            except Refused as error:
                await _deny(send, error)
                return
        await send({"type": "websocket.accept"})
        self.num_open += 1
        try:
            await Connection(self._inference, receive, send, token).run()
        finally:
            self.num_open -= 1


def _refusal(
    scope: Scope, headers: dict[bytes, bytes], allowed_hosts: Sequence[str]
) -> Refused | None:
    if scope["path"] != PATH:
        return Refused("not_found", "There is no such path.")
    names = [name for name, _ in scope["headers"]]
    if names.count(b"host") > 1 or names.count(b"authorization") > 1:
        return Refused("repeated_header", "A header that must be single is repeated.")
    if not host_is_allowed(headers.get(b"host", b""), allowed_hosts):
        return Refused("bad_host", "The Host header names no host of this service.")
    if scope["query_string"]:
        return Refused("unknown_field", "This path takes no query; send the token in a message.")
    return None


async def _deny(send: Send, error: Refused) -> None:
    """Answer the handshake with an ordinary HTTP response."""
    body = encode_error(error, "")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start = {"type": "websocket.http.response.start", "status": status_of(error)}
    await send({**start, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class Connection:
    """One client; its generations run as tasks and share the socket's flow control."""

    def __init__(self, inference: Inference, receive: Receive, send: Send, token: str) -> None:
        self._inference, self._receive, self._raw_send = inference, receive, send
        self._token, self._has_ended = token, False
        self._calls: dict[str, Call | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._budget, self._budget_at = float(MESSAGES_PER_SECOND), time.monotonic()
        self._num_warnings = 0

    async def run(self) -> None:
        try:
            if not self._token:
                self._token = await self._first_token()
            tenant = (await self._principal()).tenant
            await self._send({"type": "ready", "tenant": tenant.tenant_id})
            while (message := await self._next()) is not None:
                await self._handle(message)
        except Refused as error:
            await self._error(None, error)
            await self._close(4401, error.code)
        except _Close as close:
            await self._close(close.code, close.reason)
        finally:
            await self._end()

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(Exception):  # it may have gone already
            await self._raw_send({"type": "websocket.close", "code": code, "reason": reason})

    async def _end(self) -> None:
        """The client is gone: every generation is cancelled, and recorded."""
        self._has_ended = True
        for call in self._calls.values():
            if call is not None:
                call.client_left()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _principal(self) -> TenantPrincipal:
        """Whom the token stands for, as of now; raises Refused."""
        return await self._inference.authenticator.from_token(self._token)

    async def _first_token(self) -> str:
        try:
            async with asyncio.timeout(AUTH_DEADLINE_S):
                message = await self._next()
        except TimeoutError as error:
            raise _Close(4401, "authenticate first") from error
        if message is None:
            raise _Close(1000, "")
        token = message.get("token")
        if message.get("type") != "auth" or not isinstance(token, str):
            raise _Close(4401, "authenticate first")
        return token

    # --- in -------------------------------------------------------------------------------------
    async def _next(self) -> dict[str, Any] | None:
        """The next message; None when the client has gone."""
        while True:
            event = await self._receive()
            if event["type"] != "websocket.receive":
                return None
            text = event.get("text")
            if text is None:
                raise _Close(1003, "text frames only")
            if len(text) > MAX_MESSAGE_BYTES:
                raise _Close(1009, "message too large")
            if not await self._within_rate():
                continue
            try:
                return parse_object(text.encode())
            except Refused as error:
                await self._error(None, error)

    async def _within_rate(self) -> bool:
        now = time.monotonic()
        refill = (now - self._budget_at) * MESSAGES_PER_SECOND
        self._budget = min(self._budget + refill, float(MESSAGES_PER_SECOND))
        self._budget_at = now
        if self._budget >= 1:
            self._budget -= 1
            return True
        self._num_warnings += 1
        if self._num_warnings > WARNINGS:
            raise _Close(1008, "too many messages")
        await self._error(None, Refused("rate_limit_exceeded", "Too many messages.", retry_after=1))
        return False

    async def _handle(self, message: dict[str, Any]) -> None:
        kind, name = message.get("type"), message.get("id")
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS:
            error = Refused(
                "invalid_type", f"id is a string of 1 to {MAX_ID_CHARS} characters.", "id"
            )
            await self._error(None, error)
        elif kind == "generate":
            await self._start(name, message)
        elif kind == "cancel":
            await self._cancel(name)
        else:
            await self._error(name, Refused("unknown_type", "type is generate or cancel.", "type"))

    async def _start(self, name: str, message: dict[str, Any]) -> None:
        if name in self._calls:
            await self._error(name, Refused("duplicate_id", "This id is in use.", "id"))
        elif len(self._calls) >= MAX_OPEN:
            await self._error(name, Refused("too_many", f"At most {MAX_OPEN} at once."))
        else:
            self._calls[name] = None
            task = asyncio.ensure_future(self._generate(name, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cancel(self, name: str) -> None:
        call = self._calls.get(name)
        if call is not None:
            call.client_left()
        elif name not in self._calls:
            await self._error(name, Refused("not_found", "There is no such generation.", "id"))

    # --- one generation -------------------------------------------------------------------------
    async def _generate(self, name: str, message: dict[str, Any]) -> None:
        try:
            call = await self._open(message)
            self._calls[name] = call
            if self._has_ended:  # the client left while the call was being started
                call.client_left()
            try:
                await self._stream(name, call)
            finally:
                await self._inference.record(call)
        except Refused as error:
            self._inference.metrics.refused(error.code)
            await self._error(name, error)
        except AuditUnavailable:
            text = "The end of the request could not be recorded."
            await self._error(name, Refused("audit_unavailable", text, retry_after=1))
        except Exception:
            log.exception("generation failed", generation=name)
            await self._error(name, Refused("internal_error", "The gateway failed."))
        finally:
            self._calls.pop(name, None)

    async def _open(self, message: dict[str, Any]) -> Call:
        parse = GENERATING.get(str(message.get("endpoint")))
        body = message.get("request")
        if parse is None:
            raise Refused("invalid_parameter", "endpoint is chat or completions.", "endpoint")
        if not isinstance(body, dict):
            raise Refused("invalid_type", "request is an object.", "request")
        fields = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        parameters, endpoint = parse(fields), str(message["endpoint"])
        desk = self._inference.desk
        principal = await self._principal()
        job = await desk.job(new_request_id(), principal, endpoint, parameters, "")
        return await self._inference.serving.start(job)

    async def _stream(self, name: str, call: Call) -> None:
        task = asyncio.current_task()
        assert task is not None
        call.on_cut = task.cancel
        batch = await self._held(name, call)
        target, job = call.parts[0].target, call.job
        await self._send(
            {
                "type": "started",
                "id": name,
                "request_id": job.request_id,
                "model": job.requested_model,
                "version_id": job.version_id,
                "node": target.node_id if target else "",
            }
        )
        while batch or not call.is_over:
            batch = batch or await call.next()
            if not batch and call.waiting and not call.is_over:
                await self._moving(name, call)
            for part, delta in batch:
                if delta.text or delta.token_ids:
                    call.written_at = call.writing_since = self._inference.serving.monotonic()
                    await self._send(_delta(name, part.index, delta))
                    call.writing_since = None
            batch = []
        await self._done(name, call)

    async def _held(self, name: str, call: Call) -> Batch:
        """Say what is waited for while the model loads; the first deltas after that, if any."""
        batch: Batch = []
        call.heartbeat = False  # what it would bring is said here at once
        while call.held is not None and not batch and not call.is_over:
            message = {"type": "waiting", "id": name, "request_id": call.job.request_id}
            place = {"position": call.held.position(call), "expected_s": call.held.expected()}
            await self._send({**message, "reason": "model_loading", **place})
            call.written_at = self._inference.serving.monotonic()
            batch = await call.next()
        return batch

    async def _moving(self, name: str, call: Call) -> None:
        """Say which choice waits for a replica that continues it."""
        part = call.waiting[0]
        message = {"type": "waiting", "id": name, "request_id": call.job.request_id}
        place = {"choice": part.index, "attempt": part.attempt + 1}
        await self._send({**message, "reason": "continuation", **place})
        call.written_at = self._inference.serving.monotonic()

    async def _done(self, name: str, call: Call) -> None:
        terminal = await call.finish()
        if terminal is None:
            return
        self._inference.metrics.ended(call.job, terminal)
        if call.error is not None and not call.client_gone:
            raise call.error
        reasons = [part.finish_reason or "cancelled" for part in call.parts]
        await self._send(
            {
                "type": "done",
                "id": name,
                "finish_reason": reasons[0] if not call.client_gone else "cancelled",
                "usage": answers.usage_of(call.job, call.parts),
                "ttft_ms": terminal.ttft_ms,
                "duration_ms": terminal.duration_ms,
            }
        )

    # --- out ------------------------------------------------------------------------------------
    async def _error(self, name: str | None, error: Refused) -> None:
        await self._send({"type": "error", "id": name, **body_of(error)})

    async def _send(self, message: dict[str, Any]) -> None:
        """Waits while the client reads slowly; a client that has gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            await self._raw_send({"type": "websocket.send", "text": _encode(message).decode()})


def _delta(name: str, index: int, delta: Any) -> dict[str, Any]:
    message = {
        "type": "delta",
        "id": name,
        "index": index,
        "text": delta.text,
        "num_tokens": len(delta.token_ids),
    }
    if delta.logprobs:
        message["logprobs"] = answers.chat_logprobs(delta.logprobs)
    return message
