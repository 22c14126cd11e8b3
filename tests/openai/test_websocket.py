"""The token websocket: many generations on one connection, and what ends a connection."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from controlplane.adapters.access.tokens import sign_ticket
from tests.openai.conftest import FAST
from tests.openai.ledger import record_of, requests_of
from tests.openai.stack import ROOT, Stack, until
from tests.openai.wire import HELLO


def open_socket(stack: Stack, headers: dict[str, str] | None = None, query: str = "") -> Any:
    url = f"ws://127.0.0.1:{stack.gateway.port}/ws/v1/stream{query}"
    return connect(url, additional_headers=headers, compression=None, proxy=None, close_timeout=2)


class Client:
    """Sends and receives the JSON frames of one connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def receive(self, timeout: float = 20) -> dict[str, Any]:
        return dict(json.loads(self.socket.recv(timeout)))

    def generate(self, name: str, model: str = "fast", **fields: Any) -> None:
        request = {"model": model, "messages": HELLO, "max_tokens": 5} | fields
        self.send(type="generate", id=name, endpoint="chat", request=request)

    def until_end(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Messages by generation, until each of ``names`` has ended."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        open_names = set(names)
        while open_names:
            message = self.receive()
            found[message["id"]].append(message)
            if message["type"] in ("done", "error"):
                open_names.discard(message["id"])
        return found

    def close_code(self, timeout: float = 20) -> int:
        """The code with which the server ends the connection."""
        try:
            while True:
                self.receive(timeout)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 1006


@pytest.fixture
def ws(stack: Stack, key: str) -> Iterator[Client]:
    with open_socket(stack) as socket:
        client = Client(socket)
        client.send(type="auth", token=key)
        assert client.receive() == {"type": "ready", "tenant": "acme"}
        yield client


def test_a_generation_is_started_streamed_and_done(ws: Client, stack: Stack) -> None:
    """Texts join to the whole, counts agree, and the record is durable at "done"."""
    ws.generate("a")
    started, *deltas, done = ws.until_end("a")["a"]
    assert started["type"] == "started" and started["version_id"] == "fast@v1"
    assert sum(delta["num_tokens"] for delta in deltas) == done["usage"]["completion_tokens"] == 5
    assert len("".join(delta["text"] for delta in deltas).split()) == 5
    assert done["finish_reason"] == "length" and done["duration_ms"] >= done["ttft_ms"] > 0
    assert record_of(stack, started["request_id"])["outcome"] == "ok"


def told_frames() -> dict[str, set[str]]:
    """Of the package's README: type -> the words in code of its fields."""
    lines = (ROOT / "controlplane/entrypoints/openai/README.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith(("| client |", "| server |"))]
    return {kind.strip("`"): set(re.findall(r"`(\w+)`", fields)) for _, kind, fields, _ in cells}


def test_the_readme_tells_of_every_frame_and_its_fields(ws: Client, stack: Stack) -> None:
    told = told_frames()
    assert set(told) == {"auth", "ready", "generate", "waiting", "started", "delta", "cancel",
                         "done", "error"}  # fmt: skip
    stack.add_version("nowhere", FAST)
    ws.send(type="cancel", id="unknown")
    ws.generate("a", logprobs=True)
    seen = [{"type": "ready", "tenant": "acme"}, ws.receive(), *ws.until_end("a")["a"]]
    time.sleep(0.2)  # the gateway follows the log every 50 ms
    ws.generate("b", "nowhere")
    seen.append(ws.receive())
    ws.send(type="cancel", id="b")
    ws.until_end("b")
    assert {one["type"] for one in seen} == {
        "ready",
        "error",
        "started",
        "delta",
        "done",
        "waiting",
    }
    for one in seen:
        assert set(one) - {"type"} <= told[one["type"]], one
        missing = told[one["type"]] - set(one)
        assert not missing or one["type"] in ("error", "delta", "waiting"), (one, missing)


def test_many_generations_share_a_connection(ws: Client) -> None:
    """They run side by side and each gets its own tokens."""
    names = [f"g{i}" for i in range(20)]
    for i, name in enumerate(names):
        ws.generate(name, max_tokens=5 + i)
    for i, (_, messages) in enumerate(ws.until_end(*names).items()):
        assert messages[-1]["usage"]["completion_tokens"] == 5 + i


def test_a_cancelled_generation_is_done_with_what_it_made(ws: Client, stack: Stack) -> None:
    """The others go on."""
    ws.generate("slow", model="slow", max_tokens=1000)
    started = ws.receive()
    assert ws.receive()["type"] == "delta"
    ws.generate("other")
    ws.send(type="cancel", id="slow")
    messages = ws.until_end("slow", "other")
    done = messages["slow"][-1]
    assert done["finish_reason"] == "cancelled" and 1 <= done["usage"]["completion_tokens"] < 100
    row = record_of(stack, started["request_id"])
    assert row["outcome"] == "cancelled"
    assert row["num_output_tokens"] == done["usage"]["completion_tokens"]
    assert messages["other"][-1]["type"] == "done"


def test_a_lost_connection_cancels_its_generations(stack: Stack, key: str) -> None:
    """They are settled as cancelled, with their tokens."""
    with open_socket(stack, {"Authorization": f"Bearer {key}"}) as socket:
        client = Client(socket)
        assert client.receive()["type"] == "ready"
        client.generate("a", model="slow", max_tokens=1000)
        request_id = client.receive()["request_id"]
        client.receive()
    until(lambda: record_of(stack, request_id)["outcome"], 5)
    assert record_of(stack, request_id)["outcome"] == "cancelled"


def test_errors_name_their_generation(ws: Client) -> None:
    """Unknown model, bad field, an id in use, an unknown id: each is answered, none is fatal."""
    for name, fields, code in (
        ("a", {"model": "absent"}, "model_not_found"),
        ("b", {"temperature": 9}, "invalid_parameter"),
        ("c", {"nonsense": 1}, "unknown_field"),
    ):
        ws.generate(name, **fields)
        message = ws.receive()
        assert (message["type"], message["id"]) == ("error", name)
        assert message["error"]["code"] == code
    ws.generate("d", model="slow", max_tokens=50)
    ws.generate("d")
    codes = [m["error"]["code"] for m in (ws.receive(), ws.receive()) if m["type"] == "error"]
    assert codes == ["duplicate_id"]
    ws.send(type="cancel", id="d")
    ws.send(type="cancel", id="nobody")
    ws.socket.send("[]")
    ws.socket.send('{"type":"generate","id":7}')
    ws.send(type="dance", id="x")
    seen = {}
    while len(seen) < 3:
        message = ws.receive()
        if message["type"] == "error":
            seen[message["error"]["code"]] = message["error"]["message"]
    assert seen.keys() == {"not_found", "invalid_type", "unknown_type"}
    assert "id is a string of 1 to 64 characters." in seen["invalid_type"]


@pytest.mark.parametrize("endpoint", ["embeddings", "images", 7])
def test_only_what_generates_is_asked_for_here(ws: Client, stack: Stack, endpoint: Any) -> None:
    """Vectors have no frame: whoever asks for some is told so, and billed nothing."""
    before = len(requests_of(stack, "acme"))
    request = {"model": "vectors", "input": ["Hello"]}
    ws.send(type="generate", id="e", endpoint=endpoint, request=request)
    (message,) = ws.until_end("e")["e"]
    assert message["error"]["code"] == "invalid_parameter"
    assert message["error"]["param"] == "endpoint"
    assert len(requests_of(stack, "acme")) == before


def test_too_many_at_once_are_refused(ws: Client) -> None:
    """64 generations, the next is told so."""
    for i in range(66):
        ws.generate(f"g{i}", model="slow", max_tokens=200)
    while True:
        message = ws.receive()
        if message["type"] == "error":
            assert message["error"]["code"] == "too_many"
            break


def test_a_ticket_opens_a_connection_and_an_old_one_does_not(stack: Stack) -> None:
    """The dashboard's playground, for ten minutes."""
    for ticket, expected in (
        (sign_ticket("acme", "user:ann", time.time()), "ready"),
        (sign_ticket("acme", "user:ann", time.time() - 700), "error"),
    ):
        with open_socket(stack) as socket:
            client = Client(socket)
            client.send(type="auth", token=ticket.text)
            assert client.receive()["type"] == expected


def test_without_authentication_it_closes_in_five_seconds(stack: Stack) -> None:
    """4401, as for a wrong token or for commands before authentication."""
    code, seconds = stack.idlers.silent_websocket.result(40)
    assert code == 4401
    assert 4 < seconds < 8
    for message in ({"type": "auth", "token": "sk_wrong"}, {"type": "generate", "id": "a"}):
        with open_socket(stack) as socket:
            client = Client(socket)
            client.send(**message)
            assert client.close_code() == 4401


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ({}, "?token=sk_x", 400),
        ({"Authorization": "Bearer sk_wrong"}, "", 401),
        ({"Host": "evil.example"}, "", 400),
    ],
)
def test_a_bad_handshake_is_answered_by_http(
    stack: Stack, headers: dict[str, str], query: str, status: int
) -> None:
    """A token in the query string is refused: it would stand in logs."""
    with pytest.raises(InvalidStatus) as refused:
        open_socket(stack, headers, query)
    assert refused.value.response.status_code == status


def test_what_breaks_the_protocol_ends_the_connection(stack: Stack, key: str) -> None:
    """Binary frames 1003, more than 1 MiB 1009, a flood 1008; the gateway goes on."""

    def code_after(send: Any) -> int:
        with open_socket(stack, {"Authorization": f"Bearer {key}"}) as socket:
            with contextlib.suppress(ConnectionClosed):
                send(socket)
            return Client(socket).close_code()

    assert code_after(lambda socket: socket.send(b"\x00\x01")) == 1003
    # The rest of it is unread when the gateway closes: a reset may overtake the close frame (1006).
    large = [code_after(lambda socket: socket.send("x" * (1024 * 1024 + 1))) for _ in range(3)]
    assert 1009 in large and set(large) <= {1009, 1006}
    flood = json.dumps({"type": "cancel", "id": "x"})
    assert code_after(lambda socket: [socket.send(flood) for _ in range(3000)]) == 1008
    with open_socket(stack, {"Authorization": f"Bearer {key}"}) as socket:
        assert Client(socket).receive()["type"] == "ready"
