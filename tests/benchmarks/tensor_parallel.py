"""What a group costs: ``python -m tests.benchmarks.tensor_parallel [--repeats 60] [--json FILE]``.

SmolLM2-135M in float32, as one engine with one thread, as one engine with two, and as two ranks
with one thread each, so that the last two have the same two cores. Decode steps at 240 tokens of
context, in turns, one after the other. Other work on the machine only ever makes a step longer, and
a sum waits for whichever rank it hits: so what is compared is the tenth of the steps that was
disturbed least (`_ms`); the medians stand beside it (`_median_ms`). The rest are medians.

step     milliseconds of a step of 1, 4 and 16 rows, and of a chunk of 256 prompt tokens
order    what rank 0 adds to a step by telling the other rank: encoding and sending it, and until it
         has come back from a rank that only reads it (half of that is the delay); beside it the
         same step broadcast as a tensor of fixed size by gloo, with an answer
sum      one sum of the ranks' parts (rows x 576): by pairs, as it is done, and gloo's all-reduce;
         a step has 60 of them, and one of the marks of unsound rows
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuagent.engine.batch import Work
from gpuagent.engine.collective import Collective
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.lines import CopyBlocks, Line, Step, framed
from gpuagent.engine.ranks import Rank
from gpuagent.engine.request import GenerationRequest, SamplingParams
from tests.engine.group import Group
from tests.engine.real_model import real_model

CONTEXT = 240
ROWS = (1, 4, 16)
CHUNK = 256
WIDTH = 576
NUM_SUMS = 61
OPTIONS = {"num_blocks": 700, "max_batch_tokens": 512, "swap_bytes": 0,
           "target_itl_seconds": None, "prefix_caching": False}  # fmt: skip
Figures = dict[str, float]


def milliseconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started)


# --- whole steps --------------------------------------------------------------------------------
def steps(engines: dict[str, tuple[TorchEngine, int]], repeats: int) -> Figures:
    """Median step times by engine and rows; each engine with its number of threads."""
    figures: Figures = {}
    for num in ROWS:
        for engine, _ in engines.values():
            begin(engine, num)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(repeats):
            for name, (engine, _) in engines.items():
                times[name].append(milliseconds(engine.step))
        for name, found in times.items():
            figures[f"{name}_{num}_rows_ms"] = statistics.quantiles(found, n=10)[0]
            figures[f"{name}_{num}_rows_median_ms"] = statistics.median(found)
        for engine, _ in engines.values():
            end(engine, num)
    for name, (engine, _) in engines.items():
        figures[f"{name}_chunk_ms"] = min(chunk(engine) for _ in range(5))
    return figures


def begin(engine: TorchEngine, num: int) -> None:
    """`num` requests that decode."""
    params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    for i in range(num):
        prompt = tuple(range(100 + i, 100 + i + CONTEXT))
        engine.add(GenerationRequest(f"r{i}", prompt, params))
    while len(engine.decoding()) < num:
        engine.step()


def end(engine: TorchEngine, num: int) -> None:
    for i in range(num):
        engine.cancel(f"r{i}")
    engine.step()


def chunk(engine: TorchEngine) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(GenerationRequest("chunk", tuple(range(50, 50 + CHUNK)), params))
    took = milliseconds(engine.step)
    assert not engine.has_work()
    return took


# --- parts of a step ----------------------------------------------------------------------------
def orders(line: Line, repeats: int) -> Figures:
    """Telling a rank of a step of 16 rows with 16 blocks each, and its answer."""
    works = [Work(f"r{i}", 255, (i,), tuple(range(16)), samples=True) for i in range(16)]
    told, answered = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        line.send(framed(Step(works)))
        told.append(1e6 * (time.perf_counter() - started))
        line.next()
        answered.append(1e6 * (time.perf_counter() - started))
    return {
        "order_tell_us": statistics.median(told),
        "order_and_back_us": statistics.median(answered),
    }


def sums(collective: Collective, repeats: int) -> Figures:
    figures: Figures = {}
    fixed, answer = torch.zeros(4096, dtype=torch.int64), torch.zeros(1)

    def broadcast() -> None:
        dist.broadcast(fixed, 0)
        collective.total(answer)

    figures["broadcast_and_back_us"] = 1000 * repeated(broadcast, repeats)
    for rows in (*ROWS, CHUNK):
        part = torch.zeros(rows, WIDTH)
        pairs = repeated(lambda p=part: collective.total(p), repeats)
        figures[f"sum_{rows}_rows_us"] = 1000 * pairs
        figures[f"all_reduce_{rows}_rows_us"] = 1000 * repeated(
            lambda p=part: dist.all_reduce(p), repeats
        )
    return figures


def repeated(action: Callable[[], Any], repeats: int) -> float:
    return statistics.median(milliseconds(action) for _ in range(repeats))


def parts(repeats: int) -> Figures:
    """The two measurements above, against a process that answers."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.benchmarks.tensor_parallel", "--answer"]
    with theirs:
        other = subprocess.Popen(
            [*command, str(theirs.fileno()), "--repeats", str(repeats)], pass_fds=[theirs.fileno()]
        )
    line = Line(ours)
    figures = orders(line, repeats)
    place = Rank(0, 2, [line])
    place.connect(60)
    figures |= sums(place.collective, repeats)
    other.wait(60)
    place.collective.close()
    return figures


def answer(descriptor: int, repeats: int) -> None:
    """The other process of `parts`."""
    line = Line(socket.socket(fileno=descriptor))
    for _ in range(repeats):
        line.next()
        line.send(framed(CopyBlocks([])))
    place = Rank(1, 2, [line])
    place.connect(60)
    sums(place.collective, repeats)


def measure(repeats: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    torch.set_num_threads(1)
    figures = parts(20 * repeats)
    folder = real_model().path
    with Group(folder, 2, **OPTIONS) as group:
        engines = {"two_ranks": (group, 1), "one_thread": (TorchEngine.load(folder, **OPTIONS), 1)}
        torch.set_num_threads(2)
        engines["two_threads"] = TorchEngine.load(folder, **OPTIONS), 2
        figures |= steps(engines, repeats)
    ratios = {}
    for what in (*(f"{num}_rows" for num in ROWS), "chunk"):
        ours = figures[f"two_ranks_{what}_ms"]
        for other in ("one_thread", "two_threads"):
            ratios[f"{what}_two_ranks_over_{other}"] = ours / figures[f"{other}_{what}_ms"]
    for rows in (*ROWS, CHUNK):
        pairs, reduced = figures[f"sum_{rows}_rows_us"], figures[f"all_reduce_{rows}_rows_us"]
        ratios[f"sum_{rows}_rows_all_reduce_over_pairs"] = reduced / pairs
        if rows in ROWS:
            step = 1000 * figures[f"two_ranks_{rows}_rows_ms"]
            ratios[f"{rows}_rows_sums_share_of_step"] = NUM_SUMS * pairs / step
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"name": "tensor_parallel", "machine": machine, "ratios": ratios, "figures": figures}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer is not None:
        torch.set_num_threads(1)
        answer(options.answer, options.repeats)
        return
    found = measure(options.repeats)
    print(found["machine"])
    for part in ("ratios", "figures"):
        for name, value in found[part].items():
            print(f"{name:48} {value:12.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
