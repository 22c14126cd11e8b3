"""One follower of the log and one bus subscription per web process, fanned out to the dashboards.

Each payload is serialised once and put on the bounded queue of every subscriber. A subscriber that
does not keep up loses its queue and is told to fetch anew, so that what is kept for it is bounded::

    hub at 41     subscriber A joins after=39: reads 40, 41 from the log, then follows
    event 42  ->  A: {"type": "event", "position": 42, …}
    each second   A: {"type": "heartbeat", "position": 42, …}   all up to 42 came before it
    2,000 waiting A: {"type": "reset", "position": 2042}        and the 2,000 are forgotten

Positions have no gaps, so a client that sees one knows it missed something. Messages go past the
channel layer on purpose: as a fan-out it breaks down at a quarter of this rate.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache

import msgspec
from django.conf import settings
from prometheus_client import Counter, Gauge

from controlplane import bootstrap
from controlplane.application.fleet import FleetLoads, NodeLoad
from controlplane.application.ports import Clock, EventStore, RecordedEvent, StoreUnavailable
from controlplane.domain.audit import DashboardUserSaved
from controlplane.domain.decider import Event
from controlplane.domain.tenant import (
    ApiKeyRevoked,
    ApiKeyRotated,
    ApiKeySuspended,
    TenantDeleted,
    TenantSuspended,
)
from controlplane.entrypoints.rest.events import event_json, visible

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
BATCH = 500
MAX_WAITING = 2000
MAX_BEHIND = 5000

_EVENTS = Counter("engine_events_followed", "Events seen in the log, by type.", ["type"])
_SUBSCRIBERS = Gauge("engine_live_subscribers", "Dashboards and scripts on /ws/live.")

_encoder = msgspec.json.Encoder()

Listen = Callable[[Callable[[NodeLoad], None]], Awaitable[None]]


def message(kind: str, **fields: object) -> str:
    return _encoder.encode({"type": kind, **fields}).decode()


@dataclass(eq=False)
class Subscriber:
    """What waits to be sent to one client. ``tenant_id`` None: it may see everything. ``actor`` is
    who it is, as the events name it."""

    tenant_id: str | None
    telemetry: bool
    actor: str = ""
    after: int = 0
    waiting: deque[str] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    barred: bool = False

    def put(self, payload: str, position: int) -> None:
        if self.barred:
            return
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.clear()
            payload = message("reset", position=position)
        self.waiting.append(payload)
        self.wake.set()

    async def take(self) -> str | None:
        """The next payload; None once the hub has stopped and all is sent."""
        while not self.waiting and not self.ended:
            self.wake.clear()
            await self.wake.wait()
        return self.waiting.popleft() if self.waiting else None

    def end(self) -> None:
        self.ended = True
        self.wake.set()

    def bar(self) -> None:
        """It may not hear another word, what waits for it included."""
        self.barred = True
        self.waiting.clear()
        self.end()


class Hub:
    """Runs in one event loop, from the first subscriber on. ``listen`` subscribes to telemetry, as
    soon as ``hear`` is called; without a bus it waits for one, and the dashboards live on events
    alone meanwhile. ``loads`` keeps the newest of each node."""

    def __init__(
        self,
        store: EventStore,
        clock: Clock,
        listen: Listen | None = None,
        loads: FleetLoads | None = None,
    ) -> None:
        self._store, self._clock, self._listen = store, clock, listen
        self.loads = loads or FleetLoads()
        self._hearing: asyncio.Task[None] | None = None
        self._subscribers: set[Subscriber] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self.position = 0

    async def join(self, subscriber: Subscriber, after: int | None) -> None:
        """Start the stream for ``subscriber`` after that position, or from now (None)."""
        await self._start()
        position = self.position
        too_far = after is not None and not -MAX_BEHIND <= after - position <= BATCH
        if after is None or too_far:
            subscriber.after = position
            kind = "reset" if too_far else "hello"
            subscriber.put(message(kind, position=position, at=self._clock.now()), position)
            self._subscribers.add(subscriber)
            return
        subscriber.after = after
        subscriber.put(message("hello", position=after, at=self._clock.now()), position)
        await self._catch_up(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)

    async def stop(self) -> None:
        """Tell every subscriber to finish, and let go of log and bus."""
        for subscriber in tuple(self._subscribers):
            subscriber.end()
        hearing = [self._hearing] if self._hearing else []
        for _ in range(20):  # Python 3.11's wait_for, inside the bus client, can swallow a cancel
            pending = [task for task in (*self._tasks, *hearing) if not task.done()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        self._tasks.clear()
        self._hearing = None

    def hear(self) -> None:
        """Listen to the nodes from now on, also while nobody watches."""
        if self._hearing is None and self._listen is not None:
            self._hearing = asyncio.create_task(self._hear(self._listen))

    async def _catch_up(self, subscriber: Subscriber) -> None:
        """Read what the hub has sent already; joined in the same step that finds nothing left."""
        while subscriber.after < self.position:
            behind = await asyncio.to_thread(
                self._store.read_all, subscriber.after, BATCH, self.position
            )
            for recorded in behind:
                self._deliver(subscriber, recorded, _event_message(recorded))
                subscriber.after = recorded.position
        self._subscribers.add(subscriber)

    async def _start(self) -> None:
        async with self._starting:
            if self._tasks:
                return
            self.position = (await asyncio.to_thread(self._store.head)).position
            self._tasks = [asyncio.create_task(task) for task in (self._follow(), self._beat())]
            self.hear()

    async def _follow(self) -> None:
        while True:
            try:
                recorded = await asyncio.to_thread(self._store.read_all, self.position, BATCH)
            except StoreUnavailable:
                logger.warning("the log cannot be read now")
                await asyncio.sleep(1.0)
                continue
            for event in recorded:
                self._publish(event)
            if not recorded:
                await asyncio.sleep(POLL_SECONDS)

    def _publish(self, recorded: RecordedEvent) -> None:
        payload = _event_message(recorded)
        _EVENTS.labels(recorded.type).inc()
        self.position = recorded.position
        for subscriber in self._subscribers:
            if loses_access(subscriber, recorded.event):
                subscriber.bar()
            elif recorded.position > subscriber.after:
                self._deliver(subscriber, recorded, payload)

    def _deliver(self, subscriber: Subscriber, recorded: RecordedEvent, payload: str) -> None:
        if visible(recorded.stream, subscriber.tenant_id):
            subscriber.put(payload, recorded.position)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            _SUBSCRIBERS.set(len(self._subscribers))
            payload = message("heartbeat", position=self.position, at=self._clock.now())
            for subscriber in self._subscribers:
                subscriber.put(payload, self.position)

    async def _hear(self, listen: Listen) -> None:
        await listen(self._on_load)

    def _on_load(self, load: NodeLoad) -> None:
        self.loads.record(load, self._clock.monotonic())
        told = msgspec.structs.replace(load, prefix_filters={})  # kilobytes, for routers alone
        payload = message("telemetry", **msgspec.to_builtins(told))
        for subscriber in self._subscribers:
            if subscriber.telemetry:
                subscriber.put(payload, self.position)


def loses_access(subscriber: Subscriber, event: Event) -> bool:
    """Whether ``event`` takes from the subscriber the right to listen, or may do: who listens by
    a rotated key's old secret comes again and is judged anew."""
    match event:
        case ApiKeyRevoked() | ApiKeySuspended() | ApiKeyRotated():
            return subscriber.actor == f"key:{event.key_id}"
        case DashboardUserSaved():
            return subscriber.actor == f"user:{event.username}"
        case TenantSuspended() | TenantDeleted():
            return _works_for(subscriber) == event.tenant_id
    return False


def _works_for(subscriber: Subscriber) -> str | None:
    """The tenant whose key or token it came with; None for who logged in and sees everything."""
    if subscriber.tenant_id is None and not subscriber.actor.startswith("user:"):
        return settings.OPERATOR_TENANT
    return subscriber.tenant_id


def _event_message(recorded: RecordedEvent) -> str:
    """The frame's own ``type`` is "event", so the event's travels as ``event_type``."""
    fields = event_json(recorded)
    return message("event", **{"event_type": fields.pop("type"), **fields})


@cache
def process_hub() -> Hub:
    """The one hub of a web process."""
    listen, loads = bootstrap.listen_to_nodes, bootstrap.heard_loads()
    return Hub(bootstrap.event_store(), bootstrap.clock(), listen, loads)
