"""What a process does until it is killed: all that the control plane writes, by a seeded plan.

A plan is a list of steps; each is one of the product's own calls (a burst of commands, admissions,
settlements, a round of the controller, a batch of the read model, ...), with the product's own
adapters on a real database and a real bus. Before and after each call the journal is told what was
asked and what was acknowledged. ``recovery`` compares it with what is found afterwards.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.reaper import Reaper
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.natsbus.connection import Bus, connect, ensure_buckets
from controlplane.adapters.natsbus.publisher import DesiredPublisher
from controlplane.adapters.private_files import kept_private
from controlplane.adapters.readmodel.projector import Projector
from controlplane.application.capture import Text, TextKey, encrypt
from controlplane.application.fleet import FleetLoads, NodeLoad, NodeReport, ReplicaReport
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler, Handled
from controlplane.application.ingest import Ingest
from controlplane.application.notes import Signer
from controlplane.application.ports import (
    CONTROLLER_LEASE,
    BudgetExceeded,
    EventMeta,
    Idempotency,
    Intent,
    Terminal,
)
from controlplane.application.project import LogFollower
from controlplane.application.publish import Publisher
from controlplane.application.reconcile import Reconciler
from controlplane.application.seal import EventRecords, Sealer
from controlplane.application.settle import Settler
from controlplane.domain.errors import DomainError
from controlplane.domain.money import Price
from gpuagent.wire import subjects
from tests.contracts.ledgers import NoNodes
from tests.crash.commands import BUDGETS, DEVICES, Order, num_scene, orders
from tests.crash.places import Journal, Place

ACTOR = "user:ada"
PRICE = Price(150_000, 75_000, 600_000)
TEXT_KEY, TEXT = TextKey(0, bytes(32)), Text("chat", [("user", "Hi")], ["Ho"], [])
STREAM = f"KV_{subjects.DESIRED_BUCKET}"
# The steps during which the failpoints of a family are passed, by the family's name.
FAMILIES = {
    "handle": "commands", "append": "commands", "lease": "round", "project": "project",
    "rebuild": "rebuild", "publish": "round", "ledger": "admit", "settle": "settle",
    "admit": "admit", "reap": "beat", "seal": "seal",
}  # fmt: skip
WEIGHTS = {
    "commands": 10, "round": 6, "project": 5, "rebuild": 1, "admit": 8, "settle": 8,
    "progress": 4, "beat": 2, "seal": 2,
}  # fmt: skip
NUM_NODES = 2


@dataclass
class Plan:
    """``steps`` are (kind, a number to draw from). ``favour``: the family met most often."""

    seed: int
    at: float
    favour: str = ""
    with_bus: bool = True
    num_steps: int = 40
    orders: list[Order] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        choose = random.Random(self.seed)
        weights = dict(WEIGHTS)
        if not self.with_bus:
            del weights["round"]
        if FAMILIES.get(self.favour) in weights:
            weights[FAMILIES[self.favour]] *= 4
        kinds = choose.choices(list(weights), list(weights.values()), k=self.num_steps)
        self.steps = [(kind, choose.randrange(2**30)) for kind in kinds]
        self.orders = orders(self.seed, 4 * self.num_steps, self.at)


def gateway_of(seed: int) -> str:
    return f"gw-{seed}"


def send(handler: CommandHandler, order: Order) -> Handled:
    """As ``rest.writing`` does: the key is sent along, and names the events it causes."""
    return handler.handle(
        order.decider,
        order.stream,
        order.command,
        EventMeta(ACTOR, order.key),
        idempotency=Idempotency(order.key, order.body_hash),
        response=lambda done: (200, f"{order.key} {len(done.events)} {done.version}".encode()),
    )


def sealer_of(place: Place) -> Sealer:
    """With the run's own key; the copies are where the faults of its store do not reach."""
    return Sealer("crash", DjangoSealStore(), [signer_of(place)], SystemClock(), copies_of(place))


def signer_of(place: Place) -> Signer:
    path = place.journal.with_name("sealing_key")
    return Signer.parse(kept_private(path, lambda: Signer.generate("crash").line))


def copies_of(place: Place) -> CheckpointFiles:
    return CheckpointFiles(place.journal.with_name("checkpoints"))


class Worker:
    """One process of the control plane. ``await run()`` follows the plan to its end."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self.place, self.plan = place, plan
        self.journal = Journal(place.journal)
        self.clock = SystemClock()
        self.store = DjangoEventStore(self.clock)
        self.handler = CommandHandler(self.store, self.clock)
        self.ledger = LedgerStore()
        self.settler = Settler(self.ledger)
        self.projector = Projector(self.store)
        self.gateway = gateway_of(plan.seed)
        self.live: dict[str, Intent] = {}
        live = lambda: set(self.live)  # noqa: E731
        self.reaper = Reaper(self.ledger, self.gateway, "here", self.clock, live, NoNodes())
        self.control: Control | None = None
        self._database = ThreadPoolExecutor(1)  # Django allows no queries in a running loop
        self._orders = iter(plan.orders)
        self._num_intents = 0

    async def run(self) -> None:
        await self._in_database(self._set_budgets)
        await self._leave_orphans()
        self.journal.note("reaped", closed=await self.reaper.start())
        if self.plan.with_bus:
            self.control = Control(self, await self._bus())
            await self.control.start()
        for kind, number in self.plan.steps:
            step: Callable[[random.Random], Awaitable[None]] = getattr(self, f"_{kind}")
            await step(random.Random(number))
        if self.control is not None:
            await self.control.bus.close()

    def _set_budgets(self) -> None:
        """They come with the first orders, and hold once they are in the read model."""
        for order, _ in zip(self._orders, range(num_scene()), strict=False):
            self._send(order)
        self.projector.catch_up_all()

    async def _bus(self) -> Bus:
        bus = await connect(self.place.nats_url, self.place.nats_creds, "crash", timeout_s=10)
        await ensure_buckets(bus)
        return bus

    async def _in_database(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._database, work)

    # --- commands -------------------------------------------------------------------------------
    async def _commands(self, choose: random.Random) -> None:
        """A burst, so that some wait for a leader and are committed together."""
        burst = [order for order, _ in zip(self._orders, range(choose.randint(1, 6)), strict=False)]
        await asyncio.gather(*(asyncio.to_thread(self._send, order) for order in burst))

    def _send(self, order: Order) -> None:
        self.journal.note("sent", key=order.key)
        try:
            done = send(self.handler, order)
        except DomainError as error:
            self.journal.note("refused", key=order.key, code=error.code)
            return
        body = done.stored.body if done.stored else b""
        self.journal.note(
            "done",
            key=order.key,
            num_events=len(done.events),
            version=done.version,
            position=done.position,
            replayed=body.decode(),
        )

    # --- requests -------------------------------------------------------------------------------
    async def _leave_orphans(self) -> None:
        """What a gateway that nobody knows any more left behind."""
        for number in range(2):
            intent = self._intent(random.Random(number), gateway="gw-gone")
            await self._admit_one(intent)

    async def _admit(self, choose: random.Random) -> None:
        intents = [self._intent(choose, self.gateway) for _ in range(choose.randint(1, 5))]
        await asyncio.gather(*map(self._admit_one, intents))

    async def _admit_one(self, intent: Intent) -> None:
        self.live[intent.request_id] = intent
        self.journal.note("asked", id=intent.request_id, tenant=intent.tenant_id)
        try:
            await self.ledger.admit(intent)
        except BudgetExceeded:
            del self.live[intent.request_id]
            self.journal.note("exceeded", id=intent.request_id)
            return
        self.journal.note("admitted", id=intent.request_id, gateway=intent.gateway)
        if intent.gateway != self.gateway:
            del self.live[intent.request_id]

    def _intent(self, choose: random.Random, gateway: str) -> Intent:
        self._num_intents += 1
        tenant = choose.choice(list(BUDGETS))
        return Intent(
            request_id=f"req-{self.plan.seed}-{self._num_intents}",
            tenant_id=tenant,
            subject="key",
            end_user="",
            endpoint="chat",
            requested_model="m",
            route="",
            arm="",
            version_id=f"m@v{choose.randint(1, 2)}",
            latency_class="standard",
            num_prompt_tokens=choose.randint(1, 100),
            max_output_tokens=choose.randint(1, 300),
            price=PRICE,
            at=self.place.at,
            gateway=gateway,
        )

    async def _settle(self, choose: random.Random) -> None:
        ids = sorted(self.live)
        chosen = choose.sample(ids, min(len(ids), choose.randint(1, 4)))
        await asyncio.gather(*(self._settle_one(choose, one) for one in chosen))

    async def _settle_one(self, choose: random.Random, request_id: str) -> None:
        intent = self.live[request_id]
        outcome = choose.choice(["ok", "ok", "cancelled", "error"])
        output = choose.randint(0, intent.max_output_tokens)
        prompt = intent.num_prompt_tokens if output else 0
        end = terminal(request_id, outcome, prompt, output, self.place.at + 1)
        self.journal.note("ending", id=request_id, outcome=outcome, prompt=prompt, output=output)
        first = await self.settler.settle(end)
        del self.live[request_id]
        self.journal.note("ended", id=request_id, first=first)

    async def _progress(self, choose: random.Random) -> None:
        produced = {
            one: choose.randint(1, intent.max_output_tokens)
            for one, intent in sorted(self.live.items())
        }
        self.journal.note("producing", produced=produced)
        await self.ledger.progress(produced)
        self.journal.note("produced", produced=produced)

    async def _beat(self, choose: random.Random) -> None:
        self.journal.note("reaped", closed=await self.reaper.beat())

    # --- read model, fleet ----------------------------------------------------------------------
    async def _project(self, choose: random.Random) -> None:
        limit = choose.choice([3, 10, 1_000])
        position = await self._in_database(lambda: self.projector.catch_up(limit))
        self.journal.note("projected", position=position)

    async def _rebuild(self, choose: random.Random) -> None:
        rebuilt = await self._in_database(self.projector.rebuild)
        assert rebuilt.live in ("", rebuilt.rebuilt), rebuilt
        self.journal.note("rebuilt", position=rebuilt.position)

    async def _seal(self, choose: random.Random) -> None:
        sealer = sealer_of(self.place)
        logs = (EventRecords(self.store), RequestRecords())
        made = await self._in_database(lambda: sealer.step(logs, now=True))
        self.journal.note("sealed", made=made)

    async def _round(self, choose: random.Random) -> None:
        assert self.control is not None
        await self.control.round(choose)


class Control:
    """The controller's loops without its timers, and nodes that report what they were told."""

    def __init__(self, worker: Worker, bus: Bus) -> None:
        self.worker, self.bus = worker, bus
        store, handler, clock = worker.store, worker.handler, worker.clock
        self.state, self.loads = FleetState(), FleetLoads()
        self.follower = LogFollower(store, 0, self.state.apply)
        self.ingest = Ingest(handler, clock, self.state, self.loads)
        self.reconciler = Reconciler(handler, clock, self.state, self.loads)
        self.publisher: Publisher | None = None
        self._seq = 0

    async def start(self) -> None:
        """Lead, under an epoch of one's own; the bus is asked how much was written before."""
        info = await self.bus.jetstream().stream_info(STREAM)
        self.worker.journal.note("bus", last_seq=info.state.last_seq)
        lease = await asyncio.to_thread(self._lead)
        delivering = JournalledStates(self.bus, self.worker.journal)
        clock = self.worker.clock
        self.publisher = Publisher(delivering, clock, self.state, self.loads, lease, verify_s=0.02)

    def _lead(self) -> int:
        """A lease that has run out before anybody can be kept from leading by it."""
        store, now = self.worker.store, self.worker.clock.now()
        lease = store.acquire_lease(CONTROLLER_LEASE, f"pid-{os.getpid()}", 1e-6, now)
        assert lease is not None
        self.worker.journal.note("leading", epoch=lease.epoch)
        return lease.epoch

    async def round(self, choose: random.Random) -> None:
        await asyncio.to_thread(self._decide, choose)
        assert self.publisher is not None
        await self.publisher.step()

    def _decide(self, choose: random.Random) -> None:
        self.follower.catch_up()
        self._hear(choose)
        self.ingest.step()
        self.follower.catch_up()
        while self.reconciler.step():
            self.follower.catch_up()

    def _hear(self, choose: random.Random) -> None:
        """Each node runs what the placement wants of it, in some state or other."""
        self._seq += 1
        for number in range(NUM_NODES):
            node_id = f"{self.worker.place.tag}-n{number}"
            replicas = tuple(
                ReplicaReport(
                    one.replica_id, one.version_id, 0, choose.choice(["loading", "ready"])
                )
                for one in self.state.placement.assignments.values()
                if one.node_id == node_id
            )
            generation = self.state.placement.generation
            self.ingest.on_load(NodeLoad(node_id, "b1", self._seq, 0.0, 1, 0, False, (), ()))
            self.ingest.on_report(NodeReport(node_id, "b1", 1, generation, "z", DEVICES, replicas))


class JournalledStates(DesiredPublisher):
    """The product's publisher, which says to the journal what it was acknowledged."""

    def __init__(self, bus: Bus, journal: Journal) -> None:
        super().__init__(bus, "crash")
        self._journal = journal

    async def deliver(self, node: Any) -> Any:
        delivery = await super().deliver(node)
        self._journal.note(
            "told",
            node=node.node_id,
            epoch=delivery.epoch,
            generation=delivery.generation,
            written=delivery.written,
            content=sha256(repr((node.drain, node.replicas)).encode()).hexdigest()[:12],
        )
        return delivery


def terminal(request_id: str, outcome: str, prompt: int, output: int, at: float) -> Terminal:
    return Terminal(
        request_id=request_id,
        outcome=outcome,
        finish_reason="stop",
        error_code="",
        node_id="n1",
        replica_id="m.v1.g1.0",
        num_prompt_tokens=prompt,
        num_cached_tokens=0,
        num_output_tokens=output,
        ttft_ms=5.0,
        queue_ms=1.0,
        duration_ms=20.0,
        at=at,
        text=encrypt(TEXT_KEY, "t", request_id, TEXT) if outcome == "ok" else None,
    )
