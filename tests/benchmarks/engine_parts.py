"""The parts of `engine.py` that need no trace: steps, ceilings, prefix cache, quality."""

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from gpuagent.engine.batch import Work
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.scheduler import Policy
from tests.benchmarks.engine_runs import Prompt, request, tokens
from tests.engine.real_model import real_model

BATCHES = (1, 4, 8, 16, 32)
CONTEXT = 240
NUM_STEPS = 12
CHUNK = 128
PREFIX, SUFFIX = 512, 32
NUM_QUALITY = 24
PARTS = ("products", "attention", "other_kernels", "scheduling", "sampling", "idle")


def load(quantization: str, **more: Any) -> TorchEngine:
    """The real model."""
    return TorchEngine.load(real_model().path, quantization=quantization, **more)


class Stopwatch:
    """Seconds so far in planning and recording, and in the executor's call."""

    def __init__(self, engine: TorchEngine) -> None:
        self.scheduling = self.running = 0.0
        scheduler, runner = engine._scheduler, engine._runner
        for owner, name, total in (
            (scheduler, "schedule", "scheduling"),
            (scheduler, "complete", "scheduling"),
            (runner, "run", "running"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), total))

    def _timed(self, function: Callable[..., Any], total: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                setattr(self, total, getattr(self, total) + time.perf_counter() - start)

        return timed


def decode_steps(quantization: str) -> dict[str, float]:
    """A decode step at `CONTEXT` tokens: milliseconds, and what they are spent on.

    The kernels' parts are processor time of the calling thread, waiting for the other included;
    `idle` is what remains of the call's wall time: the processor was somebody else's.
    """
    sizes = {"max_num_seqs": max(BATCHES), "num_blocks": 640}  # prompts first: all decode at once
    engine = load(quantization, policy=Policy.PREFILL_FIRST, target_itl_seconds=None, **sizes)
    rng, found = random.Random(0), {}
    watch = Stopwatch(engine)
    for batch in BATCHES:
        for i in range(batch):
            engine.add(request(f"{batch}-{i}", tokens(rng, CONTEXT), NUM_STEPS))
        rows = []
        while engine.has_work():
            before = engine.stats().num_decode_tokens, _now(engine, watch)
            engine.step()
            if engine.stats().num_decode_tokens - before[0] == batch:
                spent = [b - a for a, b in zip(before[1], _now(engine, watch), strict=True)]
                rows.append(_shares(engine.stats().last_step_seconds, *spent))
        step, *parts = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
        found[f"decode_step_ms_batch_{batch}"] = step
        found |= {f"decode_step_ms_batch_{batch}_{n}": v for n, v in zip(PARTS, parts, strict=True)}
    return found


def _now(engine: TorchEngine, watch: Stopwatch) -> tuple[float, ...]:
    kernels = getattr(engine.executor, "seconds", (0.0, 0.0, 0.0))
    return (*kernels, watch.scheduling, watch.running)


def _shares(
    step: float, products: float, attention: float, rest: float, scheduling: float, running: float
) -> tuple[float, ...]:
    idle = max(running - products - attention - rest, 0.0)
    return step, products, attention, rest, scheduling, step - scheduling - running, idle


def ceilings() -> dict[str, float]:
    """What this machine does at best now: float32 products, and reading memory."""
    a, big = torch.rand(1536, 1536), torch.rand(64 << 20)
    gflops = 2 * 1536**3 / _fastest(lambda: a @ a) / 1e9
    return {
        "ceiling_float32_gflops": gflops,
        "ceiling_memory_gb_per_second": big.nbytes / _fastest(lambda: big.sum()) / 1e9,
    }


def _fastest(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def prefix_cache(quantization: str, repeats: int) -> dict[str, float]:
    """Median milliseconds to the first token, with 512 tokens of 544 cached or not."""
    engine, rng = load(quantization, num_blocks=400), random.Random(1)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for i in range(repeats + 1):
        prefix = tokens(rng, PREFIX)
        for kind, found in times.items():
            engine.add(request(f"{kind}{i}", prefix + tokens(rng, SUFFIX), 1))
            start = time.perf_counter()
            while engine.has_work():
                engine.step()
            found.append(1000 * (time.perf_counter() - start))
    return {
        "ttft_ms_cold_prefix": statistics.median(times["cold"][1:]),
        "ttft_ms_cached_prefix": statistics.median(times["warm"][1:]),
    }


@torch.inference_mode()
def read_prompts(engine: TorchEngine, prompts: list[tuple[int, ...]]) -> tuple[float, list[int]]:
    """Mean negative log-likelihood of the prompts' tokens, and the most likely next tokens."""
    losses, best = [], []
    for prompt in prompts:
        blocks = tuple(range(-(-len(prompt) // 16)))
        hidden = engine.executor.forward([Work("quality", 0, prompt, blocks, True)]).clone()
        for start in range(0, len(prompt) - 1, CHUNK):
            rows = hidden[start : min(start + CHUNK, len(prompt) - 1)]
            logits = engine.executor.logits(rows)
            following = torch.tensor(prompt[start + 1 : start + 1 + len(rows)])
            losses += cross_entropy(logits, following, reduction="none").tolist()
            best += logits.argmax(-1).tolist()
    return statistics.fmean(losses), best


def quality(trace: list[Prompt]) -> tuple[dict[str, float], dict[str, float]]:
    """int8, and float32 with an int8 cache, against float32 on the trace's longer prompts."""
    prompts = [prompt[:512] for prompt, _ in trace if len(prompt) >= 100][:NUM_QUALITY]
    kinds = {"fp32": ("none", "float32"), "int8": ("int8", "auto"), "kv8": ("none", "int8")}
    found, num_bytes = {}, {}
    for name, (quantization, cache) in kinds.items():
        engine = load(quantization, num_blocks=40, kv_cache_dtype=cache)
        found[name] = read_prompts(engine, prompts)
        num_bytes[name] = engine.executor.kv_bytes / (41 * 16)  # a block of zeros included
        del engine
    loss, best = found["fp32"]
    ratios = {"kv8_bytes_per_token_vs_16_bit": 2 * num_bytes["kv8"] / num_bytes["fp32"]}
    for name in ("int8", "kv8"):
        same = [a == b for a, b in zip(best, found[name][1], strict=True)]
        ratios[f"{name}_perplexity_vs_fp32"] = math.exp(found[name][0] - loss)
        ratios[f"{name}_top1_vs_fp32"] = sum(same) / len(same)
    return ratios, {"fp32_perplexity": math.exp(loss), "num_quality_tokens": float(len(best))}
