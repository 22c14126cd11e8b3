"""Several versions of a real model on a device that holds only some of them.

    python -m tests.benchmarks.residency [--minutes 1] [--repeats 15] [--fleet] [--json FILE]

A real agent, its worker and a real bus; SmolLM2-135M as three versions (float32; int8; float32 with
a quarter of the context), on one CPU device. Parts:

starts  On a device for one: time to the first token of a short prompt, by where the version was:
        `resident`; in the `host` tier (another version had the device in between); in `storage`
        (no room in the host: verified, read, packed again; the worker process runs); `process`:
        nothing runs, so an interpreter and torch are started too, and the plan has to arrive.
        Files are in the page cache, as after a download.
mixed   On a device for int8 and one of the others, for `--minutes`: four clients that each ask for
        a random version, the next when the last answer is complete. Every answer must be the one
        that the version gave first; also memory and KV blocks before and after.
fleet   With `--fleet`, and instead of the others: the whole product and an embedding model among
        them (`residency_fleet`); ends with an error if anything was lost, changed or left behind.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from gpuagent.wire.messages import ReplicaSpec, Sampling
from tests.agent.harness import Agent, Control, control, spec
from tests.benchmarks import residency_fleet
from tests.engine.real_model import SMOLLM2, cache_root, real_model
from tests.natsserver import nats_server

MIB = 1 << 20
ONE, TWO = "cpu:1150MiB", "cpu:1450MiB"  # how many versions a device holds
VERSIONS: dict[str, dict[str, Any]] = {
    "float32": {"memory_bytes": 1100 * MIB, "max_model_len": 2048},
    "int8": {"memory_bytes": 600 * MIB, "max_model_len": 2048, "quantization": "int8"},
    "short": {"memory_bytes": 900 * MIB, "max_model_len": 512},
}
PAIR = ("float32", "short")  # the two that do not fit together
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Say hello in Spanish.")
NUM_CLIENTS = 4
Figures = dict[str, float]


def replica(name: str) -> ReplicaSpec:
    return spec(
        f"{name}.1.g1.0", version_id=f"{name}@1", model=name, source=SMOLLM2, max_batch=4,
        swap_bytes=32 * MIB, **VERSIONS[name],
    )  # fmt: skip


def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(real_model().path / "tokenizer.json"))
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tuple(tokenizer.encode(turn.format(question)).ids) for question in QUESTIONS]


@asynccontextmanager
async def node(device: str, *options: str) -> AsyncIterator[tuple[Control, Agent]]:
    """An agent with all versions placed."""
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        common = ("--devices", device, "--model-cache", str(cache_root()))
        agent = Agent(server, Path(folder), "n1", *common, *options)
        agent.start()
        try:
            async with control(server) as plane:
                yield plane, agent
        finally:
            agent.stop()


async def ask(plane: Control, name: str, prompt: tuple[int, ...], max_tokens: int) -> str:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return await plane.generate(
        "n1", replica_id=f"{name}.1.g1.0", prompt_token_ids=prompt, sampling=sampling
    )


async def first_token(plane: Control, name: str, prompt: tuple[int, ...]) -> float:
    """Milliseconds from the request to its first token."""
    started = time.monotonic()
    request_id = await ask(plane, name, prompt, 2)
    last = await plane.terminal(request_id, 120)
    assert last.finish_reason == "length", last
    return 1000 * (plane.arrived_at[request_id][0] - started)


async def settled(plane: Control, name: str, tier: str) -> None:
    """Wait until the node says that the version is in that tier."""
    for _ in range(600):
        observed = await plane.observed("n1")
        found = {r.replica_id: r.tier for r in observed.replicas} if observed else {}
        if found.get(f"{name}.1.g1.0") == tier:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} is not {tier}: {found}")


async def starts(repeats: int) -> dict[str, list[float]]:
    """Times to the first token by tier; the prompt is never in the prefix cache."""
    found: dict[str, list[float]] = {"process": [], "storage": [], "host": [], "resident": []}
    prompt = prompts()[0]
    for tier, options in (("host", ()), ("storage", ("--host-memory", "1MiB"))):
        async with node(ONE, *options) as (plane, _):
            started = time.monotonic()
            await plane.place("n1", *(replica(name) for name in PAIR))
            await plane.replica("n1", "ready", "float32.1.g1.0", 300)
            await first_token(plane, "float32", prompt)
            found["process"].append(1000 * (time.monotonic() - started))
            await first_token(plane, "short", prompt)
            for turn in range(repeats if tier == "host" else max(repeats // 2, 3)):
                for name in PAIR:
                    await settled(plane, name, tier)
                    found[tier].append(await first_token(plane, name, (turn, *prompt)))
                    await settled(plane, name, "resident")
                    again = await first_token(plane, name, (turn, 1, *prompt))
                    found["resident"] += [again] if tier == "host" else []
    return found


async def client(
    plane: Control, until: float, seed: int, known: dict[tuple[str, int], str], done: Counter[str]
) -> None:
    """Ask again and again; every answer must be the one that was given first."""
    rng, asked = random.Random(seed), prompts()
    while time.monotonic() < until:
        name, number = rng.choice(sorted(VERSIONS)), rng.randrange(len(asked))
        started = time.monotonic()
        request_id = await ask(plane, name, asked[number], 24)
        last = await plane.terminal(request_id, 120)
        done[last.finish_reason if not last.error_code else last.error_code] += 1
        done["longest_ms"] = max(done["longest_ms"], int(1000 * (time.monotonic() - started)))
        text = plane.text(request_id)
        done["changed"] += known.setdefault((name, number), text) != text


def resident_mib(agent: Agent) -> float:
    return (
        float(sum(p.memory_info().rss for p in [psutil.Process(agent.pid), *agent.workers()])) / MIB
    )


async def mixed(minutes: float) -> Figures:
    """Figures of the mixed load."""
    async with node(TWO, "--turn-seconds", "2") as (plane, agent):
        await plane.place("n1", *map(replica, VERSIONS))
        known: dict[tuple[str, int], str] = {}
        done: Counter[str] = Counter()
        await plane.replica("n1", "ready", "float32.1.g1.0", 300)
        warm_up = time.monotonic() + 20  # all have been loaded, and have used their workspace
        await asyncio.gather(*(client(plane, warm_up, n, known, done) for n in range(NUM_CLIENTS)))
        before, done = resident_mib(agent), Counter()
        until = time.monotonic() + 60 * minutes
        await asyncio.gather(
            *(client(plane, until, 10 + n, known, done) for n in range(NUM_CLIENTS))
        )
        await asyncio.sleep(5)  # two reports
        loads = [plane.load("n1", f"{name}.1.g1.0") for name in VERSIONS]
        held = sum(one.num_running + one.num_waiting + one.num_held for one in loads if one)
        device = plane.telemetry["n1"].devices[0]
        swaps, lost = agent.log.count("replica_swapped"), agent.log.count("worker_ended")
        after = resident_mib(agent)
    errors = {n: c for n, c in done.items() if n not in ("length", "longest_ms", "changed")}
    return {
        "mixed_answers": done["length"],
        "mixed_errors": sum(errors.values()),
        "mixed_answers_changed": done["changed"],
        "mixed_longest_ms": done["longest_ms"],
        "mixed_swaps": swaps,
        "mixed_workers_lost": lost,
        "mixed_unfinished": held,
        "mixed_kv_held_bytes": device.kv_used_bytes,
        "mixed_resident_mib_before": before,
        "mixed_resident_mib_after": after,
        "mixed_device_used_mib": device.memory_used_bytes / MIB,
        "mixed_kv_pool_mib": device.kv_pool_bytes / MIB,
        "mixed_host_used_mib": device.host_used_bytes / MIB,
    }


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


async def measure(minutes: float, repeats: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    found = await starts(repeats)
    figures: Figures = {}
    for tier, times in found.items():
        figures[f"start_{tier}_ms_p50"] = statistics.median(times)
        figures[f"start_{tier}_ms_p99"] = percentile(times, 0.99)
    figures |= await mixed(minutes)
    p50 = {tier: figures[f"start_{tier}_ms_p50"] for tier in found}
    ratios = {f"{tier}_over_resident": p50[tier] / p50["resident"] for tier in found}
    ratios["storage_over_host"] = p50["storage"] / p50["host"]
    ratios["memory_after_over_before"] = (
        figures["mixed_resident_mib_after"] / figures["mixed_resident_mib_before"]
    )
    return {"name": "residency", "machine": machine(), "ratios": ratios, "figures": figures}


def machine() -> str:
    """What this was measured on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def fleet(minutes: float) -> dict[str, Any]:
    """The part of that name, in the same form."""
    with (
        tempfile.TemporaryDirectory() as folder,
        residency_fleet.start(Path(folder), cache_root()) as product,
    ):
        figures = residency_fleet.measure(product, 60 * minutes)
    before, after = (figures[f"fleet_resident_mib_{one}"] for one in ("before", "after"))
    ratios = {"memory_after_over_before": after / before}
    return {"name": "residency", "machine": machine(), "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fleet", action="store_true", help="The whole product, for --minutes.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fleet:
        answer = fleet(options.minutes)
    else:
        answer = asyncio.run(measure(options.minutes, options.repeats))
    print(answer["machine"])
    for part in ("ratios", "figures"):
        for name, value in answer[part].items():
            print(f"{name:40} {value:12.3f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")
    if options.fleet:
        residency_fleet.check(answer["figures"])


if __name__ == "__main__":
    main()
