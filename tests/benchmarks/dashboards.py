"""Fifty open dashboards: a web process, its listeners, and a node that reports 4 times a second."""

import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.dashboard_clients import NODE
from tests.openai.stack import ROOT, Stack, until

NUM_DASHBOARDS = 50


class Dashboards:
    """Open while in the ``with`` block; ``messages_per_s`` of each is known after it."""

    def __init__(self, stack: Stack, directory: Path, key: str) -> None:
        self._stack, self._directory, self._key = stack, directory, key
        self.messages_per_s = 0.0

    def __enter__(self) -> "Dashboards":
        self._web = self._start_web()
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.dashboard_clients",
            str(self._port),
            self._key,
        ]
        command += [str(NUM_DASHBOARDS), self._stack.nats.url]
        command.append(str(self._stack.nats.node_creds(NODE)))
        pipe = subprocess.PIPE
        self._clients = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self._clients.stdout is not None
        assert self._clients.stdout.readline().strip() == "ready", "the dashboards did not open"
        return self

    def _start_web(self) -> subprocess.Popen[bytes]:
        port_file = self._directory / "web.port"
        port_file.unlink(missing_ok=True)
        command = [
            sys.executable,
            str(ROOT / "manage.py"),
            "run_web",
            "--port-file",
            str(port_file),
        ]
        environment = os.environ | self._stack.environment | {"ENGINE_WEB_PORT": "0"}
        with (self._directory / "web.log").open("ab") as log:
            web = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        until(lambda: port_file.exists() and port_file.read_text().strip())
        self._port = int(port_file.read_text())
        return web

    def __exit__(self, *_: object) -> None:
        try:
            said = self._clients.communicate(timeout=20)[0]
            self.messages_per_s = float(said or "nan")
        finally:
            for process in (self._clients, self._web):
                process.terminate()
                process.wait(15)
