"""Cache hits of conversations on two replicas: ``python -m tests.benchmarks.prefix_routing``.

A gateway, two agents with a simulated model each (their prefix caches are the engine's own), and
conversations at once; in turn with the prefix term of the router and without (its weight is set by
an event, as an operator would). Measured is, of the tokens that a turn repeats of the last one, the
share that its replica had cached, and the time of a turn: with pauses of seconds, as people make,
where the nodes' reports are heard between two turns, and of tenths of a second, as programs make,
where they may not be. Two orders of each, interleaved.
"""

import argparse
import asyncio
import json
import os
import platform
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

from controlplane.domain import routing  # noqa: E402
from controlplane.domain.model import VersionSpec  # noqa: E402
from tests.openai.conversations import Turns, converse  # noqa: E402
from tests.openai.stack import GIB, Stack  # noqa: E402

SPEC = VersionSpec(
    version="v1",
    source="simulated://chatty?step_ms=10&prefill_tps=2000&blocks=4096",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=8000,
    max_output_tokens=64,
)
TIERS = json.dumps(
    {"premium": {"requests_per_minute": 1e7, "tokens_per_minute": 1e11, "max_open": 4096}}
)
PAUSES = {"people": (2.5, 5.0), "programs": (0.1, 0.4)}


class Bench:
    def __init__(self) -> None:
        call_command("migrate", verbosity=0)
        self.stack = Stack(DIRECTORY, settings.SECRET_KEY, {"ENGINE_TIER_LIMITS": TIERS})
        self.stack.start()
        self.key = self.stack.add_tenant("bench", budget=2**50)
        self.stack.add_version("chatty", SPEC)
        for node_id in ("n1", "n2"):
            self.stack.add_agent(node_id)
            self.stack.place("chatty", SPEC, node_id)
        self.stack.wait_for("chatty", self.key)
        self.num_measured = 0
        self.found: dict[str, list[Turns]] = {}

    def measure(self, pause: str, prefix: float, number: int, turns: int) -> None:
        """Of conversations that nobody has had before."""
        self.num_measured += 1
        changes: dict[str, Any] = {"prefix": prefix}
        command = routing.SetRoutingWeights(changes, time.time())
        self.stack.order(routing.DECIDER, routing.STREAM, command)
        time.sleep(1.0)
        url = self.stack.gateway.url
        conversing = converse(
            url, self.key, "chatty", number, turns, PAUSES[pause], self.num_measured
        )
        name = f"{pause}_{'with' if prefix else 'without'}"
        self.found.setdefault(name, []).append(asyncio.run(conversing))

    def report(self, number: int) -> dict[str, Any]:
        figures: dict[str, float] = {}
        for name, runs in self.found.items():
            figures[f"cached_share_{name}"] = statistics.median(one.share for one in runs)
            figures[f"turn_ms_{name}"] = 1e3 * statistics.median(one.median_s for one in runs)
        ratios = {}
        for pause in PAUSES:
            if f"turn_ms_{pause}_with" in figures:
                ratios[f"cached_{pause}"] = (
                    figures[f"cached_share_{pause}_with"] / figures[f"cached_share_{pause}_without"]
                )
                ratios[f"turn_time_{pause}"] = (
                    figures[f"turn_ms_{pause}_with"] / figures[f"turn_ms_{pause}_without"]
                )
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {number} conversations"
        return {
            "name": "prefix_routing",
            "machine": machine,
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
            "figures": {name: round(value, 3) for name, value in figures.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", choices=(*PAUSES, "all"), default="all")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench()
    try:
        for repeat in range(options.repeats):
            for pause in PAUSES if options.pause == "all" else (options.pause,):
                for prefix in (1.0, 0.0) if repeat % 2 else (0.0, 1.0):
                    bench.measure(pause, prefix, options.conversations, options.turns)
    finally:
        bench.stack.stop()
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    answer = bench.report(options.conversations)
    print(json.dumps(answer, indent=2))
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
