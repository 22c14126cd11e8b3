"""Start anew on what a killed process left, then compare it with what had been acknowledged.

Everything here is done by the product: commands are sent again under their keys, the reaper closes
what was left open, the read model catches up and is rebuilt, a new leader tells the nodes. The
checks read the tables and the bus. Each returns sentences that say what is wrong; none means that
every invariant holds.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db import connections

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.reaper import Reaper
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import usage_findings
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.ledger.texts import text_findings
from controlplane.adapters.natsbus.connection import Bus, connect, ensure_buckets
from controlplane.adapters.natsbus.translate import desired_to_wire
from controlplane.adapters.readmodel.models import Tenant
from controlplane.adapters.readmodel.projector import Projector
from controlplane.application.check import check_everything
from controlplane.application.fleet import FleetLoads
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import (
    BudgetExceeded,
    IntegrityError,
    Intent,
    RecordedEvent,
)
from controlplane.application.project import LogFollower
from controlplane.application.publish import Publisher, desired_nodes
from controlplane.application.seal import EventRecords
from controlplane.domain.audit import CommandRefused
from controlplane.domain.budget import day_of
from controlplane.domain.errors import DomainError
from controlplane.domain.placement import PlacementDecided
from gpuagent.wire import subjects
from gpuagent.wire.codec import decode
from gpuagent.wire.messages import DesiredState
from tests.contracts.ledgers import NoNodes
from tests.crash.commands import BUDGETS, Order
from tests.crash.places import Journal, Place, read_journal
from tests.crash.workload import (
    ACTOR,
    PRICE,
    STREAM,
    JournalledStates,
    copies_of,
    sealer_of,
    send,
    signer_of,
    terminal,
)

Found = Iterator[str]
BATCH = 1_000


@dataclass
class History:
    """A journal by what it says. ``unknown`` things may have happened or not."""

    lines: list[dict[str, Any]]
    sent: set[str] = field(default_factory=set)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    exceeded: set[str] = field(default_factory=set)
    ending: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, bool] = field(default_factory=dict)
    progress: dict[str, set[int]] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    first_seq: int | None = None
    num_leaders: int = 0
    position: int = 0

    @classmethod
    def read(cls, place: Place) -> "History":
        history = cls(read_journal(place.journal))
        for line in history.lines:
            getattr(history, f"_{line['what']}", lambda line: None)(line)
        return history

    def _sent(self, line: dict[str, Any]) -> None:
        self.sent.add(line["key"])

    def _done(self, line: dict[str, Any]) -> None:
        self.done.setdefault(line["key"], line)
        self.position = max(self.position, line["position"])

    def _asked(self, line: dict[str, Any]) -> None:
        self.asked[line["id"]] = line["tenant"]

    def _admitted(self, line: dict[str, Any]) -> None:
        self.admitted.add(line["id"])

    def _exceeded(self, line: dict[str, Any]) -> None:
        self.exceeded.add(line["id"])

    def _ending(self, line: dict[str, Any]) -> None:
        self.ending[line["id"]] = line

    def _ended(self, line: dict[str, Any]) -> None:
        self.ended[line["id"]] = line["first"]

    def _producing(self, line: dict[str, Any]) -> None:
        for request_id, produced in line["produced"].items():
            self.progress.setdefault(request_id, {0}).add(produced)

    def _produced(self, line: dict[str, Any]) -> None:
        self.progress.update({one: {produced} for one, produced in line["produced"].items()})

    def _bus(self, line: dict[str, Any]) -> None:
        if self.first_seq is None:
            self.first_seq = line["last_seq"]

    def _told(self, line: dict[str, Any]) -> None:
        self.told.append(line)

    def _leading(self, line: dict[str, Any]) -> None:
        self.num_leaders += 1


class Recovery:
    """``check()`` does everything once; it may itself be killed, and done again."""

    def __init__(self, place: Place, sent: list[Order], with_bus: bool = True) -> None:
        self.place, self.with_bus = place, with_bus
        self.journal = Journal(place.journal)
        self.history = History.read(place)
        self.orders = [order for order in sent if order.key in self.history.sent]
        self.clock = SystemClock()
        self.store = DjangoEventStore(self.clock)
        self.handler = CommandHandler(self.store, self.clock)

    def check(self) -> list[str]:
        return [
            *self._chain(),
            *self._acknowledged(),
            *self._sent_again(),
            *asyncio.run(self._requests()),
            *self._request_records(),
            *self._read_model(),
            *self._sealed(),
            *(asyncio.run(self._bus()) if self.with_bus else ()),
            *self._chain(),
        ]

    # --- the log --------------------------------------------------------------------------------
    def _chain(self) -> Found:
        try:
            head = self.store.verify()
        except IntegrityError as error:
            yield f"the chain is broken: {error}"
            return
        if head.position < self.history.position:
            yield f"position {self.history.position} was acknowledged, the head is {head.position}"

    def _acknowledged(self) -> Found:
        """What was answered is found again under its key, with the same answer and position."""
        for key, line in self.history.done.items():
            stored = self.store.stored_response(f"{ACTOR} {key}")
            if stored is None:
                yield f"lost: {key} was acknowledged and is not there"
            elif line["replayed"]:
                if stored.body.decode() != line["replayed"]:
                    yield f"{key}: answered {line['replayed']!r}, stored {stored.body!r}"
            elif (stored.body.decode(), stored.position) != (_body(line), line["position"]):
                yield f"{key}: answered {line}, stored {stored}"

    def _sent_again(self) -> Found:
        """Every command once more: what had been done is replayed, so nothing is done twice."""
        for order in self.orders:
            known = order.key in self.history.done
            try:
                answer = send(self.handler, order)
            except DomainError as error:
                if known:
                    yield f"{order.key} was acknowledged, sent again it is refused: {error.code}"
                continue
            if known and not answer.replayed:
                yield f"{order.key} was acknowledged, sent again it was applied again"
        yield from self._applied_once()

    def _applied_once(self) -> Found:
        """Each key's events are in the log as often as its one answer says."""
        written: Counter[str] = Counter()
        decisions: Counter[str] = Counter()
        for recorded in self._log():
            if not isinstance(recorded.event, CommandRefused):
                written[recorded.meta.correlation_id] += 1
            if isinstance(recorded.event, PlacementDecided):
                decisions[recorded.event.decision_id] += 1
        for order in self.orders:
            stored = self.store.stored_response(f"{ACTOR} {order.key}")
            expected = int(stored.body.split()[1]) if stored else 0
            if written[order.key] != expected:
                yield f"{order.key}: {written[order.key]} events in the log, answered {expected}"
        for decision, number in decisions.items():
            if number != 1:
                yield f"{decision} is in the log {number} times"

    def _log(self) -> Iterator[RecordedEvent]:
        position = 0
        while events := self.store.read_all(position, BATCH):
            yield from events
            position = events[-1].position

    # --- requests -------------------------------------------------------------------------------
    async def _requests(self) -> list[str]:
        """Reap, settle once more what was settled, and ask for exactly what is left of budgets."""
        ledger, name = LedgerStore(), f"gw-recovery-{os.getpid()}"
        reaper = Reaper(ledger, name, "here", self.clock, lambda: (), NoNodes())
        await reaper.start()
        found = []
        for request_id in self.history.ended:
            if await ledger.settle(terminal(request_id, "ok", 7, 7, self.place.at + 2)):
                found.append(f"{request_id} had been settled, and could be settled again")
        for name, tokens in (await asyncio.to_thread(self._budgets)).items():
            found += await self._budget(ledger, name, tokens)
        await reaper.stop()
        await ledger.close()
        return found

    def _budgets(self) -> dict[str, int]:
        """Those that were set before the crash, or just now, when what was sent was sent again."""
        Projector(self.store).catch_up_all()
        rows = Tenant.objects.filter(tenant_id__in=BUDGETS).values_list("tenant_id", "budgets")
        limits = {
            name: one["limit"]
            for name, budgets in rows
            for one in budgets
            if one["budget_id"] == "ledger"
        }
        connections.close_all()
        return limits

    async def _budget(self, ledger: LedgerStore, name: str, tokens: int) -> list[str]:
        """All that is not spent can be reserved, and not one token more: no reservation leaked."""
        spent = await asyncio.to_thread(self._spent, name)
        left = tokens - spent
        if left < 0:
            return [f"{name} spent {spent} of {tokens}"]
        found = []
        for asked, fits in ((left + 1, False), (left, True)):
            intent = self._probe(name, asked)
            try:
                await ledger.admit(intent)
                admitted = True
                await ledger.settle(terminal(intent.request_id, "error", 0, 0, self.place.at))
            except BudgetExceeded:
                admitted = False
            if admitted != fits:
                found.append(f"{name}: {left} of {tokens} left, {asked} admitted: {admitted}")
        return found

    def _probe(self, name: str, asked: int) -> Intent:
        self.place_probes = getattr(self, "place_probes", 0) + 1
        return Intent(
            request_id=f"probe-{self.clock.now()}-{self.place_probes}",
            tenant_id=name,
            subject="key",
            end_user="",
            endpoint="chat",
            requested_model="m",
            route="",
            arm="",
            version_id="m@v1",
            latency_class="standard",
            num_prompt_tokens=asked,
            max_output_tokens=0,
            price=PRICE,
            at=self.place.at,
            gateway=f"gw-recovery-{os.getpid()}",
        )

    def _spent(self, name: str) -> int:
        rows = _query(
            "SELECT COALESCE(SUM(num_prompt_tokens + num_output_tokens), 0) FROM ledger_request"
            f" WHERE tenant_id = '{name}' AND day = '{day_of(self.place.at)}' AND outcome <> ''"
        )
        connections.close_all()
        return int(rows[0][0])

    def _request_records(self) -> Found:
        """One row for each accepted request, ended once, with what was settled or noted."""
        rows = {row[0]: row for row in _query(_REQUESTS)}
        history = self.history
        for lost in history.admitted - rows.keys():
            yield f"lost: {lost} was admitted and has no record"
        for refused in history.exceeded & rows.keys():
            yield f"{refused} was refused for its budget and has a record"
        mine = {one for one in rows if not one.startswith("probe-")}
        for unknown in mine - history.asked.keys():
            yield f"{unknown} has a record and was never asked for"
        for request_id in sorted(mine & history.asked.keys()):
            yield from self._request_record(request_id, *rows[request_id][1:])
        yield from _positions(list(rows.values()))
        yield from _usage()

    def _request_record(
        self, request_id: str, outcome: str, prompt: int, output: int, *_: Any
    ) -> Found:
        ending, history = self.history.ending.get(request_id), self.history
        settled = ending and (ending["outcome"], ending["prompt"], ending["output"])
        if outcome == "":
            yield f"{request_id} never ended"
        elif history.ended.get(request_id) and (outcome, prompt, output) != settled:
            yield f"{request_id} was settled as {settled}, on record {outcome, prompt, output}"
        elif outcome == "unknown":
            if output not in history.progress.get(request_id, {0}):
                yield f"{request_id}: {output} tokens on record, noted {history.progress}"
        elif (outcome, prompt, output) != settled:
            yield f"{request_id} ended as {outcome, prompt, output}, asked was {settled}"

    # --- read model and bus ---------------------------------------------------------------------
    def _read_model(self) -> Found:
        """Caught up from where it was left, the read model equals one folded anew."""
        projector = Projector(self.store)
        reached, head = projector.catch_up_all(), self.store.head().position
        rebuilt = projector.rebuild()
        if (reached, rebuilt.position) != (head, head) or rebuilt.live != rebuilt.rebuilt:
            yield f"read model at {reached}, head {head}, {rebuilt}"
        connections.close_all()

    def _sealed(self) -> Found:
        """Seals go on from where they were left, and all that is stored and copied bears them."""
        logs = (EventRecords(self.store), RequestRecords())
        sealer_of(self.place).step(logs, now=True)
        checked = check_everything(
            logs,
            DjangoSealStore(),
            [signer_of(self.place).public],
            {"the file beside the journal": copies_of(self.place).notes},
            also=[text_findings, usage_findings],
        )
        if checked.finding is not None:
            yield f"the seals find {checked.finding}"
        connections.close_all()

    async def _bus(self) -> list[str]:
        bus = await connect(self.place.nats_url, self.place.nats_creds, "recovery", timeout_s=10)
        try:
            await ensure_buckets(bus)
            return [one async for one in self._told(bus)]
        finally:
            await bus.close()

    async def _told(self, bus: Bus) -> Any:
        """A new leader tells every node once what the log says; then there is nothing to tell."""
        state, loads = FleetState(), FleetLoads()
        await asyncio.to_thread(LogFollower(self.store, 0, state.apply).catch_up)
        epoch = await asyncio.to_thread(self._lead)
        states = JournalledStates(bus, self.journal)
        nodes = desired_nodes(state, epoch)
        num_told = await Publisher(states, self.clock, state, loads, epoch).step()
        if num_told != len(nodes):
            yield f"{num_told} of {len(nodes)} nodes were told by the new leader"
        if again := await Publisher(states, self.clock, state, loads, epoch).step():
            yield f"{again} nodes were told the same thing twice"
        bucket = await bus.jetstream().key_value(subjects.DESIRED_BUCKET)
        for node in nodes:
            entry = await bucket.get(node.node_id)
            if decode(entry.value or b"", DesiredState) != desired_to_wire(node, "crash"):
                yield f"the bus holds something else for {node.node_id}"
        info = await bus.jetstream().stream_info(STREAM)
        for sentence in self._written_once(info.state.last_seq):
            yield sentence

    def _lead(self) -> int:
        now = self.clock.now()
        lease = self.store.acquire_lease("controller", f"recovery-{now}", 1e-6, now)
        assert lease is not None
        self.journal.note("leading", epoch=lease.epoch)
        return lease.epoch

    def _written_once(self, last_seq: int) -> Found:
        """The bus took each acknowledged write once; of each killed leader at most one more."""
        history = History.read(self.place)
        written = [line for line in history.told if line["written"]]
        if history.first_seq is not None:
            extra = last_seq - history.first_seq - len(written)
            if not 0 <= extra < history.num_leaders:
                yield f"{extra} writes on the bus that nobody made ({history.num_leaders} leaders)"
        newest: dict[str, tuple[int, int, str]] = {}
        for one in written:
            told = (one["epoch"], one["generation"], one["content"])
            before = newest.get(one["node"], (0, 0, ""))
            if told[:2] < before[:2] or (told[0], told[2]) == (before[0], before[2]):
                yield f"{one['node']} was told {told} after {before}"
            newest[one["node"]] = told


_REQUESTS = (
    "SELECT request_id, outcome, num_prompt_tokens, num_output_tokens, position FROM ledger_request"
)
_SUMMED = """
SELECT tenant_id, day, COUNT(*), SUM(num_prompt_tokens), SUM(num_output_tokens),
    SUM(price), SUM(num_prompt_tokens * price_input + num_output_tokens * price_output)
FROM ledger_request WHERE outcome <> '' GROUP BY tenant_id, day
"""
_USAGE = """
SELECT tenant_id, day, num_requests, num_prompt_tokens, num_output_tokens,
    price_milli * 1000000000 + price_pico, price_milli * 1000000000 + price_pico
FROM ledger_usage WHERE scope = 'tenant'
"""


def _positions(rows: list[Any]) -> Found:
    """Terminal records count up without a gap, and the head says how many there are."""
    taken = sorted(row[4] for row in rows if row[4] is not None)
    heads = [row[0] for row in _query("SELECT position FROM ledger_head")]
    if taken != list(range(1, len(taken) + 1)) or heads not in ([len(taken)], []):
        yield f"ledger positions {taken}, head {heads}"


def _usage() -> Found:
    """What is billed is the sum of the records, and each record its tokens at their price."""
    summed = {tuple(row[:3]): tuple(map(int, row[3:])) for row in _query(_SUMMED)}
    billed = {tuple(row[:3]): tuple(map(int, row[3:])) for row in _query(_USAGE)}
    if summed != billed:
        yield f"usage {billed}, records {summed}"


def _body(line: dict[str, Any]) -> str:
    return f"{line['key']} {line['num_events']} {line['version']}"


def _query(sql: str) -> list[tuple[Any, ...]]:
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()
