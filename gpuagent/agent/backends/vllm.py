"""Models that vLLM computes: its OpenAI server as a child process, like every other engine.

A version with ``engine: vllm`` is loaded from the same verified folder, placed, routed, cancelled
and counted as every other. Its worker holds the child (``vllm_server``) and reads its streams
(``vllm_client``); this module turns the one into the other. Worked example, a prompt of 3 tokens of
which another replica had already sent 1, ``max_tokens`` 4, end-of-sequence token 2::

    Generate(prompt (5, 8, 9), sent (7,), max_tokens 4)
        -> POST /v1/completions {"prompt": [5, 8, 9, 7], "max_tokens": 3, "stream": true,
                                 "return_token_ids": true, "ignore_eos": true,
                                 "stop_token_ids": [2], "cache_salt": ..., ...}
        <- token_ids [42]                                 index 1, (42,), "He"
        <- token_ids [2], finish_reason "stop"            held until
        <- usage: completion_tokens 2, cached_tokens 0    2 were received: index 2, (), "", "stop"

What ends a generation is decided here, token by token, for then it is what the built-in engine
decides: a stop token is neither delivered nor counted, tokens that spell a stop string are, and the
text is the same detokenizer's. vLLM is told all of it too, so it stops by itself; where a stop
string began in what another replica had sent, only this end can see it, and closes the stream.
A request's last tokens wait for vLLM's own count, and the request fails (``stream_corrupt``) if
that is another than what has arrived. Each choice of a request with ``n`` is one stream.

The same prompt in float32 gives the built-in engine's greedy tokens, up to near ties. Differences:

* latency classes are priorities of vLLM's queue, and tenants of one class do not share by weight;
* a seed makes a request repeatable here, but draws are not those of the built-in engine, and a
  continued one draws anew from where it was cut;
* presence and frequency penalties count the tokens of one stream only, so a generation with them
  cannot be continued from another replica (``continuation_unsupported``);
* a replica does not leave the device and come back with its requests: it is unloaded instead.

A child that dies, or that has work and shows no sign of any for ``stall_seconds``, is lost with all
its requests, as if a step had raised; the agent starts another.
"""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty

import msgspec
from tokenizers import Tokenizer

from gpuagent.agent.backends.base import LoadedModel, LoadError, Progress
from gpuagent.agent.backends.fetching import fetch, to_wire
from gpuagent.agent.backends.memory import divide
from gpuagent.agent.backends.vllm_client import Choice, Chunk, Client, Done, Event, Failed, Usage
from gpuagent.agent.backends.vllm_figures import Figures, read_figures
from gpuagent.agent.backends.vllm_server import Launch, Server
from gpuagent.agent.backends.vllm_stream import PRIORITY, Corrupt, Stream
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.store import LocalModel
from gpuagent.agent.model_store.tokenizer_bundle import TokenizerBundle, read_tokenizer_bundle
from gpuagent.engine.batch import WEIGHTS
from gpuagent.engine.detokenizer import Detokenizer, load_tokenizer
from gpuagent.engine.precision import Precision, check_checkpoint, precision
from gpuagent.engine.request import (
    EngineStats,
    GenerationRequest,
    HandOver,
    RequestOutput,
    RequestRejected,
)
from gpuagent.engine.sampling_checks import check_sampling
from gpuagent.models.config import ModelConfig, read_config
from gpuagent.models.errors import LoadError as ModelError
from gpuagent.wire.messages import ReplicaSpec

WAIT_S = 0.02  # a cancellation waits no longer
GATHER_S = 0.001  # what one step of vLLM's produced comes on several connections
METRICS_S = 0.5
MAX_BIAS = 100.0  # vLLM cuts off what is beyond
BLOCK_SIZE = 128  # of vLLM's on a CPU, the largest that it takes by itself


class EngineLost(Exception):
    """The child has ended, or does nothing any more."""


def load_vllm(spec: ReplicaSpec, config: WorkerConfig, progress: Progress) -> LoadedModel:
    """Fetch a replica's model and start vLLM on it; raises LoadError."""
    if spec.tensor_parallel != 1:
        raise LoadError("tensor_parallel_unsupported", "one device per replica")
    try:
        formats = precision(spec.quantization, spec.kv_cache_dtype, config.device.kind)
        if formats.quantization != "none" or formats.kv_dtype != formats.dtype:
            raise LoadError("quantization_unsupported", "with vLLM it is none or bf16")
        local = fetch(spec.source, spec.sha256, config, formats.dtype, progress)
        shape = read_config(local.path)
        check_checkpoint(shape, formats.quantization)
        bundle = read_tokenizer_bundle(local.path)
        tokenizer = load_tokenizer(local.path, shape.vocab_size)
        progress("loading", "vllm", 0.0)
        return _start(spec, config, _Model(local, shape, formats, bundle, tokenizer))
    except (ModelStoreError, ModelError) as error:
        raise LoadError(error.code, error.message) from error


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of the model before its engine is started."""

    local: LocalModel
    shape: ModelConfig
    formats: Precision
    bundle: TokenizerBundle
    tokenizer: Tokenizer


def _start(spec: ReplicaSpec, config: WorkerConfig, model: _Model) -> LoadedModel:
    max_model_len = min(spec.max_model_len, model.bundle.max_model_len)
    padded = (-(-max_model_len // BLOCK_SIZE) + 1) * BLOCK_SIZE  # it keeps one block for itself
    whole = msgspec.structs.replace(spec, swap_bytes=0)
    kv_bytes = divide(whole, model.shape, model.formats, padded).kv_bytes
    server = Server(_launch(spec, config, model, max_model_len, kv_bytes))
    client = Client(server.socket, server.key)
    try:
        server.await_ready(client.is_ready, config.start_seconds)
        engine = VllmEngine(client, model, max_model_len, config.stall_seconds)
        engine.await_figures()
    except BaseException:
        client.stop()
        server.close()
        raise
    weights = model.shape.weights_bytes(model.formats.dtype, "none")

    def close() -> None:
        client.stop()
        server.close()

    return LoadedModel(
        engine=engine,
        bundle=to_wire(spec, model.local, model.bundle, max_model_len),
        sha256=model.local.sha256,
        max_model_len=max_model_len,
        peak_bytes=spec.memory_bytes,  # a process of its own cannot be measured from here
        workspace_bytes=max(spec.memory_bytes - weights - kv_bytes, 0),
        close=close,
        pidfd=server.pidfd(),
        describe_end=server.describe_end,
    )


def _launch(
    spec: ReplicaSpec, config: WorkerConfig, model: _Model, max_model_len: int, kv_bytes: int
) -> Launch:
    return Launch(
        python=config.vllm_python,
        model=model.local.path,
        dtype=model.formats.dtype,
        max_model_len=max_model_len,
        max_num_seqs=spec.max_batch,
        max_batch_tokens=spec.max_batch_tokens,
        kv_bytes=kv_bytes,
        threads=config.threads,
        options=config.vllm_options,
    )


@dataclass
class VllmEngine:
    """`gpuagent.engine.request.Engine` whose steps are taken by another process."""

    client: Client
    model: _Model
    max_model_len: int
    stall_seconds: float
    _live: dict[str, Stream] = field(default_factory=dict)
    _ended: list[RequestOutput] = field(default_factory=list)
    _figures: Figures = field(default_factory=Figures)
    _asked_at: float = 0.0
    _moved_at: float = 0.0
    _num: Counter[str] = field(default_factory=Counter)
    _last_step_seconds: float = 0.0
    _stepped_at: float = 0.0

    # --- requests ---------------------------------------------------------------------------
    def add(self, request: GenerationRequest) -> None:
        """Send a request on; raises RequestRejected for the caller's mistake."""
        self._begin(request)

    def adopt(
        self, request: GenerationRequest, state: HandOver, contents: memoryview | None
    ) -> bool:
        """Continue a request from its tokens; raises RequestRejected."""
        assert contents is None, "vLLM takes no keys and values"
        sampling = request.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise RequestRejected(
                "continuation_unsupported",
                "vLLM cannot go on with a generation whose penalties count what was sent",
            )
        self._begin(request, state.token_ids, state.num_cached)
        return True

    def _begin(
        self, request: GenerationRequest, sent: tuple[int, ...] = (), num_cached: int = 0
    ) -> None:
        self._check(request, sent)
        sampling, prompt = request.sampling, request.prompt_token_ids
        eos = () if sampling.ignore_eos else self.model.bundle.eos_token_id
        stream = Stream(
            request,
            Detokenizer(self.model.tokenizer, prompt, sampling.stop),
            frozenset(sampling.stop_token_ids) | frozenset(eos),
            min(sampling.max_tokens, self.max_model_len - len(prompt)),
        )
        stream.resume(sent, num_cached)
        if stream.reason:  # only the word that it has ended is missing
            self._ended.append(stream.ending(stream.reason))
            return
        if not self._live:
            self._moved_at = self._stepped_at = time.monotonic()
        self._live[request.request_id] = stream
        self.client.open(request.request_id, stream.body(sent))

    def _check(self, request: GenerationRequest, sent: tuple[int, ...]) -> None:
        sampling, vocab_size = request.sampling, self.model.shape.vocab_size
        num_prompt = len(request.prompt_token_ids)
        check_sampling(sampling, vocab_size)
        for token in (*request.prompt_token_ids, *sampling.stop_token_ids, *sent):
            if not 0 <= token < vocab_size:
                text = f"token {token} is not in the vocabulary of {vocab_size}"
                raise RequestRejected("invalid_token_id", text)
        if any(abs(bias) > MAX_BIAS for _, bias in sampling.logit_bias):
            raise RequestRejected("invalid_sampling", f"logit_bias is at most {MAX_BIAS:g}")
        if request.request_id in self._live:
            raise RequestRejected("duplicate_request_id", f"{request.request_id} is in progress")
        if num_prompt == 0:
            raise RequestRejected("empty_prompt", "the prompt holds no token")
        if num_prompt >= self.max_model_len:
            text = f"the prompt has {num_prompt} tokens, the model's context {self.max_model_len}"
            raise RequestRejected("context_length_exceeded", text)

    def cancel(self, request_id: str) -> None:
        """Close the stream, at which vLLM forgets the request; the next step reports it."""
        if stream := self._live.get(request_id):
            self._ended.append(self._close(stream, stream.ending("cancelled")))

    def _close(self, stream: Stream, output: RequestOutput) -> RequestOutput:
        """Forget a request that ends with ``output``."""
        del self._live[stream.request.request_id]
        self.client.close(stream.request.request_id)
        return output

    # --- steps ------------------------------------------------------------------------------
    def has_work(self) -> bool:
        """True while a request is unfinished or unreported."""
        return bool(self._live or self._ended)

    def flush(self) -> list[RequestOutput]:
        """Outputs that need no step."""
        outputs, self._ended = self._ended, []
        return outputs

    def step(self) -> list[RequestOutput]:
        """What has arrived; waits for a moment if nothing has. Raises EngineLost."""
        outputs, now = self.flush(), time.monotonic()
        self._ask_for_figures(now)
        events = self._arrived(0.0 if outputs else WAIT_S)
        for request_id, event in events:
            if stream := self._live.get(request_id):
                outputs += self._take(stream, event)
        if events:
            self._note_step()
        elif self._live and now - self._moved_at > self.stall_seconds:
            raise EngineLost(f"vLLM has shown no sign of work for {self.stall_seconds:g} s")
        return outputs

    def _arrived(self, wait_s: float) -> list[tuple[str, Event]]:
        events: list[tuple[str, Event]] = []
        with suppress(Empty):
            if wait_s:
                events.append(self.client.events.get(timeout=wait_s))
                time.sleep(GATHER_S)
            while True:
                events.append(self.client.events.get_nowait())
        return events

    def _note_step(self) -> None:
        now = time.monotonic()
        self._last_step_seconds = now - self._stepped_at
        self._moved_at = self._stepped_at = now
        self._num["steps"] += 1

    def _take(self, stream: Stream, event: Event) -> list[RequestOutput]:
        try:
            match event:
                case Chunk(usage=Usage() as usage):
                    self._num["cached_tokens"] += usage.num_cached
                    return [self._close(stream, stream.counted(usage))]
                case Chunk(choices=choices):
                    return [one for choice in choices for one in self._choice(stream, choice)]
                case Failed(code=code, message=message):
                    return [self._close(stream, stream.ending("error", code, message))]
                case Done():
                    raise Corrupt("it ended without a count")
        except (Corrupt, ValueError, OverflowError) as error:  # or a token that is none
            failure = stream.ending("error", "stream_corrupt", f"vLLM's stream: {error}")
            return [self._close(stream, failure)]
        raise AssertionError(event)

    def _choice(self, stream: Stream, choice: Choice) -> list[RequestOutput]:
        index, is_first = stream.num_output, stream.num_raw == 0
        output = stream.take(choice)
        num_new = stream.num_output - index
        if is_first and stream.num_raw:
            self._num["prefill_tokens"] += len(stream.request.prompt_token_ids) + index
            num_new = max(num_new - 1, 0)
        self._num["decode_tokens"] += num_new
        if output is None:
            return []
        return [self._close(stream, output) if output.finish_reason else output]

    # --- figures ----------------------------------------------------------------------------
    def _ask_for_figures(self, now: float) -> None:
        if now - self._asked_at >= METRICS_S:
            self._asked_at = now
            self.client.get("/metrics", self._told)

    def _told(self, status: int, text: str) -> None:
        """Called in the client's thread."""
        if status == 200:
            figures = read_figures(text)
            if figures.told != self._figures.told:
                self._moved_at = time.monotonic()
            self._figures = figures

    def await_figures(self, limit_s: float = 10.0) -> None:
        """Wait for the size of the KV cache; raises LoadError if vLLM does not tell it."""
        self._ask_for_figures(time.monotonic())
        give_up = time.monotonic() + limit_s
        while not self._figures.num_blocks:
            if time.monotonic() > give_up:
                raise LoadError("engine_start_failed", "vLLM does not tell the size of its cache")
            time.sleep(WAIT_S)

    def stats(self) -> EngineStats:
        """The counters now; what only vLLM knows is as old as its last figures."""
        figures, num_live = self._figures, len(self._live)
        kv_usage = figures.kv_usage if num_live else 0.0
        kv_bytes = figures.num_blocks * figures.block_size * self._kv_bytes_per_token
        num_waiting = min(figures.num_waiting, num_live)
        return EngineStats(
            num_running=num_live - num_waiting,
            num_waiting=num_waiting,
            num_free_blocks=round((1 - kv_usage) * figures.num_blocks),
            num_blocks=figures.num_blocks,
            block_size=figures.block_size,
            num_steps=self._num["steps"],
            last_step_seconds=self._last_step_seconds,
            num_prefill_tokens=self._num["prefill_tokens"],
            num_decode_tokens=self._num["decode_tokens"],
            num_cached_tokens=self._num["cached_tokens"],
            weights_bytes=self.model.shape.weights_bytes(self.model.formats.dtype, "none"),
            kv_bytes=kv_bytes,
            num_preemptions=figures.num_preemptions,
            num_recomputed=figures.num_preemptions,  # it swaps nothing
            executor="vllm",
            last_step_age=time.monotonic() - self._stepped_at if num_live else 0.0,
            kv_held_bytes=round(kv_usage * kv_bytes),
            waiting_by_class=self._waiting(num_waiting),
        )

    @property
    def _kv_bytes_per_token(self) -> int:
        return self.model.formats.kv_bytes_per_token(self.model.shape)

    def _waiting(self, num_waiting: int) -> dict[str, int]:
        """By class: those without a token, the least urgent of which wait."""
        quiet = [one for one in self._live.values() if not one.num_raw]
        quiet.sort(key=lambda one: -PRIORITY[one.request.latency_class])
        return dict(Counter(str(one.request.latency_class) for one in quiet[:num_waiting]))

    def urgency(self) -> float:
        """Weight of the most urgent class with an unfinished request."""
        classes = (one.request.latency_class for one in self._live.values())
        return max((WEIGHTS[one] for one in classes), default=0.0)

    # --- what it cannot do ------------------------------------------------------------------
    def park(self) -> int:
        """Never asked of it: its replicas are unloaded instead."""
        raise RuntimeError("vLLM does not leave the device with its requests")

    def unpark(self) -> int:
        raise RuntimeError("vLLM does not leave the device with its requests")

    def prefix_filter(self) -> bytes:
        """Empty: what is in its cache, only vLLM knows, so no prompt is sent here for its sake."""
        return b""

    def decoding(self) -> list[str]:
        """None that another engine could take over."""
        return []

    def num_bytes_of(self, request_id: str) -> int:
        raise RuntimeError("vLLM gives no keys and values away")

    def detach(self, request_id: str, contents: memoryview) -> HandOver:
        raise RuntimeError("vLLM gives no keys and values away")
