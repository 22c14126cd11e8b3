"""The agent process: connects the node to the bus, the clock, the port and the signals."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gpuagent.agent.bus import Bus, BusDown
from gpuagent.agent.config import AgentSettings
from gpuagent.agent.desired import SAFETY, boot_clock
from gpuagent.agent.devices import find_devices
from gpuagent.agent.http import HttpServer
from gpuagent.agent.node import Node
from gpuagent.agent.reports import Reports
from gpuagent.wire import codec, subjects

log = structlog.get_logger("gpuagent.service")

TELEMETRY_S = 2.0
RESYNC_S = 60.0
DEBOUNCE_S = 0.1
RETRY_S = 1.0
FINISH_S = 2.5  # of the five seconds that stopping may take
FORCE_S = 7.0


class Service:
    """All loops of one agent; ``run`` returns after SIGTERM or SIGINT."""

    def __init__(self, settings: AgentSettings) -> None:
        devices = find_devices(settings.devices, settings.part())
        self._settings = settings
        self._bus = Bus(settings.node_id)
        cores = max(1, len(os.sched_getaffinity(0)) // settings.part().of)
        self._node = Node(settings, devices, self._bus.publish, cores)
        self._reports = Reports(self._node, self._bus.errors)
        self._http = HttpServer(
            {
                "/metrics": self._reports.metrics,
                "/livez": self._reports.livez,
                "/readyz": self._reports.readyz,
            }
        )
        self._look = asyncio.Event()  # a hint that desired state may have changed
        self._stop = asyncio.Event()
        self._stored_at: dict[str, float] = {}  # version -> when its tokenizer was last seen

    async def run(self) -> None:
        self._handle_signals()
        await self._listen()
        loops = [asyncio.create_task(self._serve_bus(), name="bus")]
        loops += [
            asyncio.create_task(self._node.run(), name="reconcile"),
            asyncio.create_task(_every(1.0, self._tick), name="tick"),
        ]
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        done, _ = await asyncio.wait([stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
        try:
            await self._close(loops)
        finally:
            for task in done - {stopped}:
                task.result()  # a loop that ended is a defect: show it, and exit non-zero

    async def _tick(self) -> None:
        if not self._bus.is_connected:
            self._node.inference.extend_leases()
        await self._node.tick()

    async def _listen(self) -> None:
        settings = self._settings
        if self._node.fabric:
            await self._node.fabric.start()
        port = await self._http.start(settings.metrics_host, settings.metrics_port)
        if settings.port_file:
            settings.port_file.parent.mkdir(parents=True, exist_ok=True)
            temporary = settings.port_file.with_suffix(".new")
            temporary.write_text(f"{port}\n")
            temporary.replace(settings.port_file)
        log.info("agent_started", node=settings.node_id, boot=self._node.boot_id, port=port)

    # --- the bus ----------------------------------------------------------------------------
    async def _serve_bus(self) -> None:
        """Connect, subscribe, then keep desired state, reports and tokenizers in step."""
        bus, node_id = self._bus, self._settings.node_id
        await bus.connect(self._settings.nats_url, self._settings.creds)
        bus.on_reconnect = self._reconnected
        await bus.subscribe(f"$KV.{subjects.DESIRED_BUCKET}.{node_id}", self._hinted)
        await bus.subscribe(subjects.cancel(node_id), self._node.inference.cancel)
        await bus.subscribe(subjects.resend(node_id), self._node.inference.resend)
        await bus.subscribe(subjects.close(node_id), self._node.inference.close)
        await bus.subscribe(subjects.generate(node_id), self._node.inference.generate)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_desired())
            group.create_task(self._report_observed())
            group.create_task(_every(TELEMETRY_S, self._send_telemetry))
            group.create_task(self._store_tokenizers())

    async def _hinted(self, _: bytes) -> None:
        self._look.set()

    def _reconnected(self) -> None:
        """Whatever the bus held may be gone with its disk: look and write again."""
        self._look.set()
        self._node.changed.set()
        self._stored_at.clear()
        self._node.bundle_added.set()

    async def _follow_desired(self) -> None:
        """Read desired state on each hint, and often enough to keep the lease.

        The lease asks for more than the resync every minute does; reading the value rather than
        pinging means that whoever renews its lease has seen the newest plan.
        """
        interval = min(self._settings.lease_seconds * SAFETY / 3, RESYNC_S)
        while True:
            self._look.clear()
            pause = interval if await self._read_desired() else RETRY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause)

    async def _read_desired(self) -> bool:
        asked_at = boot_clock()
        try:
            desired = await self._bus.read_desired()
        except BusDown as error:
            log.warning("desired_unread", reason=str(error))
            return False
        except codec.WireError as error:
            self._node.counts["malformed"] += 1
            log.error("desired_malformed", reason=str(error))
            desired = None
        if desired is not None:
            self._node.offer(desired)
        self._node.lease.renew(asked_at)
        return True

    async def _report_observed(self) -> None:
        """Write observed state on every change, debounced, and every minute."""
        node, said = self._node, ""
        while True:
            node.changed.clear()
            try:
                await self._bus.write_observed(self._reports.observed())
            except BusDown as error:
                node.counts["observed_unwritten"] += 1
                if str(error) != said:  # once, and not every second
                    log.warning("observed_unwritten", reason=str(error))
                said = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            said = ""
            with suppress(TimeoutError):
                await asyncio.wait_for(node.changed.wait(), RESYNC_S)
            await asyncio.sleep(DEBOUNCE_S)

    async def _send_telemetry(self) -> None:
        message = self._reports.telemetry()
        if self._bus.is_connected:  # an old heartbeat sent late would be a lie
            with suppress(BusDown):
                await self._bus.publish(
                    subjects.telemetry(self._settings.node_id), codec.encode(message)
                )

    async def _store_tokenizers(self) -> None:
        """See that the tokenizer of every loaded version is in the object store."""
        node = self._node
        while True:
            node.bundle_added.clear()
            pause = RESYNC_S if await self._store_missing() else RETRY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(node.bundle_added.wait(), pause)

    async def _store_missing(self) -> bool:
        due = time.monotonic() - RESYNC_S + 1
        bundles = self._node.table.bundles.items()
        for version_id, bundle in [b for b in bundles if self._stored_at.get(b[0], 0) <= due]:
            try:
                if await self._bus.publish_tokenizer(bundle):
                    log.info("tokenizer_stored", version=version_id)
            except BusDown as error:
                log.warning("tokenizer_unstored", version=version_id, reason=str(error))
                return False
            self._stored_at[version_id] = time.monotonic()
        return True

    # --- the end ----------------------------------------------------------------------------
    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._force()
        self._stop.set()
        asyncio.get_running_loop().call_later(FORCE_S, self._force)

    def _force(self) -> None:
        """The second signal, or too slow: no worker may be left behind."""
        self._node.host.kill_all()
        os._exit(1)

    async def _close(self, loops: list[asyncio.Task[None]]) -> None:
        log.info("agent_stopping", active=self._node.inference.num_active)
        await self._node.close(FINISH_S)
        await _cancel(loops)
        with suppress(BusDown, TimeoutError):
            await asyncio.wait_for(self._bus.write_observed(self._reports.observed()), 1.0)
        await self._bus.close()
        self._http.close()
        if self._node.fabric:
            self._node.fabric.close()
        log.info("agent_stopped")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until they are done: the bus client may swallow one while it connects."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)


async def _every(seconds: float, action: Callable[[], Awaitable[None]]) -> None:
    """Call ``action`` each ``seconds``; after a pause of the process only once."""
    while True:
        await action()
        await asyncio.sleep(seconds)
