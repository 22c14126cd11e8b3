"""The engine workers of this node: started, spoken to, watched, ended.

One worker process per device hosts all replicas with ``isolation: shared``; a ``dedicated``
replica, and one on another engine than the built-in, has a worker of its own. A worker starts with
its first replica and ends with its last.

    worker "0"             replicas a, b     (shared, device 0)
    worker "0/c"           replica c         (dedicated, device 0)
    worker "0/d/prefill"   replica d         (prefill-decode: two workers, see ``pairs``)
    worker "0/d/decode"    replica d
    worker "0/e/rank 0"    replica e         (tensor-parallel: one on each device, see ``groups``,
    worker "1/e/rank 1"    replica e          and over several nodes, see ``joint``)

The host restarts nothing: it reports a death with the replicas that died, and the reconciler asks
for them again when it is time. Health is the age of the last sign of progress while there is work,
not whether the process exists: a hung CUDA call looks alive to everything else.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

import structlog
from msgspec.structs import replace

from gpuagent.agent import arena, groups, ipc
from gpuagent.agent.fabric import Fabric
from gpuagent.agent.groups import Group
from gpuagent.agent.joint import Joint
from gpuagent.agent.pairs import DECODE, PREFILL, ROLES, Orders, Pair
from gpuagent.agent.reconcile import devices_of
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
        group_start_s: float = 120.0,
        fabric: Fabric | None = None,
    ) -> None:
        self._fabric = fabric
        self._joints: dict[str, Joint] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}  # of joints, until they are closed
        self._declines: set[asyncio.Task[None]] = set()
        self._devices = {device.index: device for device in devices}
        self._make_config = make_config
        self._on_message = on_message
        self._on_lost = on_lost
        self.workers: dict[str, WorkerProcess] = {}
        self._group_start_s = group_start_s
        self._homes: dict[str, WorkerProcess] = {}  # of a pair the decode worker, of a group rank 0
        self._pairs: dict[str, Pair] = {}
        self._groups: dict[str, Group] = {}
        self.num_handed_over = 0
        self._alive: list[WorkerProcess] = []  # also those already told to end

    async def load(self, spec: ReplicaSpec) -> None:
        """Ask a worker, started if need be, for a replica; raises OSError if none can start."""
        if spec.disaggregation != "none":
            await self._load_pair(spec)
            return
        if spec.group is not None:
            if self._fabric is None:
                raise OSError("this agent has no address on a fabric (fabric_address)")
            self._begin(Joint(self._fabric, spec, self._group_start_s))
            return
        if spec.tensor_parallel > 1:
            await self._load_group(spec)
            return
        dedicated = spec.isolation == "dedicated" or spec.engine != BUILTIN
        key = f"{spec.device_index}/{spec.replica_id}" if dedicated else str(spec.device_index)
        worker = self.workers.get(key)
        if worker is None:
            device = self._devices[spec.device_index]
            worker = await self._start(key, device, self._make_config(device))
        self._order_load(worker, spec)

    async def _load_pair(self, spec: ReplicaSpec) -> None:
        """Two workers of its own, with memory that both see and nobody else."""
        device = self._devices[spec.device_index]
        shared = arena.create(spec.memory_bytes // arena.SHARE)
        config = self._make_config(device)
        num_threads = max(1, config.threads // 2)  # the two divide the device's
        config = replace(config, arena=shared, threads=num_threads)
        try:
            workers = await self._start_together(spec, [replace(config, role=r) for r in ROLES])
        finally:
            os.close(shared)  # the workers have it
        self._pairs[spec.replica_id] = Pair(spec.replica_id)
        for worker in workers:
            self._order_load(worker, spec)

    async def _load_group(
        self, spec: ReplicaSpec, elsewhere: Mapping[int, socket.socket] | None = None
    ) -> None:
        """A worker on each of its devices here, the first with a line to each other."""
        configs = [self._make_config(self._devices[index]) for index in devices_of(spec)]
        size, ranks, interface = spec.tensor_parallel, tuple(range(spec.tensor_parallel)), "lo"
        if spec.group and self._fabric:
            ranks, interface = spec.group.ranks, self._fabric.interface
        with groups.lines(ranks, size, self._group_start_s, elsewhere, interface) as places:
            workers = await self._start_together(
                spec,
                [
                    replace(config, group=place)
                    for config, place in zip(configs, places, strict=True)
                ],
            )
        self._groups[spec.replica_id] = Group(spec.replica_id, len(workers), workers[0].role)
        for worker in reversed(workers):
            self._order_load(worker, spec)  # the first last: it is the replica's home

    def _begin(self, joint: Joint) -> None:
        """One part of a group over nodes, after whatever was its part before."""
        self._leave(joint.spec.replica_id, "engine_lost", "it begins anew")
        before = self._lives.get(joint.spec.replica_id)
        self._joints[joint.spec.replica_id] = joint
        life = asyncio.create_task(self._live(joint, before), name=f"joint {joint.spec.replica_id}")
        self._lives[joint.spec.replica_id] = life

    async def _live(self, joint: Joint, before: asyncio.Task[None] | None) -> None:
        """Meet, run, end: this part and, by its ties, the others."""
        replica_id = joint.spec.replica_id
        if before:
            await before
        await self._on_message(ipc.Progress(replica_id, "loading", "meeting", 0.0))
        try:
            lines = await joint.meet()
            if not joint.over.done():
                await self._load_group(joint.spec, lines)
        except OSError as error:
            joint.end("spawn_failed", str(error))
        if joint.over.done():  # before they started, or while they did
            self._end_workers(replica_id)
        failure = await joint.over
        joint.close()
        if self._joints.get(replica_id) is joint:
            del self._joints[replica_id]
        if self._lives.get(replica_id) is asyncio.current_task():
            del self._lives[replica_id]
        if not joint.is_told:
            self._end_workers(replica_id)
            await self._on_message(failure)

    def decline(self, spec: ReplicaSpec, code: str, reason: str) -> None:
        """Let rank 0's node know why there is no part of a group here, as long as there is none."""
        known = self._joints.get(spec.replica_id)
        if self._fabric is None or (known and known.declined == code):
            return
        self._leave(spec.replica_id, code, reason)
        joint = self._joints[spec.replica_id] = Joint(self._fabric, spec, self._group_start_s)
        joint.declined = code
        life = asyncio.create_task(joint.decline(code, reason), name=f"decline {spec.replica_id}")
        self._declines.add(life)
        life.add_done_callback(self._declines.discard)

    def _leave(self, replica_id: str, code: str, reason: str) -> None:
        """This node's part is over, and the node knows."""
        if joint := self._joints.pop(replica_id, None):
            joint.is_told = True
            joint.end(code, reason)

    def is_led(self, replica_id: str) -> bool:
        """Whether it works for a rank 0 on another node, which says when it is over."""
        joint = self._joints.get(replica_id)
        return joint is not None and joint.is_led

    async def _start_together(
        self, spec: ReplicaSpec, configs: list[ipc.WorkerConfig]
    ) -> list[WorkerProcess]:
        """Workers of the replica's own; raises OSError, with none of them left."""
        try:
            for config in configs:
                key = f"{config.device.index}/{spec.replica_id}/{config.name}"
                worker = await self._start(key, config.device, config)
                worker.replicas.add(spec.replica_id)
            workers = self._workers_of(spec.replica_id)
            if len(workers) < len(configs):
                raise OSError("one of several workers has ended before it began")
            return workers
        except OSError:
            for worker in self._workers_of(spec.replica_id):
                worker.replicas.clear()
                worker.kill()
            raise

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
        workers = self._workers_of(replica_id)
        is_group_loading = replica_id in self._groups and any(each.loading for each in workers)
        for each in workers:
            if is_group_loading or each.loading == each.replicas == {replica_id}:
                each.kill()
            else:
                each.end.send(ipc.Unload(replica_id))
        return True

    def swap(self, replica_id: str, out: bool) -> bool:
        """Order a swap, off the device or back; False if no worker holds the replica."""
        worker = self._homes.get(replica_id)
        if worker is None or self.is_on_several(replica_id):
            return False
        worker.progress_at = time.monotonic()
        worker.end.send(ipc.SwapOut(replica_id) if out else ipc.SwapIn(replica_id))
        return True

    def is_on_several(self, replica_id: str) -> bool:
        """Whether the replica runs on several workers, which swap nothing."""
        return replica_id in self._pairs or replica_id in self._groups

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
        self._leave(replica_id, "replica_retired", "it was unloaded there")
        self._pairs.pop(replica_id, None)
        self._groups.pop(replica_id, None)
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
        """Whether somebody waits for this worker; for another rank than the first, the first."""
        if worker.role not in ("both", *ROLES, groups.FIRST):
            return False
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
        for replica_id in list(self._joints):
            self._leave(replica_id, "engine_lost", "its agent was stopped")
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
    async def _start(self, key: str, device: Device, config: ipc.WorkerConfig) -> WorkerProcess:
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
        """What the node is told; of several workers' messages some are about them alone."""
        group = next((self._groups[rid] for rid in worker.replicas if rid in self._groups), None)
        if group:
            if isinstance(message, ipc.LoadFailed | ipc.ReplicaFailed):
                self._leave(message.replica_id, message.code, message.message)
            return group.passed_on(worker.role, message)
        pair = next((self._pairs[rid] for rid in worker.replicas if rid in self._pairs), None)
        if pair is None:
            return message if worker.role == "both" else None  # its last words
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
            self._leave(replica_id, "engine_lost", describe_exit(code, worker.role))
            self._end_workers(replica_id)  # the others have a part of what is needed
        log.info("worker_ended", worker=worker.key, code=code, lost=lost)
        if lost:
            await self._on_lost(lost, describe_exit(code, worker.role))

    def _end_workers(self, replica_id: str) -> None:
        """At once, those that it has to itself: one on several workers shares none of them."""
        self._homes.pop(replica_id, None)
        self._pairs.pop(replica_id, None)
        self._groups.pop(replica_id, None)
        for worker in self._workers_of(replica_id):
            worker.replicas.discard(replica_id)
            del self.workers[worker.key]
            worker.kill()

    def _note_progress(self, worker: WorkerProcess, message: ipc.FromWorker) -> None:
        worker.progress_at = time.monotonic()
        match message:
            case ipc.Loaded() | ipc.LoadFailed():
                worker.loading.discard(message.replica_id)
