"""The node itself: carries out plans and moves what the workers say to where it belongs.

It knows no bus. Desired states come in through ``offer``, generations through ``inference``; what
the node is comes out of ``reports``. Three rules hold it together: the plan decides and this
module only obeys; every failure is a state with a reason, never an exception that ends the loop;
whatever changes sets ``wake``, and the loop looks at everything again.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gpuagent.agent import ipc, telemetry
from gpuagent.agent.config import AgentSettings
from gpuagent.agent.desired import DesiredKeeper, Lease, StaleDecision, boot_clock
from gpuagent.agent.engine_host import EngineHost
from gpuagent.agent.fabric import Fabric
from gpuagent.agent.inference import Inference
from gpuagent.agent.reconcile import Plan, Verdict, reconcile
from gpuagent.agent.replicas import Replica, ReplicaTable
from gpuagent.agent.residency import HOST, RESIDENT, Moves
from gpuagent.agent.telemetry import LoadMeter
from gpuagent.agent.tiers import Tiers
from gpuagent.wire.messages import DesiredState, Device, Generate, ReplicaSpec

log = structlog.get_logger("gpuagent.node")

STOPPING_POLL_S = 0.1
FOREIGN_STEP_BYTES = 256 << 20  # less is noise, about which nobody need decide anew
LED_S = 5.0  # that a part of a group gives rank 0's node to end what runs
PAUSED_S = 3.0  # a tick this late means that the agent itself was stopped


class Node:
    """Replicas, workers and generations of one agent."""

    def __init__(
        self,
        settings: AgentSettings,
        devices: tuple[Device, ...],
        publish: Callable[[str, bytes], Awaitable[None]],
        num_cores: int,
    ) -> None:
        self.settings = settings
        self.devices = devices
        self.boot_id = uuid.uuid4().hex
        self.counts: Counter[str] = Counter()
        self.changed = asyncio.Event()  # something that observed state shows
        self.bundle_added = asyncio.Event()
        self.is_stopping = False
        self._ticked_at = time.monotonic()
        self._wake = asyncio.Event()
        self.foreign = dict.fromkeys((device.index for device in devices), 0)
        self._threads = settings.threads or max(1, num_cores // len(devices))
        self.keeper = DesiredKeeper(settings.node_id, settings.state_dir)
        self.lease = Lease(settings.lease_seconds)
        self.table = ReplicaTable(time.monotonic, time.time, self._on_change)
        self.meter = LoadMeter()
        address = settings.fabric_address
        self.fabric = Fabric(address, settings.fabric_port) if address else None
        self.host = EngineHost(
            devices,
            self._worker_config,
            self._on_message,
            self._on_lost,
            settings.group_start_seconds,
            self.fabric,
        )
        self.tiers = Tiers(
            self.table, self.host, self._num_active, settings.turn_seconds, settings.host_bytes()
        )
        self.inference = Inference(
            settings.node_id, self.boot_id, self, publish, time.monotonic, settings.max_queue
        )

    # --- desired state ----------------------------------------------------------------------
    def offer(self, desired: DesiredState) -> None:
        """Accept a desired state, or count and say why not."""
        before = self.keeper.refusal
        try:
            if self.keeper.offer(desired):
                log.info("desired_accepted", epoch=desired.epoch, generation=desired.generation)
                self._on_change()
        except StaleDecision as error:
            self.counts["stale_decisions"] += 1
            log.warning("stale_decision", reason=str(error))
        if self.keeper.refusal != before:
            self.changed.set()

    async def run(self) -> None:
        """Reconcile whenever something has changed or is due."""
        while True:
            self._wake.clear()
            await self.reconcile_once()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._seconds_until_due())

    async def reconcile_once(self) -> None:
        if self.keeper.state is not None and not self.is_stopping:
            wanted, now = self.keeper.state, time.monotonic()
            moves = self.tiers.decide(wanted, self.rooms(), now)
            await self._move(moves)
            plan = reconcile(
                wanted.replicas,
                self.table.running(),
                self.devices,
                now,
                self.rooms(),
                moves.reserved,
            )
            await self._execute(plan)
        await self.inference.end_held(self.tiers.take_cancelled())
        await self._advance_stopping()

    def rooms(self) -> dict[int, int]:
        """Bytes that each device offers replicas: the reserve and foreign memory taken off."""
        reserved = self.settings.reserved_bytes
        return {
            device.index: device.memory_bytes - reserved(device.kind) - self.foreign[device.index]
            for device in self.devices
        }

    async def _move(self, moves: Moves) -> None:
        """Carry out what the tiers ask for."""
        for replica_id in moves.drop:
            self.table.move(replica_id, "drop")
            self.host.unload(replica_id)
        for replica_id in moves.swap_out:
            self.table.move(replica_id, "out")
            self.host.swap(replica_id, out=True)
        for replica_id in moves.bring_in:
            replica = self.table.get(replica_id)
            assert replica is not None
            if replica.tier == HOST:
                self.table.move(replica_id, "in")
                self.host.swap(replica_id, out=False)
            else:
                await self._start(replica.spec)

    async def _execute(self, plan: Plan) -> None:
        for verdict in plan.stop:
            replica_id = verdict.spec.replica_id
            log.info("replica_stop", replica=replica_id, reason=verdict.reason)
            later = 0.0 if verdict.spec.leads else LED_S
            self.table.stop(replica_id, self.settings.drain_seconds + later)
            if self.table.get(replica_id) is None:
                await self._gone(replica_id)
        for verdict in plan.refuse:
            self.table.refuse(verdict.spec, verdict.code, verdict.reason)
            self._decline(verdict)
        for verdict in plan.wait:
            self.table.wait(verdict.spec, verdict.code, verdict.reason)
        for verdict in plan.hold:
            self.table.hold(verdict.spec, verdict.code, verdict.reason)
            self._decline(verdict)
        for verdict in plan.start:
            await self._start(verdict.spec)

    def _decline(self, verdict: Verdict) -> None:
        """Let the node of a group's first rank know why its part is not here."""
        if not verdict.spec.leads:
            self.host.decline(verdict.spec, verdict.code, verdict.reason)

    async def _start(self, spec: ReplicaSpec) -> None:
        log.info("replica_start", replica=spec.replica_id, source=spec.source)
        self.table.start(spec)
        self.meter.forget(spec.replica_id)
        try:
            await self.host.load(spec)
        except OSError as error:
            self.table.failed(spec.replica_id, "spawn_failed", str(error))

    async def _advance_stopping(self) -> None:
        """Unload stopping replicas that have finished what ran, or whose time is over."""
        for replica in self.table:
            if replica.state == "stopping" and not replica.is_unloading and self._may_end(replica):
                replica.is_unloading = True
                if not self.host.unload(replica.spec.replica_id):
                    await self._gone(replica.spec.replica_id)

    def _may_end(self, replica: Replica) -> bool:
        replica_id = replica.spec.replica_id
        is_idle = self.inference.num_active_on(replica_id) == 0 and not self.host.is_led(replica_id)
        return is_idle or replica.is_away or time.monotonic() >= replica.stop_by

    def _seconds_until_due(self) -> float | None:
        if any(replica.state == "stopping" for replica in self.table):
            return STOPPING_POLL_S
        due = [each for each in (self.table.next_retry(), self.tiers.next_turn()) if each]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    # --- what inference asks ----------------------------------------------------------------
    def admission_refusal(self) -> str:
        """Why this node admits nothing now; "" if it does."""
        if self.is_stopping:
            return "the agent is stopping"
        if not self.lease.is_valid(boot_clock()):
            return "the node has lost contact with the control plane"
        return ""

    def refusal(self, replica_id: str) -> str:
        return self.admission_refusal() or self.table.refusal(replica_id)

    def add(self, request: Generate) -> None:
        if self.tiers.hold(request):
            self._wake.set()
            return
        is_first = self.inference.num_active_on(request.replica_id) == 1
        self.host.add(request, was_idle=is_first)

    def cancel(self, replica_id: str, request_id: str) -> None:
        if self.tiers.cancel(replica_id, request_id):
            self._wake.set()
            return
        self.host.cancel(replica_id, request_id)

    # --- what workers say -------------------------------------------------------------------
    async def _on_message(self, message: ipc.FromWorker) -> None:
        match message:
            case ipc.StepOutputs(replica_id=replica_id, deltas=deltas):
                await self.inference.outputs(deltas)
                self._used(replica_id)
            case ipc.Stats(replicas=stats):
                self.meter.update(stats)
            case ipc.Progress():
                self.table.progressed(message)
            case ipc.Loaded():
                log.info("replica_ready", replica=message.replica_id, seconds=message.load_seconds)
                self.table.became_ready(message)
                self.bundle_added.set()
                self._send_held(message.replica_id)
            case ipc.Swapped(replica_id=replica_id, tier=tier, seconds=seconds):
                log.info("replica_swapped", replica=replica_id, tier=tier, seconds=seconds)
                self.table.swapped(message)
                self._send_held(replica_id)
            case ipc.LoadFailed() | ipc.ReplicaFailed():
                self.host.release(message.replica_id)
                await self._failed(message.replica_id, message.code, message.message)
            case ipc.Unloaded(replica_id=replica_id):
                await self._unloaded(replica_id)

    async def _unloaded(self, replica_id: str) -> None:
        replica = self.table.get(replica_id)
        if replica and replica.moving == "drop" and replica.state == "ready":
            log.info("replica_dropped", replica=replica_id)
            self.host.drop(replica_id)
            self.meter.forget(replica_id)
            self.table.dropped(replica_id)
            return
        self.host.release(replica_id)
        await self._gone(replica_id)

    def _send_held(self, replica_id: str) -> None:
        """Give a replica that has become resident what was held for it."""
        for request in self.tiers.release(replica_id):
            self.host.add(request, was_idle=True)

    def _used(self, replica_id: str) -> None:
        """It worked a moment ago; if it has nothing left to do others may take its place."""
        replica = self.table.get(replica_id)
        if replica:
            replica.used_at = time.monotonic()
            if self.tiers.is_anyone_waiting() and not self.inference.num_active_on(replica_id):
                self._wake.set()

    async def _on_lost(self, replica_ids: list[str], reason: str) -> None:
        """A worker died: its generations end with a typed error, its replicas will restart.

        One that died while loading is not tried again at once: the likely cause is memory.
        """
        self.counts["workers_lost"] += 1
        for replica_id in replica_ids:
            replica = self.table.get(replica_id)
            was_ready = replica is not None and replica.loaded is not None
            code = "engine_lost" if was_ready else "load_failed"
            await self._failed(replica_id, code, reason)

    async def _failed(self, replica_id: str, code: str, reason: str) -> None:
        log.warning("replica_failed", replica=replica_id, code=code, reason=reason)
        self.meter.forget(replica_id)
        self.table.failed(replica_id, code, reason)
        self.tiers.forget(replica_id)
        await self.inference.lose_replica(replica_id, "engine_lost", reason)

    async def _gone(self, replica_id: str) -> None:
        self.table.remove(replica_id)
        self.host.release(replica_id)
        self.tiers.forget(replica_id)
        self.meter.forget(replica_id)
        drained = f"{self.settings.drain_seconds:g} s after it was told to stop"
        message = f"the replica was retired or moved, and ended {drained}"
        await self.inference.lose_replica(replica_id, "replica_retired", message)
        self.inference.forget_replica(replica_id)

    # --- time and end -----------------------------------------------------------------------
    async def tick(self) -> None:
        """Once a second: what is due by time alone."""
        now, before = time.monotonic(), self._ticked_at
        self._ticked_at = now
        if now - before > PAUSED_S:
            self.host.excuse_silence()
        hung = self.host.kill_hung(self._is_busy, self.settings.watchdog_seconds)
        self.counts["workers_hung"] += len(hung)
        self._look_at_foreign()
        await self.inference.tick()

    def _look_at_foreign(self) -> None:
        pids = {device.index: self.host.pids(device.index) for device in self.devices}
        for index, num_bytes in telemetry.foreign_bytes(self.devices, pids).items():
            if abs(num_bytes - self.foreign[index]) >= FOREIGN_STEP_BYTES:
                self.foreign[index] = num_bytes
                self._wake.set()

    def _is_busy(self, replica_id: str) -> bool:
        """Whether somebody waits for its worker now, and not for the device."""
        replica = self.table.get(replica_id)
        if replica and replica.state == "ready" and replica.tier != RESIDENT:
            return replica.moving == "in"
        return self._num_active(replica_id) > self.tiers.num_held(replica_id)

    def _num_active(self, replica_id: str) -> int:
        return self.inference.num_active_on(replica_id)

    async def close(self, deadline_s: float) -> None:
        """Admit nothing more, let what runs finish until the deadline, end the workers."""
        self.is_stopping = True
        give_up = time.monotonic() + deadline_s
        while self.inference.num_active and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        for replica in self.table:
            await self.inference.lose_replica(
                replica.spec.replica_id, "engine_lost", "the agent is stopping"
            )
        await self.host.close()

    def _on_change(self) -> None:
        self._wake.set()
        self.changed.set()

    def _worker_config(self, device: Device) -> ipc.WorkerConfig:
        return ipc.WorkerConfig(
            device=device,
            threads=self._threads,
            model_cache=str(self.settings.model_cache),
            file_roots=tuple(map(str, self.settings.allowed_file_roots())),
            vllm_python=str(self.settings.vllm_python or ""),
            vllm_options=self.settings.options_of_vllm(device.kind),
            start_seconds=self.settings.engine_start_seconds,
            stall_seconds=self.settings.watchdog_seconds,
        )
