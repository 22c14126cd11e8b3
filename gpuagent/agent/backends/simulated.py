"""A model without weights: real scheduling, real time, made-up words.

    simulated://tiny?step_ms=20&prefill_tps=20000&vocab=1000&load_ms=0&stop_after=0

Each step takes ``step_ms`` plus the prefill tokens over ``prefill_tps``, slept rather than
computed, so one core carries hundreds of streams. The engine's own scheduler decides who joins,
so queues, KV blocks, prefix cache and preemptions behave as under a real model.

The next token is a function of all tokens before it: ``crc32(tokens so far) mod words``. A prompt
therefore always gives the same text, and another replica that is handed the prompt plus what was
already generated continues exactly where the first one stopped.

The tokenizer is byte-level (ids 0..255 are bytes, then three specials, then the words), so
every text can be a prompt. ``stop_after=N`` ends generations at N tokens as an end token would.
Models with ``shares=1`` that live in one process hold the device one at a time, as real ones do;
otherwise each has a device of its own, however many there are. For drills, ``load_fails=CODE``
makes loading fail and ``raises_at=N`` the N-th step, with ``continues=0`` nothing that another
replica began is taken, and ``swap_ms`` is the time of a swap, each way.
With task embed there are vectors of ``dims`` elements instead of words (``simulated_embedding``).
"""

import hashlib
import json
import time
import zlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpuagent.agent.backends.base import LoadedModel, LoadError, Progress
from gpuagent.engine.batch import SchedulerOutput, Sequence
from gpuagent.engine.request import (
    EngineStats,
    GenerationRequest,
    HandOver,
    RequestOutput,
    RequestRejected,
    TokenLogprob,
    check_generates,
)
from gpuagent.engine.scheduler import Policy, Scheduler, SchedulerConfig
from gpuagent.wire.messages import ReplicaSpec, TokenizerBundle

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_WORD = 256 + len(SPECIALS)
END_OF_TEXT = 256
BLOCK_SIZE = 16
BYTES_PER_TOKEN = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class SimulatedParams:
    """The query of a simulated source."""

    step_ms: float = 20.0
    prefill_tps: float = 20_000.0
    vocab: int = 1_000
    load_ms: float = 0.0
    stop_after: int = 0
    blocks: int = 0
    load_fails: str = ""
    raises_at: int = 0
    continues: int = 1
    shares: int = 0
    swap_ms: float = 0.0
    dims: int = 64

    def __post_init__(self) -> None:
        if not (0 <= self.step_ms <= 60_000 and 0 <= self.load_ms <= 600_000):
            raise ValueError("step_ms is at most a minute, load_ms ten")
        if not (self.prefill_tps > 0 and FIRST_WORD < self.vocab <= 200_000):
            raise ValueError(f"prefill_tps is above 0, vocab from {FIRST_WORD + 1} to 200000")
        if not 1 <= self.dims <= 4096:
            raise ValueError("dims is from 1 to 4096")


def parse_params(source: str) -> SimulatedParams:
    """Parameters of ``simulated://name?...``; raises LoadError ``source_invalid``."""
    kinds = {name: kind.type for name, kind in SimulatedParams.__dataclass_fields__.items()}
    try:
        given = dict(parse_qsl(urlsplit(source).query, keep_blank_values=True))
        return SimulatedParams(**{name: kinds[name](text) for name, text in given.items()})  # type: ignore[operator]
    except (KeyError, ValueError) as error:
        raise LoadError("source_invalid", f"{source!r}: {error}") from error


def load_simulated(spec: ReplicaSpec, progress: Progress, role: str = "both") -> LoadedModel:
    """An engine for a ``simulated://`` source; raises LoadError."""
    params = parse_params(spec.source)
    digest = begin_load(spec, params, progress)
    return LoadedModel(
        engine=SimulatedEngine(spec, params, role),
        bundle=make_bundle(spec, params),
        sha256=digest,
        max_model_len=spec.max_model_len,
        peak_bytes=spec.memory_bytes,
    )


def begin_load(spec: ReplicaSpec, params: SimulatedParams, progress: Progress) -> str:
    """Take the time that loading takes; the digest. Raises LoadError."""
    progress("loading", "simulate", 0.0)
    time.sleep(params.load_ms / 1000)
    if params.load_fails:
        raise LoadError(params.load_fails, "as the source asks")
    digest = hashlib.sha256(spec.source.encode()).hexdigest()
    if spec.sha256 and spec.sha256 != digest:
        raise LoadError("checksum_mismatch", f"found {digest}, expected {spec.sha256}")
    return digest


def make_bundle(spec: ReplicaSpec, params: SimulatedParams) -> TokenizerBundle:
    """A byte-level tokenizer with the words of this model and a plain chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    vocab |= {special: 256 + index for index, special in enumerate(SPECIALS)}
    vocab |= {f"tok{n}Ġ": FIRST_WORD + n for n in range(params.vocab - FIRST_WORD)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    text = json.dumps(json.loads(tokenizer.to_str()), separators=(",", ":")).encode()
    return TokenizerBundle(
        version_id=spec.version_id,
        tokenizer_json=text,
        chat_template=CHAT_TEMPLATE,
        eos_token=SPECIALS[0],
        eos_token_ids=(END_OF_TEXT,),
        vocab_size=params.vocab,
        max_model_len=spec.max_model_len,
        sha256=hashlib.sha256(text).hexdigest(),
    )


@dataclass(slots=True)
class _Stream:
    """The text side of one request: what is held back for a stop string."""

    checksum: int
    held: str = ""

    def push(self, word: str, stops: tuple[str, ...]) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string is complete)."""
        if not stops:
            return word, False
        text = self.held + word
        cuts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if cuts:
            self.held = ""
            return text[: min(cuts)], True
        keep = max((_overlap(text, stop) for stop in stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:])), 0
    )


@dataclass
class _Counters:
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    last_step_seconds: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Device:
    """When the last step on it was to end."""

    due: float = 0.0


SHARED = _Device()  # a process is the worker of one device


@dataclass
class SimulatedEngine:
    """`gpuagent.engine.request.Engine` that sleeps where others compute."""

    spec: ReplicaSpec
    params: SimulatedParams
    role: str = "both"
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _ended: list[RequestOutput] = field(default_factory=list)
    _count: _Counters = field(default_factory=_Counters)
    _device: "_Device" = field(init=False)
    _num_words: int = field(init=False)

    def __post_init__(self) -> None:
        self._device = SHARED if self.params.shares else _Device()
        self._num_words = self.params.vocab - FIRST_WORD
        spec, blocks = self.spec, self.params.blocks
        num_blocks = blocks or spec.max_batch * -(-spec.max_model_len // BLOCK_SIZE)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_batch_tokens=max(spec.max_batch_tokens, spec.max_batch),
                max_num_seqs=spec.max_batch,
                max_model_len=spec.max_model_len,
                policy=Policy(spec.policy),
                num_host_blocks=num_blocks if self.role == "decode" else 0,
            )
        )

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected for the caller's mistake."""
        check_generates(request)
        if not all(0 <= token < self.params.vocab for token in request.prompt_token_ids):
            raise RequestRejected("invalid_token_id", f"ids are below {self.params.vocab}")
        if request.sampling.max_tokens < 1:
            raise RequestRejected("invalid_sampling", "max_tokens is at least 1")
        self._scheduler.add(request)
        checksum = zlib.crc32(array("I", request.prompt_token_ids).tobytes())
        self._streams[request.request_id] = _Stream(checksum)

    def cancel(self, request_id: str) -> None:
        """End a request at once; the next step reports it."""
        sequence = self._scheduler.sequence(request_id)
        if sequence:
            self._ended.append(_output(sequence, sequence.num_output, (), "", "cancelled"))
            self._forget(request_id)

    def decoding(self) -> list[str]:
        """Requests whose prompt is computed and that have a token."""
        return [sequence.request_id for sequence in self._scheduler.decoding()]

    def num_bytes_of(self, request_id: str) -> int:
        """A few bytes per token, so that there is something to move."""
        return BYTES_PER_TOKEN * self._scheduler.running[request_id].num_computed

    def detach(self, request_id: str, contents: memoryview) -> HandOver:
        """Fill ``contents`` with the tokens' pattern and forget the request."""
        sequence = self._scheduler.running[request_id]
        contents[:] = _pattern(sequence.token_ids[: sequence.num_computed])
        tokens = tuple(sequence.token_ids[sequence.num_prompt :])
        state = HandOver(tokens, 0, sequence.num_computed, sequence.num_cached)
        self._forget(request_id)
        return state

    def adopt(
        self, request: GenerationRequest, state: HandOver, contents: memoryview | None
    ) -> bool:
        """Continue a request; raises RuntimeError if ``contents`` are another's."""
        if contents is None and not self.params.continues:
            raise RequestRejected("continuation_unsupported", "as the source asks")
        copy, tokens = None, (*request.prompt_token_ids, *state.token_ids)
        if not all(0 <= token < self.params.vocab for token in tokens):
            raise RequestRejected("invalid_token_id", f"ids are below {self.params.vocab}")
        if contents is not None:
            if bytes(contents) != _pattern(tokens[: state.num_computed]):
                raise RuntimeError("these are not the request's keys and values")
            num_blocks = self._scheduler.kv.num_blocks_for(state.num_computed)
            copy = self._scheduler.host.reserve(num_blocks, state.num_computed)
            if copy is None:
                return False
        self._scheduler.adopt(request, state.token_ids, copy, state.num_cached)
        stream = _Stream(zlib.crc32(array("I", request.prompt_token_ids).tobytes()))
        stopped = False
        for token in state.token_ids:
            stream.checksum = zlib.crc32(token.to_bytes(4, "little"), stream.checksum)
            _, stopped = stream.push(f"tok{token - FIRST_WORD} ", request.sampling.stop)
        self._streams[request.request_id] = stream
        if stopped or len(state.token_ids) >= request.sampling.max_tokens:
            self._end_complete(request.request_id, "stop" if stopped else "length")
        return True

    def _end_complete(self, request_id: str, reason: str) -> None:
        """All its tokens were delivered elsewhere; the next step says that they were the last."""
        sequence = self._scheduler.sequence(request_id)
        assert sequence is not None
        held = self._streams[request_id].held
        self._ended.append(_output(sequence, sequence.num_output, (), held, reason))
        self._forget(request_id)

    def park(self) -> int:
        """Leave the device: there is nothing to move, so the time is all it takes."""
        time.sleep(self.params.swap_ms / 1000)
        return self.spec.memory_bytes // 2

    def unpark(self) -> int:
        """Come back."""
        return self.park()

    def flush(self) -> list[RequestOutput]:
        """Cancellations not yet reported."""
        outputs, self._ended = self._ended, []
        return outputs

    def urgency(self) -> float:
        """Weight of the most urgent class with an unfinished request."""
        return self._scheduler.urgency()

    def has_work(self) -> bool:
        """True while a request is unfinished or unreported."""
        return bool(self._ended) or self._scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Sleep one step and return a word for each request that was due."""
        started = time.monotonic()
        outputs, self._ended = self._ended, []
        if self._scheduler.has_work():
            plan = self._scheduler.schedule()
            outputs += self._compute(plan, started)
        return outputs

    def stats(self) -> EngineStats:
        """The counters now."""
        count, scheduler = self._count, self._scheduler
        pool = scheduler.kv.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.kv.pool.num_free,
            num_blocks=scheduler.kv.pool.num_blocks,
            block_size=BLOCK_SIZE,
            num_steps=count.num_steps,
            last_step_seconds=count.last_step_seconds,
            num_prefill_tokens=count.num_prefill_tokens,
            num_decode_tokens=count.num_decode_tokens,
            num_cached_tokens=count.num_cached_tokens,
            busy_seconds=count.busy_seconds,
            weights_bytes=self.spec.memory_bytes // 2,
            kv_bytes=self.spec.memory_bytes - self.spec.memory_bytes // 2,
            kv_held_bytes=pool.num_held * (self.spec.memory_bytes // 2) // pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            waiting_by_class=scheduler.waiting.counts(),
        )

    def prefix_filter(self) -> bytes:
        """Which prefixes it has cached, see `gpuagent.engine.prefix_filter`."""
        return self._scheduler.kv.prefix_filter()

    def _compute(self, plan: SchedulerOutput, started: float) -> list[RequestOutput]:
        outputs, tokens, num_decode = self._words(plan)
        num_prefill = plan.num_tokens - num_decode
        seconds = self.params.step_ms / 1000 + num_prefill / self.params.prefill_tps
        # Back-to-back steps keep their rhythm; what passes between them is part of the next.
        device = self._device
        is_late = started - device.due > seconds
        device.due = (started if is_late else device.due) + seconds
        self._scheduler.complete(plan, tokens)
        for output in outputs:
            if output.finish_reason:
                self._forget(output.request_id)
        time.sleep(max(0.0, device.due - time.monotonic()))
        self._record(num_prefill, num_decode, time.monotonic() - started)
        return outputs

    def _words(
        self, plan: SchedulerOutput
    ) -> tuple[list[RequestOutput], dict[str, tuple[int, ...]], int]:
        """The next words, their tokens, and how many of the works were one of a decoding one."""
        outputs: list[RequestOutput] = []
        tokens: dict[str, tuple[int, ...]] = {}
        num_decode = 0
        for work in plan.work:
            sequence = self._scheduler.running[work.request_id]
            if sequence.num_output:
                num_decode += len(work.token_ids) == 1
            elif work.start == sequence.num_cached:
                self._count.num_cached_tokens += sequence.num_cached
            if work.samples:
                token, output = self._next(sequence)
                outputs.append(output)
                tokens[work.request_id] = (token,)
        return outputs, tokens, num_decode

    def _next(self, sequence: Sequence) -> tuple[int, RequestOutput]:
        """The next word of one request and what it means for it."""
        stream, sampling = self._streams[sequence.request_id], sequence.request.sampling
        word = stream.checksum % self._num_words
        token, index = FIRST_WORD + word, sequence.num_output
        is_end = index == self.params.stop_after > 0 and not sampling.ignore_eos
        if is_end or token in sampling.stop_token_ids:
            return token, _output(sequence, index, (), stream.held, "stop")
        stream.checksum = zlib.crc32(token.to_bytes(4, "little"), stream.checksum)
        text, stopped = stream.push(f"tok{word} ", sampling.stop)
        is_full = len(sequence.token_ids) + 1 >= self.spec.max_model_len
        is_long = index + 1 >= sampling.max_tokens or is_full
        reason = "stop" if stopped else "length" if is_long else None
        if is_long and not stopped:
            text += stream.held
        top = () if sampling.logprobs is None else self._logprobs(word, sampling.logprobs)
        return token, _output(sequence, index, (token,), text, reason, top)

    def _logprobs(self, word: int, count: int) -> tuple[TokenLogprob, ...]:
        num_words = self._num_words
        words = [(word + n) % num_words for n in range(min(count, num_words))]
        top = tuple((FIRST_WORD + w, f"tok{w} ", -0.5 - n) for n, w in enumerate(words))
        return (TokenLogprob(FIRST_WORD + word, f"tok{word} ", -0.5, top),)

    def _forget(self, request_id: str) -> None:
        self._scheduler.finish(request_id)
        del self._streams[request_id]

    def _record(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        count = self._count
        count.num_steps += 1
        if count.num_steps == self.params.raises_at:
            raise RuntimeError("as the source asks")
        count.num_prefill_tokens += num_prefill
        count.num_decode_tokens += num_decode
        count.last_step_seconds = seconds
        count.busy_seconds += seconds


def _pattern(tokens: Seq[int]) -> bytes:
    return b"".join(token.to_bytes(BYTES_PER_TOKEN, "little") for token in tokens)


def _output(
    sequence: Sequence,
    index: int,
    token_ids: tuple[int, ...],
    text: str,
    reason: str | None,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> RequestOutput:
    counts = sequence.num_prompt, sequence.num_cached, index + len(token_ids)
    return RequestOutput(
        sequence.request_id, index, token_ids, text, logprobs, reason, None, *counts
    )
