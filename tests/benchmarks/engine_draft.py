"""What a draft model gains for one request at a time, and that it changes nothing.

    python -m tests.benchmarks.engine_draft [--json FILE] [--repeats 3]

The real SmolLM2-135M in float32 as the target, with two drafts:

    itself    the same checkpoint, rounded to int8 when it is loaded as a draft. A real pair: it
              guesses well and costs a third of its target.
    half      its first 15 of 30 layers. Not a model that anybody trained: a check of the mechanism
              only, with guesses that are nearly always wrong.

Greedy chat prompts, decoding time with the prompt cached, with and without guesses in turns,
medians of the repeats. The tokens must be the same.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpuagent.engine.engine import TorchEngine
from tests.benchmarks.engine_speculation import drain, extraction_prompts, request
from tests.engine.real_model import real_model

NUM_LAYERS = 15
NUM_TOKENS = 64


def half(folder: Path) -> Path:
    """The target without its last layers."""
    source = real_model().path
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".")[2]) < NUM_LAYERS
    }
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    return folder


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        drafts = {"itself": real_model().path, "half": half(Path(folder) / "half")}
        engines = {"none": TorchEngine.load(real_model().path)}
        for name, path in drafts.items():
            engines[name] = TorchEngine.load(
                real_model().path, speculation="draft", draft_path=path
            )
    times: dict[str, list[float]] = {name: [] for name in engines}
    num_same = num_tokens = 0
    for repeat, prompt in enumerate(extraction_prompts(options.repeats + 1)):
        found = {}
        for name in random.Random(repeat).sample(list(engines), len(engines)):
            seconds, tokens = drain(engines[name], [request(f"{repeat}", prompt, NUM_TOKENS)])
            found[name] = tokens[f"{repeat}"]
            times[name] += [seconds] if repeat else []
        for name in drafts:
            num_tokens += NUM_TOKENS
            num_same += sum(a == b for a, b in zip(found["none"], found[name], strict=True))
    ratios: dict[str, float] = {"tokens_unchanged": num_same / num_tokens}
    figures: dict[str, float] = {}
    for name in drafts:
        stats = engines[name].stats()
        ratios[f"{name}_speed_up"] = statistics.median(times["none"]) / statistics.median(
            times[name]
        )
        figures[f"{name}_acceptance"] = stats.spec_decode_num_accepted_tokens / max(
            stats.spec_decode_num_draft_tokens, 1
        )
        figures[f"{name}_drafts"] = stats.spec_decode_num_drafts
        figures[f"{name}_weights_mb"] = stats.weights_bytes / 1e6
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return {"name": "engine_draft", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
