"""What sharing a device costs: ``python -m tests.benchmarks.sharing [--repeats 40] [--json FILE]``.

Real SmolLM2-135M engines in one process, as a worker has them: float32 and int8, one KV pool.

switch   milliseconds of a decode step after a step of the same model, and after one of the other;
         what the second is longer is the cost of a switch. In the order a a b b a a b b ..., both
         kinds alternate and see the same contexts. The step is timed as the worker sees it, with
         the choice of whose turn it is. Other work on the machine only ever makes a step longer, by
         more than a switch: so what is compared is the tenth of the steps that was disturbed
         least (`switch_ms`); the medians stand beside it (`switch_median_ms`).
small    the same with two engines of a model so small that a step takes a fraction of a
         millisecond, in which a switch cannot hide.
swap     leaving the device with four unfinished requests and coming back: nothing is read,
         converted or packed. Beside it what loading the same engine takes, from files in the page
         cache, without the checksum, tokenizer and process that a start of a replica has besides.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from gpuagent.agent.turns import Turns
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, SamplingParams
from gpuagent.engine.shared_pool import SharedPool
from tests.engine.real_model import real_model
from tests.engine.tiny_model import wide_tiny_model

MODELS = {"float32": "none", "int8": "int8"}
KV_BYTES, KV_LIMIT_BYTES = 128 << 20, 512 << 20
NUM_REQUESTS = 4
Figures = dict[str, float]


def load(quantization: str, pool: SharedPool, path: Path | None = None) -> TorchEngine:
    engine = TorchEngine.load(
        path or real_model().path,
        kv_bytes=KV_BYTES,
        kv_limit_bytes=KV_LIMIT_BYTES,
        quantization=quantization,
    )
    assert engine.lease is not None
    pool.join(engine.lease)
    return engine


def ask(name: str, num_prompt: int = 120, max_tokens: int = 1500) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tuple(range(100, 100 + num_prompt)), sampling)


def switching(engines: dict[str, TorchEngine], repeats: int) -> Figures:
    """A step after a step of the same model and of the other, in milliseconds."""
    turns, working = Turns(), dict.fromkeys(engines, 1.0)
    for name, engine in engines.items():
        turns.join(name, 0, "normal")
        _prompt(engine)
    times: dict[tuple[str, bool], list[float]] = {
        (n, s): [] for n in engines for s in (False, True)
    }
    last, order = "", [name for name in engines for _ in range(2)] * repeats
    for name in order:
        started = time.perf_counter()
        turns.choose(working)
        engines[name].step()
        turns.charge(name, time.perf_counter() - started)
        times[name, name != last].append(1000 * (time.perf_counter() - started))
        last = name
        if not engines[name].has_work():
            _prompt(engines[name])
    figures = {}
    for name, engine in engines.items():
        engine.cancel("switch")
        engine.step()
        kinds = times[name, False], times[name, True]
        same, other = (statistics.quantiles(kind, n=10)[0] for kind in kinds)
        figures[f"{name}_step_ms"] = same
        figures[f"{name}_switch_ms"] = other - same
        same, other = map(statistics.median, kinds)
        figures[f"{name}_step_median_ms"] = same
        figures[f"{name}_switch_median_ms"] = other - same
    return figures


def _prompt(engine: TorchEngine) -> None:
    """Let it decode from now on."""
    engine.add(ask("switch"))
    engine.step()


def swapping(engines: dict[str, TorchEngine], repeats: int) -> Figures:
    """Milliseconds out and in with unfinished requests, and of loading, medians."""
    figures = {}
    for name, engine in engines.items():
        for i in range(NUM_REQUESTS):
            engine.add(ask(f"r{i}", 100 + 90 * i))
        for _ in range(10):
            engine.step()
        out, back, load_ms = [], [], []
        for _ in range(repeats):
            out.append(_milliseconds(engine.park))
            back.append(_milliseconds(engine.unpark))
            engine.step()
        for i in range(NUM_REQUESTS):
            engine.cancel(f"r{i}")
        engine.step()
        for _ in range(3):
            spare = SharedPool()
            load_ms.append(_milliseconds(lambda: load(MODELS[name], spare)))  # noqa: B023
        figures[f"{name}_swap_out_ms"] = statistics.median(out)
        figures[f"{name}_swap_in_ms"] = statistics.median(back)
        figures[f"{name}_load_ms"] = statistics.median(load_ms)
    return figures


def _milliseconds(action: Any) -> float:
    started = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started)


def measure(repeats: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    pool = SharedPool()
    engines = {name: load(quantization, pool) for name, quantization in MODELS.items()}
    figures = switching(engines, repeats)
    small = {name: load("none", pool, wide_tiny_model()) for name in ("small", "other_small")}
    figures |= switching(small, 4 * repeats)
    figures |= swapping(engines, min(repeats, 20))
    ratios = {
        f"{name}_load_over_swap_in": figures[f"{name}_load_ms"] / figures[f"{name}_swap_in_ms"]
        for name in MODELS
    }
    ratios |= {
        f"{name}_step_after_another_over_after_itself": 1
        + figures[f"{name}_switch_ms"] / figures[f"{name}_step_ms"]
        for name in (*MODELS, *small)
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"name": "sharing", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = measure(options.repeats)
    print(answer["machine"])
    for part in ("ratios", "figures"):
        for name, value in answer[part].items():
            print(f"{name:48} {value:12.4f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
