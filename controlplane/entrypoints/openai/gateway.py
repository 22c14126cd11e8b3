"""One gateway process: its parts, put together, and its periodic duties."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from controlplane.adapters.access.issuers import read_issuers
from controlplane.adapters.access.jwt_tokens import JwtVerifier
from controlplane.adapters.ledger.reaper import Reaper
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.natsbus.closing import NodeClosing
from controlplane.adapters.natsbus.connection import Bus, connect
from controlplane.adapters.natsbus.subscriber import NodeSubscriber
from controlplane.adapters.natsbus.transport import Transport
from controlplane.adapters.shared_limits import LOCAL, SharedLimits
from controlplane.adapters.store_writes import why_unwritable
from controlplane.application.explaining import DEFAULT_SHARE
from controlplane.application.fleet import BusUnavailable, FleetLoads, NodeLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.hold import HOLD_S
from controlplane.application.inference import Job
from controlplane.application.limits import TenantLimits, TierLimits
from controlplane.application.ports import (
    Append,
    Clock,
    EventMeta,
    EventStore,
    RecordedEvent,
)
from controlplane.application.project import LiveRows
from controlplane.application.refused import Refused
from controlplane.application.serve import Serving
from controlplane.application.settle import Settler
from controlplane.application.tasks import end_tasks
from controlplane.domain.audit import LIMITS, LimitsShared, LimitsUnshared
from controlplane.domain.ids import version_id
from controlplane.domain.model import ModelVersionRetired
from controlplane.domain.node import NodeSuspected
from controlplane.domain.tenant import (
    ApiKeyRevoked,
    ApiKeySuspended,
    TenantDeleted,
    TenantSuspended,
)
from controlplane.entrypoints.openai.app import GatewayApp
from controlplane.entrypoints.openai.capturing import Capturing
from controlplane.entrypoints.openai.encoding import Encoders
from controlplane.entrypoints.openai.handlers import Inference
from controlplane.entrypoints.openai.metrics import GatewayMetrics, Gauges
from controlplane.entrypoints.openai.model_list import Models
from controlplane.entrypoints.openai.nodes import LEASE_S, FleetPlacer, NatsGenerator
from controlplane.entrypoints.openai.orders import OrderDesk
from controlplane.entrypoints.openai.principals import Authenticator, KeyRing
from controlplane.entrypoints.openai.server import DRAIN_S
from controlplane.entrypoints.openai.websocket import WebSockets
from controlplane.projections.tenants import Tenant

CONNECT_TIMEOUT_S = 30.0
PING_S = 0.5  # a hung bus is noticed in time to say so within two seconds
WATCH_S = 0.1
HEAR_S = 2.0  # for which a new gateway waits for the nodes
SWEEP_S = 1.0
PROGRESS_S = 2.0
BEAT_S = 5.0
NODE_BEAT_S = LEASE_S / 5
LAST_USE_S = 60.0
RENEW_S = 20.0
ENDING = (ApiKeyRevoked, ApiKeySuspended, TenantSuspended, TenantDeleted)  # may end what runs

log = structlog.get_logger("gateway")


@dataclass(frozen=True)
class GatewaySettings:
    """``secret`` keys the tenants' cache salts; ``jwt_issuers`` is a JSON file or None."""

    nats_url: str
    nats_creds: Path | None
    allowed_hosts: tuple[str, ...]
    jwt_issuers: Path | None
    secret: bytes
    tiers: Mapping[str, TierLimits]
    operator_tenant: str
    redis_url: str = ""
    limits_fallback: str = LOCAL
    hold_s: Mapping[str, float] = field(default_factory=lambda: HOLD_S)
    explained_share: float = DEFAULT_SHARE
    currency: str = "USD"
    zone: str = ""


class Gateway:
    """``await start()`` inside the event loop that serves ``app``; then ``await stop()``."""

    def __init__(
        self, settings: GatewaySettings, store: EventStore, ledger: LedgerStore, clock: Clock
    ) -> None:
        self._settings, self._ledger, self._clock = settings, ledger, clock
        self._store = store
        self.host = socket.gethostname()
        self.name = f"gw-{os.getpid()}-{secrets.token_hex(4)}"  # one token of a bus subject
        self.state, self.loads = FleetState(zone=settings.zone), FleetLoads()
        self._loop = asyncio.get_running_loop()
        self.live = LiveRows(store, on_event=self._on_event)
        self.keys = KeyRing(self.live.rows)
        self.capturing = Capturing(self.keys.in_thread, clock)
        jwts = JwtVerifier(read_issuers(settings.jwt_issuers))
        self.authenticator = Authenticator(
            self.keys, jwts, self.live.rows, settings.operator_tenant
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Ready to serve when it returns; raises what makes that impossible."""
        await asyncio.to_thread(self.live.start)
        await self.keys.load()
        self.bus = await connect(
            self._settings.nats_url, self._settings.nats_creds, self.name,
            timeout_s=CONNECT_TIMEOUT_S, ping_s=PING_S,
        )  # fmt: skip
        self._build(self.bus)
        await self.transport.start()
        await self.closing.start()
        await NodeSubscriber(self.bus, self._on_load).start()
        await self.reaper.register()
        await self._hear_nodes()
        log.info("gateway started", gateway=self.name, position=self.live.position)
        self._tasks.append(asyncio.create_task(self._reap_first()))
        for seconds, duty in (
            (WATCH_S, self._watch_bus),
            (SWEEP_S, self._sweep),
            (PROGRESS_S, self._note_progress),
            (BEAT_S, self.reaper.register),
            (BEAT_S, self._reap),
            (NODE_BEAT_S, self.transport.beat),  # apart from all that waits for the database
            (LAST_USE_S, self.keys.write_last_use),
            (RENEW_S, self._renew_limits),
        ):
            self._tasks.append(asyncio.create_task(self._repeat(seconds, duty)))

    def _build(self, bus: Bus) -> None:
        settings, monotonic = self._settings, self._clock.monotonic
        self.transport = Transport(bus, self.name, monotonic)
        self.limits = self._limits(settings)
        self.placer = FleetPlacer(self.state, self.loads, self._clock, settings.hold_s)
        self.serving = Serving(
            ledger=self._ledger,
            settler=Settler(self._ledger),
            generator=NatsGenerator(self.transport, self.name),
            placer=self.placer,
            limits=self.limits,
            clock=self._clock,
            gateway=self.name,
            lose_node=self.transport.fail_node,
            hold_s=settings.hold_s,
            explained_share=settings.explained_share,
            currency=settings.currency,
        )
        self.closing = NodeClosing(bus, self.name, self._nodes)
        self.reaper = Reaper(
            self._ledger, self.name, self.host, self._clock, self.serving.live, self.closing
        )
        self.encoders = Encoders(self._tokenizer)
        self.metrics = GatewayMetrics(self._gauges)
        self.app = self._build_app(settings)

    def _limits(self, settings: GatewaySettings) -> TenantLimits | SharedLimits:
        """Shared with the other gateways where there is a Redis to share them in."""
        monotonic, tiers = self._clock.monotonic, settings.tiers
        if not settings.redis_url:
            return TenantLimits(monotonic, tiers)
        policy = settings.limits_fallback
        return SharedLimits(settings.redis_url, monotonic, tiers, policy, self._note_limits)

    def _note_limits(self, are_shared: bool) -> None:
        """For the audit, beside the metric; in a thread, since it writes to the log."""
        now, policy = self._clock.now(), self._settings.limits_fallback
        event = (
            LimitsShared(self.name, now) if are_shared else (LimitsUnshared(self.name, policy, now))
        )
        append = Append(LIMITS, None, [event], EventMeta(f"system:{self.name}"))
        self._noting = asyncio.ensure_future(asyncio.to_thread(self._store.append, append))
        self._noting.add_done_callback(partial(_log_failure, "limits not noted in the log"))

    async def _renew_limits(self) -> None:
        if isinstance(self.limits, SharedLimits):
            await self.limits.renew()

    def _build_app(self, settings: GatewaySettings) -> GatewayApp:
        weights = {name: tier.weight for name, tier in settings.tiers.items()}
        monotonic, capturing = self._clock.monotonic, self.capturing
        desk = OrderDesk(self.state, self.encoders, monotonic, settings.secret, weights, capturing)
        inference = Inference(self.serving, desk, self.authenticator, self.metrics)
        self.websockets = WebSockets(inference)
        return GatewayApp(
            inference,
            Models(self.state, self.live.rows, desk, self.authenticator),
            self.websockets,
            self.metrics,
            self.readiness,
            settings.allowed_hosts,
        )

    async def _tokenizer(self, wanted: str) -> Any:
        try:
            return await self.transport.tokenizer(wanted)
        except BusUnavailable as error:
            text = "The message bus is not reachable."
            raise Refused("bus_unavailable", text, retry_after=error.retry_after) from error

    # --- what comes in --------------------------------------------------------------------------
    def _on_event(self, recorded: RecordedEvent) -> None:
        """From the follower's thread; what the event loop reads is changed in the event loop."""
        self._loop.call_soon_threadsafe(self._apply, recorded)

    def _apply(self, recorded: RecordedEvent) -> None:
        event = recorded.event
        self.state.apply(recorded)
        self.keys.apply(event)
        self.authenticator.apply(event)
        self.capturing.apply(event)
        if not self._tasks:
            return  # before the start there is nothing that an event could end
        if isinstance(event, ModelVersionRetired):
            self.encoders.forget(version_id(event.name, event.version))
        elif isinstance(event, ENDING):
            self.serving.sweep(self._refusal_of)
        elif isinstance(event, NodeSuspected):
            self._leave_suspects()

    def _leave_suspects(self) -> None:
        """At once, and not with the next sweep."""
        leaving = self._loop.create_task(self.serving.leave_suspects())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        leaving.add_done_callback(partial(_log_failure, "a suspect node was not left"))

    def _on_load(self, load: NodeLoad) -> None:
        self.placer.record(load, self.serving.num_local)
        self.transport.saw_boot(load.node_id, load.boot_id)

    async def _hear_nodes(self) -> None:
        """Wait, within bounds, until every node that is up was heard: none could be chosen before.

        What the log says of them is applied between two turns of this loop.
        """
        deadline = self._loop.time() + HEAR_S
        while self._loop.time() < deadline:
            await asyncio.sleep(WATCH_S)
            up = [name for name, node in self.state.nodes.items() if node.status == "ready"]
            if all(self.loads.latest(name) for name in up):
                return

    # --- duties ---------------------------------------------------------------------------------
    async def _repeat(self, seconds: float, duty: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await duty()
            except Exception as error:  # a duty must outlive a store or a bus that is away
                log.warning("duty failed", duty=duty.__name__, error=str(error))

    async def _watch_bus(self) -> None:
        was_cut = self.serving.is_cut
        self.serving.watch_bus(self.bus.away_s(self._clock.monotonic()))
        if self.serving.is_cut != was_cut:
            log.warning("bus away" if self.serving.is_cut else "bus back")

    async def _sweep(self) -> None:
        self.serving.sweep(self._refusal_of)
        await self.serving.leave_suspects()
        await self.transport.tick()
        await self.serving.settler.retry_unsettled()

    def _refusal_of(self, job: Job) -> Refused | None:
        """Why a request that was admitted may not go on."""
        tenant = self.live.rows.get(Tenant, job.tenant_id)
        if tenant is None or tenant.suspended:
            return Refused("tenant_suspended", "The tenant is suspended.")
        reason = self.keys.why_not(job.subject)
        return Refused("invalid_api_key", f"The API key is {reason}.") if reason else None

    async def _note_progress(self) -> None:
        await self._ledger.progress(self.serving.progress())

    async def _reap(self) -> None:
        _say(await self.reaper.reap())

    async def _reap_first(self) -> None:
        """Beside the serving of new requests: nodes are asked, and one of them may be slow."""
        try:
            _say(await self.reaper.reap_host())
        except Exception as error:  # the next beats go on with it
            log.warning("orphans left to the next beat", error=str(error))

    def _nodes(self) -> Mapping[str, bool]:
        """Those that may know of a generation, and whether an answer can be expected of them."""
        known = self.state.nodes.items()
        return {name: one.status != "lost" for name, one in known if one.status != "absent"}

    def _gauges(self) -> Gauges:
        return Gauges(
            num_running=len(self.serving.calls),
            num_waiting=self.serving.waiting(),
            num_held=self.serving.holds.num_held,
            num_uncontinued=self.serving.continuations.num_waiting,
            continued=dict(self.serving.continued),
            num_unsettled=len(self.serving.settler.unsettled),
            num_websockets=self.websockets.num_open,
            log_position=self.live.position,
            is_bus_connected=self.bus.connected,
            are_limits_shared=isinstance(self.limits, SharedLimits) and self.limits.is_shared,
        )

    def readiness(self) -> dict[str, str]:
        """What keeps this gateway from serving, by part."""
        wrong = {}
        if not self.bus.connected:
            wrong["bus"] = "not connected"
        if self.live.follower.failure is not None:
            wrong["log"] = "following stopped"
        if self.serving.draining:
            wrong["gateway"] = "shutting down"
        if reason := why_unwritable():
            wrong["store"] = reason
        return wrong

    # --- the end --------------------------------------------------------------------------------
    def begin_drain(self) -> None:
        """Take no new request; after a while end what still runs, with a typed error."""
        self.serving.draining = True
        self._loop.call_soon_threadsafe(self._loop.call_later, DRAIN_S, self._fail_remaining)

    def _fail_remaining(self) -> None:
        for call in list(self.serving.calls.values()):
            call.fail(Refused("shutting_down", "The gateway is shutting down.", retry_after=1))

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        with contextlib.suppress(Exception):  # the others reap what could not be said
            await asyncio.wait_for(self.reaper.stop(), 1.0)
        self.live.stop()
        self.keys.close()
        if isinstance(self.limits, SharedLimits):
            await self.limits.close()
        await self.bus.close(1.0)
        await self._ledger.close()


def _say(num_closed: int) -> None:
    if num_closed:
        log.warning("orphans closed", count=num_closed)


def _log_failure(what: str, task: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(what, error=str(error))
