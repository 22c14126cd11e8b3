"""What two workers do for those who wait: prefill and decode apart against one for everything.

    python -m tests.benchmarks.disaggregation [--json FILE] [--repeats 3]

The real SmolLM2-135M in int8 behind a real agent on this machine's threads: all of them for the
one replica, half for each worker of the other. Four clients read long answers while every half
second somebody comes with a prompt of 700 tokens and wants eight tokens. Of the readers the gap
between two tokens is measured, of the others the time to the first token; both arrangements take
turns. A prompt that is computed apart has only half of the threads, so on a machine as small as
this it may take longer; what is bought with that are the readers' gaps.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from gpuagent.wire.messages import ReplicaSpec, Sampling
from tests.agent.harness import GIB, Agent, Control, control, spec
from tests.engine.real_model import SMOLLM2, cache_root, real_model
from tests.natsserver import nats_server

NUM_READERS = 4
NUM_PROMPTS = 12
PROMPT_TOKENS = 700
INTERVAL_S = 0.5
ARRANGEMENTS = {"together": "none", "apart": "prefill-decode"}


def tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    """Random ordinary tokens."""
    return tuple(rng.randrange(100, 49152) for _ in range(num))


async def load(plane: Control, name: str, seed: int) -> tuple[list[float], list[float]]:
    """Seconds between the readers' tokens while prompts come, and to the prompts' first tokens."""
    rng = random.Random(seed)
    endless = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
    short = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    to_it = {"replica_id": name}
    readers = [
        await plane.generate("n1", prompt_token_ids=tokens(rng, 60), sampling=endless, **to_it)
        for _ in range(NUM_READERS)
    ]
    for reader in readers:
        await plane.started(reader, 3)
    begun = asyncio.get_running_loop().time()
    first: list[float] = []
    for _ in range(NUM_PROMPTS):
        asked = asyncio.get_running_loop().time()
        prompt = tokens(rng, PROMPT_TOKENS)
        late = await plane.generate("n1", prompt_token_ids=prompt, sampling=short, **to_it)
        await asyncio.sleep(INTERVAL_S)
        await plane.started(late)
        first.append(plane.arrived_at[late][0] - asked)
    ended = asyncio.get_running_loop().time()
    await plane.cancel("n1", *readers)
    for reader in readers:
        await plane.terminal(reader)
    gaps = [
        later - earlier
        for reader in readers
        for earlier, later in pairwise(plane.arrived_at[reader])
        if begun <= earlier and later <= ended
    ]
    return gaps, first


async def measure(repeats: int) -> dict[str, object]:
    """Everything, as `--json` writes it."""
    real_model()  # fetched before anything is timed
    gaps: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    first: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    options = ("--devices", "cpu:4GiB", "--model-cache", str(cache_root()))
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        agent = Agent(server, Path(folder), "n1", *options)
        agent.start()
        async with control(server) as plane:
            for turn in range(2 * repeats):
                name = list(ARRANGEMENTS)[turn % 2]
                placed = replica(name, turn)
                await plane.place("n1", placed, generation=turn + 1)
                await plane.replica("n1", "ready", placed.replica_id, deadline_s=120)
                found = await load(plane, placed.replica_id, turn)
                gaps[name] += found[0]
                first[name] += found[1]
        agent.stop()
    figures = {}
    for name in ARRANGEMENTS:
        figures[f"{name}_itl_ms_p50"] = 1000 * statistics.median(gaps[name])
        figures[f"{name}_itl_ms_p99"] = 1000 * percentile(gaps[name], 0.99)
        figures[f"{name}_ttft_ms_p50"] = 1000 * statistics.median(first[name])
        figures[f"{name}_ttft_ms_p99"] = 1000 * percentile(first[name], 0.99)
        figures[f"{name}_reader_tokens"] = len(gaps[name])
    names = ("itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_p99")
    ratios = {f"apart_{n}": figures[f"apart_{n}"] / figures[f"together_{n}"] for n in names}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"name": "disaggregation", "machine": machine, "ratios": ratios, "figures": figures}


def replica(name: str, turn: int) -> ReplicaSpec:
    """The model in one of the arrangements, under an id of its own."""
    return spec(
        f"{name}.1.g{turn}.0",
        source=SMOLLM2,
        memory_bytes=3 * GIB,
        max_batch=16,
        quantization="int8",
        disaggregation=ARRANGEMENTS[name],
    )


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = asyncio.run(measure(options.repeats))
    print(answer["machine"])
    for part in ("ratios", "figures"):
        for name, value in answer[part].items():  # type: ignore[attr-defined]
            print(f"{name:40} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
