"""kill -9 of any one process while tokens stream and commands are written, again and again.

One product with the simulated backend. Each round opens streams, writes tenants over REST, kills
one process at a random moment, and waits until it is back and a new request is answered. What was
seen is kept as a history in the manner of Jepsen: *ok* (acknowledged), *fail* (refused), *unknown*
(cut), and checked against the log and the ledger at the end: ok must be there, unknown may be.

The seed is printed with a failure; ``ENGINE_CRASH_SEED`` and ``ENGINE_CRASH_ROUNDS`` repeat or
lengthen a run.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from tests.e2e.product import ROOT, Product, environment, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SEED = int(os.environ.get("ENGINE_CRASH_SEED", random.SystemRandom().randrange(10**6)))
NUM_ROUNDS = int(os.environ.get("ENGINE_CRASH_ROUNDS", 24))
VICTIMS = ("web", "gateway", "controller", "nats", "gpuagent-1", "worker")
NUM_STREAMS = 4
LONGEST_DELAY = 0.6
NUM_TOKENS = 56  # at 20 ms each: a stream outlasts the longest delay
# Killing these must not touch a stream: tokens flow without them.
OFF_THE_PATH = {"web", "controller"}


@dataclass
class History:
    """What clients saw. Lists are appended to by many threads, which Python makes safe."""

    streams: list["Stream"] = field(default_factory=list)
    tenants_ok: list[str] = field(default_factory=list)
    tenants_unknown: list[str] = field(default_factory=list)


@dataclass
class Stream:
    """One streamed request: ``ended`` is done, error (a typed one), or cut."""

    request_id: str = ""
    num_tokens: int = 0
    usage: int | None = None
    ended: str = "cut"
    detail: str = ""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with Product(tmp_path_factory.mktemp("crash"), "--simulated") as running:
        yield running


def test_no_kill_loses_anything(product):
    """Every process killed in turn, at least 20 rounds: see the module's docstring."""
    chance = random.Random(SEED)
    print(f"ENGINE_CRASH_SEED={SEED}")
    history = History()
    for number in range(NUM_ROUNDS):
        victim = VICTIMS[number % len(VICTIMS)]
        play_round(product, history, victim, number, chance.uniform(0.05, LONGEST_DELAY))
    assert Counter(stream.ended for stream in history.streams)["done"] > NUM_ROUNDS
    check_ledger(product, history)
    check_log(product, history)


def play_round(product: Product, history: History, victim: str, number: int, delay: float) -> None:
    began = time.monotonic()
    before = product.pids
    streams = [Stream() for _ in range(NUM_STREAMS)]
    threads = [threading.Thread(target=consume, args=(product, stream)) for stream in streams]
    written = threading.Event()
    threads.append(threading.Thread(target=write, args=(product, history, number, written)))
    for thread in threads:
        thread.start()
    until(lambda: all(s.num_tokens or s.ended != "cut" for s in streams), 20, product.logs, 0.01)
    time.sleep(delay)
    kill(product, victim)
    written.set()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), f"round {number}, {victim}: a client hangs"
    history.streams += streams
    ended = Counter(stream.ended for stream in streams)
    print(f"round {number}: {victim} killed after {delay:.2f} s, streams {dict(ended)}")
    if victim in OFF_THE_PATH:
        assert [s.ended for s in streams] == ["done"] * NUM_STREAMS, (number, victim, streams)
    recover(product, victim, before, number)
    print(f"round {number}: took {time.monotonic() - began:.1f} s")


def consume(product: Product, stream: Stream, max_tokens: int = NUM_TOKENS) -> None:
    client = product.openai(timeout=30.0)
    messages = [{"role": "user", "content": "Go on."}]
    try:
        answer = client.chat.completions.create(
            model="simulated",
            messages=messages,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        stream.request_id = answer.response.headers["x-request-id"]
        for chunk in answer:
            stream.num_tokens += len(chunk.choices)
            stream.usage = chunk.usage.completion_tokens if chunk.usage else None
        stream.ended = "done" if stream.usage is not None else "cut"
    except openai.APIStatusError as error:
        stream.ended, stream.detail = "error", str(error)
    except (openai.APIConnectionError, httpx.HTTPError) as error:
        stream.detail = repr(error)
    except openai.APIError as error:  # an error event inside the stream
        stream.ended, stream.detail = "error", str(error)


def write(product: Product, history: History, number: int, killed: threading.Event) -> None:
    """Create tenants from before the kill until a little after it."""
    for count in range(200):
        name = f"crash-{number}-{count}"
        try:
            headers = {"Idempotency-Key": name}
            body = {"name": name}
            answer = product.admin("POST", "tenants/", json=body, headers=headers)
            if answer.status_code == 201:
                history.tenants_ok.append(name)
            else:
                history.tenants_unknown.append(name)
        except httpx.HTTPError:
            history.tenants_unknown.append(name)
        if killed.wait(0.02) and count >= 10:
            return


def kill(product: Product, victim: str) -> None:
    if victim == "worker":
        for worker in product.workers():
            worker.kill()
    else:
        os.kill(product.pids[victim], signal.SIGKILL)


def recover(product: Product, victim: str, before: dict[str, int], number: int) -> None:
    """The victim is back under a new pid, the others are the same, and a request is answered."""
    untouched = {name: pid for name, pid in before.items() if name != victim}

    def restarted() -> bool:
        now = product.pids
        return now.keys() == before.keys() and (victim == "worker" or now[victim] != before[victim])

    until(restarted, 20, product.logs)
    until(lambda: served(product), 60, product.logs)
    now = product.pids
    assert {name: now[name] for name in untouched} == untouched, f"round {number}: {victim}"


def served(product: Product) -> bool:
    stream = Stream()
    consume(product, stream, max_tokens=2)
    try:
        return stream.ended == "done" and product.admin("GET", "status/").status_code == 200
    except httpx.HTTPError:
        return False


def check_ledger(product: Product, history: History) -> None:
    """Exactly one terminal record per accepted request; done streams are ok with their tokens."""
    accepted = [stream for stream in history.streams if stream.request_id]
    until(lambda: not open_requests(product), 90, every=1.0)
    for stream in accepted:
        found = product.get(f"requests/?request_id={stream.request_id}")["results"]
        assert len(found) == 1, (SEED, stream)
        if stream.ended == "done":
            assert found[0]["outcome"] == "ok", (SEED, stream, found[0])
            assert found[0]["num_output_tokens"] == stream.usage, (SEED, stream, found[0])
        else:
            assert found[0]["outcome"] in ("ok", "error", "cancelled", "timeout", "unknown")


def open_requests(product: Product) -> list[str]:
    """Accepted requests without a terminal record."""
    rows = product.results("requests/?outcome=running&limit=500")
    return [row["request_id"] for row in rows]


def check_log(product: Product, history: History) -> None:
    """Each acknowledged command is in the log exactly once, each other at most once; the chain
    verifies; and the read model equals a replay."""
    created = Counter(
        event["data"]["tenant_id"]
        for event in product.results("events/?type=TenantCreated&limit=500")
    )
    lost = [name for name in history.tenants_ok if created[name] != 1]
    assert lost == [], SEED
    assert len(history.tenants_ok) > NUM_ROUNDS
    assert all(created[name] <= 1 for name in history.tenants_unknown), SEED
    for command in (["verify"], ["rebuild_readmodel"]):
        done = subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=ROOT,
            env=environment(product.data_dir),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
