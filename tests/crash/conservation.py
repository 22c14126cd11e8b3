"""What is billed is what was generated: ``python -m tests.crash.conservation``.

Two gateways, two agents with simulated models, and thousands of requests: chat and completions,
streamed or not and some with two choices, generations over websockets, and lists of texts to embed.
A fifth of the clients hang up at a random token. The first half of the requests meets no fault but
those clients; then the tokens in the ledger must be the tokens that the engines counted, to the
token, and so must the tokens of the texts that were embedded. During the
second half gateways and engine workers are killed in turn, and then they must be so again. At the
end each accepted request has one record that ended, whoever saw an answer to its end finds it there
token by token, no client saw a token that was not billed, and usage is the sum of the records::

    python -m tests.crash.conservation --requests 10000 --kills 12 --seed 7

What a killed gateway's requests came to is told by the nodes (``application.orphans``). They bill
what the engine generated, so a little more than the client of a killed gateway saw: what was on its
way, and the steps until the nodes were told. Their number is printed as *billed and not seen*.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONCURRENCY = 48
DISCONNECTING = 0.2
MAX_TOKENS = 40
# One order's: of a longer list one part may be computed and another lost with its engine, twice.
# Such a request fails, and what was computed of it is billed to nobody.
MAX_TEXTS = 32
TENANTS = 4
LONGEST_S = 60.0
WORD = re.compile(rb"tok\d+")
GENERATED = re.compile(r"^\S*generation_tokens_total\{[^}]*\} (\S+)", re.MULTILINE)
EMBEDDED = re.compile(
    r"^engine:prompt_tokens_total\{[^}]*model_name=\"e\"[^}]*\} (\S+)", re.MULTILINE
)


@dataclass
class Seen:
    """One client's view. ``ended``: done, cut (no end was seen), refused or hung up."""

    request_id: str = ""
    num_tokens: int = 0
    usage: int | None = None
    ended: str = "cut"
    kind: str = ""
    gateway_killed: bool = False


@dataclass(frozen=True)
class Ask:
    """``hang_up_at``: the token after which the client leaves; 0: it stays. Of embeddings
    ``max_tokens`` is the number of texts, each of which takes a step."""

    kind: str  # chat, completions, websocket or embeddings
    stream: bool
    tenant: int
    max_tokens: int
    hang_up_at: int
    num_choices: int = 1


def asks(seed: int, count: int) -> Iterator[Ask]:
    choose = random.Random(seed)
    for _ in range(count):
        kind = choose.choice(("chat", "chat", "completions", "websocket", "embeddings"))
        most = choose.randint(1, MAX_TEXTS if kind == "embeddings" else MAX_TOKENS)
        leaves = choose.random() < DISCONNECTING
        stream = kind == "websocket" or (kind != "embeddings" and choose.random() < 0.6)
        tenant, at = choose.randrange(TENANTS), choose.randint(1, most)
        choices = 2 if kind in ("chat", "completions") and choose.random() < 0.1 else 1
        yield Ask(kind, stream, tenant, most, at if leaves else 0, choices)


class Fleet:
    """Two gateways on one store and one bus; ``keys`` are the tenants' API keys."""

    def __init__(self, folder: Path) -> None:
        from django.conf import settings

        from tests.openai.stack import GatewayProcess, Stack

        limits = {tier: {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_open": 500}
                  for tier in ("free", "standard", "premium")}  # fmt: skip
        self.stack = Stack(folder, settings.SECRET_KEY, {"ENGINE_TIER_LIMITS": json.dumps(limits)})
        (folder / "second").mkdir()
        second = GatewayProcess(folder / "second", self.stack.environment)
        self.gateways = [self.stack.gateway, second]
        self.keys: list[str] = []
        self.restarting: set[int] = set()

    def start(self) -> None:
        from controlplane.domain.version_spec import VersionSpec

        specs = {
            "m": VersionSpec(
                version="v1",
                source="simulated://m?step_ms=4&prefill_tps=1000000",
                gpu_memory=2**26,
                max_batch=64,
                max_prompt_tokens=512,
                max_output_tokens=512,
            ),
            "e": VersionSpec(
                version="v1",
                source="simulated://e?step_ms=4&prefill_tps=1000000&dims=8",
                gpu_memory=2**26,
                max_batch=1,
                max_prompt_tokens=64,
                task="embed",
                max_inputs=MAX_TEXTS,
            ),
        }
        self.stack.start()
        self.gateways[1].start()
        for name, spec in specs.items():
            self.stack.add_version(name, spec)
        for node_id in ("n1", "n2"):
            self.stack.add_agent(node_id)
            for name, spec in specs.items():
                self.stack.place(name, spec, node_id)
        self.keys = [self.stack.add_tenant(f"tenant{number}") for number in range(TENANTS)]
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        first = self.stack.gateway
        for gateway in self.gateways:
            self.stack.gateway = gateway
            for key in self.keys:
                self.stack.wait_for("m", key, LONGEST_S)
        self.stack.gateway = first

    def stop(self) -> None:
        self.gateways[1].stop()
        self.stack.stop()

    def counted(self, counter: re.Pattern[str]) -> int:
        """Tokens that the engines have counted."""
        pages = [agent.get("/metrics")[1] for agent in self.stack.agents.values()]
        return sum(int(float(found)) for page in pages for found in counter.findall(page))

    def query(self, sql: str) -> list[Any]:
        path = self.stack.directory / "engine.sqlite3"
        with closing(sqlite3.connect(path, timeout=10)) as connection:
            return connection.execute(sql).fetchall()

    def billed(self, what: str, model: str) -> int:
        """``what``: num_output_tokens or num_prompt_tokens."""
        sql = f"SELECT SUM({what}) FROM ledger_usage WHERE scope = 'model' AND target = '{model}'"
        return int(self.query(sql)[0][0] or 0)

    def apart(self) -> tuple[int, int]:
        """Billed minus counted: tokens generated, and tokens embedded."""
        return (
            self.billed("num_output_tokens", "m") - self.counted(GENERATED),
            self.billed("num_prompt_tokens", "e") - self.counted(EMBEDDED),
        )

    def num_open(self) -> int:
        return int(self.query("SELECT COUNT(*) FROM ledger_request WHERE outcome = ''")[0][0])


# --- clients ------------------------------------------------------------------------------------
async def play(fleet: Fleet, some: list[Ask]) -> list[Seen]:
    """All of ``some``, ``CONCURRENCY`` at a time."""
    seen: list[Seen] = []
    waiting = iter(some)

    async def client(number: int) -> None:
        choose = random.Random(number)
        for ask in waiting:
            seen.append(await asyncio.wait_for(request(fleet, ask, choose), LONGEST_S))

    await asyncio.gather(*map(client, range(CONCURRENCY)))
    return seen


async def request(fleet: Fleet, ask: Ask, choose: random.Random) -> Seen:
    """Until some gateway takes the connection: one that is being killed takes none."""
    while True:
        number = choose.randrange(2)
        seen = Seen(kind=ask.kind)
        try:
            call = websocket if ask.kind == "websocket" else http
            await call(fleet, fleet.gateways[number].port, ask, seen)
        except (OSError, asyncio.IncompleteReadError) as error:
            if isinstance(error, ConnectionRefusedError):
                await asyncio.sleep(0.05)
                continue
        seen.gateway_killed = number in fleet.restarting
        return seen


async def http(fleet: Fleet, port: int, ask: Ask, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_http_request(ask, fleet.keys[ask.tenant]))
        head = await reader.readuntil(b"\r\n\r\n") if not _leaves_early(ask) else b""
        if _leaves_early(ask):
            await asyncio.sleep(0.004 * ask.hang_up_at)
            seen.ended = "hung up"
            return
        _note_head(head, seen)
        await _read_body(reader, ask, seen)
    finally:
        writer.transport.abort()


def _leaves_early(ask: Ask) -> bool:
    """Who waits for the whole answer can only leave before it comes."""
    return bool(ask.hang_up_at) and not ask.stream


def _http_request(ask: Ask, key: str) -> bytes:
    body: dict[str, Any] = {"model": "m", "max_tokens": ask.max_tokens, "stream": ask.stream}
    body["n"] = ask.num_choices
    path = "/v1/completions"
    if ask.kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    elif ask.kind == "embeddings":
        path, body = "/v1/embeddings", {"model": "e", "input": ["Hello"] * ask.max_tokens}
    else:
        body["prompt"] = "Once upon a time"
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        "Connection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def _note_head(head: bytes, seen: Seen) -> None:
    found = re.search(rb"\r\nx-engine-request-id: *(\S+)", head, re.IGNORECASE)
    seen.request_id = found[1].decode() if found else ""
    if not head.startswith(b"HTTP/1.1 200"):
        seen.ended = "refused"


async def _read_body(reader: asyncio.StreamReader, ask: Ask, seen: Seen) -> None:
    body = bytearray()
    while data := await reader.read(65536):
        body += data
        seen.num_tokens = len(WORD.findall(body))
        if ask.hang_up_at and seen.num_tokens >= ask.hang_up_at:
            seen.ended = "hung up"
            return
    told = b"prompt" if ask.kind == "embeddings" else b"completion"
    usage = re.findall(rb'"%b_tokens": ?(\d+)' % told, body)
    whole = b"data: [DONE]" in body if ask.stream else bool(usage)
    if seen.ended != "refused" and whole:
        failed = b'"error"' in body
        seen.ended = "refused" if failed else "done"
        seen.usage = int(usage[-1]) if usage and not failed else None


async def websocket(fleet: Fleet, port: int, ask: Ask, seen: Seen) -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    url = f"ws://127.0.0.1:{port}/ws/v1/stream"
    try:
        socket = await connect(url, compression=None, proxy=None, close_timeout=1)
    except WebSocketException:
        seen.ended = "refused"
        return
    try:
        await socket.send(json.dumps({"type": "auth", "token": fleet.keys[ask.tenant]}))
        await socket.recv()
        asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}],
                 "max_tokens": ask.max_tokens}  # fmt: skip
        await socket.send(
            json.dumps({"type": "generate", "id": "a", "endpoint": "chat", "request": asked})
        )
        await _read_messages(socket, ask, seen)
    except WebSocketException:
        return  # cut
    finally:
        socket.transport.abort()


async def _read_messages(socket: Any, ask: Ask, seen: Seen) -> None:
    while True:
        message = json.loads(await socket.recv())
        seen.request_id = message.get("request_id", seen.request_id)
        seen.num_tokens += message.get("num_tokens", 0)
        if message["type"] == "error":
            seen.ended = "refused"
            return
        if message["type"] == "done":
            seen.ended, seen.usage = "done", message["usage"]["completion_tokens"]
            return
        if ask.hang_up_at and seen.num_tokens >= ask.hang_up_at:
            seen.ended = "hung up"
            return


# --- faults -------------------------------------------------------------------------------------
async def kill_in_turn(fleet: Fleet, kills: int, seed: int, done: asyncio.Event) -> Counter[str]:
    """A gateway, a worker, a gateway, …; each starts again before the next one dies."""
    choose, killed = random.Random(seed), Counter[str]()
    for number in range(kills):
        await asyncio.sleep(choose.uniform(0.3, 1.2))
        if done.is_set():
            break
        if number % 2:
            agent = choose.choice(list(fleet.stack.agents.values()))
            for worker in agent.workers():
                worker.kill()
            killed["worker"] += 1
        else:
            await _kill_gateway(fleet, choose.randrange(2))
            killed["gateway"] += 1
    return killed


async def _kill_gateway(fleet: Fleet, number: int) -> None:
    gateway = fleet.gateways[number]
    fleet.restarting.add(number)
    gateway.stop(signal.SIGKILL)
    await asyncio.to_thread(gateway.start)
    await asyncio.sleep(0.1)  # those who were cut have noticed by now
    fleet.restarting.discard(number)


# --- checks -------------------------------------------------------------------------------------
def settled(fleet: Fleet, seconds: float = 90.0) -> float:
    """Seconds until no request is open any more."""
    began = time.monotonic()
    while fleet.num_open():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{fleet.num_open()} requests are still open")
        time.sleep(0.1)
    return time.monotonic() - began


def difference(fleet: Fleet) -> tuple[int, int]:
    """See ``Fleet.apart``; engines tell their counters every two seconds."""
    for _ in range(60):
        if (apart := fleet.apart()) == (0, 0):
            break
        time.sleep(0.1)
    return apart


def violations(fleet: Fleet, seen: list[Seen]) -> Iterator[str]:
    rows = {
        row[0]: row[1:]
        for row in fleet.query(
            "SELECT request_id, outcome, num_prompt_tokens, num_output_tokens, max_output_tokens"
            " FROM ledger_request"
        )
    }
    ids = [one.request_id for one in seen if one.request_id]
    if len(set(ids)) != len(ids):
        yield "a request id was given out twice"
    for one in seen:
        if one.request_id and one.request_id not in rows:
            if one.ended != "refused":
                yield f"{one} has no record"
        elif one.request_id:
            yield from _violation(one, *rows[one.request_id])
    yield from _totals(fleet)


def _violation(one: Seen, outcome: str, prompt: int, billed: int, most: int) -> Iterator[str]:
    told = prompt if one.kind == "embeddings" else billed
    if one.ended == "done" and (outcome, told) != ("ok", one.usage):
        yield f"{one}: on record {outcome}, {billed} tokens"
    if one.num_tokens > billed:
        yield f"{one}: on record {outcome}, {billed} tokens, fewer than were seen"
    if billed > most:
        yield f"{one}: {billed} tokens of at most {most}"


def _totals(fleet: Fleet) -> Iterator[str]:
    tokens = "SUM(num_prompt_tokens), SUM(num_output_tokens)"
    billed = f"SELECT tenant_id, SUM(num_requests), {tokens} FROM ledger_usage"
    usage = fleet.query(f"{billed} WHERE scope = 'tenant' GROUP BY 1")
    records = fleet.query(f"SELECT tenant_id, COUNT(*), {tokens} FROM ledger_request GROUP BY 1")
    if sorted(usage) != sorted(records):
        yield f"usage {usage}, records {records}"


def unseen(fleet: Fleet, seen: list[Seen]) -> int:
    """Tokens that were billed for requests of killed gateways beyond what their clients saw."""
    found = fleet.query(
        "SELECT request_id, num_output_tokens FROM ledger_request WHERE outcome = 'unknown'"
    )
    billed = dict(found)
    return sum(billed[one.request_id] - one.num_tokens for one in seen if one.request_id in billed)


def closed_by(fleet: Fleet) -> dict[str, int]:
    """How many records the reaper closed, by whose count."""
    found = fleet.query(
        "SELECT error_code, COUNT(*) FROM ledger_request WHERE outcome = 'unknown' GROUP BY 1"
    )
    return dict(found)


# --- the command ------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.conservation")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _set_up(folder)
        fleet = Fleet(folder)
        try:
            fleet.start()
            return run(fleet, asked)
        finally:
            fleet.stop()


def _set_up(folder: Path) -> None:
    os.environ["ENGINE_DATA_DIR"] = str(folder)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    import django

    django.setup()
    from tests.crash.places import migrated_sqlite

    with migrated_sqlite(folder) as template:
        shutil.move(template, folder / "engine.sqlite3")


def run(fleet: Fleet, asked: argparse.Namespace) -> int:
    every, half = list(asks(asked.seed, asked.requests)), asked.requests // 2
    began = time.monotonic()
    seen = asyncio.run(play(fleet, every[:half]))
    settled(fleet)
    before, counted = difference(fleet), (fleet.counted(GENERATED), fleet.counted(EMBEDDED))
    more, killed = asyncio.run(_with_kills(fleet, every[half:], asked))
    seen += more
    waited, after = settled(fleet), difference(fleet)
    found = [f"billed - counted = {apart}" for apart in (before, after) if apart != (0, 0)]
    found += violations(fleet, seen)
    for one in found[:20]:
        print(f"VIOLATION {one}")
    print(
        f"{len(seen)} requests, seed {asked.seed}, {time.monotonic() - began:.0f} s:"
        f" {dict(Counter(one.ended for one in seen))}, {dict(killed)} killed\n"
        f"before the kills: {counted[0]} tokens generated, billed - generated = {before[0]};"
        f" {counted[1]} embedded, billed - embedded = {before[1]}\n"
        f"after them: billed - generated = {after[0]}, billed - embedded = {after[1]}; all ended"
        f" {waited:.1f} s after the last answer, of killed gateways {closed_by(fleet)},"
        f" {unseen(fleet, seen)} tokens billed and not seen\n"
        f"violations: {len(found)}"
    )
    return 1 if found else 0


async def _with_kills(
    fleet: Fleet, some: list[Ask], asked: argparse.Namespace
) -> tuple[list[Seen], Counter[str]]:
    done = asyncio.Event()
    killing = asyncio.create_task(kill_in_turn(fleet, asked.kills, asked.seed, done))
    seen = await play(fleet, some)
    done.set()
    return seen, await killing


if __name__ == "__main__":
    sys.exit(main())
