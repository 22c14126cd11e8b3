"""The whole product as tests see it: ``manage.py demo`` on a folder of its own, and its clients."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_READY = 400.0  # the model is downloaded and converted, where no test did that before


class Product:
    """One demo. Use as a context manager; ``arguments`` are those of ``manage.py demo``."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.started_in = 0.0

    def __enter__(self) -> "Product":
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    # --- its life ---------------------------------------------------------------------------
    def start(self) -> None:
        began = time.monotonic()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "demo", *self._arguments],
                cwd=ROOT,
                env=environment(self.data_dir),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(lambda: self._has_ended() or self.ready_file.exists(), SECONDS_TO_READY, self.logs)
        assert not self._has_ended(), self.logs()
        self.started_in = time.monotonic() - began

    def stop(self) -> float:
        """SIGTERM, and the seconds until it was gone; SIGKILL (and a failure) after 15."""
        assert self._process is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        finally:
            self._process.kill()
        return time.monotonic() - began

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ready_file(self) -> Path:
        return self.data_dir / "ready.json"

    @property
    def output(self) -> Path:
        return self.data_dir / "demo.out"

    @property
    def ready(self) -> dict[str, Any]:
        return json.loads(self.ready_file.read_text())

    @property
    def pids(self) -> dict[str, int]:
        return self.ready["pids"]

    def port(self, name: str) -> int:
        """The port of a process, also of those that ready.json does not list (the bus)."""
        return json.loads((self.data_dir / "ports.json").read_text())[name]

    def workers(self, agent: str = "gpuagent-1") -> list[psutil.Process]:
        """The engine workers: whatever the agent has started."""
        return psutil.Process(self.pids[agent]).children(recursive=True)

    def family(self) -> list[psutil.Process]:
        """The demo and everything below it."""
        demo = psutil.Process(self.pid)
        return [demo, *demo.children(recursive=True)]

    def logs(self) -> str:
        """The end of every log, for a test that failed."""
        files = [self.output, *sorted((self.data_dir / "logs").glob("*.log"))]
        parts = [
            f"--- {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-25:])
            for f in files
        ]
        return "\n".join(parts)

    def _has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    # --- its surfaces -----------------------------------------------------------------------
    def openai(self, **options: Any) -> OpenAI:
        ready = self.ready
        options = {"timeout": 120.0, "max_retries": 0, **options}
        return OpenAI(base_url=f"{ready['api_url']}/v1", api_key=ready["api_key"], **options)

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A call of the admin REST API, ``path`` below /api/v1/."""
        ready = self.ready
        headers = {"Authorization": f"Bearer {ready['admin_token']}", **options.pop("headers", {})}
        url = f"{ready['dashboard_url']}/api/v1/{path}"
        return httpx.request(method, url, headers=headers, timeout=15, trust_env=False, **options)

    def get(self, path: str) -> Any:
        response = self.admin("GET", path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self.admin("POST", path, json=body or {})
        assert response.status_code in (200, 201), f"{path}: {response.status_code} {response.text}"
        return response.json()

    def results(self, path: str) -> Iterator[dict[str, Any]]:
        """All results of a list, page after page."""
        page = self.get(path)
        yield from page["results"]
        while page["next"]:
            page = self.get(page["next"].split("/api/v1/", 1)[1])
            yield from page["results"]

    def request_record(self, request_id: str, seconds: float = 15.0) -> dict[str, Any]:
        """The ledger's one record of a request, once it has ended."""

        def ended() -> dict[str, Any] | None:
            found = self.get(f"requests/?request_id={request_id}")["results"]
            assert len(found) <= 1
            return found[0] if found and found[0]["outcome"] != "running" else None

        return until(ended, seconds)

    def placements(self, version_id: str) -> list[dict[str, Any]]:
        """The replicas of a version that are ready to serve."""
        return [
            row
            for row in self.results("placements/")
            if row["version_id"] == version_id and row["state"] == "ready"
        ]


def environment(data_dir: Path) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("ENGINE_")}
    return {**ours, "ENGINE_DATA_DIR": str(data_dir), "PYTHONUNBUFFERED": "1"}


def until(
    condition: Callable[[], Any],
    seconds: float,
    explain: Callable[[], str] = lambda: "",
    every: float = 0.1,
) -> Any:
    """The first true value of ``condition``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s\n{explain()}"
        time.sleep(every)
    return value
