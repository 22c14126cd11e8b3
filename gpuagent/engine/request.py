"""What crosses the engine's border: requests in, outputs out, and the protocol between.

An agent talks to any engine (torch, simulated, a child process) through `Engine`:

    engine.add(GenerationRequest("r1", prompt_token_ids=(1, 5, 9),
                                 sampling=SamplingParams(max_tokens=2)))
    while engine.has_work():
        for output in engine.step():
            ...                      # ("r1", index 0, token_ids (42,), text "He", None)
                                     # ("r1", index 1, token_ids (7,), text "llo", "length")

Rules every engine keeps:
* each request ends with exactly one output whose `finish_reason` is set;
* the end-of-sequence or stop token that ends a request is neither in `token_ids` nor counted;
* tokens that spell a stop string are in `token_ids` and counted, the text is cut before it;
* `index` of an output equals the number of tokens delivered before it.

No torch here: the agent's and the simulator's processes import this module.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec


class LatencyClass(StrEnum):
    """How urgent a request is; the scheduler weighs the classes 10 / 1 / 0.1."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. `temperature=0` is greedy; `seed` makes a request repeatable.

    `top_k=0`, `top_p=1`, `min_p=0` and `logprobs=None` switch the feature off;
    `logprobs=k` asks for the chosen token's log probability and the k best alternatives.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Requests share prefix-cache blocks only under one `cache_salt`.

    It also stands for the tenant where tenants of a class share (`gpuagent.engine.fairness`);
    `weight`, above 0, is that tenant's: with 4 it gets four times the tokens of one with 1.

    With `input_lengths` nothing is generated: the prompt is so many inputs side by side, and a
    vector of each is wanted (`gpuagent.engine.embedding`); then `max_tokens` is 0.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    latency_class: LatencyClass = LatencyClass.STANDARD
    cache_salt: bytes = b""
    weight: float = 1.0
    input_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a delivered token; `top` holds (token_id, token, logprob)."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step produced for one request.

    `text` is the detokenised delta; it is held back while it could be the start of a stop
    string or an incomplete UTF-8 sequence, so it may lag behind `token_ids`.
    `finish_reason` is None, "stop", "length", "cancelled" or "error" (then with `error_code`).
    Where an exception was the reason, `error_type` is its class and `error_trace` its traceback as
    text: an exception itself would keep the step's frames, and their tensors, alive.
    `embeddings` are the vectors of a request's inputs, as little-endian float32; `begun_at` is the
    monotonic time at which it was first given a step, 0 if that is the present one.
    `num_computed_tokens`: of inputs to embed, those whose vectors are there, also if it was
    cancelled and nobody gets them.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error_type: str = ""
    error_trace: str = ""
    embeddings: tuple[bytes, ...] = ()
    begun_at: float = 0.0
    num_computed_tokens: int = 0


class RequestRejected(Exception):
    """The caller's mistake, raised by `Engine.add`; nothing was queued.

    Codes: context_length_exceeded, invalid_token_id, empty_prompt, kv_capacity,
    duplicate_request_id, invalid_sampling, task_unsupported.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def check_generates(request: GenerationRequest) -> None:
    """For engines that generate: raise RequestRejected where vectors are wanted."""
    if request.input_lengths:
        raise RequestRejected("task_unsupported", "this model generates and does not embed")


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the engine; the `num_*_tokens`, steps and seconds are totals since load.

    A preemption swaps out or recomputes; `swapped_bytes` went to the host or came back.
    `num_blocks` are those held and those that could be had now: of a shared pool, what neighbours
    hold beyond their part is not among them. `kv_bytes` is the pool, or what is guaranteed of a
    shared one, `kv_held_bytes` what unfinished requests hold of it. `spec_decode_*` are named as
    in vLLM: proposals made, their tokens, and those of them accepted. `last_step_age` is the
    seconds since a step was last completed, 0 while there is nothing to do.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    num_steps: int = 0
    last_step_seconds: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    busy_seconds: float = 0.0
    weights_bytes: int = 0
    kv_bytes: int = 0
    num_preemptions: int = 0
    executor: str = ""
    num_swapped_out: int = 0
    num_recomputed: int = 0
    num_free_host_blocks: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    last_step_age: float = 0.0
    swapped_bytes: int = 0
    kv_held_bytes: int = 0
    waiting_by_class: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class HandOver:
    """A request in progress, to be continued by another engine of the same model.

    `token_ids` are the tokens delivered so far; the keys and values of the first `num_computed`
    tokens, prompt included, go with it as bytes. `seed` makes the rest what it would have been.
    """

    token_ids: tuple[int, ...]
    seed: int
    num_computed: int
    num_cached: int = 0


class Engine(Protocol):
    """One loaded model. Not thread-safe: one thread calls everything.

    The last four methods let a second engine go on with what this one began (see `hand_over`):

        for name in prefill.decoding():
            contents = memoryview(bytearray(prefill.num_bytes_of(name)))
            decode.adopt(request, prefill.detach(name, contents), contents)
    """

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected for the caller's mistake."""

    def cancel(self, request_id: str) -> None:
        """End a request at once; the next step reports it. Unknown ids are ignored."""

    def step(self) -> list[RequestOutput]:
        """Run one iteration and return what it produced."""

    def has_work(self) -> bool:
        """True while a request is queued, running, or has an output not yet returned."""

    def stats(self) -> EngineStats:
        """The engine's counters now."""

    def prefix_filter(self) -> bytes:
        """Which prefixes it has cached, see `prefix_filter`; empty if it does not know."""
        return b""

    def urgency(self) -> float:
        """Weight of the most urgent latency class that has an unfinished request; 0 without any."""

    def park(self) -> int:
        """Leave the device: its memory is another's until `unpark`. Unfinished requests stay, with
        their keys and values in host memory, and go on afterwards as if nothing had been. Until
        then only `add`, `cancel`, `flush` and `stats` may be called. The bytes that were moved."""

    def unpark(self) -> int:
        """Be ready to step again; the bytes that were moved."""

    def flush(self) -> list[RequestOutput]:
        """Outputs that need no step: those of requests cancelled while parked."""

    def decoding(self) -> list[str]:
        """Requests whose prompt is computed and that have a token."""

    def num_bytes_of(self, request_id: str) -> int:
        """Bytes of the keys and values of a request that is decoding."""

    def detach(self, request_id: str, contents: memoryview) -> HandOver:
        """Put a decoding request's keys and values into `contents` and forget it."""

    def adopt(
        self, request: GenerationRequest, state: HandOver, contents: memoryview | None
    ) -> bool:
        """Continue a request; False if there is no room for `contents` now.

        Without `contents` keys and values are computed anew. Raises RequestRejected.
        """
