"""``manage.py run_controller`` as it is started in production: ready, and gone when asked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.natsserver import NatsServer, nats  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def _manage(environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "manage.py", *arguments], cwd=ROOT, env={**os.environ, **environment}
    )


def _ready(port_file: Path, deadline: float) -> httpx.Response:
    while True:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port_file.read_text()}/readyz", timeout=2)
            if answer.status_code == 200:
                return answer
        except (OSError, httpx.HTTPError):
            answer = None
        assert time.monotonic() < deadline, f"not ready: {answer and answer.text}"
        time.sleep(0.1)


def test_it_becomes_ready_leads_and_ends_on_sigterm(nats: NatsServer, tmp_path: Path) -> None:  # noqa: F811
    environment = {
        "ENGINE_DATA_DIR": str(tmp_path / "data"),
        "ENGINE_NATS_URL": nats.url,
        "ENGINE_NATS_CREDS": str(nats.control_creds),
        "ENGINE_DATABASE_URL": "",
    }
    assert _manage(environment, "migrate", "-v0").wait(60) == 0
    port_file = tmp_path / "port"
    process = _manage(environment, "run_controller", "--port=0", f"--port-file={port_file}")
    try:
        answer = _ready(port_file, time.monotonic() + 30)
        assert answer.json()["leader"] is True
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(8) == 0
        assert time.monotonic() - began < 5
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(5)
