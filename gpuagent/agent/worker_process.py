"""One engine worker as the agent holds it: its process, its pipe, and what it has been given.

::

    agent                                worker
    AgentEnd  <--- socket pair --->      python -m gpuagent.agent.worker FD PARENT_PID CONFIG
    kill: a signal to its whole group    a session of its own: Ctrl-C reaches the agent alone
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import psutil

from gpuagent.agent import ipc
from gpuagent.wire.messages import Device


@dataclass
class WorkerProcess:
    """One running worker and the replicas in it."""

    key: str
    device: Device
    process: asyncio.subprocess.Process
    end: ipc.AgentEnd
    replicas: set[str] = field(default_factory=set)
    loading: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)  # unloaded, and to be loaded again on demand
    progress_at: float = 0.0
    role: str = "both"
    has_children: bool = False
    reader: asyncio.Task[None] | None = None

    def pids(self) -> list[int]:
        """The worker and, where its engine runs in processes of its own, those."""
        pids = [self.process.pid]
        if self.has_children:
            with suppress(psutil.Error):
                children = psutil.Process(self.process.pid).children(recursive=True)
                pids += [child.pid for child in children]
        return pids

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the worker's whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


async def start(key: str, device: Device, config: ipc.WorkerConfig) -> WorkerProcess:
    """Start a worker, which inherits the arena's descriptor if there is one. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpuagent.agent.worker"),
            *(str(theirs.fileno()), str(os.getpid())),
            msgspec.json.encode(config).decode(),
            pass_fds=(theirs.fileno(), *([config.arena] if config.arena >= 0 else [])),
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(device),
            start_new_session=True,  # its own group: Ctrl-C is not for it, a kill takes it all
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return WorkerProcess(key, device, process, ipc.AgentEnd(reader, writer), role=config.role)


def _environment(device: Device) -> dict[str, str]:
    """A worker sees only its own GPU, as device 0."""
    if device.kind != "cuda":
        return dict(os.environ)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid or str(device.index)}


def describe_exit(code: int, role: str) -> str:
    """How a worker ended, for people."""
    name = "engine worker" if role == "both" else f"{role} worker"
    if code < 0:
        return f"the {name} was ended by signal {-code}"
    return f"the {name} exited with code {code}"
