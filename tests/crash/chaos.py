"""Nodes die, hang, leave and come back under load: ``python -m tests.crash.chaos --minutes 15``.

A black box: ``manage.py demo`` with three agents of two virtual devices, three models of made-up
tokens with two replicas each, and clients that stream from all of them over the public API. Every
few seconds one thing happens, chosen by the seed; workers and agents are killed beside the rest::

    worker   kill -9 of an engine worker        agent    kill -9 of an agent, which demo restarts
    bus      kill -9 of the bus, restarted      restart  SIGTERM of the bus, which demo restarts
    drain    a node is drained and taken back   blip     a node is cut off for less than its lease
    cut      a node is cut off from the bus (``links``), in one direction or both, for longer than
             its lease, and then no more
    pause    SIGSTOP of an agent and its workers for as long, then SIGCONT

A model's tokens are a function of the prompt, so it is known what every stream must say. A stream
ends with ``[DONE]`` and that text, or with a typed error and a beginning of it; anything else is a
violation. So is a refusal without a code, a request without exactly one record, a record or
attempts that disagree with what the client saw, a kind of fault that never came, a fleet that is
not as desired within ``SETTLE_S`` of the last fault, and whatever ``slots`` finds.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.crash import slots
from tests.crash.links import DIRECTIONS, Links

ROOT = Path(__file__).parents[2]
MODELS = ("a", "b", "c")
NUM_AGENTS, NUM_CLIENTS, NUM_TOKENS, NUM_REPLICAS = 3, 9, 150, 2
RECORDS = "requests/?limit=500"
PAUSE_S = 18.0  # past the lease, and past the time after which a node counts as lost
WANTED = {f"{name}@v1": NUM_REPLICAS for name in MODELS}
BLIP_S, REST_S = (2.0, 9.0), (1.0, 6.0)
SETTLE_S, STEADY_S = 15.0, 4.0
START_S = 240.0


@dataclass
class Seen:
    """One stream, as its client saw it. ``end``: done, a typed error's code, that of a refusal
    after "refused ", or cut or untyped, which must not be."""

    model: str
    request_id: str = ""
    text: str = ""
    end: str = "cut"


class Demo:
    """The demo's processes and its public API."""

    def __init__(self, folder: Path, links: Links) -> None:
        devices = ["--agents", str(NUM_AGENTS), "--devices", "cpu:4GiB,cpu:4GiB", "--simulated"]
        devices += ["--bus-for-agents", links.url]
        environment = os.environ | {"ENGINE_DATA_DIR": str(folder)}
        self.folder, self.links = folder, links
        with (folder / "demo.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "demo", *devices],
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            until((folder / "ready.json").exists, START_S)
        except TimeoutError:
            self._process.terminate()
            self._process.wait(30)
            raise
        self.facts = json.loads((folder / "ready.json").read_text())
        bearer = {"Authorization": f"Bearer {self.facts['admin_token']}"}
        base = f"{self.facts['dashboard_url']}/api/v1/"
        self.admin = httpx.Client(base_url=base, headers=bearer, timeout=30)

    def get(self, path: str) -> list[dict[str, Any]]:
        body = self.admin.get(path).raise_for_status().json()
        return list(body.get("results", body) if isinstance(body, dict) else body)

    def post(self, path: str, **body: object) -> None:
        self.admin.post(path, json=body).raise_for_status()

    def events(self) -> Iterator[dict[str, Any]]:
        """All of the log, in its order."""
        return self.pages("events/?after=0&limit=500")

    def pages(self, path: str | None) -> Iterator[dict[str, Any]]:
        """All results of a list, page after page."""
        while path:
            body = self.admin.get(path).raise_for_status().json()
            yield from body["results"]
            path = body["next"] and body["next"].partition("/api/v1/")[2]

    def agents(self) -> list[psutil.Process]:
        """The live agents, the first node's first."""
        children = psutil.Process(self._process.pid).children()
        found = [one for one in children if "gpuagent" in one.cmdline()]
        return sorted(found, key=lambda one: one.cmdline())

    def bus(self) -> psutil.Process:
        """Raises StopIteration while there is none."""
        children = psutil.Process(self._process.pid).children()
        return next(one for one in children if "nats-server" in one.name())

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
            min_replicas=NUM_REPLICAS,
            max_replicas=NUM_REPLICAS,
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
            seen.end = _refusal(answer)
            return seen
        for line in answer.iter_lines():
            _note(line, seen)
    return seen


def _refusal(answer: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError):
        return f"refused {json.loads(answer.read())['error']['code']}"
    return "untyped"


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
            if seen.end.startswith("refused"):
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
    demo.bus().kill()


def restart_bus(demo: Demo, choose: random.Random) -> None:
    demo.bus().terminate()


def blip(demo: Demo, choose: random.Random) -> None:
    _cut(demo, choose, choose.uniform(*BLIP_S))


def cut(demo: Demo, choose: random.Random) -> None:
    _cut(demo, choose, PAUSE_S)


def _cut(demo: Demo, choose: random.Random, seconds: float) -> None:
    demo.links.cut(choose.randint(1, NUM_AGENTS), choose.choice(DIRECTIONS))
    time.sleep(seconds)
    demo.links.heal()


FAULTS: dict[str, Callable[[Demo, random.Random], None]] = {
    "worker": kill_worker,
    "agent": kill_agent,
    "pause": pause,
    "drain": drain,
    "bus": kill_bus,
    "restart": restart_bus,
    "blip": blip,
    "cut": cut,
}
BESIDE = frozenset({"worker", "agent"})  # come beside the others, which come one at a time


def rage(demo: Demo, seconds: float, seed: int, kinds: Sequence[str]) -> Counter[str]:
    """Faults until the time is over; how many of each kind. Not every one beside every other: while
    buses come and go all the time, no silent node is ever given up."""
    end = time.monotonic() + seconds
    halves = [sorted(BESIDE & set(kinds)), sorted(set(kinds) - BESIDE)]
    with ThreadPoolExecutor(2) as pool:
        raging = [
            pool.submit(_rage, demo, end, random.Random(f"{seed} {half}"), half) for half in halves
        ]
    return sum((one.result() for one in raging), Counter())


def _rage(demo: Demo, end: float, choose: random.Random, kinds: list[str]) -> Counter[str]:
    """One after the other, each kind as often as the others and once at least."""
    done, waiting = Counter[str](), list[str]()
    while kinds and (time.monotonic() < end or len(done) < len(kinds)):
        time.sleep(choose.uniform(*REST_S))
        waiting = waiting or choose.sample(kinds, len(kinds))
        name = waiting.pop()
        with contextlib.suppress(psutil.NoSuchProcess, IndexError, StopIteration):  # just restarted
            print(f"{time.strftime('%H:%M:%S')}  {name}", flush=True)
            FAULTS[name](demo, choose)
            done[name] += 1
    return done


# --- checks -----------------------------------------------------------------------------------
def is_as_desired(demo: Demo) -> bool:
    """Every version has its replicas, all are ready and acknowledged, and nothing else runs."""
    replicas = [one for one in demo.get("placements/") if one["version_id"] in WANTED]
    ready = Counter(
        one["version_id"]
        for one in replicas
        if one["desired"] and one["acked"] and one["state"] == "ready" == one["observed"]
    )
    nodes = demo.get("nodes/")
    is_whole = ready == WANTED and len(replicas) == sum(WANTED.values())
    return is_whole and all(one["status"] == "ready" for one in nodes)


def violations(demo: Demo, seen: list[Seen], expected: dict[str, str]) -> Iterator[str]:
    records = {one["request_id"]: one for one in demo.pages(RECORDS)}
    for one in seen:
        if one.end in ("cut", "untyped"):
            yield f"{one.request_id}: ended {one.end}"
        whole = expected[one.model]
        is_right = one.text == whole if one.end == "done" else whole.startswith(one.text)
        if not is_right:
            yield f"{one.request_id}: another text, after {_common(one, expected)} characters"
        if one.request_id and not one.end.startswith("refused"):
            yield from _record_violations(one, records.get(one.request_id))
    yield from _bill_violations(records, slots.attempts_of(demo.folder))


def _bill_violations(
    records: dict[str, dict[str, Any]], attempts: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Every request has ended, and its attempts add up to what is billed."""
    billed = Counter[str]()
    for attempt in attempts:
        billed[attempt["request_id"]] += attempt["num_output_tokens"]
    for name, record in records.items():
        if record["outcome"] == "running":
            yield f"{name} is still open"
        elif billed[name] != record["num_output_tokens"]:
            yield f"{name}: {billed[name]} tokens in its attempts, and another number on record"


def _record_violations(one: Seen, record: dict[str, Any] | None) -> Iterator[str]:
    if record is None:
        yield f"{one.request_id}: no record"
    elif (record["outcome"] == "ok") != (one.end == "done"):
        yield f"{one.request_id}: on record {record['outcome']}, seen {one.end}"
    elif not _is_billed_right(one, record["num_output_tokens"]):
        yield f"{one.request_id}: {record['num_output_tokens']} tokens on record"


def _is_billed_right(one: Seen, num_tokens: int) -> bool:
    """What was cut short may have brought more than was shown by then."""
    num_seen = len(one.text.split())
    return num_tokens == num_seen if one.end == "done" else num_seen <= num_tokens <= NUM_TOKENS


def _common(one: Seen, expected: dict[str, str]) -> int:
    pairs = zip(one.text, expected[one.model], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# --- the command ------------------------------------------------------------------------------
def run(folder: Path, minutes: float, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> int:
    with Links(NUM_AGENTS, lambda: bus_port(folder)) as links:
        print(f"cuts: {links.means}", flush=True)
        demo = Demo(folder, links)
        try:
            problems = campaign(demo, minutes * 60, seed, kinds)
        finally:
            demo.stop()
    print("\n".join(problems[:50] or ["no violation"]))
    return 1 if problems else 0


def bus_port(folder: Path) -> int:
    return int(json.loads((folder / "ports.json").read_text())["nats"])


def campaign(demo: Demo, seconds: float, seed: int, kinds: Sequence[str]) -> list[str]:
    """Load and faults, and what was violated."""
    register(demo)
    undisturbed = [stream(demo, name) for name in MODELS]
    assert all(one.end == "done" for one in undisturbed), undisturbed
    expected = {one.model: one.text for one in undisturbed}
    load = Load(demo)
    load.start()
    try:
        faults = rage(demo, seconds, seed, kinds)
        problems = settle(demo)
    finally:
        load.stop()
    time.sleep(2)  # the read model follows the ledger
    problems += violations(demo, load.seen, expected)
    problems += slots.violations(demo.folder, demo.events(), WANTED)
    ends = Counter(one.end for one in load.seen)
    moved = Counter(one["outcome"] for one in demo.pages(RECORDS) if (one["attempts"] or 0) > 1)
    print(f"faults {dict(faults)}; streams {dict(ends)}; of several attempts {dict(moved)}")
    return problems if moved else [*problems, "no stream was interrupted"]


def settle(demo: Demo) -> list[str]:
    """Wait until the fleet is as desired, and stays so; what is wrong if it is not in time.

    Time in which processes waited for a processor does not count, up to ``SETTLE_S`` again.
    """
    began, since, starved = time.monotonic(), float("inf"), starved_s()
    while (now := time.monotonic()) - since < STEADY_S:
        since = min(since, now) if is_as_desired(demo) else float("inf")
        waited = min(starved_s() - starved, SETTLE_S)
        if min(since, now) - began > SETTLE_S + waited:
            rows = [*demo.get("nodes/"), *demo.get("placements/")]
            print("\n".join(json.dumps(row) for row in rows))
            return [f"not as desired within {SETTLE_S:g} s and {waited:.1f} s of waiting"]
        time.sleep(0.2)
    print(f"as desired {since - began:.1f} s after the last fault")
    return []


def starved_s() -> float:
    """Seconds since the machine's start in which some process waited for a processor; 0 where the
    kernel does not say."""
    with contextlib.suppress(OSError):
        some = Path("/proc/pressure/cpu").read_text().split("\n")[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kinds", default=",".join(FAULTS), help="Of faults, by commas.")
    parser.add_argument("--folder", type=Path, help="Keep the data and the logs there.")
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}")
    kinds = asked.kinds.split(",")
    if asked.folder:
        asked.folder.mkdir(parents=True)
        return run(asked.folder, asked.minutes, asked.seed, kinds)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        return run(Path(name), asked.minutes, asked.seed, kinds)


if __name__ == "__main__":
    sys.exit(main())
