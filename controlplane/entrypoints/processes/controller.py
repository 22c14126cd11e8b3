"""The controller: one process leads, any number stand by; each loop is level-triggered.

::

    lease      take or keep the lease; its epoch grows with each change of holder
    project    fold new events into the read model; new events wake the others
    seal       sign checkpoints of the log and the ledger, and copy them
    usage      add up the ended requests, and now and then recount all totals
    upkeep     archive and remove what the retention policy lets go, destroy keys of erased text
    demand     read from the ledger what is asked for; forecast fits and forecasts beside it
    act        ingest -> scale -> reconcile -> publish, in this order, on one view of the fleet

Every loop takes no arguments: a message or an event only wakes it, and it also runs every second.
So nothing depends on a message that was missed, and a failed round is simply tried again. Two
controllers that both believe to lead for a moment do no harm: a placement is appended with the
version it was planned from, and a desired state is written only over an older ``(epoch,
generation)``; whoever finds a newer one there steps down.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from controlplane.adapters.failed_sync import has_failed, leave_if_failed
from controlplane.adapters.natsbus.connection import Bus, connect, ensure_buckets
from controlplane.adapters.natsbus.publisher import DesiredPublisher
from controlplane.adapters.natsbus.subscriber import NodeSubscriber
from controlplane.application.demand import DemandWatch
from controlplane.application.fleet import (
    BusUnavailable,
    FleetLoads,
    NodeLoad,
    NodeReport,
    StaleDesired,
)
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ingest import DEFAULT_TIMINGS, Ingest, Timings
from controlplane.application.overdue import DEADLINES, Deadlines, Overdue
from controlplane.application.ports import (
    CONTROLLER_LEASE,
    Clock,
    EventStore,
    Lease,
    RecordedEvent,
)
from controlplane.application.project import LogFollower
from controlplane.application.publish import VERIFY_S, Late, Publisher
from controlplane.application.reconcile import Reconciler
from controlplane.application.scaling import Scaler
from controlplane.application.tasks import end_tasks
from controlplane.entrypoints.processes.sealing import Sealing

MAX_PLANS = 8  # in one round: evictions and joins settle in one or two

T = TypeVar("T")
log = structlog.get_logger("controller")


class ReadModel(Protocol):
    """What projects the log: at most ``limit`` events at a call, the position reached."""

    def catch_up(self, limit: int = ...) -> int: ...


class UsageBooks(Protocol):
    """What keeps usage, and checks it: blocking."""

    def roll_up(self) -> None:
        """Add up the records that ended since."""

    def check_if_due(self) -> None:
        """Recount all totals, if the last time is long enough ago; the result is kept."""


class Upkeep(Protocol):
    """What lets go of what is old, or erased: blocking."""

    def step(self) -> bool:
        """One bounded round; True if there may be more to do."""


@dataclass(frozen=True)
class ControllerSettings:
    """Times in seconds. A lease that is not renewed for ``lease_s`` is free for others. Of
    ``group_key`` the secrets of groups over nodes are made: the same for all controllers."""

    nats_url: str
    nats_creds: Path | None
    cluster_id: str
    timings: Timings = DEFAULT_TIMINGS
    deadlines: Deadlines = DEADLINES
    lease_s: float = 6.0
    round_s: float = 1.0
    poll_s: float = 0.05
    verify_s: float = VERIFY_S
    upkeep_s: float = 60.0
    demand_s: float = 0.25
    forecast_s: float = 20.0
    group_key: bytes = field(default=b"", repr=False)
    holder: str = field(
        default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
    )


@dataclass
class LoopStats:
    """How one loop fares, for /metrics."""

    num_rounds: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    last_error: str = ""


class Controller:
    """``await run(stop)`` until the event is set. Blocking work runs on its own threads."""

    def __init__(
        self,
        settings: ControllerSettings,
        store: EventStore,
        handler: CommandHandler,
        clock: Clock,
        read_model: ReadModel,
        reconnect_database: Callable[[], None] = lambda: None,
        sealing: Sealing | None = None,
        usage: UsageBooks | None = None,
        upkeep: Upkeep | None = None,
        demand: DemandWatch | None = None,
    ) -> None:
        self.settings, self._store, self._clock = settings, store, clock
        self._handler, self._read_model, self._usage = handler, read_model, usage
        self._reconnect_database, self.sealing = reconnect_database, sealing
        self._upkeep = upkeep
        self.state, self.loads = FleetState(), FleetLoads()
        self.ingest = Ingest(handler, clock, self.state, self.loads, settings.timings)
        rates = (lambda: demand.view.rates_asked()) if demand else dict[str, float]
        self.reconciler = Reconciler(handler, clock, self.state, self.loads, rates)
        watched = self.state, self.loads, self.ingest.report, self._late
        self.overdue = Overdue(handler, clock, *watched, settings.deadlines)
        self.demand = demand
        self.scaler = Scaler(handler, clock, self.state, self.loads, demand) if demand else None
        self.follower = LogFollower(store, 0, self._on_event)
        self.publisher: Publisher | None = None
        self.subscriber: NodeSubscriber | None = None
        self.bus: Bus | None = None
        self.lease: Lease | None = None
        self._lease_until = 0.0
        self.projected, self.head = 0, 0
        loops = ("lease", "project", "act", "seal", "usage", "upkeep", "demand", "forecast")
        self.stats = {name: LoopStats() for name in loops}
        self.events: Counter[str] = Counter()  # all in the log, by type
        self._planned: tuple[int, float] = (-1, 0.0)  # log position and time of the last plan
        self._outdone_by = ""
        self._wake = asyncio.Event()
        self._threads = {name: ThreadPoolExecutor(1, name) for name in self.stats}

    @property
    def leads(self) -> bool:
        return self.lease is not None and self._clock.monotonic() < self._lease_until

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; then finish the round, give the lease back and close the bus."""
        loops = [
            asyncio.create_task(self._repeat("lease", self._keep_lease, self.settings.lease_s / 4)),
            asyncio.create_task(self._repeat("project", self._project, self.settings.poll_s)),
            asyncio.create_task(self._repeat("seal", self._seal, self.settings.round_s)),
            asyncio.create_task(self._repeat("usage", self._keep_usage, self.settings.round_s)),
            asyncio.create_task(self._repeat("upkeep", self._let_go, self.settings.upkeep_s)),
            asyncio.create_task(self._repeat("demand", self._watch, self.settings.demand_s)),
            asyncio.create_task(self._repeat("forecast", self._foresee, self.settings.forecast_s)),
            asyncio.create_task(self._act_loop()),
        ]
        await stop.wait()
        await end_tasks(loops)
        await self._leave()

    async def _leave(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._on("lease", self._give_back), 2)
        if self.bus is not None:
            await self.bus.close(deadline_s=1.0)
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    async def _on(self, name: str, work: Callable[[], T]) -> T:
        """Run blocking work on the thread of loop ``name``."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], work)

    async def _repeat(self, name: str, once: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await self._guarded(name, once)
            failed = bool(self.stats[name].last_error)
            await asyncio.sleep(max(seconds, self.settings.round_s) if failed else seconds)

    async def _guarded(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        """One round; a failure is counted, said once, and tried again in the next one."""
        stats, began = self.stats[name], time.perf_counter()
        try:
            await once()
            stats.last_error = ""
        except Exception as error:
            leave_if_failed(error)
            stats.num_failures += 1
            text = f"{type(error).__name__}: {error}"
            if text != stats.last_error:
                log.warning("round failed", loop=name, error=text)
            stats.last_error = text
            if not isinstance(error, BusUnavailable) and not has_failed():
                await self._on(name, self._reconnect_database)
        stats.num_rounds += 1
        stats.seconds += time.perf_counter() - began

    # --- leadership -----------------------------------------------------------------------------
    async def _keep_lease(self) -> None:
        asked_at = self._clock.monotonic()
        lease = await self._on("lease", self._acquire)
        if lease is None:
            self._step_down("another controller holds the lease")
            return
        self._lease_until = asked_at + self.settings.lease_s
        if self.lease is None or self.lease.epoch != lease.epoch:
            log.info("leading", holder=lease.holder, epoch=lease.epoch)
            self.ingest.listen_anew()
            self.publisher = None
            self._wake.set()
        self.lease = lease

    def _acquire(self) -> Lease | None:
        return self._store.acquire_lease(
            CONTROLLER_LEASE, self.settings.holder, self.settings.lease_s, self._clock.now()
        )

    def _give_back(self) -> None:
        if self.lease is not None:
            self._store.acquire_lease(CONTROLLER_LEASE, self.settings.holder, 0, self._clock.now())

    def _step_down(self, why: str) -> None:
        if self.lease is not None:
            log.warning("standing by", reason=why)
        self.lease, self.publisher = None, None

    # --- projecting -----------------------------------------------------------------------------
    async def _project(self) -> None:
        """Bring the read model to the head, batch by batch; wake the others for new events."""
        head = (await self._on("project", self._store.head)).position
        if head != self.head:
            self._wake.set()
        self.head = head
        while self.leads and self.projected < self.head:
            self.projected = await self._on("project", self._read_model.catch_up)

    # --- sealing, usage -------------------------------------------------------------------------
    async def _seal(self) -> None:
        """Sign what is due and copy it to the bus, if there is one just now."""
        if self.sealing is None or not self.leads:
            return
        await self._on("seal", self.sealing.step)
        if self.bus is not None and self.bus.connected:
            await self.sealing.copy_to(self.bus, lambda read: self._on("seal", read))

    async def _keep_usage(self) -> None:
        """On a thread of its own: a check reads every record, and holds up nothing else."""
        if self.leads and self._usage is not None:
            await self._on("usage", self._usage.roll_up)
            await self._on("usage", self._usage.check_if_due)

    async def _let_go(self) -> None:
        """Round after round, as long as there is something to let go and this process leads."""
        while self.leads and self._upkeep is not None:
            if not await self._on("upkeep", self._upkeep.step):
                break

    # --- demand ---------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """What is asked for; somebody who waits for a model that is not there wakes the planner."""
        if self.demand is not None and self.leads and await self._on("demand", self.demand.watch):
            self._wake.set()

    async def _foresee(self) -> None:
        """On a thread of its own: fitting takes seconds, and holds up nothing else."""
        if self.demand is not None and self.leads:
            await self._on("forecast", self.demand.forecast)

    # --- ingest, reconcile, publish -------------------------------------------------------------
    async def _act_loop(self) -> None:
        await self._connect()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.settings.round_s)
            self._wake.clear()
            if self.leads:
                await self._guarded("act", self._act)
                await asyncio.sleep(self.settings.poll_s)  # let wake-ups gather

    async def _connect(self) -> None:
        settings = self.settings
        self.bus = await connect(settings.nats_url, settings.nats_creds, "controller")
        self.bus.on_reconnect(self._reconnected)
        self.subscriber = NodeSubscriber(self.bus, self._on_load, self._on_report)
        while True:
            try:
                await ensure_buckets(self.bus)
                await self.subscriber.start()
                break
            except Exception as error:
                log.warning("bus not ready", error=repr(error))
                await asyncio.sleep(settings.round_s)
        self.ingest.listen_anew()

    async def _reconnected(self) -> None:
        log.info("bus reconnected")
        self.ingest.listen_anew()
        if self.publisher is not None:
            self.publisher.verify_soon()
        if self.sealing is not None:
            self.sealing.forget_bus()
        self._wake.set()

    def _on_load(self, load: NodeLoad) -> None:
        self.ingest.on_load(load)
        self._wake.set()

    def _on_report(self, report: NodeReport) -> None:
        self.ingest.on_report(report)
        self._wake.set()

    async def _act(self) -> None:
        was_frozen = self.ingest.frozen
        await self._on("act", self._decide)
        if self.ingest.frozen != was_frozen:
            log.error("frozen" if self.ingest.frozen else "thawed", silent=self.ingest.num_silent)
        await self._publish()

    def _on_event(self, recorded: RecordedEvent) -> None:
        self.state.apply(recorded)
        self.events[recorded.type] += 1

    def _decide(self) -> None:
        """Record what nodes said, then plan until nothing changes; blocking."""
        self.follower.catch_up()
        if self.bus is not None and self.bus.connected:  # deaf, we cannot judge silence
            self.ingest.step()
            self.follower.catch_up()
            self.overdue.step()
            self.follower.catch_up()
        if self.scaler is not None and self.leads and self.scaler.step():
            self.follower.catch_up()
        position, planned_at = self._planned
        now = self._clock.monotonic()
        if self.state.position == position and now - planned_at < self.settings.round_s:
            return  # woken by a heartbeat that changed nothing
        for _ in range(MAX_PLANS):
            if not self.leads or not self.reconciler.step():
                break
            self.follower.catch_up()
        self._planned = (self.state.position, now)

    async def _publish(self) -> None:
        lease = self.lease
        if lease is None or self.bus is None or not self.leads:
            return
        if self.publisher is None:
            states = DesiredPublisher(self.bus, self.settings.cluster_id)
            self.publisher = Publisher(
                states,
                self._clock,
                self.state,
                self.loads,
                lease.epoch,
                self.settings.verify_s,
                self.settings.group_key,
            )
        try:
            await self.publisher.step()
        except StaleDesired as error:
            await self._outdone(str(error))

    async def _outdone(self, why: str) -> None:
        """The bus holds something newer than we decide: another controller of this log leads by
        now, or the log went back. The lease tells which; in a log that went back we lead on, and
        the nodes that do not follow are told of (``overdue``)."""
        await self._keep_lease()
        if self.leads and why != self._outdone_by:
            log.error("the bus is ahead of the log", reason=why)
        self._outdone_by = why

    def _late(self) -> dict[str, Late] | None:
        return self.publisher.late() if self.publisher is not None else None

    # --- health ---------------------------------------------------------------------------------
    def problems(self) -> list[str]:
        """Why the process is not ready; empty if it is, leading or standing by."""
        found = [f"{name}: {stats.last_error}" for name, stats in self.stats.items()
                 if stats.last_error]  # fmt: skip
        if not self.stats["lease"].num_rounds:
            found.append("the lease was not asked for yet")
        if self.bus is None or not self.bus.connected:
            found.append("the message bus is not connected")
        if self.leads and not self.stats["act"].num_rounds:
            found.append("the first round is not done")
        if self.follower.failure is not None:
            found.append(f"the log cannot be followed: {self.follower.failure}")
        return found


async def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
