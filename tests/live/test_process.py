"""``manage.py run_web`` as a process of its own: what only the real server can show."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats as nats_client
import psutil
import pytest
import websockets

from controlplane import bootstrap
from controlplane.application.ports import Append, EventMeta
from controlplane.domain.ids import TenantId
from controlplane.domain.tenant import TenantCreated
from gpuagent.wire import codec, messages, subjects
from tests.natsserver import NatsServer, nats  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


class Web:
    def __init__(self, folder: Path, **environment: str) -> None:
        self._port_file = folder / "web.port"
        self._log = (folder / "web.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "run_web", "--port-file", str(self._port_file)],
            cwd=ROOT,
            env={**os.environ, "ENGINE_DATA_DIR": str(folder), "ENGINE_WEB_PORT": "0",
                 **environment},
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip

    def wait(self, seconds: float = 40.0) -> "Web":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
                self.port = int(self._port_file.read_text())
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return self
            time.sleep(0.1)
        raise TimeoutError(self.log())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def live(self, token: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"ws://127.0.0.1:{self.port}/ws/live"
        return websockets.connect(url, additional_headers=headers, proxy=None, **options)

    def stop(self) -> float:
        """Seconds from SIGTERM to the end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(15)
        return time.monotonic() - began


@pytest.fixture
def secret_key(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process hashes keys as this test does."""
    monkeypatch.setenv("ENGINE_SECRET_KEY", settings.SECRET_KEY)


@pytest.fixture
def web(database: Path, secret_key: None) -> Iterator[Web]:
    """On the test's database, which lies in its own folder under the right name."""
    server = Web(database.parent)
    try:
        yield server.wait()
    finally:
        server.process.kill()
        server.process.wait()


def answer_of(port: int, head: bytes, chunks: list[bytes]) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as peer:
        peer.sendall(head)
        with contextlib.suppress(OSError):
            for chunk in chunks:
                peer.sendall(chunk)
        return peer.recv(4096)


def test_the_edges_of_the_server(web: Web, operator: str) -> None:
    """One process for many short checks, since starting it takes seconds."""
    post = (
        b"POST /api/v1/session/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    before = psutil.Process(web.process.pid).memory_info().rss
    block = b"x" * 65536
    promised = answer_of(web.port, post + b"Content-Length: 209715200\r\n\r\n", [block] * 200)
    chunk = b"10000\r\n" + block + b"\r\n"
    chunked = answer_of(web.port, post + b"Transfer-Encoding: chunked\r\n\r\n", [chunk] * 200)
    for answer in (promised, chunked):
        assert answer.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answer
    assert psutil.Process(web.process.pid).memory_info().rss - before < 20 << 20
    get = b"GET /livez HTTP/1.1\r\n"
    for head, status in (
        (get + b"Host: localhost\r\n\r\n", b"200"),
        (get + b"Host: evil\r\n\r\n", b"400"),
        (get + b"\r\n", b"400"),
        (get + b"Host: localhost\r\nHost: evil\r\n\r\n", b"400"),
        (get + b"Host: localhost\r\n" + b"X-A: 1\r\n" * 1000 + b"\r\n", b"400"),
        (post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"GET http://evil/livez HTTP/1.1\r\nHost: evil\r\n\r\n", b"400"),
    ):
        assert answer_of(web.port, head, [])[9:12] == status, head[:80]
    assert httpx.get(f"{web.url}/livez").status_code == 200
    assert asyncio.run(_closed_for(web, operator, "x" * 70_000)) == 1009
    assert asyncio.run(_closed_for(web, operator, b"\x00")) == 1003
    assert asyncio.run(_closed_for(web, operator, *["{}"] * 30)) == 1008
    assert "Traceback" not in web.log()


async def _closed_for(web: Web, token: str, *frames: str | bytes) -> int | None:
    """The close code that these frames earn."""
    async with web.live(token) as one:
        for frame in frames:
            await one.send(frame)
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await asyncio.wait_for(one.recv(), 5)
        return one.close_code


def test_half_open_connections_are_dropped(web: Web) -> None:
    peers = [socket.create_connection(("127.0.0.1", web.port), 5) for _ in range(50)]
    for peer in peers:
        peer.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
    began = time.monotonic()
    assert httpx.get(f"{web.url}/livez").status_code == 200
    assert time.monotonic() - began < 2
    threading.Thread(target=_drip, args=(peers[:5],), daemon=True).start()
    for peer in peers:
        peer.settimeout(20)
        assert peer.recv(1) == b""
        peer.close()


def _drip(peers: list[socket.socket]) -> None:
    """A header a second: never silent, and never done."""
    with contextlib.suppress(OSError):
        while True:
            for peer in peers:
                peer.sendall(b"alhost\r\nX-A: b")
            time.sleep(1)


def test_a_listener_that_never_reads_costs_little_and_is_cut(web: Web, operator: str) -> None:
    """It asks for a backlog of some 12 MB; what the system's own buffers take is theirs."""
    long_reason = EventMeta(actor="user:test", reason="x" * 3000)
    events = [TenantCreated(TenantId(f"t{n}"), f"t{n}", "free", 1.0) for n in range(4000)]
    bootstrap.event_store().append(Append("tenant-many", 0, events, long_reason))
    before = psutil.Process(web.process.pid).memory_info().rss
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", web.port))
        peer.sendall(
            b"GET /ws/live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Authorization: Bearer " + operator.encode() + b"\r\n\r\n"
        )
        assert peer.recv(12) == b"HTTP/1.1 101"
        frame = b'{"type": "subscribe", "after": 0}'
        peer.sendall(bytes((0x81, 0x80 | len(frame))) + b"\0\0\0\0" + frame)
        deadline = time.monotonic() + 20
        while _is_connected(web, peer) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not _is_connected(web, peer)
    assert psutil.Process(web.process.pid).memory_info().rss - before < 40 << 20
    assert httpx.get(f"{web.url}/livez").status_code == 200


def _is_connected(web: Web, peer: socket.socket) -> bool:
    """As the server sees it."""
    port = peer.getsockname()[1]
    connections = psutil.Process(web.process.pid).net_connections("tcp")
    return any(one.raddr and one.raddr.port == port for one in connections)


def test_stopping_says_goodbye_and_takes_few_seconds(web: Web, operator: str) -> None:
    async def listen() -> int | None:
        async with web.live(operator) as one:
            await one.send(json.dumps({"type": "subscribe", "after": None}))
            assert json.loads(await one.recv())["type"] == "hello"
            web.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(one.wait_closed(), 8)
            return one.close_code

    assert asyncio.run(listen()) == 1001
    assert web.stop() < 8 and web.process.returncode == 0
    assert "Traceback" not in web.log()


def test_telemetry_comes_over_the_real_bus(
    database: Path,
    secret_key: None,
    operator: str,
    nats: NatsServer,  # noqa: F811
) -> None:
    """Also when the bus comes up only after the dashboard is open."""
    nats.stop()
    creds = str(nats.control_creds)
    web = Web(database.parent, ENGINE_NATS_URL=nats.url, ENGINE_NATS_CREDS=creds).wait()
    try:
        asyncio.run(_hear_telemetry(web, operator, nats))
    finally:
        web.process.kill()
        web.process.wait()


async def _hear_telemetry(web: Web, token: str, nats: NatsServer) -> None:  # noqa: F811
    said = messages.Telemetry(node_id="n1", boot_id="b", seq=1, at=1.0)
    async with web.live(token) as one:
        await one.send(json.dumps({"type": "subscribe", "after": None}))
        assert json.loads(await one.recv())["type"] == "hello"
        await asyncio.to_thread(nats.start)
        node = await nats_client.connect(nats.url, user_credentials=str(nats.node_creds("n1")))
        for _ in range(100):
            await node.publish(subjects.telemetry("n1"), codec.encode(said))
            frame = json.loads(await asyncio.wait_for(one.recv(), 5))
            if frame["type"] == "telemetry":
                break
            await asyncio.sleep(0.1)
        await node.close()
    assert frame["type"] == "telemetry" and frame["node_id"] == "n1"


def test_a_taken_port_is_said_and_ends_the_process(database: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        web = Web(database.parent, ENGINE_WEB_PORT=str(taken.getsockname()[1]))
        assert web.process.wait(40) == 1
    assert "cannot be bound" in web.log()
