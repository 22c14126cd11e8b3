"""What happens to requests when a part dies under them. The tests share a stack, which is mended
before each: only what the one before has ended is started again."""

import os
import re
import shutil
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from django.conf import settings

from controlplane.dispatch.record import recompute
from tests.agent.harness import Agent
from tests.databases import pointed_at
from tests.openai.conftest import FAST, SLOW, SLOW_VECTORS
from tests.openai.ledger import attempts_of, dispatches_of, record_of, requests_of
from tests.openai.stack import Stack, until
from tests.openai.test_websocket import Client, open_socket
from tests.openai.wire import HELLO, events, post

CHAT = "/v1/chat/completions"
NUM_TOKENS = 160
# Of a version whose engine cannot rebuild what another replica began.
RIGID = msgspec.structs.replace(
    SLOW, source="simulated://rigid?step_ms=50&prefill_tps=1000000&continues=0"
)
# An input in a step of 0.4 s: a hundred take longer than a node waits for a lost gateway.
LONG_VECTORS = msgspec.structs.replace(
    SLOW_VECTORS, source="simulated://vectors?step_ms=400&prefill_tps=1000000&dims=16"
)
RUNNING = "engine:num_requests_running{"
COMPUTED = "engine:prompt_tokens_total{"


@pytest.fixture(scope="module")
def shared(
    migrated_file: Path, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any
) -> Iterator[Stack]:
    """Two nodes, each with a replica of ``slow``; ``fast`` runs on the first."""
    directory = tmp_path_factory.mktemp("faults")
    path = directory / "engine.sqlite3"
    shutil.copy(migrated_file, path)
    with django_db_blocker.unblock(), pointed_at(path):
        stack = Stack(directory, settings.SECRET_KEY)
        try:
            stack.start()
            stack.add_tenant("operators")
            stack.add_version("slow", SLOW)
            stack.add_version("fast", FAST)
            stack.add_version("rigid", RIGID)
            stack.add_version("vectors", LONG_VECTORS)
            for node_id in ("n1", "n2"):
                stack.add_agent(node_id)
                stack.place("slow", SLOW, node_id)
                stack.place("rigid", RIGID, node_id)
            stack.place("fast", FAST, "n1")
            stack.place("vectors", LONG_VECTORS, "n1")
            yield stack
        finally:
            stack.stop()


@pytest.fixture
def broken(shared: Stack, request: pytest.FixtureRequest) -> Stack:
    """Whole again before each test, which has a tenant of its own."""
    shared.mend()
    tenant = re.sub(r"\W+", "-", request.node.name)[:63]
    shared.keys = {tenant: shared.add_tenant(tenant)}
    for name in ("slow", "rigid", "fast"):
        shared.wait_for(name, shared.keys[tenant])
    return shared


def key_of(stack: Stack) -> str:
    (key,) = stack.keys.values()
    return key


def rows_of(stack: Stack) -> list[dict[str, Any]]:
    (tenant,) = stack.keys
    return requests_of(stack, tenant)


def wait_for_both_nodes(stack: Stack) -> None:
    """Until a burst is spread over both: one may be heard of seconds after the other.

    It is larger than one node's slots: a smaller one may all fit on the faster node.
    """

    def spread() -> bool:
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda _: streamed(stack, 2), range(24)))
        return {answer.headers["x-engine-node"] for answer in answers} == {"n1", "n2"}

    until(spread)


def streamed(stack: Stack, max_tokens: int, seconds: float = 60) -> httpx.Response:
    body = {"model": "slow", "messages": HELLO, "max_tokens": max_tokens, "stream": True}
    headers = {"Authorization": f"Bearer {key_of(stack)}"}
    return httpx.post(
        stack.gateway.url + CHAT, json=body, headers=headers, timeout=seconds, verify=False
    )


def in_background(stack: Stack, count: int, max_tokens: int) -> tuple[ThreadPoolExecutor, Any]:
    pool = ThreadPoolExecutor(count)
    return pool, [pool.submit(streamed, stack, max_tokens) for _ in range(count)]


def wait_for_tokens(stack: Stack, count: int) -> None:
    """Until that many requests are live and noted to have produced tokens."""
    sql = "SELECT COUNT(*) FROM ledger_request WHERE outcome = '' AND progress_tokens > 0"

    def producing() -> bool:
        with sqlite3.connect(stack.directory / "engine.sqlite3") as connection:
            return bool(connection.execute(sql).fetchone()[0] >= count)

    until(producing, 20)


def text_of(answer: httpx.Response) -> str:
    """All that a stream brought; it ended well, with nothing after DONE."""
    chunks = events(answer.text)
    assert chunks[-1] == "[DONE]" and "error" not in chunks[-2], chunks[-2]
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def fault(stack: Stack, name: str) -> None:
    """What befalls the node that runs most, which comes back."""
    agent = max(stack.agents.values(), key=num_running_on)
    if name == "worker":
        for worker in agent.workers():
            worker.kill()
    elif name == "agent":
        agent.stop(signal.SIGKILL)
    else:
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(18)  # past its lease and past the time after which it counts as lost
        os.kill(agent.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["worker", "agent", "pause"])
def test_streams_go_on_elsewhere_and_nobody_notices(broken: Stack, name: str) -> None:
    """kill -9 of a worker and of an agent, and a pause past the lease: every stream ends as an
    undisturbed one does, one record each, whose attempts add up; no token twice, none unbilled."""
    wait_for_both_nodes(broken)
    num_tokens = 500 if name == "pause" else 160
    whole = text_of(streamed(broken, num_tokens))
    pool, futures = in_background(broken, 24, num_tokens)
    wait_for_tokens(broken, 24)
    fault(broken, name)
    answers = [future.result(90) for future in futures]
    pool.shutdown()
    assert {text_of(answer) for answer in answers} == {whole}
    moved = 0
    for answer in answers:
        request_id = answer.headers["x-engine-request-id"]
        tries = tries_of(broken, request_id, num_tokens)
        assert len({one["attempt"] for one in tries}) == len(tries)
        moved += len(tries) > 1
        kept = dispatches_of(broken, request_id)
        assert set(range(2, len(tries) + 1)) <= {one.attempt for one in kept}
        assert all(recompute(one) == () for one in kept)
    assert moved > 0
    reader = broken.add_key("operators", ("admin:read",), role="auditor")
    headers = {"Authorization": f"Bearer {reader}"}
    page = httpx.get(f"{broken.gateway.url}/metrics", headers=headers, verify=False).text
    assert "engine_gateway_continuations_total{cause=" in page


def tries_of(stack: Stack, request_id: str, num_tokens: int) -> list[dict[str, Any]]:
    """The attempts of a request that ended well: they add up to what is billed."""
    row, tries = record_of(stack, request_id), attempts_of(stack, request_id)
    assert (row["outcome"], row["num_output_tokens"]) == ("ok", num_tokens)
    assert sum(one["num_output_tokens"] for one in tries) == num_tokens
    assert row["attempts"] == max(one["attempt"] for one in tries)
    return tries


Said = tuple[list[str], str]  # the text of each choice, and the request's id


def whole(stack: Stack) -> Said:
    """Not streamed: one answer, after all of it."""
    body = {"model": "slow", "messages": HELLO, "max_tokens": NUM_TOKENS}
    answer = post(stack, CHAT, body, key=key_of(stack))
    texts = [one["message"]["content"] for one in answer.json()["choices"]]
    assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
    return texts, answer.headers["x-engine-request-id"]


def choices(stack: Stack) -> Said:
    """Three choices of one stream, and each may be on another node."""
    body = {"model": "slow", "prompt": "Hello", "max_tokens": NUM_TOKENS, "n": 3, "stream": True}
    answer = post(stack, "/v1/completions", body, key=key_of(stack))
    texts, ends = ["", "", ""], ["", "", ""]
    for chunk in events(answer.text)[:-1]:
        for one in chunk["choices"]:
            texts[one["index"]] += one["text"]
            ends[one["index"]] += one["finish_reason"] or ""
    assert ends == ["length"] * 3
    return texts, answer.headers["x-engine-request-id"]


def socket_stream(stack: Stack) -> Said:
    """On the token websocket."""
    with open_socket(stack, {"Authorization": f"Bearer {key_of(stack)}"}) as socket:
        client = Client(socket)
        assert client.receive()["type"] == "ready"
        client.generate("a", model="slow", max_tokens=NUM_TOKENS)
        started, *said, done = client.until_end("a")["a"]
    deltas = [one for one in said if one["type"] == "delta"]
    assert done["finish_reason"] == "length"
    assert sum(one["num_tokens"] for one in deltas) == NUM_TOKENS
    assert done["usage"]["completion_tokens"] == NUM_TOKENS
    return ["".join(one["text"] for one in deltas)], started["request_id"]


@pytest.mark.parametrize("ask", [whole, choices, socket_stream])
def test_however_it_is_asked_for_it_goes_on(broken: Stack, ask: Callable[[Stack], Said]) -> None:
    """kill -9 of the worker under it: the same texts, and one record with all its attempts."""
    texts, _ = ask(broken)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, broken)
        wait_for_tokens(broken, 1)
        fault(broken, "worker")
        again, request_id = future.result(60)
    assert again == texts
    tries = tries_of(broken, request_id, NUM_TOKENS * len(texts))
    lost = [one for one in tries if one["outcome"] == "error"]
    assert lost and all(one["num_output_tokens"] for one in lost)


def test_on_a_websocket_it_is_said_what_is_waited_for(broken: Stack) -> None:
    """Of a version with one replica: until that one is back."""
    with open_socket(broken, {"Authorization": f"Bearer {key_of(broken)}"}) as socket:
        client = Client(socket)
        assert client.receive()["type"] == "ready"
        client.generate("a", model="fast", max_tokens=1000)
        assert [client.receive()["type"] for _ in range(3)] == ["started", "delta", "delta"]
        for worker in broken.agents["n1"].workers():
            worker.kill()
        *said, done = client.until_end("a")["a"]
    waiting = next(one for one in said if one["type"] == "waiting")
    assert (waiting["reason"], waiting["choice"], waiting["attempt"]) == ("continuation", 0, 2)
    assert done["usage"]["completion_tokens"] == 1000


def test_what_no_replica_can_rebuild_ends_typed(broken: Stack) -> None:
    """The text stays a beginning of the whole, the reason is said, and what came is billed."""
    body = {"model": "rigid", "prompt": "Hello", "max_tokens": NUM_TOKENS}
    entire = post(broken, "/v1/completions", body, key=key_of(broken)).json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        asked = (body | {"stream": True}, body)
        futures = [
            pool.submit(post, broken, "/v1/completions", one, key=key_of(broken)) for one in asked
        ]
        wait_for_tokens(broken, 2)
        for agent in broken.agents.values():
            for worker in agent.workers():
                worker.kill()
        stream, answer = (future.result(60) for future in futures)
    *chunks, error, done = events(stream.text)
    text = "".join(one["text"] for chunk in chunks for one in chunk["choices"])
    assert entire.startswith(text) and 0 < len(text) < len(entire)
    assert (error["error"]["code"], done) == ("continuation_unsupported", "[DONE]")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "continuation_unsupported"
    row = record_of(broken, stream.headers["x-engine-request-id"])
    assert (row["outcome"], row["error_code"]) == ("error", "continuation_unsupported")
    assert row["num_output_tokens"] == len(text.split())
    first, *_, last = attempts_of(broken, row["request_id"])
    assert first["num_output_tokens"] == row["num_output_tokens"]
    assert last["error_code"] == "continuation_unsupported"


def test_a_request_not_yet_begun_moves_to_another_node(broken: Stack) -> None:
    """While telemetry still believes in the dead node, what is sent there is sent again.

    Many short choices of one request go out in one moment, so that both nodes get some: of requests
    that come one by one, the node whose steps a busy machine made slower may get none.
    """
    wait_for_both_nodes(broken)
    broken.agents["n2"].stop(signal.SIGKILL)
    body = {"model": "slow", "prompt": ["Hello"] * 32, "max_tokens": 2}
    answer = post(broken, "/v1/completions", body, key=key_of(broken))
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-engine-request-id"]
    tries_of(broken, request_id, 64)
    ends: dict[int, list[tuple[str, str, int]]] = {}
    for one in attempts_of(broken, request_id):
        end = (one["node_id"], one["outcome"], one["num_output_tokens"])
        ends.setdefault(one["choice"], []).append(end)
    stayed, moved = [("n1", "ok", 2)], [("n2", "error", 0), ("n1", "ok", 2)]
    assert len(ends) == 32 and moved in ends.values()
    assert all(one in (stayed, moved) for one in ends.values())


def test_sigterm_lets_short_streams_end_and_fails_long_ones_typed(broken: Stack) -> None:
    """Within eight seconds; every stream has DONE and every request its record."""
    pool, (long,) = in_background(broken, 1, 2000)
    wait_for_tokens(broken, 1)
    short_pool, (short,) = in_background(broken, 1, 20)
    time.sleep(0.5)
    began = time.monotonic()
    assert broken.gateway.stop() == 0
    assert time.monotonic() - began < 8
    assert events(short.result().text)[-2]["choices"][0]["finish_reason"] == "length"
    ending = events(long.result().text)[-2:]
    assert ending[0]["error"]["code"] == "shutting_down" and ending[1] == "[DONE]"
    pool.shutdown()
    short_pool.shutdown()
    rows = rows_of(broken)
    assert all(row["outcome"] for row in rows)
    assert [row["outcome"] for row in rows if row["num_output_tokens"] > 30] == ["error"]


def test_without_the_bus_requests_are_refused_soon(broken: Stack) -> None:
    """503 within two seconds, and served again after the bus is back."""
    broken.nats.stop(kill=True)
    began = time.monotonic()
    answer = streamed(broken, 2)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] in ("bus_unavailable", "model_not_ready", "engine_lost")
    assert time.monotonic() - began < 2
    assert httpx.get(f"{broken.gateway.url}/readyz", verify=False).status_code == 503
    broken.nats.start()
    until(lambda: streamed(broken, 2).status_code == 200, 20, 0.3)


def test_with_a_bus_that_hangs_requests_are_refused_soon(broken: Stack) -> None:
    """In each of the eight seconds after it fell silent, and with the same code; nodes that were
    not heard for want of it are not blamed. Then all is well again within five."""
    wait_for_both_nodes(broken)
    hung_at = time.monotonic()
    os.kill(broken.nats.pid, signal.SIGSTOP)
    while time.monotonic() < hung_at + 8:
        began = time.monotonic()
        answer = streamed(broken, 2)
        assert answer.json()["error"]["code"] == "bus_unavailable", began - hung_at
        assert time.monotonic() - began < 2.5, began - hung_at
        time.sleep(0.3)
    os.kill(broken.nats.pid, signal.SIGCONT)
    until(lambda: streamed(broken, 2).status_code == 200, 5, 0.2)


def test_without_the_ledger_nothing_is_served(broken: Stack) -> None:
    """A writer that holds the database: 503 audit_unavailable, no token; then all is well again."""
    path = broken.directory / "engine.sqlite3"
    holder = sqlite3.connect(path, isolation_level=None, timeout=10)
    holder.execute("BEGIN EXCLUSIVE")
    answer = streamed(broken, 2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "audit_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    holder.execute("ROLLBACK")
    holder.close()
    until(lambda: streamed(broken, 2).status_code == 200, 10, 0.2)


def test_a_reader_that_never_reads_is_cut_and_others_go_on(broken: Stack) -> None:
    """After half a minute; its generation is stopped and on record, memory stays bounded."""
    body = b'{"model":"fast","prompt":"x","max_tokens":1000,"n":8,"stream":true,"logprobs":20}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {key_of(broken)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    readers = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", broken.gateway.port))
        connection.sendall(head.encode() + body)
        readers.append(connection)
    began = time.monotonic()

    def cut() -> bool:
        rows = [row for row in rows_of(broken) if row["max_output_tokens"] == 8000]
        return len(rows) == 4 and all(row["error_code"] == "slow_reader" for row in rows)

    until(cut, 50, 0.5)
    assert time.monotonic() - began > 25
    assert streamed(broken, 2).status_code == 200
    for connection in readers:
        connection.close()


def test_a_killed_gateways_requests_are_closed_by_the_next(broken: Stack) -> None:
    """As unknown, with what the nodes had generated, which is more than was last noted; they are
    told to stop long before they would be through, and no reservation is left.
    """
    pool, futures = in_background(broken, 3, 2000)
    wait_for_tokens(broken, 3)
    until(lambda: num_running(broken) == 3, 10)
    broken.gateway.stop(signal.SIGKILL)
    broken.gateway.start()
    for future in futures:
        assert isinstance(future.exception(30), httpx.HTTPError)
    pool.shutdown()
    until(lambda: all(row["outcome"] for row in rows_of(broken)), 60)
    rows = [row for row in rows_of(broken) if row["max_output_tokens"] == 2000]
    ends = [(row["outcome"], row["error_code"]) for row in rows]
    assert ends == [("unknown", "gateway_lost")] * 3
    assert all(2000 > row["num_output_tokens"] > row["progress_tokens"] for row in rows)
    assert all(row["node_id"] for row in rows)
    until(lambda: num_running(broken) == 0, 10)


def test_a_killed_gateways_embeddings_are_billed_as_computed(broken: Stack) -> None:
    """To the token: what its node had embedded by the time it stopped, and not all that was asked.

    No frame of it ever left the engine, so that the node alone can know.
    """
    n1 = broken.agents["n1"]
    broken.wait_for("vectors", key_of(broken), path="/v1/embeddings")
    before = total_on(n1, COMPUTED, "vectors")
    body = {"model": "vectors", "input": [[5, 6, 7]] * 100}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, broken, "/v1/embeddings", body, key=key_of(broken))
        until(lambda: num_running(broken) > 0, 10)
        broken.gateway.stop(signal.SIGKILL)
        assert isinstance(answer.exception(30), httpx.HTTPError)
    broken.gateway.start()
    until(lambda: all(row["outcome"] for row in rows_of(broken)), 60)
    (row,) = [row for row in rows_of(broken) if row["outcome"] == "unknown"]
    assert row["error_code"] == "gateway_lost" and row["node_id"] == "n1"
    billed = row["num_prompt_tokens"]
    assert 0 < billed < 300 and billed % 3 == 0
    until(lambda: total_on(n1, COMPUTED, "vectors") - before == billed, 10)


def num_running(stack: Stack) -> int:
    """Requests in the engines of all nodes."""
    return sum(map(num_running_on, stack.agents.values()))


def num_running_on(agent: Agent) -> int:
    """Requests in the engines of one node."""
    return total_on(agent, RUNNING)


def total_on(agent: Agent, metric: str, model: str = "") -> int:
    """Of the replicas of one node, or of those of one model."""
    lines = agent.get("/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith(metric) and model in line]
    assert found
    return int(sum(float(line.rpartition(" ")[2]) for line in found))
