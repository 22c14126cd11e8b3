"""The bytes of an answer: whole responses, and chunks whose constant parts are encoded once.

A chunk of a stream differs from the one before only in its text, so everything around the text is
joined when the stream begins::

    data: {"id":…,"object":"chat.completion.chunk",…,"choices":[{"index":0,"delta":{"content":
    "the text"
    },"logprobs":null,"finish_reason":null}]}

Rules that clients depend on: the role stands in a choice's first delta only; every choice ends with
one chunk that has a finish_reason and an empty delta; ``usage`` is a chunk of its own with no
choices, and only when asked for.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from controlplane.application.call import Call, Part
from controlplane.application.inference import Job
from controlplane.application.refused import Refused
from controlplane.entrypoints.openai.errors import encode_error

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
_WAITING = ": waiting reason=engine_queue class=%s weight=%g open=%d waited=%.0fs\n\n"

_MOVING = ": waiting reason=continuation choice=%d attempt=%d class=%s waited=%.0fs\n\n"
_LOADING = ": waiting reason=model_loading position=%d expected=%.0fs class=%s waited=%.0fs\n\n"

_encode = msgspec.json.Encoder().encode
_SHOWN_CLASS = {"realtime": "priority", "standard": "default", "batch": "flex"}


@lru_cache(4096)
def fingerprint(version_id: str) -> str:
    """Changes with the exact version that answered."""
    return "fp_" + hashlib.blake2b(version_id.encode(), digest_size=5).hexdigest()


def _identity(job: Job, kind: str, created: int) -> dict[str, Any]:
    prefix = "chatcmpl-" if job.endpoint == "chat" else "cmpl-"
    return {
        "id": prefix + job.request_id.removeprefix("req-"),
        "object": kind,
        "created": created,
        "model": job.requested_model,
        "system_fingerprint": fingerprint(job.version_id),
        "service_tier": _SHOWN_CLASS[job.latency_class],
    }


def usage_of(job: Job, parts: Sequence[Part]) -> dict[str, Any]:
    """Each prompt counts once, however many choices continue it."""
    produced = sum(part.num_output_tokens for part in parts)
    cached = sum(part.num_cached_tokens for part in parts[:: job.num_choices])
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": produced,
        "total_tokens": job.num_prompt_tokens + produced,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


# --- log probabilities --------------------------------------------------------------------------
def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


def chat_logprobs(entries: Sequence[Any]) -> dict[str, Any]:
    content = [
        _chat_token(entry.token, entry.logprob)
        | {"top_logprobs": [_chat_token(top.token, top.logprob) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[Any], offset: int) -> dict[str, Any]:
    """``text_offset`` of a token is where its text begins, from the start of the completion."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {top.token: _finite(top.logprob) for top in entry.top} for entry in entries
        ],
        "text_offset": offsets,
    }


# --- a whole answer -----------------------------------------------------------------------------
class Collector:
    """Gathers the deltas of all choices into one response body."""

    def __init__(self, call: Call) -> None:
        self._texts: list[list[str]] = [[] for _ in call.parts]
        self._logprobs: list[list[Any]] = [[] for _ in call.parts]

    def add(self, batch: Sequence[tuple[Part, Any]]) -> None:
        for part, delta in batch:
            if delta.text:
                self._texts[part.index].append(delta.text)
            if delta.logprobs:
                self._logprobs[part.index].extend(delta.logprobs)

    def body(self, call: Call, created: int) -> bytes:
        job = call.job
        is_chat = job.endpoint == "chat"
        kind = "chat.completion" if is_chat else "text_completion"
        make = self._chat_choice if is_chat else self._text_choice
        answer = _identity(job, kind, created)
        answer["choices"] = [make(part, job) for part in call.parts]
        answer["usage"] = usage_of(job, call.parts)
        return _encode(answer)

    def _chat_choice(self, part: Part, job: Job) -> dict[str, Any]:
        wanted = job.sampling.logprobs is not None
        text = "".join(self._texts[part.index])
        return {
            "index": part.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._logprobs[part.index]) if wanted else None,
            "finish_reason": part.finish_reason,
        }

    def _text_choice(self, part: Part, job: Job) -> dict[str, Any]:
        wanted = job.sampling.logprobs is not None
        return {
            "index": part.index,
            "text": "".join(self._texts[part.index]),
            "logprobs": text_logprobs(self._logprobs[part.index], 0) if wanted else None,
            "finish_reason": part.finish_reason,
        }


# --- a stream -----------------------------------------------------------------------------------
class ChunkWriter:
    """The server-sent events of one call."""

    def __init__(self, call: Call, created: int, *, include_usage: bool) -> None:
        job = call.job
        self._is_chat = job.endpoint == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = b"data: " + _encode(_identity(job, kind, created))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._started = [False] * len(call.parts)
        self._ended = [False] * len(call.parts)
        self._offsets = [0] * len(call.parts)
        after = b'},"logprobs":null,"finish_reason":null}' if self._is_chat else (
            b',"logprobs":null,"finish_reason":null}'
        )  # fmt: skip
        self._after = after + self._tail
        self._before = [self._opening(part.index) for part in call.parts]

    def _opening(self, index: int) -> bytes:
        inside = b'"delta":{"content":' if self._is_chat else b'"text":'
        return self._head + b'{"index":%d,' % index + inside

    def deltas(self, batch: Sequence[tuple[Part, Any]]) -> bytes:
        """One write for everything that has come; texts of one choice are joined."""
        if len(batch) == 1 and not batch[0][1].logprobs:
            part, delta = batch[0]
            return self._text(part.index, delta.text) if delta.text else b""
        texts: dict[int, list[Any]] = {}
        for part, delta in batch:
            texts.setdefault(part.index, []).append(delta)
        return b"".join(self._joined(index, deltas) for index, deltas in texts.items())

    def _joined(self, index: int, deltas: list[Any]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        if logprobs:
            return self._with_logprobs(index, text, logprobs)
        return self._text(index, text) if text else b""

    def _text(self, index: int, text: str) -> bytes:
        chunk = self._before[index] + _encode(text) + self._after
        self._offsets[index] += len(text)
        return chunk if self._started[index] else self._role(index) + chunk

    def _with_logprobs(self, index: int, text: str, entries: list[Any]) -> bytes:
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            choice |= {"delta": {"content": text}, "logprobs": chat_logprobs(entries)}
        else:
            offset = self._offsets[index]
            choice |= {"text": text, "logprobs": text_logprobs(entries, offset)}
        self._offsets[index] += len(text)
        chunk = self._head + _encode(choice | {"finish_reason": None}) + self._tail
        return chunk if self._started[index] else self._role(index) + chunk

    def _role(self, index: int) -> bytes:
        self._started[index] = True
        if not self._is_chat:
            return b""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},' % index
        return self._head + delta + b'"logprobs":null,"finish_reason":null}' + self._tail

    def finished(self, batch: Sequence[tuple[Part, Any]]) -> bytes:
        """The ends of the choices that end in ``batch`` while others go on."""
        return b"".join(self.finish(part) for part, delta in batch if delta.finish_reason)

    def finish(self, part: Part) -> bytes:
        """The chunk that ends a choice; nothing if it was written before."""
        if self._ended[part.index]:
            return b""
        self._ended[part.index] = True
        inside = b'"delta":{}' if self._is_chat else b'"text":""'
        reason = _encode(part.finish_reason)
        first = b"" if self._started[part.index] else self._role(part.index)
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}' % (
            part.index,
            inside,
            reason,
        )
        return first + self._head + choice + self._tail

    def usage(self, call: Call) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._include_usage:
            return b""
        counts = _encode(usage_of(call.job, call.parts))
        return self._head + b'],"usage":' + counts + b"}\n\n"


def heartbeat(call: Call, now: float) -> bytes:
    """A comment. While the model loads it says the request's place among those that wait for it,
    and how long that is expected to take; then, until the first token, what the tenant's own part
    is, its weight among the tenants of the class and the requests that it has open here; and after
    it, which choice waits for a replica that continues it."""
    if call.waiting:
        part = call.waiting[0]
        waited = now - (part.course.lost_at or now)
        return (_MOVING % (part.index, part.attempt + 1, call.job.latency_class, waited)).encode()
    if call.first_at is not None:
        return HEARTBEAT
    job = call.job
    if call.held is not None:
        place = (call.held.position(call), call.held.expected())
        return (_LOADING % (*place, job.latency_class, now - job.began)).encode()
    said = (job.latency_class, job.weight, call.num_of_tenant, now - job.began)
    return (_WAITING % said).encode()


def error_event(error: Refused, request_id: str) -> bytes:
    return b"data: " + encode_error(error, request_id) + b"\n\n"
