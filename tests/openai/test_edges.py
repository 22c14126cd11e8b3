"""The edges of HTTP and of the websocket protocol: clients that are unusual, broken or hostile."""

import json
import socket
import time

import pytest
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from tests.openai.ledger import record_of, requests_of
from tests.openai.stack import Stack, until
from tests.openai.test_websocket import Client, open_socket
from tests.openai.wire import HELLO

CHAT = "/v1/chat/completions"
HANDSHAKE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def exchange(stack: Stack, data: bytes, timeout: float = 10) -> bytes:
    """Send bytes, return all that comes until the server closes (or nothing more comes)."""
    with socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=timeout) as raw:
        raw.sendall(data)
        received = b""
        while piece := raw.recv(65536):
            received += piece
        return received


def get(path: bytes, *lines: bytes, version: bytes = b"1.1") -> bytes:
    head = b"GET " + path + b" HTTP/" + version + b"\r\nHost: 127.0.0.1\r\n"
    return head + b"".join(lines) + b"\r\n"


def code_in(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


# --- HTTP ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_envelope(stack: Stack, request_bytes: bytes) -> None:
    """Like every other error, and the connection ends."""
    answer = exchange(stack, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ") and code_in(answer) == "bad_request"


def test_a_wrong_method_names_the_right_ones(stack: Stack, key: str) -> None:
    """405 with Allow."""
    answer = exchange(stack, get(CHAT.encode(), b"Connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 405 ") and b"\r\nallow: POST\r\n" in answer


def test_http_1_0_gets_a_stream_without_chunks(stack: Stack, key: str) -> None:
    """It does not know them; the end of the connection is the end of the body."""
    body = json.dumps({"model": "fast", "messages": HELLO, "max_tokens": 3, "stream": True})
    answer = exchange(
        stack,
        f"POST {CHAT} HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode(),
    )
    head, _, stream = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    assert all(not line or line.startswith(b"data: ") for line in stream.split(b"\n"))


def test_a_large_body_stops_nobody(stack: Stack, key: str) -> None:
    """Eight megabytes of JSON are parsed beside the event loop, which answers meanwhile."""
    body = b'{"model":"fast","max_tokens":1,"prompt":[' + b"1," * 3_900_000 + b"1]}"
    slowest = 0.0
    with socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=30) as raw:
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        raw.setblocking(False)
        for _ in range(60):
            began = time.monotonic()
            assert b" 200 " in exchange(stack, get(b"/livez", b"Connection: close\r\n"))
            slowest = max(slowest, time.monotonic() - began)
            try:
                answer = raw.recv(65536)
                break
            except BlockingIOError:
                time.sleep(0.05)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"context_length_exceeded" in answer
    assert slowest < 0.5


# --- websocket handshakes -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        ((HANDSHAKE.replace(b"13", b"8"),), b"426", "upgrade_required"),
        ((HANDSHAKE.replace(b"dGhl", b"!"),), b"426", "upgrade_required"),
        ((HANDSHAKE, b"Content-Length: 2\r\n"), b"426", "upgrade_required"),
        ((), b"426", "upgrade_required"),
        ((HANDSHAKE, b"X: " + b"a" * 20_000 + b"\r\n"), b"400", "bad_request"),
    ],
)
def test_a_broken_handshake_is_answered(
    stack: Stack, lines: tuple[bytes, ...], status: bytes, code: str
) -> None:
    """And not kept open, whatever about it is wrong."""
    answer = exchange(stack, get(b"/ws/v1/stream", b"Connection: close\r\n", *lines))
    assert answer.startswith(b"HTTP/1.1 " + status) and code_in(answer) == code


def open_raw(stack: Stack, key: str) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=20)
    authorization = f"Authorization: Bearer {key}\r\n".encode()
    raw.sendall(get(b"/ws/v1/stream", HANDSHAKE, authorization))
    assert raw.recv(4096).startswith(b"HTTP/1.1 101 ")
    return raw


def frame(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True, extensions=[])


def test_pings_without_reading_end_the_connection(stack: Stack, key: str) -> None:
    """Their answers would pile up in the gateway's memory."""
    pings = frame(Opcode.PING, b"x" * 125) * 2000
    with open_raw(stack, key) as raw, pytest.raises(OSError, match=r"reset|Broken pipe"):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(400):  # a hundred megabytes
            raw.sendall(pings)


def test_a_message_in_endless_pieces_is_too_large(stack: Stack, key: str) -> None:
    """1009, also for pieces that are empty and never add up to the limit."""
    with open_raw(stack, key) as raw:
        raw.sendall(frame(Opcode.TEXT, b"", fin=False))
        raw.sendall(frame(Opcode.CONT, b"", fin=False) * 20_000)
        received = b""
        while piece := raw.recv(4096):
            received += piece
    assert (1009).to_bytes(2, "big") in received


def test_text_that_is_no_utf8_ends_the_connection(stack: Stack, key: str) -> None:
    """1007, and no stack trace in the log."""
    with open_raw(stack, key) as raw:
        raw.sendall(frame(Opcode.TEXT, b"\xff\xfe"))
        received = b""
        while piece := raw.recv(4096):
            received += piece
    assert (1007).to_bytes(2, "big") in received
    assert "Traceback" not in stack.gateway.log


# --- what a connection may outlive --------------------------------------------------------------
def test_a_revoked_key_ends_its_streams_and_starts_no_more(stack: Stack) -> None:
    """On a connection that was opened while it was good, within a second."""
    key = stack.add_tenant("gone")
    with open_socket(stack, {"Authorization": f"Bearer {key}"}) as connection:
        client = Client(connection)
        assert client.receive()["type"] == "ready"
        client.generate("a", model="slow", max_tokens=2000)
        assert client.receive()["type"] == "started"
        assert client.receive()["type"] == "delta"
        stack.revoke("gone", key)
        began = time.monotonic()
        last = client.until_end("a")["a"][-1]
        assert last["error"]["code"] == "invalid_api_key" and time.monotonic() - began < 1
        client.generate("b", max_tokens=1)
        assert client.receive()["error"]["code"] == "invalid_api_key"
    assert len(requests_of(stack, "gone")) == 1


def test_a_client_that_leaves_at_once_stops_its_generation(stack: Stack, key: str) -> None:
    """Even if it leaves while its request is only being started."""
    before = {row["request_id"] for row in requests_of(stack, "acme")}
    for _ in range(10):
        with connect(
            f"ws://127.0.0.1:{stack.gateway.port}/ws/v1/stream",
            additional_headers={"Authorization": f"Bearer {key}"},
            compression=None,
            proxy=None,
        ) as connection:
            client = Client(connection)
            assert client.receive()["type"] == "ready"
            client.generate("a", model="slow", max_tokens=2000)
            connection.socket.close()

    def new() -> list[str]:
        ids = {row["request_id"] for row in requests_of(stack, "acme")} - before
        return sorted(ids)

    until(lambda: all(record_of(stack, name)["outcome"] for name in new()), 5)
    for name in new():
        assert record_of(stack, name)["outcome"] == "cancelled"
