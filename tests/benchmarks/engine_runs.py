"""Traces for `engine.py`, and one pass over a trace."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, SamplingParams

VOCAB = 49152
HEAVY_TAILED = "heavy-tailed"
Prompt = tuple[tuple[int, ...], int]  # token ids, forced output length


def find_trace(name: str | None, num: int) -> list[Prompt]:
    """A file of JSON lines, or one of the two that are made here; at most `num` requests."""
    if name is None:
        return log_normal_trace(num)
    return heavy_tailed_trace(num) if name == HEAVY_TAILED else read_trace(Path(name))[:num]


def log_normal_trace(num: int) -> list[Prompt]:
    """Random prompts without shared prefixes, outputs of median 40 and at most 160 tokens."""
    rng = random.Random(0)

    def length(median: float, least: int, most: int) -> int:
        return min(max(round(median * rng.lognormvariate(0.0, 0.9)), least), most)

    return [(tokens(rng, length(80, 16, 256)), length(40, 4, 160)) for _ in range(num)]


def heavy_tailed_trace(num: int) -> list[Prompt]:
    """Outputs from a Pareto distribution with shape 1.1, from 8 to 768 tokens: half of them are
    shorter than 15, and a few in a hundred as long as all others of a batch together. Prompts of
    16 to 64 tokens, so that output is what is measured."""
    rng = random.Random(0)
    return [
        (tokens(rng, rng.randint(16, 64)), min(round(8 * rng.paretovariate(1.1)), 768))
        for _ in range(num)
    ]


def read_trace(path: Path) -> list[Prompt]:
    """The requests of a file of JSON lines."""
    rows = map(json.loads, path.read_text().splitlines())
    return [(tuple(row["prompt_ids"]), row["max_tokens"]) for row in rows]


def tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    """`num` random ordinary tokens."""
    return tuple(rng.randrange(100, VOCAB) for _ in range(num))


def request(name: str, prompt: Sequence[int], num: int) -> GenerationRequest:
    """A greedy request that runs to its full length."""
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling)


@dataclass
class Run:
    """What one pass over the trace took."""

    seconds: float = 0.0
    num_tokens: int = 0
    busy_seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    num_steps: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


def closed_loop(engine: TorchEngine, trace: list[Prompt], concurrency: int) -> Run:
    """All requests of the trace, a new one as soon as one ends."""
    waiting = list(enumerate(trace))
    run, begun, before = Run(), {}, engine.stats()
    start = time.perf_counter()
    while waiting or engine.has_work():
        while waiting and len(begun) < concurrency:
            i, (prompt, num) = waiting.pop(0)
            begun[str(i)] = time.perf_counter()
            engine.add(request(str(i), prompt, num))
        for output in engine.step():
            run.num_tokens += len(output.token_ids)
            if output.index == 0:
                run.ttft.append(time.perf_counter() - begun[output.request_id])
            if output.finish_reason:
                del begun[output.request_id]
    run.seconds = time.perf_counter() - start
    run.busy_seconds = engine.stats().busy_seconds - before.busy_seconds
    run.num_steps = engine.stats().num_steps - before.num_steps
    return run


def padded_batches(engine: TorchEngine, trace: list[Prompt], concurrency: int) -> Run:
    """What a padded batch computes, as `generate` of transformers does and as the papers' static
    baseline: all prompts as long as the batch's longest, all outputs too; own tokens count."""
    rng, run, start = random.Random(1), Run(), time.perf_counter()
    before = engine.stats()
    for first in range(0, len(trace), concurrency):
        batch = trace[first : first + concurrency]
        width = max(len(prompt) for prompt, _ in batch)
        longest = max(num for _, num in batch)
        for i, (prompt, _) in enumerate(batch):
            padding = tokens(rng, width - len(prompt))
            engine.add(request(str(first + i), padding + prompt, longest))
        while engine.has_work():
            engine.step()
        run.num_tokens += sum(num for _, num in batch)
    run.seconds = time.perf_counter() - start
    run.num_steps = engine.stats().num_steps - before.num_steps
    return run
