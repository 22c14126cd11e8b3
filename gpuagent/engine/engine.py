"""The torch engine: one model, its cache and its queue, stepped by one thread.

    engine = TorchEngine.load(path, kv_bytes=512 << 20)
    engine.add(GenerationRequest("r1", prompt, SamplingParams(max_tokens=64, temperature=0)))
    while engine.has_work():
        for output in engine.step():
            print(output.text, end="")

A step is: schedule, run, sample, deliver. What goes wrong inside a step is kept to the request
it belongs to: a row of NaN logits ends that request (`numerical_error`), an exception while a
request's token is processed ends that request, and a forward pass that raises is repeated
request by request to find whose it is (`engine_error`). Results of a failed request are never
put into the prefix cache, and its keys and values are erased.
"""

import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer

from gpuagent.engine.batch import SchedulerOutput, Sequence
from gpuagent.engine.detokenizer import Detokenizer, load_tokenizer
from gpuagent.engine.executors import block_bytes, make_executor
from gpuagent.engine.model_runner import Executor, ModelRunner, StepResult
from gpuagent.engine.request import (
    EngineStats,
    GenerationRequest,
    RequestOutput,
    RequestRejected,
    TokenLogprob,
)
from gpuagent.engine.sampler import Sample, SamplingRow, check_sampling, sample
from gpuagent.engine.scheduler import Policy, Scheduler, SchedulerConfig
from gpuagent.models.config import ModelConfig, eos_ids, read_json
from gpuagent.models.llama import LlamaModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_KV_BYTES = 512 << 20
DEFAULT_SWAP_BYTES = 128 << 20
DEFAULT_ITL_SECONDS = 0.1
MAX_GENERATION_CONFIG_BYTES = 1 << 20


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
    last_step_seconds: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Delivery:
    """What a step has decided so far: outputs, and which tokens the requests keep."""

    outputs: list[RequestOutput] = field(default_factory=list)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)


class TorchEngine:
    """Implements `gpuagent.engine.request.Engine`. Not thread-safe."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.executor = executor
        self._model = model
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(config)
        self._runner = ModelRunner(executor, config.num_host_blocks)
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
        swap_bytes: int = DEFAULT_SWAP_BYTES,
        target_itl_seconds: float | None = DEFAULT_ITL_SECONDS,
    ) -> Self:
        """Load a safetensors folder. The pool has `num_blocks`, or what `kv_bytes` hold.

        `max_model_len` is at most what the model knows. `swap_bytes` of host memory take in
        preempted requests (touched at the first one), `target_itl_seconds` bounds the prompt
        tokens of a step in which others decode. Raises LoadError for a bad folder and
        ValueError for sizes that leave no block or no slot.
        """
        folder = Path(path)
        model = LlamaModel.load(folder, DTYPES[dtype], device, max_model_len)
        width = block_bytes(model.config, block_size, DTYPES[dtype], device, quantization)
        longest = model.config.max_position
        scheduling = SchedulerConfig(
            num_blocks=num_blocks or kv_bytes // width,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=min(max_model_len or longest, longest),
            policy=policy,
            prefix_caching=prefix_caching,
            num_host_blocks=swap_bytes // block_bytes,
            target_itl_seconds=target_itl_seconds,
        )
        eos = _eos_token_ids(folder, model.config)
        tokenizer = load_tokenizer(folder, model.config.vocab_size)
        executor = make_executor(model, scheduling, DTYPES[dtype], device, quantization)
        return cls(executor, model.config, tokenizer, scheduling, eos)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected."""
        check_sampling(request.sampling, self._model.vocab_size)
        self._check_tokens(request)
        self._scheduler.add(request)
        params = request.sampling
        self._live[request.request_id] = _Live(
            request=request,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
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
        if self._scheduler.has_work():
            output = self._scheduler.schedule()
            swap_seconds = self._move_blocks(output)
            self._compute(output, delivery)
            self._scheduler.observe(output, time.perf_counter() - start - swap_seconds)
        self._counters.last_step_seconds = time.perf_counter() - start
        self._counters.busy_seconds += self._counters.last_step_seconds
        return delivery.outputs

    def stats(self) -> EngineStats:
        """The engine's counters now."""
        config, counters = self._scheduler.config, self._counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._scheduler.kv.pool.num_free,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_steps=self._scheduler.num_steps,
            last_step_seconds=counters.last_step_seconds,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            busy_seconds=counters.busy_seconds,
            weights_bytes=self.executor.weights_bytes,
            kv_bytes=self.executor.kv_bytes,
            num_preemptions=self._scheduler.num_preemptions,
            executor=self.executor.name,
            num_swapped_out=self._scheduler.num_swapped_out,
            num_recomputed=self._scheduler.num_recomputed,
            num_free_host_blocks=self._scheduler.host.num_free,
        )

    def _check_tokens(self, request: GenerationRequest) -> None:
        vocab_size = self._model.vocab_size
        for token in (*request.prompt_token_ids, *request.sampling.stop_token_ids):
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

    def _compute(self, output: SchedulerOutput, delivery: _Delivery) -> None:
        """Run the step, deliver what it gives, and record it."""
        result = self._run(output, delivery)
        self._count(output)
        for request_id in result.unsound:
            self._fail(request_id, "numerical_error", delivery)
        self._deliver(result, delivery)
        self._scheduler.complete(output, delivery.tokens)
        for request_id in delivery.ended:
            self._forget(request_id)

    def _run(self, output: SchedulerOutput, delivery: _Delivery) -> StepResult:
        try:
            return self._runner.run(output)
        except Exception:
            return self._run_one_by_one(output, delivery)

    def _run_one_by_one(self, output: SchedulerOutput, delivery: _Delivery) -> StepResult:
        """The step again, a request at a time; those that raise end, the others go on."""
        results, all_logits = [], []
        for work in output.work:
            try:
                results.append(self._runner.run(replace(output, work=(work,))))
                all_logits.append(results[-1].logits.clone())  # the next run reuses the memory
            except Exception:
                self._runner.erase(work)
                self._fail(work.request_id, "engine_error", delivery)
        rows = [row for logits in all_logits for row in logits.unbind()]
        return StepResult(
            request_ids=tuple(name for result in results for name in result.request_ids),
            logits=torch.stack(rows) if rows else torch.empty(0, 0),
            unsound=tuple(name for result in results for name in result.unsound),
        )

    def _count(self, output: SchedulerOutput) -> None:
        """Decode tokens are single ones after the prompt; recomputed ones count as prefill."""
        for work in output.work:
            sequence = self._scheduler.sequence(work.request_id)
            if sequence and len(work.token_ids) == 1 and work.start >= sequence.num_prompt:
                self._counters.num_decode_tokens += 1
            else:
                self._counters.num_prefill_tokens += len(work.token_ids)

    def _deliver(self, result: StepResult, delivery: _Delivery) -> None:
        for request_id, chosen in self._sample(result, delivery):
            if chosen is None:
                self._fail(request_id, "numerical_error", delivery)
                continue
            try:
                self._deliver_one(request_id, chosen, delivery)
            except Exception:
                self._fail(request_id, "engine_error", delivery)

    def _sample(self, result: StepResult, delivery: _Delivery) -> list[tuple[str, Sample | None]]:
        """A sample for each request, found one by one if they cannot be found together."""
        rows = [self._row(request_id) for request_id in result.request_ids]
        if not rows:
            return []
        try:
            return list(zip(result.request_ids, sample(result.logits, rows), strict=True))
        except Exception:
            return self._sample_one_by_one(result, rows, delivery)

    def _sample_one_by_one(
        self, result: StepResult, rows: list[SamplingRow], delivery: _Delivery
    ) -> list[tuple[str, Sample | None]]:
        samples = []
        for i, request_id in enumerate(result.request_ids):
            try:
                samples.append((request_id, sample(result.logits[i : i + 1], rows[i : i + 1])[0]))
            except Exception:
                self._fail(request_id, "engine_error", delivery)
        return samples

    def _row(self, request_id: str) -> SamplingRow:
        live, sequence = self._live[request_id], self._sequence(request_id)
        return SamplingRow(
            params=live.request.sampling,
            seed=live.seed,
            index=sequence.num_output,
            token_ids=sequence.token_ids,
            num_prompt=sequence.num_prompt,
        )

    def _deliver_one(self, request_id: str, chosen: Sample, delivery: _Delivery) -> None:
        live, sequence = self._live[request_id], self._sequence(request_id)
        if chosen.token_id in live.stop_ids:
            text = live.detokenizer.finish()
            delivery.outputs.append(_output(sequence, text=text, finish_reason="stop"))
            delivery.ended.append(request_id)
            return
        text = live.detokenizer.push(chosen.token_id)
        reason = self._finish_reason(live, sequence)
        text += live.detokenizer.finish() if reason == "length" else ""
        if live.detokenizer.stopped:
            reason = "stop"  # also where the text released at the end holds the stop string
        output = _output(sequence, chosen.token_id, text, _logprobs(live, chosen), reason)
        delivery.outputs.append(output)
        delivery.tokens[request_id] = (chosen.token_id,)
        if reason:
            delivery.ended.append(request_id)

    def _finish_reason(self, live: _Live, sequence: Sequence) -> str | None:
        """Why the request ends with the token being delivered, which is not counted yet."""
        if live.detokenizer.stopped:
            return "stop"
        is_full = len(sequence.token_ids) + 1 >= self._scheduler.config.max_model_len
        if is_full or sequence.num_output + 1 >= live.request.sampling.max_tokens:
            return "length"
        return None

    def _fail(self, request_id: str, code: str, delivery: _Delivery) -> None:
        """End a request whose results cannot be trusted, before they are recorded."""
        sequence = self._sequence(request_id)
        delivery.outputs.append(_output(sequence, finish_reason="error", error_code=code))
        self._forget(request_id)

    def _sequence(self, request_id: str) -> Sequence:
        sequence = self._scheduler.sequence(request_id)
        assert sequence is not None, f"{request_id} is not in progress"
        return sequence

    def _forget(self, request_id: str) -> None:
        self._scheduler.finish(request_id)
        self._live.pop(request_id, None)


def _output(
    sequence: Sequence,
    token: int | None = None,
    text: str = "",
    logprobs: tuple[TokenLogprob, ...] = (),
    finish_reason: str | None = None,
    error_code: str | None = None,
) -> RequestOutput:
    tokens = () if token is None else (token,)
    return RequestOutput(
        request_id=sequence.request_id,
        index=sequence.num_output,
        token_ids=tokens,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        error_code=error_code,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
        num_output_tokens=sequence.num_output + len(tokens),
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
