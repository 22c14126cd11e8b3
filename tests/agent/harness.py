"""A real agent process, a real bus, and a small control plane to drive it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from controlplane.adapters.natsbus.connection import Bus, connect, ensure_buckets
from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import (
    Cancel,
    Delta,
    DesiredState,
    Frame,
    Generate,
    ObservedState,
    ReplicaLoad,
    ReplicaSpec,
    ReplicaStatus,
    Resend,
    Sampling,
    Telemetry,
)
from tests.natsserver import NatsServer

GIB = 1 << 30
DEADLINE_S = 20.0
T = TypeVar("T")


def spec(replica_id: str = "m.1.g1.0", **fields: object) -> ReplicaSpec:
    """A replica of a fast simulated model."""
    values: dict[str, object] = {
        "replica_id": replica_id,
        "version_id": "m@1",
        "model": "m",
        "version": "1",
        "device_index": 0,
        "memory_bytes": GIB // 4,
        "source": "simulated://m?step_ms=10&prefill_tps=100000",
        **fields,
    }
    return ReplicaSpec(**values)  # type: ignore[arg-type]


async def eventually(check: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """The first truthy value of ``check``; fails after the deadline."""
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        if value := check():
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {deadline_s} s: {check}")


class Agent:
    """``python -m gpuagent`` as a process."""

    def __init__(self, server: NatsServer, directory: Path, node_id: str, *options: str) -> None:
        self.node_id = node_id
        self.directory = directory / node_id
        self._port_file = self.directory / "port"
        self._command = [
            *(sys.executable, "-m", "gpuagent", "--node-id", node_id),
            *("--nats-url", server.url, "--creds", str(server.node_creds(node_id))),
            *("--devices", "cpu:1GiB", "--state-dir", str(self.directory / "state")),
            *("--model-cache", str(self.directory / "models")),
            *("--port-file", str(self._port_file), *options),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._port_file.unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdout=log)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page on the agent's port."""
        url = f"http://127.0.0.1:{self._port_file.read_text().strip()}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the agent and return its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            self.process.send_signal(number)
        try:
            return self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5)


class Control:
    """Places replicas and generates, as controller and gateway in one."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.gateway = f"gw-{uuid.uuid4().hex[:8]}"
        self.frames: list[Frame] = []
        self.telemetry: dict[str, Telemetry] = {}
        self.drop_next = 0  # frames to lose, as a broken connection would
        self._streams: dict[str, list[Delta]] = {}
        self.arrived_at: dict[str, list[float]] = {}

    async def listen(self) -> None:
        client = self.bus.client
        await client.subscribe(subjects.frames_of(self.gateway), cb=self._on_frame)
        await client.subscribe(subjects.TELEMETRY_ALL, cb=self._on_telemetry)
        await client.flush()

    async def _on_frame(self, message: object) -> None:
        frame = codec.decode(message.data, Frame)  # type: ignore[attr-defined]
        if self.drop_next and frame.deltas:
            self.drop_next -= 1
            return
        self.frames.append(frame)
        for delta in frame.deltas:
            self._streams.setdefault(delta.request_id, []).append(delta)
            self.arrived_at.setdefault(delta.request_id, []).append(time.monotonic())

    async def _on_telemetry(self, message: object) -> None:
        report = codec.decode(message.data, Telemetry)  # type: ignore[attr-defined]
        self.telemetry[report.node_id] = report

    def load(self, node_id: str, replica_id: str = "m.1.g1.0") -> ReplicaLoad | None:
        """The replica's figures in the newest telemetry."""
        report = self.telemetry.get(node_id)
        loads = report.replicas if report else ()
        return next((load for load in loads if load.replica_id == replica_id), None)

    async def place(
        self,
        node_id: str,
        *replicas: ReplicaSpec,
        generation: int = 1,
        epoch: int = 1,
        drain: bool = False,
    ) -> None:
        desired = DesiredState(
            cluster_id="test",
            epoch=epoch,
            generation=generation,
            node_id=node_id,
            drain=drain,
            replicas=tuple(replicas),
        )
        await self.bus.jetstream().publish(f"$KV.desired.{node_id}", codec.encode(desired))

    async def observed(self, node_id: str) -> ObservedState | None:
        try:
            subject = f"$KV.observed.{node_id}"
            message = await self.bus.jetstream().get_msg(
                "KV_observed", subject=subject, direct=True
            )
        except Exception:
            return None
        return codec.decode(message.data or b"", ObservedState)

    async def replica(
        self, node_id: str, state: str, replica_id: str = "m.1.g1.0", deadline_s: float = DEADLINE_S
    ) -> ReplicaStatus:
        """Wait until the replica is observed in ``state``."""
        give_up = time.monotonic() + deadline_s
        observed = None
        while time.monotonic() < give_up:
            observed = await self.observed(node_id)
            for status in observed.replicas if observed else ():
                if status.replica_id == replica_id and status.state == state:
                    return status
            await asyncio.sleep(0.03)
        raise AssertionError(f"{replica_id} is not {state}: {observed}")

    async def generate(
        self, node_id: str, max_tokens: int = 8, replica_id: str = "m.1.g1.0", **fields: object
    ) -> str:
        request_id = f"req-{uuid.uuid4().hex}"
        message = Generate(
            request_id=request_id,
            gateway=self.gateway,
            replica_id=replica_id,
            prompt_token_ids=tuple(range(20)),
            sampling=Sampling(max_tokens=max_tokens),
        )
        message = codec.decode(codec.encode(message), Generate)
        await self.send(subjects.generate(node_id), _with(message, fields))
        return request_id

    async def send(self, subject: str, message: Generate | Cancel | Resend) -> None:
        await self.bus.client.publish(subject, codec.encode(message))

    async def cancel(self, node_id: str, *request_ids: str) -> None:
        await self.send(
            subjects.cancel(node_id), Cancel(gateway=self.gateway, request_ids=request_ids)
        )

    async def resend(self, node_id: str, requests: dict[str, int]) -> None:
        await self.send(subjects.resend(node_id), Resend(gateway=self.gateway, requests=requests))

    def deltas(self, request_id: str) -> list[Delta]:
        return self._streams.get(request_id, [])

    async def started(self, request_id: str, num_tokens: int = 1) -> None:
        """Wait until so many tokens have come."""
        await eventually(
            lambda: sum(len(d.token_ids) for d in self.deltas(request_id)) >= num_tokens
        )

    async def terminal(self, request_id: str, deadline_s: float = DEADLINE_S) -> Delta:
        """Wait for the delta that ends a generation."""
        return await eventually(
            lambda: next((d for d in self.deltas(request_id) if d.finish_reason), None), deadline_s
        )

    def assert_contiguous(self, request_id: str) -> list[int]:
        """Indices run from 0 without gap or repeat and one terminal ends them; the token ids."""
        token_ids: list[int] = []
        deltas = self.deltas(request_id)
        for delta in deltas:
            assert delta.index == len(token_ids), (delta, len(token_ids))
            token_ids.extend(delta.token_ids)
        assert [bool(d.finish_reason) for d in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].num_output_tokens == len(token_ids)
        return token_ids

    def text(self, request_id: str) -> str:
        return "".join(delta.text for delta in self.deltas(request_id))


def _with(message: Generate, fields: dict[str, object]) -> Generate:
    return msgspec.structs.replace(message, **fields)


@asynccontextmanager
async def control(server: NatsServer) -> AsyncIterator[Control]:
    bus = await connect(server.url, server.control_creds, "test-control", timeout_s=10)
    await ensure_buckets(bus)
    try:
        driver = Control(bus)
        await driver.listen()
        yield driver
    finally:
        await bus.close()
