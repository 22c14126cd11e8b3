"""The real model on two nodes: a worker is killed under a stream, and no client notices."""

import json
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
from websockets.sync.client import connect

from tests.e2e.conftest import joining
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(500)]

STORY = [{"role": "user", "content": "Tell me a long story about a dragon and a lighthouse."}]
NUM_TOKENS, NUM_BEFORE = 120, 15  # in all; deltas until the worker is killed
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@dataclass
class Fleet:
    """Two nodes, each with a replica of the model: their agents, and where these report."""

    product: Product
    agents: dict[str, int]  # node -> pid
    ports: dict[str, int]  # node -> of /metrics

    def kill_worker(self, node_id: str) -> None:
        for worker in psutil.Process(self.agents[node_id]).children():
            worker.send_signal(signal.SIGKILL)

    def wait_until_whole(self) -> None:
        until(lambda: self.nodes() == sorted(self.agents), 120, self.product.logs)

    def nodes(self) -> list[str]:
        return sorted(one["node_id"] for one in self.product.placements("smollm2@v1"))

    def num_generated(self) -> float:
        """Output tokens so far, as the agents' own /metrics count them."""
        pages = [
            httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            for port in self.ports.values()
        ]
        lines = [line for page in pages for line in page.splitlines()]
        of_tokens = [one for one in lines if one.startswith("engine:generation_tokens_total")]
        assert of_tokens
        return sum(float(line.rsplit(" ", 1)[1]) for line in of_tokens)


@pytest.fixture(scope="module")
def fleet(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    port_file = tmp_path_factory.mktemp("node-3") / "port"
    with joining(product, "node-3", port_file=str(port_file)) as agent:
        product.post("models/smollm2/versions/v1/scale/", {"min_replicas": 2, "max_replicas": 2})
        until(port_file.exists, 60)
        ports = {"node-1": product.port("gpuagent-1"), "node-3": int(port_file.read_text())}
        found = Fleet(product, {"node-1": product.pids["gpuagent-1"], "node-3": agent.pid}, ports)
        found.wait_until_whole()
        yield found
        _leave(product, found)


def _leave(product: Product, fleet: Fleet) -> None:
    """One replica, on the node that stays."""
    product.post("nodes/node-3/drain/", {"reason": "the test is over"})
    until(lambda: fleet.nodes() == ["node-1", "node-1"], 120, product.logs)
    product.post("models/smollm2/versions/v1/scale/", {"min_replicas": 1, "max_replicas": 1})
    until(lambda: fleet.nodes() == ["node-1"], 60, product.logs)


@dataclass
class Told:
    """What a client was told of one generation."""

    text: str = ""
    num_deltas: int = 0
    request_id: str = ""
    node: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def streamed(product: Product, sampling: dict[str, Any]) -> Iterator[Told]:
    """A stream of server-sent events by the official client; what was told so far, each time."""
    stream = product.openai().chat.completions.create(
        model="smollm2",
        messages=STORY,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    headers = stream.response.headers
    told = Told(request_id=headers["x-engine-request-id"], node=headers["x-engine-node"])
    for chunk in stream:
        for choice in chunk.choices:
            told.text += choice.delta.content or ""
            told.num_deltas += bool(choice.delta.content)
            told.finish_reason = choice.finish_reason or told.finish_reason
        if chunk.usage:
            told.usage = chunk.usage.model_dump()
        yield told


def on_the_socket(product: Product, sampling: dict[str, Any]) -> Iterator[Told]:
    """The same over the token websocket."""
    url = product.ready["api_url"].replace("http", "ws") + "/ws/v1/stream"
    bearer = {"Authorization": f"Bearer {product.ready['api_key']}"}
    asked = {"model": "smollm2", "messages": STORY, "max_tokens": NUM_TOKENS, **sampling}
    told = Told()
    with connect(url, additional_headers=bearer, proxy=None) as socket:
        message = {"type": "generate", "id": "a", "endpoint": "chat", "request": asked}
        socket.send(json.dumps(message))
        while not told.finish_reason:
            said = json.loads(socket.recv(60))
            assert said["type"] != "error", said
            told.text += said.get("text", "")
            told.num_deltas += said["type"] == "delta"
            told.request_id = said.get("request_id", told.request_id)
            told.node = said.get("node", told.node)
            told.finish_reason = said.get("finish_reason", "")
            told.usage = said.get("usage", {})
            yield told


def undisturbed(telling: Iterable[Told]) -> Told:
    *_, told = telling
    return told


def interrupted(telling: Iterable[Told], fleet: Fleet) -> Told:
    """kill -9 of the worker that streams, in the midst of it."""
    is_killed = False
    for told in telling:
        if told.num_deltas >= NUM_BEFORE and not is_killed:
            fleet.kill_worker(told.node)
            is_killed = True
    assert is_killed
    return told


@pytest.mark.parametrize(
    ("ask", "sampling"),
    [(streamed, GREEDY), (streamed, SEEDED), (on_the_socket, GREEDY)],
    ids=["greedy", "seeded", "websocket"],
)
def test_a_killed_workers_stream_is_the_undisturbed_one(
    fleet: Fleet, ask: Any, sampling: dict[str, Any]
) -> None:
    """To the token, as is the usage; on record is one request with both attempts, and what is
    billed is what the agents say that they generated."""
    product = fleet.product
    fleet.wait_until_whole()
    whole = undisturbed(ask(product, sampling))
    product.request_record(whole.request_id)
    before = fleet.num_generated()
    told = interrupted(ask(product, sampling), fleet)
    assert (told.text, told.finish_reason) == (whole.text, whole.finish_reason)
    num_tokens = told.usage["completion_tokens"]
    assert num_tokens == whole.usage["completion_tokens"] > NUM_BEFORE
    record = product.request_record(told.request_id)
    assert (record["outcome"], record["attempts"]) == ("ok", 2)
    assert record["num_output_tokens"] == num_tokens
    attempts = product.get(f"requests/{told.request_id}/attempts/")["results"]
    assert [one["outcome"] for one in attempts] == ["error", "ok"]
    assert {one["node_id"] for one in attempts} == set(fleet.agents)
    assert all(one["num_output_tokens"] for one in attempts)
    assert sum(one["num_output_tokens"] for one in attempts) == num_tokens
    until(lambda: fleet.num_generated() - before >= num_tokens, 10)
    assert fleet.num_generated() - before == num_tokens
