"""A node that falls silent, with real processes: what it was asked is answered by another one long
before it is lost, and nothing is said twice when it comes back. The models are simulated."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.sync.client import connect

from tests.e2e.conftest import joining
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MIB = 1 << 20
TEXT = {"source": "simulated://slow?step_ms=50&prefill_tps=1000000", "max_output_tokens": 1000}
SHORT = ("chat", "completions", "socket", "vectors")  # a model for each kind of request
VECTORS = {"source": "simulated://vectors?step_ms=20&dims=16", "task": "embed", "max_inputs": 10}
HELLO = [{"role": "user", "content": "Hello"}]
NUM_SHORT, NUM_LONG = 10, 200  # tokens: of half a second, and of ten
ANSWERED_S, SLEPT_S = 12.0, 12.5  # suspect after 6, lost after 15
EACH = 4  # at once, and more than the slots of one node, so that they are spread over both


@dataclass(frozen=True)
class Said:
    """What one client was told: the text or the vectors, and how long after it asked."""

    content: str
    request_id: str
    seconds: float


@dataclass(frozen=True)
class Fleet:
    product: Product
    agent: psutil.Process  # of node-2
    port_file: Path  # of its /metrics

    @contextmanager
    def asleep(self) -> Iterator[float]:
        """SIGSTOP of the agent and its workers; when that was, in monotonic seconds."""
        stopped = [self.agent, *self.agent.children(recursive=True)]
        for one in stopped:
            one.suspend()
        try:
            yield time.monotonic()
        finally:
            for one in stopped:
                one.resume()

    def num_running(self) -> float:
        """Requests in node-2's engines."""
        url = f"http://127.0.0.1:{self.port_file.read_text().strip()}/metrics"
        lines = httpx.get(url, trust_env=False).text.splitlines()
        found = [one for one in lines if one.startswith("engine:num_requests_running{")]
        assert found
        return sum(float(one.rsplit(" ", 1)[1]) for one in found)

    def events(self) -> list[str]:
        return [one["type"] for one in self.product.results("events/?stream=node-node-2")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes with a replica of each model; nobody watches over node-2's agent."""
    folder = tmp_path_factory.mktemp("suspect")
    port_file = folder / "node-2.port"
    special = {"devices": "cpu:3GiB", "port_file": str(port_file)}
    with (
        Product(folder, "--simulated", "--devices", "cpu:3GiB") as product,
        joining(product, "node-2", **special) as agent,
    ):
        until(lambda: len(product.get("nodes/")["results"]) == 2, 90, product.logs)
        models = (*SHORT, "long")
        for name in models:
            add(product, name, VECTORS if name == "vectors" else TEXT, 4 if name == "long" else 2)
        until(lambda: all(is_on_both(product, one) for one in models), 120, product.logs)
        yield Fleet(product, psutil.Process(agent.pid), port_file)


def add(product: Product, name: str, spec: dict[str, Any], max_batch: int) -> None:
    product.post("models/", {"name": name})
    sizes = {"gpu_memory": 100 * MIB, "min_replicas": 2, "max_replicas": 2, "max_batch": max_batch}
    product.post(f"models/{name}/versions/", {"version": "v1", **sizes, **spec})


def is_on_both(product: Product, name: str) -> bool:
    return {one["node_id"] for one in product.placements(f"{name}@v1")} == {"node-1", "node-2"}


# --- clients ----------------------------------------------------------------------------------
def answered(product: Product, model: str, num_tokens: int) -> tuple[str, str]:
    """A chat that is not streamed."""
    answer = product.openai().chat.completions.with_raw_response.create(
        model=model, messages=HELLO, max_tokens=num_tokens
    )
    return answer.parse().choices[0].message.content, answer.headers["x-engine-request-id"]


def streamed(product: Product, model: str, num_tokens: int) -> tuple[str, str]:
    """A completion by server-sent events."""
    stream = product.openai().completions.create(
        model=model, prompt="Hello", max_tokens=num_tokens, stream=True
    )
    text = "".join(one.text for chunk in stream for one in chunk.choices)
    return text, stream.response.headers["x-engine-request-id"]


def on_the_socket(product: Product, model: str, num_tokens: int) -> tuple[str, str]:
    url = product.ready["api_url"].replace("http", "ws") + "/ws/v1/stream"
    bearer = {"Authorization": f"Bearer {product.ready['api_key']}"}
    asked = {"model": model, "messages": HELLO, "max_tokens": num_tokens}
    text, request_id, said = "", "", {"type": ""}
    with connect(url, additional_headers=bearer, proxy=None) as socket:
        message = {"type": "generate", "id": "a", "endpoint": "chat", "request": asked}
        socket.send(json.dumps(message))
        while not said.get("finish_reason"):
            said = json.loads(socket.recv(60))
            assert said["type"] != "error", said
            text += said.get("text", "")
            request_id = said.get("request_id", request_id)
    return text, request_id


def embedded(product: Product, model: str, num_tokens: int) -> tuple[str, str]:
    answer = product.openai().embeddings.with_raw_response.create(model=model, input="Hello")
    return str(answer.parse().data[0].embedding), answer.headers["x-engine-request-id"]


Ask = Callable[[Product, str, int], tuple[str, str]]
SHORTLY: dict[Ask, str] = dict(
    zip((answered, streamed, on_the_socket, embedded), SHORT, strict=True)
)
AT_LENGTH: dict[Ask, str] = dict.fromkeys((answered, streamed, on_the_socket), "long")


def asked(product: Product, ask: Ask, model: str, num_tokens: int) -> Said:
    began = time.monotonic()
    return Said(*ask(product, model, num_tokens), time.monotonic() - began)


def asking(
    pool: ThreadPoolExecutor, product: Product, asks: dict[Ask, str], num_tokens: int
) -> list[tuple[Ask, "Future[Said]"]]:
    """Several clients of each kind, at once."""
    each = [(ask, model) for ask, model in asks.items() for _ in range(EACH)]
    return [(ask, pool.submit(asked, product, ask, model, num_tokens)) for ask, model in each]


def undisturbed(product: Product, asks: dict[Ask, str], num_tokens: int) -> dict[Ask, str]:
    """What is to be told, by kind."""
    with ThreadPoolExecutor(len(asks)) as pool:
        told = pool.map(lambda one: one[0](product, one[1], num_tokens)[0], asks.items())
        return dict(zip(asks, told, strict=True))


def moved(product: Product, said: Said, num_tokens: int) -> list[dict[str, Any]] | None:
    """Both attempts of a request that node-2 was silent about; None if it was not sent there.

    Either way it has one record, which bills what the client was sent.
    """
    record = product.request_record(said.request_id)
    assert (record["outcome"], record["num_output_tokens"]) == ("ok", num_tokens)
    attempts = product.get(f"requests/{said.request_id}/attempts/")["results"]
    assert len(attempts) == record["attempts"]
    assert sum(one["num_output_tokens"] for one in attempts) == num_tokens
    if len(attempts) == 1:
        assert attempts[0]["node_id"] == "node-1"
        return None
    ends = [(one["node_id"], one["outcome"], one["error_code"]) for one in attempts]
    assert ends == [("node-2", "error", "node_suspect"), ("node-1", "ok", "")]
    return attempts


def test_what_a_silent_node_was_asked_is_answered_long_before_it_is_lost(fleet: Fleet) -> None:
    """Asked before it fell silent or after, of any kind; when it goes on nothing comes twice, what
    was taken from it is not computed there, and it is a node like any other again."""
    product = fleet.product
    short = undisturbed(product, SHORTLY, NUM_SHORT)
    long = undisturbed(product, AT_LENGTH, NUM_LONG)
    with ThreadPoolExecutor(EACH * (len(SHORTLY) + len(AT_LENGTH))) as pool:
        under_way = asking(pool, product, AT_LENGTH, NUM_LONG)
        until(lambda: fleet.num_running() >= 2, 10, product.logs)
        time.sleep(2)  # tokens have come of those that do not wait for a slot
        with fleet.asleep() as since:
            waiting = asking(pool, product, SHORTLY, NUM_SHORT)
            first = [(ask, future.result(ANSWERED_S)) for ask, future in waiting]
            time.sleep(max(0.0, since + SLEPT_S - time.monotonic()))
            assert "NodeLost" not in fleet.events()
        until(lambda: fleet.num_running() == 0, 5, product.logs)
        then = [(ask, future.result(90)) for ask, future in under_way]
    assert all(said.content == short[ask] for ask, said in first)
    assert all(said.content == long[ask] for ask, said in then)
    assert max(said.seconds for _, said in first) < ANSWERED_S
    for ask in SHORTLY:
        count = 0 if ask is embedded else NUM_SHORT
        tries = [moved(product, said, count) for kind, said in first if kind is ask]
        begun = [one for one in tries if one]
        assert begun and all(one[0]["num_output_tokens"] == 0 for one in begun), ask
    tries = [moved(product, said, NUM_LONG) for _, said in then]
    begun = [one for one in tries if one]
    assert any(one[0]["num_output_tokens"] > 0 for one in begun)
    until(lambda: "NodeRecovered" in fleet.events(), 10, product.logs)
    assert "NodeLost" not in fleet.events()
