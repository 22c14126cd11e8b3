"""Nodes die, hang, leave and come back under load: ``python -m tests.crash.chaos --minutes 15``.

A black box: ``manage.py demo`` with three agents of two virtual devices, three models of made-up
tokens with two replicas each, and clients that stream from all of them over the public API. Every
few seconds one thing happens, chosen by the seed::

    worker   kill -9 of an engine worker        agent    kill -9 of an agent, which demo restarts
    pause    SIGSTOP of an agent and its workers for longer than its lease, then SIGCONT
    drain    a node is drained and taken back   bus      kill -9 of the bus, which demo restarts

A model's tokens are a function of the prompt, so it is known what every stream must say. A stream
ends with ``[DONE]`` and that text, or with a typed error and a beginning of it; anything else is a
violation, and so is a request without exactly one record, a record that disagrees with what the
client saw, a kind of fault that never came, and a fleet that is not as desired within
``SETTLE_S`` of the last fault.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
MODELS = ("a", "b", "c")
NUM_AGENTS, NUM_CLIENTS, NUM_TOKENS = 3, 9, 150
PAUSE_S = 18.0  # past the lease, and past the time after which a node counts as lost
SETTLE_S = 15.0
START_S = 120.0


@dataclass
class Seen:
    """One stream, as its client saw it. ``end``: done, a typed error's code, refused, or cut."""

    model: str
    request_id: str = ""
    text: str = ""
    end: str = "cut"


class Demo:
    """The demo's processes and its public API."""

    def __init__(self, folder: Path) -> None:
        devices = ["--agents", str(NUM_AGENTS), "--devices", "cpu:4GiB,cpu:4GiB", "--simulated"]
        environment = os.environ | {"ENGINE_DATA_DIR": str(folder)}
        self.folder = folder
        with (folder / "demo.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "demo", *devices],
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        until((folder / "ready.json").exists, START_S)
        self.facts = json.loads((folder / "ready.json").read_text())
        bearer = {"Authorization": f"Bearer {self.facts['admin_token']}"}
        base = f"{self.facts['dashboard_url']}/api/v1/"
        self.admin = httpx.Client(base_url=base, headers=bearer, timeout=30)

    def get(self, path: str) -> list[dict[str, Any]]:
        body = self.admin.get(path).raise_for_status().json()
        return list(body.get("results", body) if isinstance(body, dict) else body)

    def post(self, path: str, **body: object) -> None:
        self.admin.post(path, json=body).raise_for_status()

    def agents(self) -> list[psutil.Process]:
        """The live agents, the first node's first."""
        children = psutil.Process(self._process.pid).children()
        found = [one for one in children if "gpuagent" in one.cmdline()]
        return sorted(found, key=lambda one: one.cmdline())

    def bus(self) -> psutil.Process | None:
        children = psutil.Process(self._process.pid).children()
        return next((one for one in children if "nats-server" in one.name()), None)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self.admin.close()


def until(check: Callable[[], object], seconds: float) -> float:
    """Wait for ``check``; the seconds that took. Raises TimeoutError."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {check}")
        time.sleep(0.1)
    return time.monotonic() - began


# --- load -------------------------------------------------------------------------------------
def register(demo: Demo) -> None:
    for name in MODELS:
        demo.post("models/", name=name)
        demo.post(
            f"models/{name}/versions/",
            version="v1",
            source=f"simulated://{name}?step_ms=20&prefill_tps=100000",
            gpu_memory=2**29,
            min_replicas=2,
            max_replicas=2,
        )
    until(lambda: is_as_desired(demo), START_S)


def stream(demo: Demo, model: str) -> Seen:
    """One generation from beginning to end, whatever becomes of it."""
    seen = Seen(model)
    body = {"model": model, "prompt": f"Tell {model}", "max_tokens": NUM_TOKENS, "stream": True}
    headers = {"Authorization": f"Bearer {demo.facts['api_key']}"}
    url = f"{demo.facts['api_url']}/v1/completions"
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer,
    ):
        seen.request_id = answer.headers.get("x-engine-request-id", "")
        if answer.status_code != 200:
            seen.end = "refused"
            return seen
        for line in answer.iter_lines():
            _note(line, seen)
    return seen


def _note(line: str, seen: Seen) -> None:
    if line == "data: [DONE]":
        seen.end = "done" if seen.end == "cut" else seen.end
    elif line.startswith("data: "):
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            seen.end = str(chunk["error"].get("code") or "untyped")
        seen.text += "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))


@dataclass
class Load:
    """Clients on threads of their own, until told to stop."""

    demo: Demo
    seen: list[Seen] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(NUM_CLIENTS):
            model = MODELS[number % len(MODELS)]
            self.threads.append(threading.Thread(target=self._client, args=(model,)))
            self.threads[-1].start()

    def _client(self, model: str) -> None:
        while not self.is_over.is_set():
            seen = stream(self.demo, model)
            self.seen.append(seen)
            if seen.end == "refused":
                time.sleep(1)

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()


# --- faults -----------------------------------------------------------------------------------
def kill_worker(demo: Demo, choose: random.Random) -> None:
    workers = [child for agent in demo.agents() for child in agent.children()]
    choose.choice(workers).kill()


def kill_agent(demo: Demo, choose: random.Random) -> None:
    choose.choice(demo.agents()).kill()


def pause(demo: Demo, choose: random.Random) -> None:
    agent = choose.choice(demo.agents())
    stopped = [agent, *agent.children(recursive=True)]
    for process in stopped:
        process.suspend()
    time.sleep(PAUSE_S)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def drain(demo: Demo, choose: random.Random) -> None:
    node_id = choose.choice(demo.get("nodes/"))["node_id"]
    demo.post(f"nodes/{node_id}/drain/", reason="chaos")
    time.sleep(choose.uniform(2, 8))
    demo.post(f"nodes/{node_id}/undrain/", reason="chaos is over")


def kill_bus(demo: Demo, choose: random.Random) -> None:
    if (bus := demo.bus()) is not None:
        bus.kill()


FAULTS: dict[str, Callable[[Demo, random.Random], None]] = {
    "worker": kill_worker,
    "agent": kill_agent,
    "pause": pause,
    "drain": drain,
    "bus": kill_bus,
}


def rage(demo: Demo, seconds: float, seed: int, kinds: Sequence[str]) -> Counter[str]:
    """Faults until the time is over, each kind as often as the others; how many of each."""
    choose, done = random.Random(seed), Counter[str]()
    end, waiting = time.monotonic() + seconds, list[str]()
    while time.monotonic() < end:
        if not waiting:
            waiting = choose.sample(sorted(kinds), len(kinds))
        name = waiting.pop()
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it is just being restarted
            FAULTS[name](demo, choose)
            done[name] += 1
            print(f"{time.strftime('%H:%M:%S')}  {name}", flush=True)
        time.sleep(choose.uniform(1, 6))
    return done


# --- checks -----------------------------------------------------------------------------------
def is_as_desired(demo: Demo) -> bool:
    """Every version has its replicas, all are ready and acknowledged, and nothing else runs."""
    wanted = {f"{name}@v1": 2 for name in MODELS}
    replicas = [one for one in demo.get("placements/") if one["version_id"] in wanted]
    ready = Counter(
        one["version_id"]
        for one in replicas
        if one["desired"] and one["acked"] and one["state"] == "ready" == one["observed"]
    )
    nodes = demo.get("nodes/")
    return ready == wanted and len(replicas) == 6 and all(n["status"] == "ready" for n in nodes)


def violations(demo: Demo, seen: list[Seen], expected: dict[str, str]) -> Iterator[str]:
    records = {one["request_id"]: one for one in _records(demo)}
    for one in seen:
        if one.end in ("cut", "untyped"):
            yield f"{one.request_id}: ended {one.end}"
        whole = expected[one.model]
        is_right = one.text == whole if one.end == "done" else whole.startswith(one.text)
        if not is_right:
            yield f"{one.request_id}: another text, after {_common(one, expected)} characters"
        if one.request_id and one.end != "refused":
            yield from _record_violations(one, records.get(one.request_id))
    yield from (f"{name} is still open" for name, one in records.items() if not one["outcome"])


def _record_violations(one: Seen, record: dict[str, Any] | None) -> Iterator[str]:
    if record is None:
        yield f"{one.request_id}: no record"
    elif (record["outcome"] == "ok") != (one.end == "done"):
        yield f"{one.request_id}: on record {record['outcome']}, seen {one.end}"
    elif one.end == "done" and record["num_output_tokens"] != NUM_TOKENS:
        yield f"{one.request_id}: {record['num_output_tokens']} tokens on record"


def _common(one: Seen, expected: dict[str, str]) -> int:
    pairs = zip(one.text, expected[one.model], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _records(demo: Demo) -> Iterator[dict[str, Any]]:
    path: str | None = "requests/?limit=500"
    while path:
        body = demo.admin.get(path).raise_for_status().json()
        yield from body["results"]
        path = body.get("next")


# --- the command ------------------------------------------------------------------------------
def run(folder: Path, minutes: float, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> int:
    demo = Demo(folder)
    try:
        register(demo)
        expected = {name: stream(demo, name).text for name in MODELS}
        load = Load(demo)
        load.start()
        faults = rage(demo, minutes * 60, seed, kinds)
        problems = [f"no fault of kind {name}" for name in kinds if not faults[name]]
        try:
            print(f"as desired {until(lambda: is_as_desired(demo), SETTLE_S):.1f} s after the last")
        except TimeoutError:
            problems.append(f"not as desired within {SETTLE_S:g} s")
        load.stop()
        time.sleep(2)  # the read model follows the ledger
        problems += violations(demo, load.seen, expected)
        continued = sum(one["attempts"] > 1 for one in _records(demo))
    finally:
        demo.stop()
    ends = Counter(one.end for one in load.seen)
    print(f"faults {dict(faults)}; streams {dict(ends)}, {continued} of more than one attempt")
    print("\n".join(problems[:50] or ["no violation"]))
    return 1 if problems else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        return run(Path(name), asked.minutes, asked.seed)


if __name__ == "__main__":
    sys.exit(main())
