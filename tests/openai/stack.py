"""A real gateway with everything it needs: a bus, agents with simulated models, a log with a
catalog and a placement in it. The processes are real; the test is the controller.

Django's default database must be ``directory / "engine.sqlite3"``, migrated (see ``gateway_stack``
in the conftest and the benchmark, which arrange that in their own ways).
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane.adapters.access import keys, tokens
from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.natsbus.connection import connect, ensure_buckets
from controlplane.adapters.natsbus.publisher import DesiredPublisher
from controlplane.adapters.readmodel.projector import Projector
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import EventMeta
from controlplane.domain import model, node, placement, tenant
from controlplane.domain.budget import Budget
from controlplane.domain.decider import Command, Decider
from controlplane.domain.version_spec import VersionSpec
from gpuagent.wire.messages import DesiredState, ReplicaSpec
from tests.agent.harness import Agent
from tests.natsserver import NatsServer
from tests.openai.idlers import Idlers

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
META = EventMeta(actor="test")
CLUSTER = "test"


def until(check: Callable[[], object], seconds: float = 30.0, every: float = 0.05) -> None:
    """Wait for ``check`` to be true; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {check}")
        time.sleep(every)


class GatewayProcess:
    """``manage.py run_gateway`` on a free port."""

    program: Sequence[str] = (str(ROOT / "manage.py"), "run_gateway")

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory, self._environment = directory, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return (self._directory / "gateway.log").read_text()

    def start(self) -> None:
        port_file = self._directory / "gateway.port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, *self.program]
        options = ["--port", "0", "--port-file", str(port_file)]
        with (self._directory / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                command + options, env=os.environ | self._environment, stdout=log, stderr=log
            )
        until(lambda: port_file.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, self.log
        self.port = int(port_file.read_text())

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 15.0) -> int:
        """End it and return its exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


class Stack:
    """Bus, agents, log and gateway. ``secret_key`` is what hashes the API keys."""

    idlers: Idlers  # of the one stack that the folder shares

    def __init__(self, directory: Path, secret_key: str, extra: Mapping[str, str] = {}) -> None:
        self.directory = directory
        self.nats = NatsServer(directory)
        self.agents: dict[str, Agent] = {}
        self._placed: dict[str, list[ReplicaSpec]] = {}
        self._generation = 0
        self.store = DjangoEventStore(SystemClock())
        self.handler = CommandHandler(self.store, SystemClock())
        self.environment = {
            "ENGINE_DATA_DIR": str(directory),
            "ENGINE_DATABASE_URL": "",
            "ENGINE_SECRET_KEY": secret_key,
            "ENGINE_NATS_URL": self.nats.url,
            "ENGINE_NATS_CREDS": str(self.nats.control_creds),
            **extra,
        }
        self.keys: dict[str, str] = {}  # API key by tenant
        self.secrets: list[str] = []  # of every key there was
        self.gateway = GatewayProcess(directory, self.environment)

    def start(self) -> None:
        self.nats.start()
        asyncio.run(self._make_buckets())
        self.gateway.start()

    def mend(self) -> None:
        """Start again whatever a test has ended."""
        for agent in self.agents.values():
            if agent.process is None or agent.process.poll() is not None:
                agent.start()
        if not self.gateway.is_running:
            self.gateway.start()

    def stop(self) -> None:
        self.gateway.stop()
        for agent in self.agents.values():
            agent.stop()
        self.nats.stop()
        self.store.close()

    # --- the log --------------------------------------------------------------------------------
    def order(self, decider: Decider, stream: str, command: Command) -> None:
        self.handler.handle(decider, stream, command, META)

    def add_tenant(self, name: str, tier: str = "premium", budget: int | None = None) -> str:
        """A tenant with an API key; the key."""
        now = time.time()
        stream = f"tenant-{name}"
        self.order(tenant.DECIDER, stream, tenant.CreateTenant(name, name, tier, now))
        if budget is not None:
            self.set_budget(name, Budget("default", "tenant", "", "tokens", budget, "month"))
        return self.add_key(name)

    def set_budget(self, name: str, budget: Budget) -> None:
        """In effect when it returns, as over REST."""
        command = tenant.SetBudget(name, budget, time.time())
        self.order(tenant.DECIDER, f"tenant-{name}", command)
        Projector(self.store).catch_up_all()

    def add_key(self, name: str, scopes: tuple[str, ...] = ("inference",), **fields: Any) -> str:
        key_id, secret, full = tokens.new_key()
        keys.store_secret(key_id, key_id, secret, name)
        self.secrets.append(secret)
        fields = {"expires_at": None, "now": time.time()} | fields
        command = tenant.IssueApiKey(name, key_id, "test", secret[-4:], scopes, **fields)
        self.order(tenant.DECIDER, f"tenant-{name}", command)
        return full

    def rotate(self, name: str, full: str, previous_until: float) -> str:
        """Another secret of the same key; the full new key."""
        key_id = full.removeprefix("sk_").partition(".")[0]
        secret_id, secret, new = tokens.new_secret(key_id)
        now = time.time()
        keys.store_secret(secret_id, key_id, secret, name)
        self.secrets.append(secret)
        command = tenant.RotateApiKey(
            name, key_id, secret_id, secret[-4:], max(previous_until, now), now
        )
        self.order(tenant.DECIDER, f"tenant-{name}", command)
        return new

    def revoke(self, name: str, full: str) -> None:
        key_id = full.removeprefix("sk_").partition(".")[0]
        command = tenant.RevokeApiKey(name, key_id, time.time())
        self.order(tenant.DECIDER, f"tenant-{name}", command)

    def add_version(self, name: str, spec: VersionSpec) -> None:
        now, stream = time.time(), f"model-{name}"
        self.order(model.DECIDER, stream, model.RegisterModel(name, now))
        self.order(model.DECIDER, stream, model.AddVersion(name, spec, now))

    # --- the fleet ------------------------------------------------------------------------------
    def add_agent(self, node_id: str, *options: str) -> Agent:
        """Start an agent and say in the log that it joined."""
        agent = self.agents[node_id] = Agent(self.nats, self.directory, node_id, *options)
        agent.start()
        device = node.DeviceInfo(0, "cpu", "cpu", GIB)
        self._report(node_id, node.NodeJoined(node_id, "boot", "", (device,), time.time()))
        return agent

    def place(self, name: str, spec: VersionSpec, node_id: str) -> str:
        """Run a replica there: decide it, say it is ready, tell the node; its id."""
        self._generation += 1
        version_id = f"{name}@{spec.version}"
        replica_id = f"{name}.{spec.version}.g{self._generation}.0"
        assignment = placement.Assignment(replica_id, version_id, node_id, 0, spec.gpu_memory)
        started = placement.Started(assignment, "test", (), ())
        command = placement.DecidePlacement(replica_id, 0, (started,), (), (), time.time())
        self.order(placement.DECIDER, placement.STREAM, command)
        ready = node.ReplicaBecameReady(
            node_id, replica_id, version_id, 0, 0, 0, 0, 0.0, "", time.time()
        )
        self._report(node_id, ready)
        self._placed.setdefault(node_id, []).append(_replica(replica_id, name, spec))
        asyncio.run(self._tell(node_id))
        return replica_id

    def _report(self, node_id: str, event: node.NodeEvent) -> None:
        command = node.RecordNodeEvents(node_id, (event,), time.time())
        self.order(node.DECIDER, f"node-{node_id}", command)

    async def _make_buckets(self) -> None:
        bus = await connect(self.nats.url, self.nats.control_creds, "test", timeout_s=10)
        await ensure_buckets(bus)
        await bus.close()

    async def _tell(self, node_id: str) -> None:
        bus = await connect(self.nats.url, self.nats.control_creds, "test", timeout_s=10)
        state = DesiredState(
            cluster_id=CLUSTER,
            epoch=1,
            generation=self._generation,
            node_id=node_id,
            replicas=tuple(self._placed[node_id]),
        )
        await DesiredPublisher(bus, CLUSTER).publish_desired(state)
        await bus.close()

    def wait_for(
        self, model_name: str, key: str, seconds: float = 30.0, path: str = "/v1/completions"
    ) -> None:
        """Until the gateway answers for the model."""
        until(lambda: self._answers(model_name, key, path), seconds, 0.2)

    def _answers(self, model_name: str, key: str, path: str) -> bool:
        rest = b'"prompt":"hi","max_tokens":1' if "completions" in path else b'"input":"hi"'
        body = b'{"model":"%b",%b}' % (model_name.encode(), rest)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.gateway.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 503):
                return False
            raise AssertionError(error.read().decode()) from error
        except TimeoutError:  # held while the model is fetched and loaded
            return False


def _replica(replica_id: str, name: str, spec: VersionSpec) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=replica_id,
        version_id=f"{name}@{spec.version}",
        model=name,
        version=spec.version,
        device_index=0,
        memory_bytes=spec.gpu_memory,
        source=spec.source,
        max_batch=spec.max_batch,
        max_batch_tokens=16_384,
        max_model_len=spec.max_model_len,
        priority=spec.priority,
        guaranteed_percent=spec.guaranteed_percent,
        task=spec.task,
    )
