"""Who waits for whom: ``python -m tests.benchmarks.fairness [--part PART] [--json FILE]``.

The whole stack with simulated engines (steps of 20 ms, really waited for). Parts:

``tenants``    One tenant keeps 200 streams of 50 to 150 tokens open at an engine of 16 slots; once
               a second a request of 10 tokens is sent, by another tenant (``apart``), or by the
               same one (``in_line``: first come, first served, what everybody had without
               fairness). Compared is its time to the first token.
``models``     16 streams at a model beside 128 at another one on the same device, 64 of which run
               at once: ``plain`` of equal priority, ``guaranteed`` of high priority with 60 %
               beside best effort. Compared is what the first has alone with what it has beside
               the other, and what the other has once it is alone.
``scheduler``  Microseconds of a step with 16 running and 256 waiting requests of 1 and 256 tenants.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

DIRECTORY = Path(tempfile.mkdtemp(prefix="engine-bench-"))
os.environ["ENGINE_DATA_DIR"] = str(DIRECTORY)
os.environ["ENGINE_DATABASE_URL"] = ""
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django  # noqa: E402

django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402

from controlplane.domain.model import VersionSpec  # noqa: E402
from gpuagent.engine.request import GenerationRequest, SamplingParams  # noqa: E402
from gpuagent.engine.scheduler import Scheduler, SchedulerConfig  # noqa: E402
from tests.benchmarks.http_load import Result, percentile, request_bytes, run, steady  # noqa: E402
from tests.openai.stack import GIB, Stack  # noqa: E402

CHAT = "/v1/chat/completions"
PARTS = ("tenants", "models", "scheduler")
STEP_MS, SLOTS, FLOOD = 20, 16, 200
WARM_UP_S, MEASURED_S = 6.0, 25.0
STEADY, BULK, BULK_SLOTS = 16, 128, 64
OPEN_TIER = {"requests_per_minute": 1e7, "tokens_per_minute": 1e11, "max_open": 4096}
TIERS = json.dumps({"premium": OPEN_TIER})
Figures = dict[str, list[float]]


def spec(name: str, slots: int, **fields: Any) -> VersionSpec:
    return VersionSpec(
        version="v1",
        source=f"simulated://{name}?step_ms={STEP_MS}&prefill_tps=1000000&shares=1",
        gpu_memory=GIB // 16,
        max_batch=slots,
        max_prompt_tokens=512,
        max_output_tokens=512,
        **fields,
    )


class Bench:
    """The stack and what was measured on it."""

    def __init__(self) -> None:
        call_command("migrate", verbosity=0)
        self.stack = Stack(DIRECTORY, settings.SECRET_KEY, {"ENGINE_TIER_LIMITS": TIERS})
        self.stack.start()
        self.stack.add_agent("n1", "--devices", "cpu:4GiB")
        self.keys = {name: self.stack.add_tenant(name) for name in ("flood", "quiet")}
        self.figures: Figures = {}
        self._placed: set[str] = set()

    def place(self, name: str, version: VersionSpec) -> None:
        if name not in self._placed:
            self._placed.add(name)
            self.stack.add_version(name, version)
            self.stack.place(name, version, "n1")
            self.stack.wait_for(name, self.keys["quiet"], 60)

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def request(self, key: str, model: str, max_tokens: int, text: str) -> bytes:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return request_bytes(CHAT, self.keys[key], body)

    def streams(self, key: str, model: str, number: int) -> list[bytes]:
        """Of 50 to 150 tokens each."""
        lengths = [random.Random(n).randint(50, 150) for n in range(number)]
        return [self.request(key, model, length, f"{n}?") for n, length in enumerate(lengths)]

    def load(self, key: str, model: str, number: int, seconds: float) -> Any:
        requests = self.streams(key, model, number)
        return steady(self.stack.gateway.port, requests, WARM_UP_S, seconds, 0.02)

    # --- tenants --------------------------------------------------------------------------------
    def tenants(self) -> None:
        self.place("shared", spec("shared", SLOTS))
        for name, key in (("in_line", "flood"), ("apart", "quiet")):
            flood, firsts = asyncio.run(self._once_a_second(key))
            self.note(f"ttft_{name}_p50_ms", percentile(firsts, 0.5) * 1e3)
            self.note(f"ttft_{name}_p99_ms", percentile(firsts, 0.99) * 1e3)
            self.note(f"flood_{name}_tokens_per_s", flood.num_words / flood.seconds)
            print(name, self.figures, flush=True)

    async def _once_a_second(self, key: str) -> tuple[Result, list[float]]:
        flood = asyncio.ensure_future(self.load("flood", "shared", FLOOD, MEASURED_S))
        await asyncio.sleep(WARM_UP_S)
        asked = []
        for n in range(int(MEASURED_S)):
            request = self.request(key, "shared", 10, f"one {n}")
            port = self.stack.gateway.port
            asked.append(asyncio.ensure_future(run(port, request, 1, num_each=1, is_stream=True)))
            await asyncio.sleep(1.0)
        answers = await asyncio.gather(*asked)
        return checked(await flood), [first for one in answers for first in checked(one).first]

    # --- models ---------------------------------------------------------------------------------
    def models(self) -> None:
        high = {"priority": "high", "guaranteed_percent": 60}
        self.place("plain", spec("plain", STEADY))
        self.place("plainbulk", spec("plainbulk", BULK_SLOTS))
        self.place("guaranteed", spec("guaranteed", STEADY, **high))
        self.place("bulk", spec("bulk", BULK_SLOTS, priority="best-effort"))
        for name, other in (("plain", "plainbulk"), ("guaranteed", "bulk")):
            alone = checked(asyncio.run(self.load("quiet", name, STEADY, 6.0)))
            self.note(f"{name}_alone_tokens_per_s", alone.num_words / alone.seconds)
            own, beside = asyncio.run(self._beside(name, other))
            self.note(f"{name}_beside_tokens_per_s", own.num_words / own.seconds)
            self.note(f"{name}_beside_ttft_p99_ms", percentile(own.first, 0.99) * 1e3)
            self.note(f"{other}_beside_tokens_per_s", beside.num_words / beside.seconds)
            idle = checked(asyncio.run(self.load("flood", other, BULK, 6.0)))
            self.note(f"{other}_alone_tokens_per_s", idle.num_words / idle.seconds)
            print(name, self.figures, flush=True)

    async def _beside(self, name: str, other: str) -> tuple[Result, Result]:
        both = self.load("quiet", name, STEADY, 10.0), self.load("flood", other, BULK, 10.0)
        own, beside = await asyncio.gather(*both)
        return checked(own), checked(beside)

    # --- scheduler ------------------------------------------------------------------------------
    def scheduler(self) -> None:
        for num_tenants in (1, 256):
            self.note(f"step_us_{num_tenants}_tenants", step_us(num_tenants))

    # --- all of it ------------------------------------------------------------------------------
    def report(self) -> dict[str, Any]:
        found = {name: statistics.median(values) for name, values in self.figures.items()}
        wanted = {
            "ttft_p50_apart": ("ttft_apart_p50_ms", "ttft_in_line_p50_ms"),
            "ttft_p99_apart": ("ttft_apart_p99_ms", "ttft_in_line_p99_ms"),
            "flood_apart": ("flood_apart_tokens_per_s", "flood_in_line_tokens_per_s"),
            "plain_kept": ("plain_beside_tokens_per_s", "plain_alone_tokens_per_s"),
            "guaranteed_kept": ("guaranteed_beside_tokens_per_s", "guaranteed_alone_tokens_per_s"),
            "step_256_tenants": ("step_us_256_tenants", "step_us_1_tenants"),
        }
        ratios = {k: found[a] / found[b] for k, (a, b) in wanted.items() if {a, b} <= set(found)}
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        return {
            "name": "fairness",
            "machine": f"{machine}, Python {platform.python_version()}",
            "ratios": {name: round(value, 4) for name, value in ratios.items()},
            "figures": {name: round(value, 1) for name, value in found.items()},
        }


def step_us(num_tenants: int, num_steps: int = 1000) -> float:
    """Median processor time of planning and recording one step; who ends is replaced."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4096, max_num_seqs=16, max_batch_tokens=512))
    number, spent = 0, []

    def add() -> None:
        nonlocal number
        salt, prompt = b"%d" % (number % num_tenants), tuple(range(number % 7, number % 7 + 20))
        sampling = SamplingParams(max_tokens=50)
        scheduler.add(GenerationRequest(f"r{number}", prompt, sampling, cache_salt=salt))
        number += 1

    for _ in range(16 + 256):
        add()
    for _ in range(num_steps):
        began = time.thread_time()
        output = scheduler.schedule()
        tokens = {work.request_id: (1,) for work in output.work if work.samples}
        scheduler.complete(output, tokens)
        spent.append(time.thread_time() - began)
        for name in tokens:
            sequence = scheduler.sequence(name)
            if sequence is not None and sequence.num_output >= 30 + int(name[1:]) % 20:
                scheduler.finish(name)
                add()
    return statistics.median(spent) * 1e6


def checked(result: Result) -> Result:
    if result.num_errors:
        print(f"{result.num_errors} errors, one of them: {result.sample_error}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench()
    try:
        for _ in range(options.repeats):
            for part in PARTS if options.part == "all" else (options.part,):
                getattr(bench, part)()
    finally:
        bench.stack.stop()
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    answer = bench.report()
    print(json.dumps(answer, indent=2))
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
