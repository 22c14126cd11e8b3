"""What the gateway adds: ``python -m tests.benchmarks.gateway [--json FILE] [--litellm]``.

Starts nats-server, one agent with a simulated model and one gateway with everything on:
authentication, limits, reservation, intent and terminal record, on SQLite with synchronous=FULL.
With ``--litellm`` LiteLLM's proxy (one worker, one key, a fake upstream without delay) is measured
in the same run, in turn with ours; it is installed once under ``~/.cache/engine-bench``. Figures
are medians of ``--repeats`` interleaved repeats.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
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

from controlplane.adapters.natsbus.connection import connect  # noqa: E402
from controlplane.adapters.natsbus.transport import Generate, Sampling, Transport  # noqa: E402
from controlplane.domain.model import VersionSpec  # noqa: E402
from tests.benchmarks.http_load import Result, percentile, request_bytes, run  # noqa: E402
from tests.natsserver import free_port  # noqa: E402
from tests.openai.stack import GIB, Stack, until  # noqa: E402

CACHE = Path.home() / ".cache" / "engine-bench" / "litellm"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How many tokens a second?"}]
STEP_MS = 20
NUM_STEPPED = 256
STEPPED_TOKENS = 100
OPEN_TIER = {"requests_per_minute": 1e7, "tokens_per_minute": 1e11, "max_open": 4096}
TIERS = json.dumps({"premium": OPEN_TIER})


def spec(name: str, step_ms: int) -> VersionSpec:
    return VersionSpec(
        version="v1",
        source=f"simulated://{name}?step_ms={step_ms}&prefill_tps=100000000",
        gpu_memory=GIB // 16,
        max_batch=320,
        max_prompt_tokens=512,
        max_output_tokens=512,
    )


def body(model: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": max_tokens}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return asked | (usage if stream else {})


# --- ours ---------------------------------------------------------------------------------------
class Ours:
    """The whole stack, with one tenant that has a budget."""

    def __init__(self) -> None:
        call_command("migrate", verbosity=0)
        extra = {"ENGINE_TIER_LIMITS": TIERS}
        self.stack = Stack(DIRECTORY, settings.SECRET_KEY, extra)
        self.stack.start()
        self.stack.add_agent("n1")
        self.key = self.stack.add_tenant("bench", budget=2**50)
        self.replicas = {}
        for name, step_ms in (("nodelay", 0), ("stepped", STEP_MS)):
            self.stack.add_version(name, spec(name, step_ms))
            self.replicas[name] = self.stack.place(name, spec(name, step_ms), "n1")
            self.stack.wait_for(name, self.key)

    @property
    def port(self) -> int:
        return self.stack.gateway.port

    def request(self, model: str, max_tokens: int, *, stream: bool) -> bytes:
        return request_bytes(CHAT, self.key, body(model, max_tokens, stream=stream))

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.stack.gateway.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1024


# --- LiteLLM ------------------------------------------------------------------------------------
class LiteLlm:
    """Its proxy in front of the fake upstream."""

    key = "sk-bench"

    def __init__(self) -> None:
        python = self._install()
        self._upstream_port, self.port = free_port(), free_port()
        upstream = [sys.executable, "-m", "tests.benchmarks.fake_openai", str(self._upstream_port)]
        self._processes = [subprocess.Popen(upstream)]
        config = DIRECTORY / "litellm.yaml"
        config.write_text(self._config())
        log = (DIRECTORY / "litellm.log").open("wb")
        command = [python.with_name("litellm"), "--config", config, "--port", str(self.port)]
        self._processes.append(
            subprocess.Popen(
                [*map(str, command), "--host", "127.0.0.1", "--num_workers", "1"],
                stdout=log, stderr=log,
                env=os.environ | {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION",
                                  "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            )
        )  # fmt: skip
        until(self._answers, 180, 1)

    def _install(self) -> Path:
        python = CACHE / "bin" / "python"
        if not python.with_name("litellm").exists():
            subprocess.run([sys.executable, "-m", "venv", str(CACHE)], check=True)
            pip = [str(python), "-m", "pip", "install", "-q", "litellm[proxy]"]
            subprocess.run(pip, check=True)
        return python

    def _config(self) -> str:
        base = f"http://127.0.0.1:{self._upstream_port}/v1"
        parameters = {"model": "openai/fake", "api_base": base, "api_key": "x"}
        return json.dumps(
            {
                "model_list": [{"model_name": "fake", "litellm_params": parameters}],
                "general_settings": {"master_key": self.key},
                "litellm_settings": {"set_verbose": False, "request_timeout": 600},
            }
        )

    def _answers(self) -> bool:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{CHAT}",
            json.dumps(body("fake", 1, stream=False)).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def request(self, max_tokens: int, *, stream: bool) -> bytes:
        return request_bytes(CHAT, self.key, body("fake", max_tokens, stream=stream))

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


# --- the same burst without a gateway -----------------------------------------------------------
async def direct_burst(stack: Stack, replica_id: str, count: int, max_tokens: int) -> list[float]:
    """Seconds to the first token of ``count`` generations, straight from the bus."""
    bus = await connect(stack.nats.url, stack.nats.control_creds, "bench", timeout_s=10)
    transport = Transport(bus, f"bench-{os.getpid()}-{time.time_ns()}", time.monotonic)
    await transport.start()
    firsts: list[float] = []
    remaining = count
    finished = asyncio.get_running_loop().create_future()

    def sink(delta: Any, began: float) -> None:
        nonlocal remaining
        if delta.index == 0 and delta.token_ids:
            firsts.append(time.perf_counter() - began)
        if delta.finish_reason:
            remaining -= 1
            if not remaining:
                finished.set_result(None)

    prompt = tuple(range(65, 97))
    for i in range(count):
        order = Generate(
            request_id=f"direct-{time.time_ns()}-{i}",
            gateway=transport._gateway_id,
            replica_id=replica_id,
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=max_tokens),
        )
        began = time.perf_counter()
        await transport.generate("n1", order, lambda delta, began=began: sink(delta, began))  # type: ignore[misc]
    await asyncio.wait_for(finished, 60)
    await bus.close()
    return firsts


# --- measuring ----------------------------------------------------------------------------------
Figures = dict[str, list[float]]


def note(figures: Figures, name: str, value: float) -> None:
    figures.setdefault(name, []).append(value)


def _checked(result: Result, name: str) -> Result:
    if result.num_errors:
        print(f"{name}: {result.num_errors} errors, one of them: {result.sample_error}")
    return result


def measure_whole(figures: Figures, ours: Ours, peer: LiteLlm | None, seconds: float) -> None:
    for at_once in (1, 16, 64):
        request = ours.request("nodelay", 1, stream=False)
        result = _checked(asyncio.run(run(ours.port, request, at_once, seconds=seconds)), "ours")
        note(figures, f"rps_{at_once}", result.rps)
        note(figures, f"latency_p50_ms_{at_once}", percentile(result.latency, 0.5) * 1e3)
        note(figures, f"latency_p99_ms_{at_once}", percentile(result.latency, 0.99) * 1e3)
        if peer and at_once == 16:
            request = peer.request(1, stream=False)
            result = _checked(asyncio.run(run(peer.port, request, 16, seconds=seconds)), "litellm")
            note(figures, "litellm_rps_16", result.rps)


def measure_streams(figures: Figures, ours: Ours, peer: LiteLlm | None) -> None:
    request = ours.request("nodelay", 200, stream=True)
    burst = run(ours.port, request, 128, num_each=3, is_stream=True)
    note(figures, "stream_tokens_per_s_128", _checked(asyncio.run(burst), "ours").tokens_per_s)
    if peer:
        request = peer.request(50, stream=True)
        burst = run(peer.port, request, 128, num_each=1, is_stream=True)
        result = _checked(asyncio.run(burst), "litellm")
        note(figures, "litellm_stream_tokens_per_s_128", result.tokens_per_s)


def measure_stepped(figures: Figures, ours: Ours) -> None:
    direct = asyncio.run(
        direct_burst(ours.stack, ours.replicas["stepped"], NUM_STEPPED, STEPPED_TOKENS)
    )
    request = ours.request("stepped", STEPPED_TOKENS, stream=True)
    burst = run(ours.port, request, NUM_STEPPED, num_each=1, is_stream=True)
    result = _checked(asyncio.run(burst), "ours")
    note(figures, "stepped_tokens_per_s_256", result.tokens_per_s)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ours_ms = percentile(result.first, share) * 1e3
        note(figures, f"ttft_{name}_ms_256", ours_ms)
        note(figures, f"ttft_added_{name}_ms_256", ours_ms - percentile(direct, share) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--litellm", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    ours = Ours()
    peer = LiteLlm() if options.litellm else None
    figures: Figures = {}
    try:
        for _ in range(options.repeats):
            measure_whole(figures, ours, peer, options.seconds)
            measure_streams(figures, ours, peer)
            measure_stepped(figures, ours)
        note(figures, "gateway_memory_mb", ours.memory_mb())
    finally:
        if peer:
            peer.stop()
        ours.stack.stop()
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    report(figures, options.json)


def report(figures: Figures, path: Path | None) -> None:
    medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    ratios = {"stepped_of_13400": medians["stepped_tokens_per_s_256"] / 13_400}
    if "litellm_rps_16" in medians:
        ratios["rps_vs_litellm"] = medians["rps_16"] / medians["litellm_rps_16"]
        streamed = medians["stream_tokens_per_s_128"]
        ratios["stream_vs_litellm"] = streamed / medians["litellm_stream_tokens_per_s_128"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    rounded = {name: round(value, 2) for name, value in ratios.items()}
    answer = {"name": "gateway", "machine": machine, "ratios": rounded, "figures": medians}
    print(json.dumps(answer, indent=2))
    if path:
        path.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
