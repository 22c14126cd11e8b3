"""The engine workers of this node: started, spoken to, watched, ended.

One worker process per device hosts all replicas with ``isolation: shared``; a ``dedicated``
replica has a worker of its own. A worker starts with its first replica and ends with its last.

    worker "0"         replicas a, b     (shared, device 0)
    worker "0/c"       replica c         (dedicated, device 0)

The host restarts nothing: it reports a death with the replicas that died, and the reconciler asks
for them again when it is time. Health is the age of the last sign of progress while there is work,
not whether the process exists: a hung CUDA call looks alive to everything else.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from gpuagent.agent import ipc
from gpuagent.wire.messages import Device, Generate, ReplicaSpec

log = structlog.get_logger("gpuagent.engine_host")

MessageHandler = Callable[[ipc.FromWorker], Awaitable[None]]
LostHandler = Callable[[list[str], str], Awaitable[None]]


@dataclass
class WorkerProcess:
    """One running worker and the replicas in it."""

    key: str
    device: Device
    process: asyncio.subprocess.Process
    end: ipc.AgentEnd
    replicas: set[str] = field(default_factory=set)
    loading: set[str] = field(default_factory=set)
    progress_at: float = 0.0
    reader: asyncio.Task[None] | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the worker's whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class EngineHost:
    """Workers by key, and which of them holds each replica."""

    def __init__(
        self,
        devices: Iterable[Device],
        make_config: Callable[[Device], ipc.WorkerConfig],
        on_message: MessageHandler,
        on_lost: LostHandler,
    ) -> None:
        self._devices = {device.index: device for device in devices}
        self._make_config = make_config
        self._on_message = on_message
        self._on_lost = on_lost
        self.workers: dict[str, WorkerProcess] = {}
        self._homes: dict[str, WorkerProcess] = {}
        self._alive: list[WorkerProcess] = []  # also those already told to end

    async def load(self, spec: ReplicaSpec) -> None:
        """Ask a worker, started if need be, for a replica; raises OSError if none can start."""
        dedicated = spec.isolation == "dedicated"
        key = f"{spec.device_index}/{spec.replica_id}" if dedicated else str(spec.device_index)
        worker = self.workers.get(key)
        if worker is None:
            worker = await self._start(key, self._devices[spec.device_index])
        worker.replicas.add(spec.replica_id)
        worker.loading.add(spec.replica_id)
        self._homes[spec.replica_id] = worker
        worker.progress_at = time.monotonic()
        worker.end.send(ipc.Load(spec))

    def unload(self, replica_id: str) -> bool:
        """Ask for a replica's end; False if no worker holds it.

        A load cannot be interrupted, so a worker that does nothing else is killed.
        """
        worker = self._homes.get(replica_id)
        if worker is None:
            return False
        if worker.loading == worker.replicas == {replica_id}:
            worker.kill()
        else:
            worker.end.send(ipc.Unload(replica_id))
        return True

    def add(self, request: Generate, was_idle: bool) -> None:
        """Hand a generation over; ``was_idle`` restarts the worker's watchdog."""
        worker = self._homes.get(request.replica_id)
        if worker:
            if was_idle:
                worker.progress_at = time.monotonic()
            worker.end.send(ipc.Add(request))

    def cancel(self, replica_id: str, request_id: str) -> None:
        worker = self._homes.get(replica_id)
        if worker:
            worker.end.send(ipc.Cancel(replica_id, request_id))

    def release(self, replica_id: str) -> None:
        """Forget a replica that is unloaded; a worker without replicas is ended."""
        worker = self._homes.pop(replica_id, None)
        if worker is None:
            return
        worker.replicas.discard(replica_id)
        worker.loading.discard(replica_id)
        if not worker.replicas:
            self.workers.pop(worker.key, None)
            worker.end.send(ipc.Shutdown())

    def kill_hung(self, is_busy: Callable[[str], bool], limit_s: float) -> list[str]:
        """Kill workers with work and no progress for ``limit_s`` seconds; their keys."""
        now = time.monotonic()
        hung = [
            worker
            for worker in self.workers.values()
            if now - worker.progress_at > limit_s
            and (worker.loading or any(is_busy(rid) for rid in worker.replicas))
        ]
        for worker in hung:
            log.error("worker_hung", worker=worker.key, seconds=round(now - worker.progress_at))
            worker.kill()
        return [worker.key for worker in hung]

    def excuse_silence(self) -> None:
        """Restart every watchdog: it was the agent that did not listen."""
        for worker in self.workers.values():
            worker.progress_at = time.monotonic()

    def pids(self, device_index: int) -> list[int]:
        """Processes that use a device's memory."""
        return [w.process.pid for w in self.workers.values() if w.device.index == device_index]

    def kill_all(self) -> None:
        """End every worker at once."""
        for worker in self._alive:
            worker.kill()

    async def close(self, deadline_s: float = 2.0) -> None:
        """End all workers, by force after ``deadline_s`` seconds."""
        self.workers.clear()
        self._homes.clear()
        for worker in self._alive:
            worker.end.send(ipc.Shutdown())
        readers = [worker.reader for worker in self._alive if worker.reader]
        if readers:
            await asyncio.wait(readers, timeout=deadline_s)
        self.kill_all()
        await asyncio.gather(*readers)

    # --- one worker -------------------------------------------------------------------------
    async def _start(self, key: str, device: Device) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpuagent.agent.worker"),
                *(str(theirs.fileno()), str(os.getpid())),
                msgspec.json.encode(self._make_config(device)).decode(),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=_worker_environment(device),
                start_new_session=True,  # its own group: Ctrl-C is not for it, a kill takes it all
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = WorkerProcess(key, device, process, ipc.AgentEnd(reader, writer))
        self.workers[key] = worker
        self._alive.append(worker)
        worker.reader = asyncio.create_task(self._read(worker), name=f"worker {key}")
        log.info("worker_started", worker=key, pid=process.pid)
        return worker

    async def _read(self, worker: WorkerProcess) -> None:
        """Relay the worker's messages until it is gone, then report who is gone with it."""
        try:
            while True:
                message = await worker.end.receive()
                self._note_progress(worker, message)
                await self._on_message(message)
        except EOFError:
            pass
        except ipc.ProtocolError as error:
            log.error("worker_protocol_error", worker=worker.key, error=str(error))
            worker.kill()
        await self._bury(worker)

    async def _bury(self, worker: WorkerProcess) -> None:
        with suppress(TimeoutError):  # an end of file without an exit is a worker gone astray
            await asyncio.wait_for(worker.process.wait(), 2.0)
        worker.kill()
        code = await worker.process.wait()
        worker.end.close()
        self._alive.remove(worker)
        if self.workers.get(worker.key) is worker:
            del self.workers[worker.key]
        lost = [rid for rid, home in self._homes.items() if home is worker]
        for replica_id in lost:
            del self._homes[replica_id]
        log.info("worker_ended", worker=worker.key, code=code, lost=lost)
        if lost:
            await self._on_lost(lost, _describe_exit(code))

    def _note_progress(self, worker: WorkerProcess, message: ipc.FromWorker) -> None:
        worker.progress_at = time.monotonic()
        match message:
            case ipc.Loaded() | ipc.LoadFailed():
                worker.loading.discard(message.replica_id)


def _worker_environment(device: Device) -> dict[str, str]:
    """A worker sees only its own GPU, as device 0."""
    if device.kind != "cuda":
        return dict(os.environ)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid or str(device.index)}


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the engine worker was ended by signal {-code}"
    return f"the engine worker exited with code {code}"
