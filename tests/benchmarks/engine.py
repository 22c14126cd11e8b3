"""Continuous against static batching inside this engine, and against OpenVINO GenAI if it is there.

    python -m tests.benchmarks.engine [--trace FILE] [--precision fp32|int8] [--num-requests 40]
                                      [--concurrency 16] [--peers-home DIR] [--json FILE]

A trace is a file of JSON lines with `prompt_ids` and `max_tokens`; without one, random prompts
of 16 to 256 tokens and outputs of 4 to 160, log-normal, are used. A closed loop keeps
`--concurrency` requests in progress. The static baseline is a kind one: members of a batch that
have finished cost nothing, where a padded batch would go on computing them. The prompts of each
run begin with another token, so that prefix caches help within a run and not across runs.
Policies and peers take turns, medians are printed.

With int8, quality is measured against float32 in the same process: perplexity of the prompts, and
how often the most likely next token is the same (`int8_top1_vs_fp32`).

A peer runs in the Python of `DIR/ov`, with models at `DIR/smollm2-ov-fp32` and `-ov-int8`, as
a child process that answers one line per run, so that it can take turns with this engine.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from gpuagent.engine.batch import Work
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, SamplingParams
from gpuagent.engine.scheduler import Policy
from tests.engine.real_model import real_model

QUANTIZATIONS = {"fp32": "none", "int8": "int8"}
VOCAB = 49152
CHUNK = 128
PREFIX, SUFFIX = 200, 30
Prompt = tuple[tuple[int, ...], int]  # token ids, forced output length


def built_in_trace(num: int) -> list[Prompt]:
    """Random prompts without shared prefixes."""
    rng = random.Random(0)

    def length(median: float, least: int, most: int) -> int:
        return min(max(round(median * rng.lognormvariate(0.0, 0.9)), least), most)

    return [(tokens(rng, length(80, 16, 256)), length(40, 4, 160)) for _ in range(num)]


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

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


def closed_loop(engine: TorchEngine, trace: list[Prompt], concurrency: int) -> Run:
    """All requests of the trace, a new one as soon as one ends."""
    waiting = list(enumerate(trace))
    run, begun, busy = Run(), {}, engine.stats().busy_seconds
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
    run.busy_seconds = engine.stats().busy_seconds - busy
    return run


class Peer:
    """OpenVINO GenAI's continuous batching in a child process of its own Python."""

    def __init__(self, home: Path, precision: str) -> None:
        command = [home / "ov/bin/python", Path(__file__).with_name("peer_openvino.py")]
        self._process = subprocess.Popen(
            [*map(str, command), str(home / f"smollm2-ov-{precision}"), precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, trace: list[Prompt], concurrency: int) -> Run:
        """One pass over the trace."""
        assert self._process.stdin and self._process.stdout
        question = {"trace": trace, "concurrency": concurrency}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the child."""
        self._process.communicate(timeout=30)


def take_turns(options: argparse.Namespace, trace: list[Prompt]) -> dict[str, list[Run]]:
    """Runs by contestant; the order is shuffled each time."""
    engines = {p.value: load(options, policy=p) for p in Policy}
    peer = Peer(options.peers_home, options.precision) if options.peers_home else None
    contestants = [*engines, *(["openvino"] if peer else [])]
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for repeat in range(options.repeats + 1):
        for name in random.Random(repeat).sample(contestants, len(contestants)):
            part = trace if repeat else trace[:4]  # the first is to warm up
            first = 100 + repeat  # another first token: nothing is left over from the last run
            part = [((first, *prompt[1:]), num) for prompt, num in part]
            if name == "openvino" and peer:
                run = peer.run(part, options.concurrency)
            else:
                run = closed_loop(engines[name], part, options.concurrency)
            runs[name] += [run] if repeat else []
    if peer:
        peer.close()
    return runs


def decode_steps(options: argparse.Namespace) -> dict[str, float]:
    """A decode step at about 240 tokens of context: milliseconds, and what they are spent on."""
    engine, rng, found = load(options, max_num_seqs=32), random.Random(0), {}
    for batch in (1, 8, 16, 32):
        for i in range(batch):
            engine.add(request(f"{batch}-{i}", tokens(rng, 240), 17 + batch))
        rows = []
        while engine.has_work():
            before = engine.stats(), parts(engine)
            engine.step()
            now = engine.stats()
            if now.num_decode_tokens - before[0].num_decode_tokens == batch == now.num_running:
                spent = [b - a for a, b in zip(before[1], parts(engine), strict=True)]
                rows.append((now.last_step_seconds, *spent))
        step, products, attention, rest = (statistics.median(c) for c in zip(*rows, strict=True))
        found |= {
            f"decode_tokens_per_second_batch_{batch}": batch / step,
            f"decode_step_ms_batch_{batch}": 1000 * step,
            f"decode_step_ms_batch_{batch}_products": 1000 * products,
            f"decode_step_ms_batch_{batch}_attention": 1000 * attention,
            f"decode_step_ms_batch_{batch}_other_kernels": 1000 * rest,
            f"decode_step_ms_batch_{batch}_outside": 1000 * (step - products - attention - rest),
        }
    return found


def parts(engine: TorchEngine) -> tuple[float, ...]:
    """Seconds so far in products, attention and other kernels; zeros for torch."""
    return getattr(engine.executor, "seconds", (0.0, 0.0, 0.0))


def prefix_cache(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds to the first token, with the first 200 tokens of 230 cached or not."""
    engine, rng = load(options), random.Random(1)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for i in range(options.repeats + 1):
        prefix = tokens(rng, PREFIX)
        for kind, found in times.items():
            engine.add(request(f"{kind}{i}", prefix + tokens(rng, SUFFIX), 1))
            engine.step()
            found.append(1000 * engine.stats().last_step_seconds)
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


def quality(options: argparse.Namespace, trace: list[Prompt]) -> dict[str, float]:
    """int8 against float32 on the trace's longer prompts."""
    prompts = [prompt[:512] for prompt, _ in trace if len(prompt) >= 100][:24]
    fp32, int8 = (
        read_prompts(load(options, quantization=q), prompts) for q in QUANTIZATIONS.values()
    )
    same = [a == b for a, b in zip(fp32[1], int8[1], strict=True)]
    return {
        "int8_perplexity_vs_fp32": math.exp(int8[0] - fp32[0]),
        "int8_top1_vs_fp32": sum(same) / len(same),
    }


def load(options: argparse.Namespace, **more: Any) -> TorchEngine:
    """The real model in the precision asked for."""
    quantization = QUANTIZATIONS[options.precision]
    defaults = {"max_num_seqs": options.concurrency, "quantization": quantization}
    return TorchEngine.load(real_model().path, **{**defaults, "kv_bytes": 256 << 20, **more})


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def summarise(runs: dict[str, list[Run]], precision: str) -> tuple[dict[str, float], ...]:
    """Ratios and figures of the contestants."""
    figures = {}
    for name, each in runs.items():
        ttft = [seconds for run in each for seconds in run.ttft]
        figures[f"{name}_tokens_per_second"] = statistics.median(run.rate for run in each)
        figures[f"{name}_ttft_p50_s"] = percentile(ttft, 0.5)
        figures[f"{name}_ttft_p99_s"] = percentile(ttft, 0.99)
    ours = runs[Policy.CONTINUOUS]
    figures["busy_fraction"] = statistics.median(run.busy_seconds / run.seconds for run in ours)
    rate = figures["continuous_tokens_per_second"]
    ratios = {"continuous_vs_static": rate / figures["static_tokens_per_second"]}
    if "openvino" in runs:
        ratios[f"{precision}_vs_openvino"] = rate / figures["openvino_tokens_per_second"]
    return ratios, figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    trace = read_trace(options.trace) if options.trace else built_in_trace(options.num_requests)
    trace = trace[: options.num_requests]
    ratios, figures = summarise(take_turns(options, trace), options.precision)
    figures["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not options.only_trace:
        figures |= decode_steps(options) | prefix_cache(options)
        ratios |= quality(options, trace) if options.precision == "int8" else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    machine += f" on {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return {"name": "engine", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--precision", choices=QUANTIZATIONS, default="fp32")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-home", type=Path)
    parser.add_argument("--only-trace", action="store_true", help="no steps, cache and quality")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = measure(options)
    print(answer["machine"])
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:45} {value:9.3f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
