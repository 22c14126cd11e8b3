"""Continuous against static batching inside this engine, and against other engines if installed.

    python -m tests.benchmarks.engine [--trace FILE|heavy-tailed] [--precision fp32|int8]
                                      [--num-requests 40] [--concurrency 16] [--repeats 3]
                                      [--peers-home DIR] [--peers openvino,vllm,hf_cb]
                                      [--only-trace | --no-trace] [--json FILE]

A trace is a file of JSON lines with `prompt_ids` and `max_tokens`; without one, random prompts
of 16 to 256 tokens and outputs of 4 to 160, log-normal, are used, and `heavy-tailed` has outputs
of 8 to 768 from a Pareto distribution. A closed loop keeps `--concurrency` requests in progress.
The prompts of each run begin with another token, so that prefix caches help within a run and not
across runs. Policies and peers take turns, medians are printed.

There are two static baselines. `static` is the engine's policy: members of a batch that have
ended cost nothing, and the next batch begins when the last has ended. `padded_static` computes
what a padded batch computes, as `generate` of transformers does: everybody's prompt and output as
long as the longest of the batch. Both run on the same kernels as `continuous`. `guessing` is
`continuous` with n-gram speculation, which gives the same tokens and switches itself off where it
does not pay; its ratios to the peers are printed beside those of `continuous`.

`tokens_per_step` is output tokens over steps: how full the batch was.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpuagent.engine.scheduler import Policy
from tests.benchmarks.engine_parts import ceilings, decode_steps, load, prefix_cache, quality
from tests.benchmarks.engine_peers import KINDS, start_peers
from tests.benchmarks.engine_runs import Prompt, Run, closed_loop, find_trace, padded_batches

QUANTIZATIONS = {"fp32": "none", "int8": "int8"}
KV_BYTES = {"fp32": 512 << 20, "int8": 256 << 20}
PADDED = "padded_static"
GUESSING = "guessing"
Contestant = Callable[[list[Prompt], int], Run]


def contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    """One engine's weights and pool under each policy; a run begins with nothing cached."""
    loaded = load(
        QUANTIZATIONS[options.precision],
        max_num_seqs=options.concurrency,
        kv_bytes=KV_BYTES[options.precision],
    )

    def under(policy: Policy) -> Contestant:
        return lambda trace, concurrency: closed_loop(
            loaded.emptied(policy=policy), trace, concurrency
        )

    def padded(trace: list[Prompt], concurrency: int) -> Run:
        engine = loaded.emptied(policy=Policy.STATIC, prefix_caching=False)
        return padded_batches(engine, trace, concurrency)

    def guessing(trace: list[Prompt], concurrency: int) -> Run:
        return closed_loop(loaded.emptied(guesses=True), trace, concurrency)

    policies = {policy.value: under(policy) for policy in Policy}
    return {**policies, PADDED: padded, GUESSING: guessing}


def take_turns(options: argparse.Namespace, trace: list[Prompt]) -> dict[str, list[Run]]:
    """Runs by contestant; the order is shuffled each time."""
    peers = start_peers(options.peers_home, options.peers.split(","), options.precision)
    everybody = contestants(options) | {name: peer.run for name, peer in peers.items()}
    wanted = [name for name in everybody if not options.only or name in options.only.split(",")]
    runs: dict[str, list[Run]] = {name: [] for name in wanted}
    for repeat in range(options.repeats + 1):
        for name in random.Random(repeat).sample(wanted, len(wanted)):
            part = trace if repeat else trace[:4]  # the first is to warm up
            first = 100 + repeat  # another first token: nothing is left over from the last run
            part = [((first, *prompt[1:]), num) for prompt, num in part]
            run = everybody[name](part, options.concurrency)
            runs[name] += [run] if repeat else []
            print(f"# {name} {run.rate:.1f} tok/s in {run.seconds:.1f} s", flush=True)
    for peer in peers.values():
        peer.close()
    return runs


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def summarise(runs: dict[str, list[Run]], precision: str) -> tuple[dict[str, float], ...]:
    """Ratios and figures of the contestants."""
    figures: dict[str, float] = {}
    for name, each in runs.items():
        figures[f"{name}_tokens_per_second"] = statistics.median(run.rate for run in each)
        if ttft := [seconds for run in each for seconds in run.ttft]:
            figures[f"{name}_ttft_p50_s"] = percentile(ttft, 0.5)
            figures[f"{name}_ttft_p99_s"] = percentile(ttft, 0.99)
        if num_steps := sum(run.num_steps for run in each):
            figures[f"{name}_tokens_per_step"] = sum(run.num_tokens for run in each) / num_steps
    ours = runs[Policy.CONTINUOUS]
    figures["busy_fraction"] = statistics.median(run.busy_seconds / run.seconds for run in ours)
    rate, ratios = figures["continuous_tokens_per_second"], {}
    for name in runs.keys() - {"continuous"}:
        theirs = figures[f"{name}_tokens_per_second"]
        kind = precision if name in KINDS else "continuous"
        ratios[f"{kind}_vs_{name}"] = rate / theirs
        if name in KINDS and GUESSING in runs:
            ratios[f"{precision}_guessing_vs_{name}"] = (
                figures[f"{GUESSING}_tokens_per_second"] / theirs
            )
    for part in ("p50", "p99"):
        if f"static_ttft_{part}_s" in figures:
            ours_part, their_part = (
                figures[f"{n}_ttft_{part}_s"] for n in ("continuous", "static")
            )
            ratios[f"ttft_{part}_continuous_over_static"] = ours_part / their_part
    return dict(sorted(ratios.items())), figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    trace = find_trace(options.trace, options.num_requests)
    quantization = QUANTIZATIONS[options.precision]
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    if not options.no_trace:
        ratios, figures = summarise(take_turns(options, trace), options.precision)
        figures["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not options.only_trace:
        figures |= ceilings() | decode_steps(quantization)
        prefix = prefix_cache(quantization, options.repeats)
        ratios["ttft_cached_over_cold_prefix"] = (
            prefix["ttft_ms_cached_prefix"] / prefix["ttft_ms_cold_prefix"]
        )
        more, sizes = quality(trace)
        ratios, figures = ratios | more, figures | prefix | sizes
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    machine += f" on {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return {"name": "engine", "machine": machine, "ratios": ratios, "figures": figures}


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", help="a file, or heavy-tailed")
    parser.add_argument("--precision", choices=QUANTIZATIONS, default="fp32")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-home", type=Path)
    parser.add_argument("--peers", default=",".join(KINDS), help="which of the installed ones")
    parser.add_argument("--only", help="contestants by name, continuous among them")
    parser.add_argument("--only-trace", action="store_true", help="no steps, cache and quality")
    parser.add_argument("--no-trace", action="store_true", help="steps, cache and quality alone")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write if asked."""
    options = parsed()
    answer = measure(options)
    print(answer["machine"])
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:45} {value:9.3f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
