"""Continuous against static batching inside this engine, and what the prefix cache saves.

    python -m tests.benchmarks.engine [--json FILE] [--num-requests 24] [--repeats 3]

The real SmolLM2-135M in float32. All requests are queued at once and share 8 slots; prompts
have 16 to 256 tokens and outputs 4 to 160, log-normal, so members of one static batch finish
at different times. The static baseline is a kind one: members that have finished cost nothing,
where a padded batch would go on computing them. Policies take turns, medians are printed.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, SamplingParams
from gpuagent.engine.scheduler import Policy
from tests.engine.real_model import real_model

NUM_SLOTS = 8
PREFIX, SUFFIX = 200, 30
VOCAB = 49152


def requests(num: int, seed: int) -> list[GenerationRequest]:
    """Random prompts (no shared prefixes) and forced output lengths."""
    rng = random.Random(seed)

    def length(median: float, least: int, most: int) -> int:
        return min(max(round(median * rng.lognormvariate(0.0, 0.9)), least), most)

    return [
        request(f"r{i}", tokens(rng, length(80, 16, 256)), length(40, 4, 160)) for i in range(num)
    ]


def tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    """`num` random ordinary tokens."""
    return tuple(rng.randrange(100, VOCAB) for _ in range(num))


def request(name: str, prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    """A greedy request that runs to its full length."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling)


def drain(engine: TorchEngine, queued: list[GenerationRequest]) -> tuple[float, float]:
    """Seconds to finish all requests, and output tokens per second."""
    for each in queued:
        engine.add(each)
    num_tokens, start = 0, time.perf_counter()
    while engine.has_work():
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - start
    return seconds, num_tokens / seconds


def policies(num_requests: int, repeats: int) -> dict[str, float]:
    """Median output tokens per second by policy, the policies taking turns."""
    engines = {policy: load(policy=policy, prefix_caching=False) for policy in Policy}
    rates: dict[Policy, list[float]] = {policy: [] for policy in Policy}
    for repeat in range(repeats):
        for policy in random.Random(repeat).sample(list(Policy), 2):
            rates[policy].append(drain(engines[policy], requests(num_requests, repeat))[1])
    return {f"{policy}_tokens_per_second": statistics.median(rates[policy]) for policy in Policy}


def decode_steps() -> dict[str, float]:
    """Median milliseconds of a decode step with 1, 8 and 16 requests at about 128 tokens."""
    engine, rng, found = load(max_num_seqs=16), random.Random(0), {}
    for batch in (1, 8, 16):
        for i in range(batch):
            engine.add(request(f"{batch}-{i}", tokens(rng, 120), 17))
        seconds = []
        while engine.has_work():
            if len(engine.step()) == batch and engine.stats().num_running:
                seconds.append(engine.stats().last_step_seconds)
        step = statistics.median(seconds[1:])
        found[f"decode_step_ms_batch_{batch}"] = 1000 * step
        found[f"decode_tokens_per_second_batch_{batch}"] = batch / step
    return found


def prefix_cache(repeats: int) -> dict[str, float]:
    """Median milliseconds to the first token, with the first 200 tokens of 230 cached or not."""
    engine, rng = load(), random.Random(1)
    cold, warm = [], []
    for i in range(repeats + 1):
        prefix = tokens(rng, PREFIX)
        for kind, times in (("cold", cold), ("warm", warm)):
            engine.add(request(f"{kind}{i}", prefix + tokens(rng, SUFFIX), 1))
            seconds, _ = drain(engine, [])
            times.append(1000 * seconds)
    return {
        "ttft_ms_cold_prefix": statistics.median(cold[1:]),
        "ttft_ms_cached_prefix": statistics.median(warm[1:]),
    }


def load(**options: Any) -> TorchEngine:
    """The real model, for `NUM_SLOTS` requests at once unless told otherwise."""
    return TorchEngine.load(real_model().path, **{"max_num_seqs": NUM_SLOTS, **options})


def measure(num_requests: int, repeats: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    figures = policies(num_requests, repeats) | decode_steps() | prefix_cache(repeats)
    static, continuous = (figures[f"{p}_tokens_per_second"] for p in (Policy.STATIC, "continuous"))
    ratios = {
        "continuous_over_static_tokens_per_second": continuous / static,
        "batch_16_over_batch_1_tokens_per_second": figures["decode_tokens_per_second_batch_16"]
        / figures["decode_tokens_per_second_batch_1"],
        "cached_over_cold_prefix_ttft": figures["ttft_ms_cached_prefix"]
        / figures["ttft_ms_cold_prefix"],
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    machine += f" on {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return {"name": "engine", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    answer = measure(options.num_requests, options.repeats)
    print(answer["machine"])
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:45} {value:9.2f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
