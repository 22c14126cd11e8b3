"""Quality, memory and speed of each number format that a version may choose, against float32.

    python -m tests.benchmarks.engine_precisions --trace FILE [--only NAME ...] [--num-prompts 24]
                                                 [--repeats 3] [--json FILE]

The real SmolLM2-135M on the English prompts of a trace (JSON lines with `prompt_ids`), the same
24 of at least 100 tokens that `tests.benchmarks.engine` measures int8 on. Perplexity is that of
the prompts over float32's; agreement is how often the most likely next token is float32's. Speed
is a decode step at 240 tokens of context, alone and 16 at once, formats taking turns.

The AWQ checkpoint is written by `tests.models.awq_export` with groups of 64, because 576 inputs
have no whole groups of 128; without AWQ's search for scales, so its quality is the least that the
format gives.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from gpuagent.engine.engine import TorchEngine
from tests.benchmarks.engine import read_prompts, read_trace, request, tokens
from tests.engine.real_model import real_model
from tests.models.awq_export import export

GROUP = 64
CONTEXT = 240
FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "float32_kv_int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8_kv_float32": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "int8_weight_only": {"quantization": "int8-weight-only"},
    "awq_int4": {"quantization": "awq-int4"},
    "awq_int4_bf16": {"quantization": "awq-int4", "dtype": "bfloat16"},
    "bf16": {"dtype": "bfloat16"},
}


def load(name: str, awq: Path, **more: Any) -> TorchEngine:
    """The real model in one of the formats."""
    folder = awq if name.startswith("awq") else real_model().path
    return TorchEngine.load(folder, kv_bytes=160 << 20, **{**FORMATS[name], **more})


def quality(name: str, awq: Path, prompts: list[tuple[int, ...]]) -> tuple[float, list[int]]:
    """Mean loss and most likely tokens, and the engine is gone again."""
    return read_prompts(load(name, awq, max_batch_tokens=512), prompts)


def decode_ms(engine: TorchEngine, batch: int, seed: int) -> float:
    """Median milliseconds of a step in which `batch` requests decode."""
    rng = random.Random(seed)
    for i in range(batch):
        engine.add(request(f"{seed}-{i}", tokens(rng, CONTEXT), 12 + batch))
    times = []
    while engine.has_work():
        before = engine.stats()
        engine.step()
        now = engine.stats()
        if now.num_decode_tokens - before.num_decode_tokens == batch == now.num_running:
            times.append(1000 * now.last_step_seconds)
    return statistics.median(times)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    names = options.only or list(FORMATS)
    rows = [prompt[:512] for prompt, _ in read_trace(options.trace) if len(prompt) >= 100]
    rows = rows[: options.num_prompts]
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {"num_tokens": sum(map(len, rows))}
    with tempfile.TemporaryDirectory() as folder:
        awq = export(real_model().path, Path(folder) / "awq", GROUP)
        exact = quality("float32", awq, rows)
        for name in names:
            loss, best = quality(name, awq, rows)
            same = [a == b for a, b in zip(exact[1], best, strict=True)]
            ratios[f"{name}_perplexity_vs_float32"] = math.exp(loss - exact[0])
            ratios[f"{name}_top1_vs_float32"] = sum(same) / len(same)
            print(f"{name}: perplexity x {math.exp(loss - exact[0]):.4f}", flush=True)
        engines = {name: load(name, awq, max_num_seqs=16) for name in names}
        for batch in (1, 16) if options.repeats else ():
            times: dict[str, list[float]] = {name: [] for name in names}
            for repeat in range(options.repeats):
                for name in random.Random(repeat).sample(names, len(names)):
                    times[name].append(decode_ms(engines[name], batch, 100 * batch + repeat))
            for name, each in times.items():
                figures[f"{name}_decode_ms_batch_{batch}"] = statistics.median(each)
    for name, engine in engines.items():
        figures[f"{name}_weights_mb"] = engine.stats().weights_bytes / 1e6
        figures[f"{name}_kv_bytes_per_token"] = engine.stats().kv_bytes / (
            (engine.stats().num_blocks + 1) * engine.stats().block_size
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    machine += f" on {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return {"name": "engine_precisions", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=FORMATS)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = measure(options)
    print(answer["machine"])
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:45} {value:9.4f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
