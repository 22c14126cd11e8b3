"""The embedding engine: inputs to vectors, a step at a time. No torch; an `Embedder` computes.

A request holds several inputs side by side in its prompt, `input_lengths` says where each ends, and
it ends with one output that holds the vectors of all, in their order. Nothing is cached and nothing
generated, so a step is only: whose inputs come next, compute them, deliver who has everything.
With a budget of 512 tokens a step, "a" with 3 inputs of 200 tokens and "b" with one of 100:

    step 1   a: inputs 1, 2    b: its input      500 tokens; b ends
    step 2   a: input 3                          a ends

Who comes next is decided as for generation: the most urgent latency class (`waiting`), in it the
tenant that was served least (`fairness`), charged by the tokens of each input as it is taken. So a
request of two thousand inputs does not hold up another tenant's single one. An input longer than
the budget has a step of its own. Padding or sorting by length is the embedder's affair.

A request that is cancelled ends with how many tokens of its inputs were computed by then, since
those are paid for: "a" after step 1 with 400.

A step that raises is computed again, each request by itself, to find whose fault it is; that one
ends with `engine_error`. If every request of `MAX_FAILED_STEPS` steps in a row fails, the engine
raises. A vector that is not finite ends its request with `numerical_error`.
"""

import time
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from gpuagent.engine.batch import WEIGHTS, Sequence
from gpuagent.engine.request import (
    EngineStats,
    GenerationRequest,
    HandOver,
    LatencyClass,
    RequestOutput,
    RequestRejected,
)
from gpuagent.engine.waiting import WaitingQueue

MAX_FAILED_STEPS = 3
MAX_TRACE_CHARS = 20_000
Inputs = Seq[tuple[int, ...]]


class Embedder(Protocol):
    """What computes vectors; one thread calls everything."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""

    def embed(self, inputs: Inputs) -> list[bytes | None]:
        """The vector of each, as little-endian float32; None for one that is not finite."""

    def park(self) -> int:
        """Leave the device; the bytes moved. Until `unpark` nothing is computed."""

    def unpark(self) -> int:
        """Come back; the bytes moved."""


@dataclass(slots=True)
class _Live:
    """An unfinished request: its inputs, and the vectors of those computed so far."""

    sequence: Sequence
    inputs: list[tuple[int, ...]]
    vectors: list[bytes] = field(default_factory=list)
    num_taken: int = 0
    begun_at: float = 0.0  # monotonic; 0 while it waits


@dataclass(slots=True)
class _Counters:
    num_steps: int = 0
    num_tokens: int = 0
    num_failed_steps: int = 0  # one after the other
    busy_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_step_at: float = 0.0


Share = tuple[_Live, list[tuple[int, ...]]]  # what a step computes of one request


class EmbeddingEngine:
    """Implements `gpuagent.engine.request.Engine`, without handing over. Not thread-safe."""

    def __init__(
        self,
        embedder: Embedder,
        vocab_size: int,
        max_length: int,
        max_batch_tokens: int = 512,
        max_num_inputs: int = 64,
    ) -> None:
        self._embedder = embedder
        self._vocab_size, self._max_length = vocab_size, max_length
        self._max_batch_tokens, self._max_num_inputs = max_batch_tokens, max_num_inputs
        self._waiting = WaitingQueue()
        self._live: dict[str, _Live] = {}
        self._ended: list[RequestOutput] = []
        self._num_arrivals = 0
        self._count = _Counters()

    # --- requests ---------------------------------------------------------------------------
    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected."""
        inputs = self._checked(request)
        if not self._live:
            self._count.last_step_at = time.monotonic()  # its age begins with the work
        sequence = Sequence(request, self._num_arrivals, list(request.prompt_token_ids))
        self._num_arrivals += 1
        self._live[request.request_id] = _Live(sequence, inputs)
        self._waiting.add(sequence)

    def _checked(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        """Its inputs, each by itself."""
        tokens, lengths = request.prompt_token_ids, request.input_lengths
        if not lengths:
            raise RequestRejected("task_unsupported", "this model embeds and does not generate")
        if request.request_id in self._live:
            raise RequestRejected("duplicate_request_id", f"{request.request_id} is in progress")
        if min(lengths) < 1 or sum(lengths) != len(tokens):
            raise RequestRejected("empty_prompt", "an input is empty, or the lengths do not add up")
        if max(lengths) > self._max_length:
            text = f"an input has {max(lengths)} tokens, the model takes {self._max_length}"
            raise RequestRejected("context_length_exceeded", text)
        if not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            text = f"a token is not in the vocabulary of {self._vocab_size}"
            raise RequestRejected("invalid_token_id", text)
        return _split(tokens, lengths)

    def cancel(self, request_id: str) -> None:
        """End a request at once; the next step reports it. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._ended.append(_output(live, "cancelled"))
            self._forget(live)

    def _forget(self, live: _Live) -> None:
        del self._live[live.sequence.request_id]
        if self._waiting.get(live.sequence.request_id):
            self._waiting.remove(live.sequence.request_id)

    # --- a step -----------------------------------------------------------------------------
    def has_work(self) -> bool:
        """True while a request is unfinished or a cancellation is not yet reported."""
        return bool(self._ended or self._live)

    def step(self) -> list[RequestOutput]:
        """Compute one batch of inputs and return the requests that ended with it."""
        started = time.monotonic()
        outputs, self._ended = self._ended, []
        if self._live:
            shares = self._take(started)
            outputs += self._deliver(shares, self._compute(shares))
            self._note(shares, time.monotonic() - started)
        return outputs

    def _take(self, now: float) -> list[Share]:
        """The inputs of the next step, in the order in which their owners are served."""
        shares: dict[str, Share] = {}
        num_tokens = num_inputs = 0
        while (head := self._waiting.first()) and num_inputs < self._max_num_inputs:
            live = self._live[head.request_id]
            following = live.inputs[live.num_taken]
            if num_inputs and num_tokens + len(following) > self._max_batch_tokens:
                break
            num_tokens, num_inputs = num_tokens + len(following), num_inputs + 1
            shares.setdefault(head.request_id, (live, []))[1].append(following)
            self._charge(live, len(following), now)
        self._waiting.age({live.sequence.request.latency_class for live, _ in shares.values()})
        return list(shares.values())

    def _charge(self, live: _Live, num_tokens: int, now: float) -> None:
        live.num_taken += 1
        live.begun_at = live.begun_at or now
        request = live.sequence.request
        live.sequence.account.charge_prompt(num_tokens, request.weight)
        if live.num_taken == len(live.inputs):
            self._waiting.remove(request.request_id)

    def _compute(self, shares: list[Share]) -> list[list[bytes | None] | Exception]:
        """The vectors of each share, or what went wrong with it."""
        everything = [each for _, inputs in shares for each in inputs]
        try:
            vectors = iter(self._embedder.embed(everything))
            return [[next(vectors) for _ in inputs] for _, inputs in shares]
        except Exception:
            found = [self._compute_alone(inputs) for _, inputs in shares]
        self._check_engine(found)
        return found

    def _compute_alone(self, inputs: Inputs) -> list[bytes | None] | Exception:
        try:
            return self._embedder.embed(inputs)
        except Exception as error:
            return error

    def _check_engine(self, found: Seq[list[bytes | None] | Exception]) -> None:
        """Raise the error if everything fails again and again: it is not the requests."""
        errors = [each for each in found if isinstance(each, Exception)]
        self._count.num_failed_steps += 1
        if len(errors) < len(found):
            self._count.num_failed_steps = 0
        elif self._count.num_failed_steps >= MAX_FAILED_STEPS:
            raise errors[0]

    def _deliver(
        self, shares: list[Share], found: list[list[bytes | None] | Exception]
    ) -> list[RequestOutput]:
        outputs = []
        for (live, _), vectors in zip(shares, found, strict=True):
            output = self._ending(live, vectors)
            if output is not None:
                outputs.append(output)
                self._forget(live)
        return outputs

    def _ending(self, live: _Live, vectors: list[bytes | None] | Exception) -> RequestOutput | None:
        """The output that ends the request; None while inputs are missing."""
        if isinstance(vectors, Exception):
            return _output(live, "error", "engine_error", vectors)
        whole = [vector for vector in vectors if vector is not None]
        if len(whole) < len(vectors):
            return _output(live, "error", "numerical_error")
        live.vectors += whole
        return _output(live, "stop") if len(live.vectors) == len(live.inputs) else None

    def _note(self, shares: list[Share], seconds: float) -> None:
        count = self._count
        count.num_steps += 1
        count.num_tokens += sum(len(each) for _, inputs in shares for each in inputs)
        count.busy_seconds += seconds
        count.last_step_seconds, count.last_step_at = seconds, time.monotonic()

    # --- the rest of the protocol -----------------------------------------------------------
    def flush(self) -> list[RequestOutput]:
        """Cancellations not yet reported."""
        outputs, self._ended = self._ended, []
        return outputs

    def urgency(self) -> float:
        """Weight of the most urgent class with an unfinished request; 0 without any."""
        present = (each for each in LatencyClass if self._waiting.count(each))
        return max((WEIGHTS[each] for each in present), default=0.0)

    def park(self) -> int:
        """Leave the device; requests keep the vectors they have."""
        return self._embedder.park()

    def unpark(self) -> int:
        """Be ready to step again."""
        return self._embedder.unpark()

    def stats(self) -> EngineStats:
        """The counters now; there is no KV cache, so there are no blocks."""
        count, live = self._count, self._live.values()
        num_running = sum(1 for each in live if each.begun_at)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(live) - num_running,
            num_steps=count.num_steps,
            last_step_seconds=count.last_step_seconds,
            num_prefill_tokens=count.num_tokens,
            busy_seconds=count.busy_seconds,
            weights_bytes=self._embedder.weights_bytes,
            executor="encoder",
            last_step_age=time.monotonic() - count.last_step_at if live else 0.0,
            waiting_by_class=self._waiting.counts(),
        )

    def prefix_filter(self) -> bytes:
        """Nothing is cached."""
        return b""

    def decoding(self) -> list[str]:
        """Nothing is ever decoded here."""
        return []

    def num_bytes_of(self, request_id: str) -> int:
        """There are no keys and values."""
        return 0

    def detach(self, request_id: str, contents: memoryview) -> HandOver:
        """Never called: nobody is decoding."""
        raise KeyError(request_id)

    def adopt(
        self, request: GenerationRequest, state: HandOver, contents: memoryview | None
    ) -> bool:
        """Refused: there is nothing to continue from."""
        raise RequestRejected("task_unsupported", "this model embeds and does not generate")


def _split(tokens: Seq[int], lengths: Seq[int]) -> list[tuple[int, ...]]:
    """Inputs that lie side by side: (1, 2, 3) with lengths (1, 2) is [(1,), (2, 3)]."""
    inputs, start = [], 0
    for length in lengths:
        inputs.append(tuple(tokens[start : start + length]))
        start += length
    return inputs


def _output(
    live: _Live, reason: str, code: str | None = None, error: Exception | None = None
) -> RequestOutput:
    is_whole = reason == "stop"
    return RequestOutput(
        request_id=live.sequence.request_id,
        index=0,
        token_ids=(),
        text="",
        finish_reason=reason,
        error_code=code,
        num_prompt_tokens=live.sequence.num_prompt,
        error_type=type(error).__name__ if error else "",
        error_trace="".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:] if error else "",
        embeddings=tuple(live.vectors) if is_whole else (),
        begun_at=live.begun_at,
        num_computed_tokens=sum(map(len, live.inputs[: len(live.vectors)])),
    )
