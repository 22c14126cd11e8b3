"""The serving core by itself: retries before the first token, and the record at the end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from controlplane.application.call import Call
from controlplane.application.hold import HOLD_S
from controlplane.application.inference import (
    Gap,
    Job,
    Order,
    SamplingOptions,
    Seen,
    Target,
)
from controlplane.application.ports import AuditUnavailable, BudgetExceeded, Intent, Terminal
from controlplane.application.refused import Refused
from controlplane.application.serve import Serving
from controlplane.application.settle import Settler
from controlplane.dispatch.choose import NoReplica, ReplicaView, RequestView, choose
from controlplane.domain.budget import Budget
from controlplane.domain.money import FREE
from controlplane.entrypoints.openai.answers import HEARTBEAT, heartbeat
from controlplane.entrypoints.openai.errors import status_of


@dataclass(frozen=True)
class FakeDelta:
    """A wire delta, as far as the core reads it."""

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    num_cached_tokens: int = 0
    queue_ms: float = 0.0
    logprobs: tuple[Any, ...] = ()
    embeddings: tuple[bytes, ...] = ()
    num_computed_tokens: int = 0


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


@dataclass
class MemoryLedger:
    """``failures`` settlements fail before one succeeds; ``limit`` is a budget in ``unit``."""

    failures: int = 0
    limit: int | None = None
    unit: str = "tokens"
    intents: list[Intent] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)

    async def admit(self, intent: Intent) -> None:
        if self.limit is not None:
            raise BudgetExceeded(
                Budget("default", "tenant", "", self.unit, self.limit, "month"), 0, 0, 13
            )
        self.intents.append(intent)

    async def settle(self, terminal: Terminal) -> bool:
        if self.failures:
            self.failures -= 1
            raise AuditUnavailable("disk full")
        self.terminals.append(terminal)
        return True


@dataclass
class Nodes:
    """The bus and the placement: every order is kept, and its sink can be called by the test."""

    replicas: list[Target] = field(default_factory=lambda: [Target("n1", "r1"), Target("n2", "r2")])
    orders: list[tuple[str, Order]] = field(default_factory=list)
    sinks: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    suspect: set[str] = field(default_factory=set)  # they take nothing and answer nothing
    loads_in: float | None = None  # seconds until a replica is ready; None: it is not cold
    unplaced: Gap | None = None
    too_large: Gap | None = None  # for all devices, as the planner finds at the first request
    retired: bool = False

    async def generate(self, node_id: str, order: Order, sink: Callable[[Any], None]) -> None:
        self.orders.append((node_id, order))
        self.sinks[order.request_id] = sink

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if self._node_of(request_id) in self.suspect:
            return
        index = 2
        self.sinks[request_id](FakeDelta(index, finish_reason="cancelled"))

    def _node_of(self, request_id: str) -> str:
        return next(node for node, one in self.orders if one.request_id == request_id)

    def release(self, request_id: str) -> None:
        self.sinks.pop(request_id, None)

    def choose(self, job: Job, excluded: frozenset[str], local: Any, saw: Any) -> Target:
        views = self._views()
        try:
            choice = choose(views, RequestView(3, 10), excluded=excluded)
        except NoReplica as none:
            saw(Seen(none.choice, 812, 5.0))
            raise Refused("model_not_ready", "none is left", retry_after=2) from none
        saw(Seen(choice, 812, 5.0))
        return Target(choice.node_id, choice.replica_id)

    def _views(self) -> list[ReplicaView]:
        views = [ReplicaView(one.replica_id, one.node_id) for one in self.replicas]
        return [one for one in views if one.node_id not in self.suspect]

    def is_heard(self, node_id: str) -> bool:
        return node_id not in self.silent

    def is_suspect(self, node_id: str) -> bool:
        return node_id in self.suspect

    def has_other(self, job: Job, excluded: frozenset[str]) -> bool:
        return any(one.replica_id not in excluded for one in self._views())

    def wait_s(self, version_id: str) -> float | None:
        return self.loads_in

    def gone(self, version_id: str) -> Refused | None:
        return Refused("model_not_found", f"no {version_id}", "model") if self.retired else None

    def gap(self, version_id: str) -> Gap | None:
        return self.unplaced

    def tried(self, version_id: str) -> Gap | None:
        return self.too_large

    def lose(self, node_id: str) -> None:
        for at, order in self.orders:
            if at == node_id and order.request_id in self.sinks:
                delta = FakeDelta(finish_reason="error", error_code="node_lost")
                self.sinks[order.request_id](delta)


class NoLimits:
    def __init__(self) -> None:
        self.given_back: list[int] = []

    async def take(self, job: Job) -> None:
        return None

    def give_back(self, job: Job, num_tokens: int, was_refused: bool = False) -> None:
        self.given_back.append(num_tokens)


@dataclass
class World:
    ledger: MemoryLedger
    nodes: Nodes
    limits: NoLimits
    clock: ManualClock
    serving: Serving

    def say(self, request_id: str, *deltas: FakeDelta) -> None:
        for delta in deltas:
            self.nodes.sinks[request_id](delta)


@pytest.fixture
async def world() -> World:
    ledger, nodes, limits, clock = MemoryLedger(), Nodes(), NoLimits(), ManualClock()
    serving = Serving(ledger, Settler(ledger, 0.2), nodes, nodes, limits, clock, "gw", nodes.lose)
    return World(ledger, nodes, limits, clock, serving)


def a_job(**changes: Any) -> Job:
    job = Job(
        request_id="req-1",
        tenant_id="acme",
        subject="key",
        end_user="",
        tier="standard",
        endpoint="chat",
        requested_model="m",
        route="",
        arm="",
        version_id="m@v1",
        latency_class="standard",
        price=FREE,
        prompts=((1, 2, 3),),
        num_choices=1,
        max_tokens=(10,),
        sampling=SamplingOptions(),
        cache_salt=b"",
        began=100.0,
    )
    return replace(job, **changes)


ONE = FakeDelta(0, (7,), "a")
TWO = FakeDelta(1, (8,), "b", "stop")
LOST = FakeDelta(finish_reason="error", error_code="node_lost")
RETIRED = FakeDelta(finish_reason="error", error_code="replica_retired")


async def drain(call: Call) -> str:
    text = ""
    while not call.is_over:
        text += "".join(delta.text for _, delta in await call.next())
    return text


async def test_a_call_is_recorded_before_it_is_sent_and_once_at_its_end(world: World) -> None:
    """Intent, order, tokens, terminal record; a second finish does nothing."""
    call = await world.serving.start(a_job())
    assert len(world.ledger.intents) == 1 and world.serving.live() == {"req-1"}
    world.say("req-1", ONE, TWO)
    assert await drain(call) == "ab"
    assert await call.finish() is not None and await call.finish() is None
    (terminal,) = world.ledger.terminals
    assert (terminal.outcome, terminal.finish_reason, terminal.num_output_tokens) == (
        "ok",
        "stop",
        2,
    )
    assert terminal.num_prompt_tokens == 3 and world.limits.given_back == [5]
    assert not world.serving.live()


async def test_a_part_lost_before_its_first_token_is_sent_elsewhere(world: World) -> None:
    """The client notices nothing; the record names the replica that answered and two attempts."""
    call = await world.serving.start(a_job())
    world.say("req-1", LOST)
    reading = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    assert [node for node, _ in world.nodes.orders] == ["n1", "n2"]
    world.say("req-1_2", ONE, TWO)
    assert await reading == "ab"
    terminal = await call.finish()
    assert (terminal.outcome, terminal.node_id, terminal.attempts) == ("ok", "n2", 2)


async def test_when_no_replica_is_left_in_time_the_call_fails(world: World) -> None:
    """Both nodes are lost; nothing was produced, nothing is billed."""
    call = await given_back_by_both(world, LOST)
    terminal = await call.finish()
    assert call.error.code == "engine_lost"
    assert (terminal.outcome, terminal.num_prompt_tokens) == ("error", 0)


async def given_back_by_both(world: World, delta: FakeDelta) -> Call:
    """A call that the first node gives back with ``delta``, and then the other one too, and no
    other is there for as long as it may wait."""
    call = await world.serving.start(a_job())
    world.say("req-1", delta)
    reading = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    assert [node for node, _ in world.nodes.orders] == ["n1", "n2"]
    world.say("req-1_2", delta)
    world.nodes.replicas.clear()
    await asyncio.sleep(0)
    world.clock.time += HOLD_S["standard"]
    await reading
    return call


async def test_a_full_queue_is_tried_elsewhere_and_then_said_in_the_nodes_words(
    world: World,
) -> None:
    """Not as a lost engine, and with the numbers; the client may come again."""
    full = FakeDelta(finish_reason="error", error_code="tenant_queue_full",
                     error_message="You have 80 unfinished requests.")  # fmt: skip
    call = await given_back_by_both(world, full)
    await call.finish()
    assert (call.error.code, call.error.message) == (full.error_code, full.error_message)
    assert call.error.retry_after > 0 and status_of(call.error) == 429


async def test_a_wait_is_explained_by_the_callers_own_part(world: World) -> None:
    """Before the first token; after it there is nothing to explain."""
    call = await world.serving.start(a_job())
    said = heartbeat(call, call.job.began + 12)
    assert said == b": waiting reason=engine_queue class=standard weight=1 open=1 waited=12s\n\n"
    assert world.serving.waiting() == {"standard": 1}
    world.say("req-1", ONE)
    assert heartbeat(call, call.job.began + 20) == HEARTBEAT and not world.serving.waiting()
    world.say("req-1", TWO)
    await call.finish()
    assert not world.serving.num_of_tenant


async def test_what_a_retired_replica_never_began_goes_elsewhere(world: World) -> None:
    """Only when no other replica is left does the client hear of it."""
    call = await given_back_by_both(world, RETIRED)
    terminal = await call.finish()
    assert call.error.code == "replica_retired" and "no other is ready" in call.error.message
    assert (terminal.outcome, terminal.num_prompt_tokens) == ("error", 0)


async def test_a_client_that_leaves_is_billed_for_what_the_node_says(world: World) -> None:
    """The node is told to stop, and its last words count."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE, replace(TWO, finish_reason=""))
    call.client_left()
    terminal = await call.finish()
    assert world.nodes.cancelled == ["req-1"]
    assert (terminal.outcome, terminal.num_output_tokens) == ("cancelled", 2)


async def test_an_error_of_the_engine_keeps_its_code(world: World) -> None:
    """What the engine refuses is refused to the client in its words."""
    call = await world.serving.start(a_job())
    world.say("req-1", FakeDelta(finish_reason="error", error_code="kv_capacity",
                                 error_message="no blocks"))  # fmt: skip
    await drain(call)
    await call.finish()
    assert (call.error.code, call.error.message) == ("kv_capacity", "no blocks")


async def test_a_silent_engine_is_given_up(world: World) -> None:
    """A minute without a token after the first one: another replica goes on."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE)
    reading = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    world.clock.time += 59
    world.serving.sweep(lambda _: None)
    assert len(world.nodes.orders) == 1
    world.clock.time += 2
    world.serving.sweep(lambda _: None)
    await asyncio.sleep(0)
    assert "req-1" not in world.nodes.sinks  # what it still says is nobody's
    world.say("req-1_2", TWO)
    assert await reading == "ab" and call.error is None
    await call.finish()
    assert world.serving.continued == {"engine_silent": 1}


async def test_without_the_bus_only_what_has_tokens_goes_on(world: World) -> None:
    """Not at once, as a bus that is restarted is soon back; then nothing new is taken either."""
    first, second = [await world.serving.start(replace(a_job(), request_id=n)) for n in ("x", "y")]
    world.say("y", ONE)
    for away_s in (0.0, 1.5, 2.0):
        assert first.error is None
        world.serving.watch_bus(away_s)
    assert first.error and (first.error.code, first.error.retry_after) == ("bus_unavailable", 1)
    assert second.error is None
    with pytest.raises(Refused, match="cannot reach the nodes"):
        await world.serving.start(replace(a_job(), request_id="z"))
    assert len(world.ledger.intents) == 2
    world.serving.watch_bus(0.0)
    await world.serving.start(replace(a_job(), request_id="z"))


async def test_a_node_that_is_not_heard_is_lost(world: World) -> None:
    """Its parts move or fail; the sweep finds it without any frame."""
    call = await world.serving.start(a_job())
    world.nodes.silent.add("n1")
    world.serving.sweep(lambda _: None)
    reading = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    assert [node for node, _ in world.nodes.orders] == ["n1", "n2"]
    world.say("req-1_2", ONE, TWO)
    assert await reading == "ab"
    await call.finish()


async def test_choices_share_one_record(world: World) -> None:
    """Three generations with seeds of their own, one intent, one terminal, the prompt once."""
    job = a_job(num_choices=3, sampling=SamplingOptions(seed=5))
    call = await world.serving.start(job)
    assert [order.sampling.seed for _, order in world.nodes.orders] == [5, 6, 7]
    assert world.ledger.intents[0].max_output_tokens == 30
    for i in range(3):
        world.say(f"req-1-{i}", ONE, TWO)
    await drain(call)
    terminal = await call.finish()
    assert (terminal.num_prompt_tokens, terminal.num_output_tokens) == (3, 6)


async def test_a_refused_budget_leaves_nothing_behind(world: World) -> None:
    """No order, no live call, and the rate limit gets its tokens back."""
    world.ledger.limit = 5
    with pytest.raises(Refused) as refused:
        await world.serving.start(a_job())
    assert refused.value.code == "insufficient_quota"
    assert refused.value.message == (
        "The budget 'default' (tokens a month, tenant) does not cover this: "
        "budget 5, spent 0, reserved 0, this request needs 13."
    )
    assert not world.nodes.orders and not world.serving.live()
    assert world.limits.given_back == [0]


async def test_a_refused_budget_of_money_names_the_currency(world: World) -> None:
    world.ledger.limit, world.ledger.unit = 10**7, "money"
    world.serving.currency = "EUR"
    with pytest.raises(Refused, match=r"'default' \(EUR a month, tenant\).*: budget 0\.00001, "):
        await world.serving.start(a_job())


async def test_without_a_replica_the_intent_is_closed(world: World) -> None:
    """Every intent has a terminal record, also that of a request nobody could take."""
    world.nodes.replicas.clear()
    with pytest.raises(Refused) as refused:
        await world.serving.start(a_job())
    assert refused.value.code == "model_not_ready"
    assert [terminal.error_code for terminal in world.ledger.terminals] == ["model_not_ready"]


async def test_a_settlement_is_tried_again(world: World) -> None:
    """A store that is away for a moment delays the end and changes nothing."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE, TWO)
    await drain(call)
    world.ledger.failures = 1
    await call.finish()
    assert len(world.ledger.terminals) == 1 and not world.serving.settler.unsettled


async def test_a_settlement_that_fails_is_kept_and_written_later(world: World) -> None:
    """The client is told; the record waits here, safe from the reaper, until the store is back."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE, TWO)
    await drain(call)
    world.ledger.failures = 100
    with pytest.raises(AuditUnavailable):
        await call.finish()
    assert world.serving.live() == {"req-1"}
    world.ledger.failures = 0
    assert await world.serving.settler.retry_unsettled() == 0
    assert [terminal.outcome for terminal in world.ledger.terminals] == ["ok"]


async def test_a_draining_gateway_takes_nothing_new(world: World) -> None:
    """503 shutting_down, before anything is recorded."""
    world.serving.draining = True
    with pytest.raises(Refused) as refused:
        await world.serving.start(a_job())
    assert refused.value.code == "shutting_down" and not world.ledger.intents


async def test_a_reader_that_blocks_is_cut_after_half_a_minute(world: World) -> None:
    """Measured from when its write began to wait."""
    call = await world.serving.start(a_job())
    cuts: list[int] = []
    call.on_cut = lambda: cuts.append(1)
    world.say("req-1", ONE)
    call.writing_since = world.clock.time
    for seconds, expected in ((15, 0), (14, 0), (2, 1)):
        world.clock.time += seconds
        world.serving.sweep(lambda _: None)
        assert len(cuts) == expected
    assert call.was_cut and call.error.code == "slow_reader"
    terminal = await call.finish()
    assert terminal.outcome == "cancelled"


async def test_a_long_wait_gets_a_heartbeat(world: World) -> None:
    """The consumer is woken every ten seconds to write a comment."""
    call = await world.serving.start(a_job())
    waiting = asyncio.ensure_future(call.next())
    await asyncio.sleep(0)
    world.clock.time += 11
    world.serving.sweep(lambda _: None)
    assert await waiting == [] and not call.is_over
    world.say("req-1", ONE, TWO)
    await drain(call)
    await call.finish()
