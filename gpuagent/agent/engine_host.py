"""The engine workers of this node: started, spoken to, watched, ended.

One worker process per device hosts all replicas with ``isolation: shared``; a ``dedicated``
replica, and one on another engine than the built-in, has a worker of its own. A worker starts with
its first replica and ends with its last.

    worker "0"             replicas a, b     (shared, device 0)
    worker "0/c"           replica c         (dedicated, device 0)
    worker "0/d/prefill"   replica d         (prefill-decode: two workers, see ``pairs``)
    worker "0/d/decode"    replica d

The host restarts nothing: it reports a death with the replicas that died, and the reconciler asks
for them again when it is time. Health is the age of the last sign of progress while there is work,
not whether the process exists: a hung CUDA call looks alive to everything else.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import msgspec
import structlog

from gpuagent.agent import arena, ipc
from gpuagent.agent.pairs import DECODE, PREFILL, ROLES, Orders, Pair
from gpuagent.agent.worker_process import WorkerProcess, describe_exit, start
from gpuagent.wire.messages import BUILTIN, Device, Generate, ReplicaSpec

log = structlog.get_logger("gpuagent.engine_host")

MessageHandler = Callable[[ipc.FromWorker], Awaitable[None]]
LostHandler = Callable[[list[str], str], Awaitable[None]]


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
        self._homes: dict[str, WorkerProcess] = {}  # of a pair: the decode worker
        self._pairs: dict[str, Pair] = {}
        self.num_handed_over = 0
        self._alive: list[WorkerProcess] = []  # also those already told to end

    async def load(self, spec: ReplicaSpec) -> None:
        """Ask a worker, started if need be, for a replica; raises OSError if none can start."""
        if spec.disaggregation != "none":
            await self._load_pair(spec)
            return
        dedicated = spec.isolation == "dedicated" or spec.engine != BUILTIN
        key = f"{spec.device_index}/{spec.replica_id}" if dedicated else str(spec.device_index)
        worker = self.workers.get(key)
        if worker is None:
            worker = await self._start(key, self._devices[spec.device_index])
        self._order_load(worker, spec)

    async def _load_pair(self, spec: ReplicaSpec) -> None:
        """Two workers of its own, with memory that both see and nobody else."""
        device = self._devices[spec.device_index]
        shared = arena.create(spec.memory_bytes // arena.SHARE)
        try:
            for role in ROLES:
                key = f"{spec.device_index}/{spec.replica_id}/{role}"
                worker = await self._start(key, device, role, shared)
                worker.replicas.add(spec.replica_id)
            workers = self._workers_of(spec.replica_id)
            if len(workers) < len(ROLES):
                raise OSError("one of two workers has ended before it began")
        except OSError:
            for worker in self._workers_of(spec.replica_id):
                worker.replicas.clear()
                worker.kill()
            raise
        finally:
            os.close(shared)  # the workers have it
        self._pairs[spec.replica_id] = Pair(spec.replica_id)
        for worker in workers:
            self._order_load(worker, spec)

    def _order_load(self, worker: WorkerProcess, spec: ReplicaSpec) -> None:
        worker.has_children = spec.engine != BUILTIN
        worker.replicas.add(spec.replica_id)
        worker.loading.add(spec.replica_id)
        worker.expected.discard(spec.replica_id)
        self._homes[spec.replica_id] = worker
        worker.progress_at = time.monotonic()
        worker.end.send(ipc.Load(spec))

    def _workers_of(self, replica_id: str) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if replica_id in worker.replicas]

    def _carry_out(self, replica_id: str, orders: Orders) -> None:
        """Send what a pair's bookkeeping asks for."""
        for worker in self._workers_of(replica_id):
            for role, message in orders:
                if role == worker.role:
                    worker.end.send(message)

    def unload(self, replica_id: str) -> bool:
        """Ask for a replica's end; False if no worker holds it.

        A load cannot be interrupted, so a worker that does nothing else is killed.
        """
        worker = self._homes.get(replica_id)
        if worker is None:
            return False
        for each in self._workers_of(replica_id):
            if each.loading == each.replicas == {replica_id}:
                each.kill()
            else:
                each.end.send(ipc.Unload(replica_id))
        return True

    def swap(self, replica_id: str, out: bool) -> bool:
        """Order a swap, off the device or back; False if no worker holds the replica."""
        worker = self._homes.get(replica_id)
        if worker is None or replica_id in self._pairs:
            return False
        worker.progress_at = time.monotonic()
        worker.end.send(ipc.SwapOut(replica_id) if out else ipc.SwapIn(replica_id))
        return True

    def is_pair(self, replica_id: str) -> bool:
        """Whether the replica runs on two workers, which swap nothing."""
        return replica_id in self._pairs

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is unloaded and will be loaded again on demand; its worker stays,
        so that a start's costs (an interpreter and torch) are not paid again."""
        for worker in self._workers_of(replica_id):
            if worker.role == "both":
                worker.expected.add(replica_id)
        self._forget(replica_id)

    def add(self, request: Generate, was_idle: bool) -> None:
        """Hand a generation over; ``was_idle`` restarts the worker's watchdog."""
        if pair := self._pairs.get(request.replica_id):
            self._excuse(pair, PREFILL)
            self._carry_out(request.replica_id, pair.add(request))
            return
        worker = self._homes.get(request.replica_id)
        if worker:
            if was_idle:
                worker.progress_at = time.monotonic()
            worker.end.send(ipc.Add(request))

    def _excuse(self, pair: Pair, role: str) -> None:
        """A worker that owed nobody anything was not silent."""
        for worker in self._workers_of(pair.replica_id):
            if worker.role == role and not pair.is_busy(role):
                worker.progress_at = time.monotonic()

    def cancel(self, replica_id: str, request_id: str) -> None:
        if pair := self._pairs.get(replica_id):
            self._carry_out(replica_id, pair.cancel(request_id))
            return
        worker = self._homes.get(replica_id)
        if worker:
            worker.end.send(ipc.Cancel(replica_id, request_id))

    def release(self, replica_id: str) -> None:
        """Forget a replica for good; a worker without replicas is ended."""
        for worker in self.workers.values():
            worker.expected.discard(replica_id)
        self._forget(replica_id)

    def _forget(self, replica_id: str) -> None:
        self._pairs.pop(replica_id, None)
        self._homes.pop(replica_id, None)
        for worker in list(self.workers.values()):
            worker.replicas.discard(replica_id)
            worker.loading.discard(replica_id)
            if not worker.replicas and not worker.expected:
                self.workers.pop(worker.key, None)
                worker.end.send(ipc.Shutdown())

    def kill_hung(self, is_busy: Callable[[str], bool], limit_s: float) -> list[str]:
        """Kill workers with work and no progress for ``limit_s`` seconds; their keys."""
        now = time.monotonic()
        hung = [
            worker
            for worker in self.workers.values()
            if now - worker.progress_at > limit_s
            and (worker.loading or self._owes(worker, is_busy))
        ]
        for worker in hung:
            log.error("worker_hung", worker=worker.key, seconds=round(now - worker.progress_at))
            worker.kill()
        return [worker.key for worker in hung]

    def _owes(self, worker: WorkerProcess, is_busy: Callable[[str], bool]) -> bool:
        """Whether somebody waits for this worker."""
        pairs = [self._pairs[rid] for rid in worker.replicas if rid in self._pairs]
        if pairs:
            return any(pair.is_busy(worker.role) for pair in pairs)
        return any(is_busy(rid) for rid in worker.replicas)

    def excuse_silence(self) -> None:
        """Restart every watchdog: it was the agent that did not listen."""
        for worker in self.workers.values():
            worker.progress_at = time.monotonic()

    def pids(self, device_index: int) -> list[int]:
        """Processes that use a device's memory, those of other engines included."""
        workers = [w for w in self.workers.values() if w.device.index == device_index]
        return [pid for worker in workers for pid in worker.pids()]

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
    async def _start(
        self, key: str, device: Device, role: str = "both", shared: int = -1
    ) -> WorkerProcess:
        config = self._make_config(device)
        if role != "both":  # two workers divide the device's threads
            num_threads = max(1, config.threads // 2)
            config = msgspec.structs.replace(config, role=role, arena=shared, threads=num_threads)
        worker = await start(key, device, config)
        self.workers[key] = worker
        self._alive.append(worker)
        worker.reader = asyncio.create_task(self._read(worker), name=f"worker {key}")
        log.info("worker_started", worker=key, pid=worker.process.pid)
        return worker

    async def _read(self, worker: WorkerProcess) -> None:
        """Relay the worker's messages until it is gone, then report who is gone with it."""
        try:
            while True:
                message = await worker.end.receive()
                self._note_progress(worker, message)
                if passed_on := self._sorted(worker, message):
                    await self._on_message(passed_on)
        except EOFError:
            pass
        except ipc.ProtocolError as error:
            log.error("worker_protocol_error", worker=worker.key, error=str(error))
            worker.kill()
        await self._bury(worker)

    def _sorted(self, worker: WorkerProcess, message: ipc.FromWorker) -> ipc.FromWorker | None:
        """What the node is told; of a pair's messages some are about the pair alone."""
        pair = next((self._pairs[rid] for rid in worker.replicas if rid in self._pairs), None)
        if pair is None:
            return message if worker.role == "both" else None  # the last words of half a pair
        match message:
            case ipc.HandOver():
                self.num_handed_over += 1
                self._excuse(pair, DECODE)
                self._carry_out(pair.replica_id, pair.handed_over(message))
            case ipc.Taken(start=start):
                self._carry_out(pair.replica_id, [(PREFILL, ipc.Free(start))])
            case ipc.Loaded():
                return pair.loaded(worker.role, message)
            case ipc.Unloaded():
                return message if pair.unloaded(worker.role) else None
            case ipc.Stats():
                return pair.stats(worker.role, message) if message.replicas else None
            case ipc.StepOutputs():
                pair.ended(message)
                return message
            case _:
                return message
        return None

    async def _bury(self, worker: WorkerProcess) -> None:
        with suppress(TimeoutError):  # an end of file without an exit is a worker gone astray
            await asyncio.wait_for(worker.process.wait(), 2.0)
        worker.kill()
        code = await worker.process.wait()
        worker.end.close()
        self._alive.remove(worker)
        if self.workers.get(worker.key) is worker:
            del self.workers[worker.key]
        lost = [rid for rid in worker.replicas if rid in self._homes]
        for replica_id in lost:
            del self._homes[replica_id]
            self._pairs.pop(replica_id, None)
            for other in self._workers_of(replica_id):  # of a pair: it has half of what is needed
                other.replicas.discard(replica_id)
                del self.workers[other.key]
                other.kill()
        log.info("worker_ended", worker=worker.key, code=code, lost=lost)
        if lost:
            await self._on_lost(lost, describe_exit(code, worker.role))

    def _note_progress(self, worker: WorkerProcess, message: ipc.FromWorker) -> None:
        worker.progress_at = time.monotonic()
        match message:
            case ipc.Loaded() | ipc.LoadFailed():
                worker.loading.discard(message.replica_id)
