"""The torch engine: one model, its cache and its queue, stepped by one thread.

    engine = TorchEngine.load(path, kv_bytes=512 << 20)
    engine.add(GenerationRequest("r1", prompt, SamplingParams(max_tokens=64, temperature=0)))
    while engine.has_work():
        for output in engine.step():
            print(output.text, end="")

A step is: schedule, run, sample, deliver. What goes wrong inside a step is kept to the request
it belongs to: a row of NaN logits ends that request (`numerical_error`), an exception while a
request's token is processed ends that request, and a forward pass that raises is repeated with
halves of its requests, and halves of those, to find whose it is (`engine_error`): of 16, one
bad one costs eight smaller passes. If in `MAX_FAILED_STEPS` steps one after the other every
request fails, it is not the requests: `EngineFailed` ends the engine. Results of a failed
request are never put into the prefix cache, and its keys and values are erased.

A step that does not return cannot be ended from within its thread. `last_step_age` tells the
watchdog outside, which ends the process.
"""

import secrets
import time
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch
from tokenizers import Tokenizer

from gpuagent.engine import hand_over
from gpuagent.engine.batch import SchedulerOutput, Sequence
from gpuagent.engine.detokenizer import Detokenizer, load_tokenizer
from gpuagent.engine.drafts import load_draft
from gpuagent.engine.executors import DTYPES, make_executor
from gpuagent.engine.model_runner import Executor, ExecutorLost, ModelRunner, StepResult
from gpuagent.engine.parking import Parked, park
from gpuagent.engine.precision import Precision, check_checkpoint, of_dtype
from gpuagent.engine.ranks import Rank, check_supported
from gpuagent.engine.request import (
    EngineStats,
    GenerationRequest,
    HandOver,
    RequestOutput,
    RequestRejected,
    TokenLogprob,
    check_generates,
)
from gpuagent.engine.sampler import Sample, SamplingRow, sample
from gpuagent.engine.sampling_checks import check_sampling
from gpuagent.engine.scheduler import Policy, Scheduler, SchedulerConfig
from gpuagent.engine.shared_pool import Lease
from gpuagent.engine.speculation import SpeculationCounters
from gpuagent.engine.speculator import MAX_CATCH_UP, SpeculationKind, Speculator, make_speculator
from gpuagent.engine.verification import Drafts, accept
from gpuagent.models.config import ModelConfig, eos_ids, read_config, read_json
from gpuagent.models.llama import LlamaModel
from gpuagent.models.sharding import Shard

NO_SPECULATION = SpeculationCounters()
NO_DRAFTS = Drafts(())
DEFAULT_KV_BYTES = 512 << 20
DEFAULT_SWAP_BYTES = 128 << 20
DEFAULT_ITL_SECONDS = 0.2
MAX_FAILED_STEPS = 3
MAX_BLOCKS_PER_CHUNK = 16
MAX_GENERATION_CONFIG_BYTES = 1 << 20
MAX_TRACE_CHARS = 20_000


class Span(NamedTuple):
    """Rows [start, end) of a step's logits belong to one request."""

    request_id: str
    start: int
    end: int


Chosen = tuple[str, list[Sample | None]]


@dataclass(slots=True)
class _Live:
    """What the engine keeps of an unfinished request beside the scheduler's part."""

    request: GenerationRequest
    seed: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer


@dataclass(slots=True)
class _Counters:
    """Totals since the engine was made."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_failed_steps: int = 0  # one after the other
    last_step_seconds: float = 0.0
    last_step_at: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Delivery:
    """What a step has decided so far: outputs, and which tokens the requests keep."""

    outputs: list[RequestOutput] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    num_raised: int = 0


@dataclass(slots=True)
class _Part:
    """What one step gives one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class EngineFailed(RuntimeError):
    """The engine cannot go on, whatever it is asked; `code` says why: step_failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class TorchEngine:
    """Implements `gpuagent.engine.request.Engine`. Not thread-safe."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...] = (),
        lease: Lease | None = None,
    ) -> None:
        self.executor = executor
        self.lease = lease
        self._model = model
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(config, lease)
        self._runner = ModelRunner(executor, config.num_host_blocks)
        self._parked: Parked | None = None
        if lease:
            lease.shed = self._shed
            self._scheduler.kv.pool.on_trim = executor.discard
        self.draft: Executor | None = None
        self._speculator: Speculator | None = None
        self._drafts: dict[str, Drafts] = {}
        self._eos = frozenset(eos_token_ids)
        self._live: dict[str, _Live] = {}
        self._cancelled: list[RequestOutput] = []
        self._counters = _Counters()

    @classmethod
    def load(
        cls,
        path: Path | str,
        dtype: str = "float32",
        num_blocks: int | None = None,
        kv_bytes: int = DEFAULT_KV_BYTES,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        device: str = "cpu",
        policy: Policy = Policy.CONTINUOUS,
        prefix_caching: bool = True,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        swap_bytes: int = DEFAULT_SWAP_BYTES,
        target_itl_seconds: float | None = DEFAULT_ITL_SECONDS,
        speculation: str = "none",
        draft_path: Path | str | None = None,
        kv_limit_bytes: int | None = None,
        rank: Rank | None = None,
    ) -> Self:
        """Load a safetensors folder. The pool has `num_blocks`, or what `kv_bytes` hold.

        `quantization` and `kv_cache_dtype` are those of `precision`. `max_model_len` is at most
        what the model knows. `swap_bytes` of host memory take in preempted requests,
        `target_itl_seconds` bounds the prompt tokens of a step in which others decode.
        `speculation` is "none", "ngram" or "draft", the last with a smaller model's folder and a
        part of `kv_bytes`. `kv_limit_bytes`: see `_size_pool`. With a `rank`, its part of
        the model, to be connected before the first step (`ranks`). Raises LoadError for a bad
        folder and ValueError for sizes that leave no block or no slot."""
        folder, kind = Path(path), SpeculationKind(speculation)
        formats = of_dtype(dtype, quantization, kv_cache_dtype)
        check_checkpoint(read_config(folder), quantization)
        shard = _shard_of(rank, quantization, speculation, swap_bytes)
        model = LlamaModel.load(folder, DTYPES[dtype], device, max_model_len, shard)
        length = min(max_model_len or model.config.max_position, model.config.max_position)
        small = None
        if kind is SpeculationKind.DRAFT:
            small = load_draft(draft_path, folder, model.config, length, DTYPES[dtype], device)
        widths = [formats.kv_bytes_per_token(each.config) for each in (model, small) if each]
        limit = kv_limit_bytes if small is None and device == "cpu" else None
        pool = _size_pool(folder.name, kv_bytes, limit, length, block_size, widths)
        scheduling = SchedulerConfig(
            num_blocks=num_blocks or pool.num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            policy=policy,
            prefix_caching=prefix_caching,
            num_host_blocks=swap_bytes // (block_size * widths[0]),
            target_itl_seconds=target_itl_seconds,
            blocks_per_chunk=pool.blocks_per_chunk,
        )
        executor = make_executor(model, scheduling, formats, device, pool.lease is not None)
        executor = rank.executor(executor, scheduling) if rank else executor
        tokenizer = load_tokenizer(folder, model.config.vocab_size)
        eos = _eos_token_ids(folder, model.config)
        engine = cls(executor, model.config, tokenizer, scheduling, eos, pool.lease)
        if small:
            engine.draft = _drafting(small, scheduling, formats, device)
        return engine._guessing(kind)

    def _guessing(self, kind: SpeculationKind) -> Self:
        self._speculator = make_speculator(kind, self._row, self.draft, self._scheduler.config)
        return self

    def emptied(self, guesses: bool = False, **scheduling: Any) -> Self:
        """An engine over the same weights and pool with nothing in it, with other values of
        SchedulerConfig, and n-gram speculation or none. Only one of the two may have work."""
        config = replace(self._scheduler.config, **scheduling)
        eos = tuple(self._eos)
        engine = type(self)(self.executor, self._model, self._tokenizer, config, eos)
        return engine._guessing(SpeculationKind.NGRAM) if guesses else engine

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected."""
        check_generates(request)
        check_sampling(request.sampling, self._model.vocab_size)
        self._check_tokens(request)
        self._note_begin()
        self._scheduler.add(request)
        seed = request.sampling.seed
        self._live[request.request_id] = self._begin(
            request, secrets.randbits(64) if seed is None else seed
        )

    def decoding(self) -> list[str]:
        """Requests whose prompt is computed and that have a token."""
        return [sequence.request_id for sequence in self._scheduler.decoding()]

    def num_bytes_of(self, request_id: str) -> int:
        """Bytes of the keys and values of a request that is decoding."""
        return hand_over.num_bytes_of(self._scheduler, self._block_bytes, request_id)

    def detach(self, request_id: str, contents: memoryview) -> HandOver:
        """Put a decoding request's keys and values into `contents` and forget it."""
        sequence, live = self._sequence(request_id), self._live[request_id]
        hand_over.copy_out(self._scheduler, self.executor, request_id, contents)
        tokens = tuple(sequence.token_ids[sequence.num_prompt :])
        state = HandOver(tokens, live.seed, sequence.num_computed, sequence.num_cached)
        self._forget(request_id)
        return state

    def adopt(
        self, request: GenerationRequest, state: HandOver, contents: memoryview | None
    ) -> bool:
        """Continue a request; see `gpuagent.engine.request.Engine`."""
        check_sampling(request.sampling, self._model.vocab_size)
        self._check_tokens(request, state.token_ids)
        self._note_begin()
        copy = None
        if contents is not None:
            num_tokens = state.num_computed
            copy = hand_over.copy_in(self._scheduler, self._runner.host, num_tokens, contents)
            if copy is None:
                return False
        try:
            self._scheduler.adopt(request, state.token_ids, copy, state.num_cached)
        except RequestRejected:
            if copy:
                self._scheduler.host.release(copy)
            raise
        live = self._live[request.request_id] = self._begin(request, state.seed)
        for token in state.token_ids:
            live.detokenizer.push(token)  # its text is delivered already
        self._end_if_complete(live, self._sequence(request.request_id))
        return True

    def _end_if_complete(self, live: _Live, sequence: Sequence) -> None:
        """All tokens were delivered elsewhere, and only the word that they were the last is
        missing: the next step says it."""
        reason = self._finish_reason(live, sequence, 0)
        if reason is not None:
            text = live.detokenizer.finish()
            reason = "stop" if live.detokenizer.stopped else reason
            self._cancelled.append(_output(sequence, text=text, finish_reason=reason))
            self._forget(sequence.request_id)

    def _note_begin(self) -> None:
        if not self._scheduler.has_work():
            self._counters.last_step_at = time.perf_counter()  # its age begins with the work

    def _begin(self, request: GenerationRequest, seed: int) -> _Live:
        params = request.sampling
        return _Live(
            request=request,
            seed=seed,
            stop_ids=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else self._eos),
            detokenizer=Detokenizer(self._tokenizer, request.prompt_token_ids, params.stop),
        )

    def cancel(self, request_id: str) -> None:
        """End a request at once; the next step reports it. Unknown ids are ignored."""
        sequence = self._scheduler.sequence(request_id)
        if sequence is not None:
            text = self._live[request_id].detokenizer.finish()
            self._cancelled.append(_output(sequence, text=text, finish_reason="cancelled"))
            self._forget(request_id)

    def has_work(self) -> bool:
        """True while a request is unfinished or a cancellation is not yet reported."""
        return bool(self._cancelled) or self._scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Run one iteration and return what it produced."""
        start = time.perf_counter()
        delivery = _Delivery(outputs=self._cancelled)
        self._cancelled = []
        assert self._parked is None, "its weights are not on the device"
        if self._scheduler.has_work():
            self._drafts = self._propose()
            drafts = {name: drafts.token_ids for name, drafts in self._drafts.items()}
            output = self._scheduler.schedule(drafts)
            swap_seconds = self._move_blocks(output)
            self._compute(output, delivery)
            self._observe(output, delivery, time.perf_counter() - start - swap_seconds)
        counters = self._counters
        counters.last_step_at = time.perf_counter()
        counters.last_step_seconds = counters.last_step_at - start
        counters.busy_seconds += counters.last_step_seconds
        return delivery.outputs

    def flush(self) -> list[RequestOutput]:
        """What is to be told without computing: cancellations of an engine that may not step."""
        outputs, self._cancelled = self._cancelled, []
        return outputs

    def park(self) -> int:
        """Leave the device, with unfinished requests; see `gpuagent.engine.request.Engine`."""
        assert self._parked is None, "it is parked already"
        if self._speculator and self.executor.is_apart:
            for request_id in self._live:  # a draft model computes its own cache anew
                self._speculator.forget(request_id)
        self._parked = park(self._scheduler, self._executors, self.lease, self._shed)
        return self._parked.num_bytes

    def unpark(self) -> int:
        """Be ready to step again; see `gpuagent.engine.request.Engine`."""
        assert self._parked is not None, "it is not parked"
        num_bytes = self._parked.bring_back()
        self._parked = None
        return num_bytes

    def urgency(self) -> float:
        """Weight of the most urgent class with an unfinished request; 0 without any."""
        return self._scheduler.urgency()

    def _shed(self, num_chunks: int) -> int:
        """Give chunks of the pool back, preempting the last requests for as long as it takes."""
        pool = self._scheduler.kv.pool
        num_given = pool.trim(num_chunks)
        while num_given < num_chunks:
            swaps = self._scheduler.preempt_last()
            if swaps is None:
                break
            if swaps:
                with torch.inference_mode():
                    self._runner.host.swap_out(swaps)
            num_given += pool.trim(num_chunks - num_given)
        return num_given

    def stats(self) -> EngineStats:
        """The engine's counters now."""
        config, counters, pool = self._scheduler.config, self._counters, self._scheduler.kv.pool
        num_free = pool.num_free if self._is_at_home else self._num_promised - pool.num_held
        spec = self._speculator.speculation.counters if self._speculator else NO_SPECULATION
        age = time.perf_counter() - counters.last_step_at if self._scheduler.has_work() else 0.0
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=num_free,
            num_blocks=pool.num_held + num_free,
            block_size=config.block_size,
            num_steps=self._scheduler.num_steps,
            last_step_seconds=counters.last_step_seconds,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            busy_seconds=counters.busy_seconds,
            weights_bytes=sum(each.weights_bytes for each in self._executors),
            kv_bytes=self._kv_bytes,
            kv_held_bytes=pool.num_held * self._block_bytes,
            num_preemptions=self._scheduler.num_preemptions,
            waiting_by_class=self._scheduler.waiting.counts(),
            executor=self.executor.name,
            num_swapped_out=self._scheduler.num_swapped_out,
            num_recomputed=self._scheduler.num_recomputed,
            num_free_host_blocks=self._scheduler.host.num_free,
            spec_decode_num_drafts=spec.num_drafts,
            spec_decode_num_draft_tokens=spec.num_draft_tokens,
            spec_decode_num_accepted_tokens=spec.num_accepted_tokens,
            last_step_age=age,
            swapped_bytes=self._runner.host.num_moved * self._block_bytes,
        )

    def prefix_filter(self) -> bytes:
        """Which prefixes it has cached, see `prefix_filter`."""
        return self._scheduler.kv.prefix_filter()

    @property
    def _is_at_home(self) -> bool:
        """Whether its pool is its own, or it has joined the one that it shares."""
        return self.lease is None or self.lease.share is not None

    @property
    def _num_promised(self) -> int:
        assert self.lease is not None
        chunks = self.lease.guarantee_bytes // self.lease.chunk_bytes
        return chunks * self._scheduler.config.blocks_per_chunk

    @property
    def _kv_bytes(self) -> int:
        """Bytes of the pools, or what is guaranteed of a shared one."""
        if self.lease:
            return self.lease.guarantee_bytes
        return sum(each.kv_bytes for each in self._executors)

    @property
    def _executors(self) -> tuple[Executor, ...]:
        return (self.executor, self.draft) if self.draft else (self.executor,)

    @property
    def _block_bytes(self) -> int:
        return self.executor.kv_bytes // (self._scheduler.config.num_blocks + 1)  # and the null one

    def _check_tokens(self, request: GenerationRequest, sent: tuple[int, ...] = ()) -> None:
        vocab_size = self._model.vocab_size
        for token in (*request.prompt_token_ids, *request.sampling.stop_token_ids, *sent):
            if not 0 <= token < vocab_size:
                message = f"token {token} is not in the vocabulary of {vocab_size}"
                raise RequestRejected("invalid_token_id", message)

    def _move_blocks(self, output: SchedulerOutput) -> float:
        """Swaps and copies; the seconds that the swaps took."""
        host = self._runner.host
        num_before, seconds_before = host.num_moved, host.seconds
        self._runner.copy_blocks(output)
        num_moved, seconds = host.num_moved - num_before, host.seconds - seconds_before
        if num_moved:
            self._scheduler.observe_swaps(num_moved, seconds)
        return seconds

    def _propose(self) -> dict[str, Drafts]:
        if self._speculator is None:
            return {}
        return self._speculator.propose(list(self._scheduler.decoding()))

    def _observe(self, output: SchedulerOutput, delivery: _Delivery, seconds: float) -> None:
        """Let scheduler and speculation learn from the step; forget who has ended."""
        self._scheduler.observe(output, seconds)
        if self._speculator:
            self._speculator.observe(output, delivery.tokens, seconds)
        for request_id in delivery.ended:
            self._forget(request_id)

    def _compute(self, output: SchedulerOutput, delivery: _Delivery) -> None:
        """Run the step, deliver what it gives, and record it."""
        result = self._run(output, delivery)
        self._check_engine(output, delivery)
        self._count(output)
        for request_id in result.unsound:
            self._fail(request_id, "numerical_error", delivery)
        self._deliver(result, delivery)
        self._scheduler.complete(output, delivery.tokens)

    def _check_engine(self, output: SchedulerOutput, delivery: _Delivery) -> None:
        """Raise EngineFailed if everything fails again and again."""
        has_failed = 0 < delivery.num_raised == len(output.work)
        self._counters.num_failed_steps = self._counters.num_failed_steps + 1 if has_failed else 0
        if self._counters.num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailed("step_failed", f"all requests of {MAX_FAILED_STEPS} steps failed")

    def _run(self, output: SchedulerOutput, delivery: _Delivery) -> StepResult:
        try:
            return self._runner.run(output)
        except ExecutorLost:
            raise
        except Exception as error:
            return self._bisect(output, delivery, error)

    def _bisect(self, output: SchedulerOutput, delivery: _Delivery, error: Exception) -> StepResult:
        """The failed step again, a half at a time; a request that raises alone ends."""
        if len(output.work) == 1:
            (work,) = output.work
            delivery.num_raised += 1
            self._runner.erase(work)
            self._fail(work.request_id, "engine_error", delivery, error)
            return StepResult((), torch.empty(0, 0))
        middle = len(output.work) // 2
        first = self._run(replace(output, work=output.work[:middle]), delivery)
        first = replace(first, logits=first.logits.clone())  # the next run reuses the memory
        return _joined(first, self._run(replace(output, work=output.work[middle:]), delivery))

    def _count(self, output: SchedulerOutput) -> None:
        """Decode tokens are single ones after the prompt; recomputed ones count as prefill."""
        for work in output.work:
            sequence = self._scheduler.sequence(work.request_id)
            num_own = len(work.token_ids) - work.num_drafts
            if sequence and num_own == 1 and work.start >= sequence.num_prompt:
                self._counters.num_decode_tokens += 1
            else:
                self._counters.num_prefill_tokens += len(work.token_ids)

    def _deliver(self, result: StepResult, delivery: _Delivery) -> None:
        for request_id, chosen in self._sample(result, delivery):
            if None in chosen:
                self._fail(request_id, "numerical_error", delivery)
                continue
            try:
                self._deliver_one(request_id, chosen, delivery)
            except Exception as error:
                self._fail(request_id, "engine_error", delivery, error)

    def _sample(self, result: StepResult, delivery: _Delivery) -> list[Chosen]:
        """Each request's samples, found one by one if they cannot be found together."""
        spans = _spans(result.request_ids)
        try:
            return self._choose(result, spans)
        except Exception:
            return self._sample_one_by_one(result, spans, delivery)

    def _sample_one_by_one(
        self, result: StepResult, spans: list[Span], delivery: _Delivery
    ) -> list[Chosen]:
        samples = []
        for span in spans:
            try:
                samples += self._choose(result, [span])
            except Exception as error:
                self._fail(span.request_id, "engine_error", delivery, error)
        return samples

    def _choose(self, result: StepResult, spans: list[Span]) -> list[Chosen]:
        """Samples of all rows of the spans, in one call; of guesses only the accepted ones."""
        if not spans:
            return []
        rows = [self._rows(span) for span in spans]
        part = slice(spans[0].start, spans[-1].end)
        flat = list(chain.from_iterable(rows))
        samples = iter(sample(result.logits[part], flat, result.best[part]))
        return [
            (span.request_id, self._accepted(span, list(islice(samples, len(its))), result, its))
            for span, its in zip(spans, rows, strict=True)
        ]

    def _accepted(
        self, span: Span, samples: list[Sample | None], result: StepResult, rows: list[SamplingRow]
    ) -> list[Sample | None]:
        drafts = self._drafts.get(span.request_id, NO_DRAFTS)
        return accept(drafts, samples, result.logits[span.start : span.end], rows)

    def _rows(self, span: Span) -> list[SamplingRow]:
        sequence = self._sequence(span.request_id)
        guesses = self._drafts.get(span.request_id, NO_DRAFTS).token_ids
        return [self._row(sequence, guesses[:i]) for i in range(span.end - span.start)]

    def _row(self, sequence: Sequence, guesses: Seq[int] = ()) -> SamplingRow:
        """What choosing the token after `guesses` needs to know."""
        live = self._live[sequence.request_id]
        return SamplingRow(
            params=live.request.sampling,
            seed=live.seed,
            index=sequence.num_output + len(guesses),
            token_ids=[*sequence.token_ids, *guesses] if guesses else sequence.token_ids,
            num_prompt=sequence.num_prompt,
        )

    def _deliver_one(
        self, request_id: str, samples: list[Sample | None], delivery: _Delivery
    ) -> None:
        sequence, part = self._sequence(request_id), _Part()
        for chosen in samples:
            assert chosen is not None
            self._push(sequence, chosen, part)
            if part.reason:
                break
        delivery.outputs.append(
            _output(sequence, part.token_ids, part.text, part.logprobs, part.reason)
        )
        delivery.tokens[request_id] = part.token_ids
        if part.reason:
            delivery.ended.append(request_id)

    def _push(self, sequence: Sequence, chosen: Sample, part: _Part) -> None:
        """Add a token to what the request gets, unless it is one that ends it."""
        live = self._live[sequence.request_id]
        if chosen.token_id in live.stop_ids:
            part.text += live.detokenizer.finish()
            part.reason = "stop"
            return
        part.text += live.detokenizer.push(chosen.token_id)
        part.token_ids.append(chosen.token_id)
        part.logprobs += _logprobs(live, chosen)
        part.reason = self._finish_reason(live, sequence, len(part.token_ids))
        part.text += live.detokenizer.finish() if part.reason == "length" else ""
        if live.detokenizer.stopped:
            part.reason = "stop"  # also where the text released at the end holds the stop string

    def _finish_reason(self, live: _Live, sequence: Sequence, num_new: int) -> str | None:
        """Why the request ends with the step's `num_new` tokens, which are not counted yet."""
        if live.detokenizer.stopped:
            return "stop"
        is_full = len(sequence.token_ids) + num_new >= self._scheduler.config.max_model_len
        if is_full or sequence.num_output + num_new >= live.request.sampling.max_tokens:
            return "length"
        return None

    def _fail(
        self, request_id: str, code: str, delivery: _Delivery, error: Exception | None = None
    ) -> None:
        """End a request whose results cannot be trusted, before they are recorded."""
        output = _output(self._sequence(request_id), finish_reason="error", error_code=code)
        if error is not None:
            trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
            kind = type(error).__name__
            output = msgspec.structs.replace(output, error_type=kind, error_trace=trace)
        delivery.outputs.append(output)
        self._forget(request_id)

    def _sequence(self, request_id: str) -> Sequence:
        sequence = self._scheduler.sequence(request_id)
        assert sequence is not None, f"{request_id} is not in progress"
        return sequence

    def _forget(self, request_id: str) -> None:
        self._scheduler.finish(request_id)
        self._live.pop(request_id, None)
        if self._speculator:
            self._speculator.forget(request_id)


def _output(
    sequence: Sequence,
    token_ids: Seq[int] = (),
    text: str = "",
    logprobs: Seq[TokenLogprob] = (),
    finish_reason: str | None = None,
    error_code: str | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=sequence.request_id,
        index=sequence.num_output,
        token_ids=tuple(token_ids),
        text=text,
        logprobs=tuple(logprobs),
        finish_reason=finish_reason,
        error_code=error_code,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
        num_output_tokens=sequence.num_output + len(token_ids),
    )


@dataclass(frozen=True, slots=True)
class _PoolSize:
    """Of a model's KV pool; `lease` where it takes chunks from a shared one."""

    num_blocks: int
    blocks_per_chunk: int = 1
    lease: Lease | None = None


def _drafting(
    model: LlamaModel, scheduling: SchedulerConfig, formats: Precision, device: str
) -> Executor:
    """What computes the guesses: its prompts may be longer than a step of the target's."""
    sizes = replace(scheduling, max_batch_tokens=max(scheduling.max_batch_tokens, MAX_CATCH_UP))
    return make_executor(model, sizes, formats.of_draft(), device)


def _shard_of(
    rank: Rank | None, quantization: str, speculation: str, swap_bytes: int
) -> Shard | None:
    """The rank's part of the model, None for all of it; raises LoadError."""
    if rank is None:
        return None
    check_supported(quantization, speculation, swap_bytes)
    return rank.shard


def _size_pool(
    name: str, kv_bytes: int, limit: int | None, length: int, block_size: int, widths: list[int]
) -> _PoolSize:
    """`widths` are bytes a token of model and draft; `length` is the longest sequence's.

    With a `limit` the pool is leased (`shared_pool`): `kv_bytes` is its guarantee, the limit what
    it may grow to, and whoever loads puts `lease` into a shared pool before the first step.
    """
    width = block_size * sum(widths)
    if limit is None:
        return _PoolSize(kv_bytes // width)
    per_chunk = _blocks_per_chunk(kv_bytes // width, -(-length // block_size))
    lease = Lease(name, kv_bytes, per_chunk * width)
    return _PoolSize(max(limit, kv_bytes) // width, per_chunk, lease)


def _blocks_per_chunk(num_guaranteed: int, num_for_one: int) -> int:
    """At most 16, so that whole chunks of the guarantee still hold one sequence."""
    sizes = range(MAX_BLOCKS_PER_CHUNK, 0, -1)
    fits = (size for size in sizes if num_guaranteed // size * size >= num_for_one)
    return next(fits, 1)


def _spans(request_ids: tuple[str, ...]) -> list[Span]:
    """The rows of each request, which lie side by side."""
    spans, start = [], 0
    for request_id, rows in groupby(request_ids):
        end = start + len(list(rows))
        spans.append(Span(request_id, start, end))
        start = end
    return spans


def _joined(first: StepResult, second: StepResult) -> StepResult:
    """Two results as one."""
    logits = [part.logits for part in (first, second) if part.request_ids]
    return StepResult(
        request_ids=first.request_ids + second.request_ids,
        logits=torch.cat(logits) if logits else first.logits,
        unsound=first.unsound + second.unsound,
        best=first.best + second.best,
    )


def _logprobs(live: _Live, chosen: Sample) -> tuple[TokenLogprob, ...]:
    if chosen.logprob is None:
        return ()
    text = live.detokenizer.token_text
    top = tuple((token, text(token), logprob) for token, logprob in chosen.top)
    return (TokenLogprob(chosen.token_id, text(chosen.token_id), chosen.logprob, top),)


def _eos_token_ids(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """generation_config.json knows more end tokens than config.json, where it exists."""
    path = folder / "generation_config.json"
    if not path.exists():
        return model.eos_token_ids
    values = read_json(path, MAX_GENERATION_CONFIG_BYTES, "config_invalid")
    ids = eos_ids(values.get("eos_token_id"), model.vocab_size)
    return ids or model.eos_token_ids
