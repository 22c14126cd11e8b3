"""What a suspect node is silent about goes elsewhere: the serving core and the gateway's placer."""

import asyncio

import pytest
from msgspec.structs import replace as changed

from controlplane.application.call import Call
from controlplane.application.continuation import (
    MAX_ATTEMPTS,
    MAX_CONTINUATIONS,
    QUIET_S,
    Course,
)
from controlplane.application.inference import SamplingOptions
from controlplane.domain import node as nodes
from controlplane.domain.money import Price
from tests.openai.test_continuation import orders, reading
from tests.openai.test_embeddings import DONE, embedding_job
from tests.openai.test_placer import Fleet
from tests.openai.test_serving import (  # noqa: F401
    LOST,
    ONE,
    TWO,
    FakeDelta,
    World,
    a_job,
    drain,
    world,
)


async def suspected(world: World, call: Call, after_s: float = 6.1) -> "asyncio.Future[str]":  # noqa: F811
    """n1, which has the call, falls silent; its consumer, which reads on."""
    text = await reading(call)
    world.clock.time += after_s
    world.nodes.suspect.add("n1")
    await world.serving.leave_suspects()
    await asyncio.sleep(0)
    return text


async def test_what_has_no_token_is_sent_elsewhere_at_once(world: World) -> None:  # noqa: F811
    """From its start; the attempt that is left is cancelled, and on record beside the other one."""
    call = await world.serving.start(a_job())
    text = await suspected(world, call, after_s=0.1)
    assert orders(world) == [("n1", "req-1", ()), ("n2", "req-1_2", ())]
    assert world.nodes.cancelled == ["req-1"] and world.serving.num_local == {"r1": 0, "r2": 1}
    world.say("req-1_2", ONE, TWO)
    assert await text == "ab"
    terminal = await call.finish()
    assert terminal is not None and world.ledger.terminals == [terminal]
    assert (terminal.outcome, terminal.attempts, terminal.num_output_tokens) == ("ok", 2, 2)
    tries = [(one.node_id, one.outcome, one.error_code) for one in terminal.tries]
    assert tries == [("n1", "error", "node_suspect"), ("n2", "ok", "")]
    assert [one.num_output_tokens for one in terminal.tries] == [0, 2]


async def test_what_has_tokens_goes_on_with_them(world: World) -> None:  # noqa: F811
    """What the client is sent has no gap and no repeat, and is what is billed, once: the node that
    wakes up is heard by nobody, and was told to stop."""
    call = await world.serving.start(a_job(price=Price(1, 1, 1)))
    world.say("req-1", ONE)
    text = await suspected(world, call)
    assert orders(world)[1] == ("n2", "req-1_2", (7,)) and world.nodes.cancelled == ["req-1"]
    assert "req-1" not in world.nodes.sinks
    world.say("req-1_2", TWO)
    assert await text == "ab"
    terminal = await call.finish()
    assert terminal is not None and [one.num_output_tokens for one in terminal.tries] == [1, 1]
    assert (terminal.num_prompt_tokens, terminal.num_output_tokens) == (3, 2)
    assert world.limits.given_back == [5] and world.serving.continued == {"node_suspect": 1}


async def test_inputs_to_embed_are_computed_elsewhere(world: World) -> None:  # noqa: F811
    """The part that is silent alone, and they are billed once."""
    call = await world.serving.start(embedding_job())
    world.say("req-1-0", DONE)
    text = await suspected(world, call)
    assert orders(world)[2:] == [("n2", "req-1-1_2", ())]
    world.say("req-1-1_2", DONE)
    await text
    terminal = await call.finish()
    assert terminal is not None and (terminal.outcome, terminal.num_prompt_tokens) == ("ok", 4)


async def test_without_another_ready_replica_it_stays(world: World) -> None:  # noqa: F811
    """The node may be back: then all goes on as if nothing had been. Or another becomes ready."""
    other = world.nodes.replicas.pop()
    calls = [await world.serving.start(a_job(request_id=name)) for name in ("req-1", "req-2")]
    texts = [await suspected(world, call, after_s=0.1) for call in calls]
    assert len(world.nodes.orders) == 2 and not world.nodes.cancelled
    world.say("req-1", ONE, TWO)
    assert await texts[0] == "ab"
    world.nodes.replicas.append(other)
    await world.serving.leave_suspects()
    await asyncio.sleep(0)
    assert orders(world)[2:] == [("n2", "req-2_2", ())]
    world.say("req-2_2", ONE, TWO)
    assert await texts[1] == "ab"
    ends = [await call.finish() for call in calls]
    assert [end.attempts for end in ends if end] == [1, 2]


async def test_what_still_brings_tokens_is_not_left(world: World) -> None:  # noqa: F811
    """It is the telemetry that is missing, not the node; once both are, it is left."""
    call = await world.serving.start(a_job())
    text = await reading(call)
    world.say("req-1", ONE)
    world.clock.time += QUIET_S
    world.nodes.suspect.add("n1")
    await world.serving.leave_suspects()
    assert len(world.nodes.orders) == 1 and not world.nodes.cancelled
    world.clock.time += 1
    await world.serving.leave_suspects()
    await asyncio.sleep(0)
    assert orders(world)[1] == ("n2", "req-1_2", (7,))
    world.say("req-1_2", TWO)
    assert await text == "ab"
    await call.finish()


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_what_not_every_engine_can_continue_waits_for_its_own(
    world: World,  # noqa: F811
    penalty: str,
) -> None:
    """A false alarm would end it; without a token there is nothing to continue."""
    sampling = SamplingOptions(**{penalty: 0.5})
    call = await world.serving.start(a_job(sampling=sampling))
    world.say("req-1", ONE)
    text = await suspected(world, call)
    assert len(world.nodes.orders) == 1 and not world.nodes.cancelled
    world.say("req-1", TWO)
    assert await text == "ab"
    await call.finish()
    world.nodes.suspect.clear()
    other = await world.serving.start(a_job(sampling=sampling, request_id="req-2"))
    await suspected(world, other)
    assert orders(world)[1:] == [("n1", "req-2", ()), ("n2", "req-2_2", ())]
    other.client_left()
    await other.finish()


async def test_an_answer_that_crosses_the_word_to_stop_is_taken(world: World) -> None:  # noqa: F811
    """The node lives after all: what it says before it is left counts, and once only."""
    call = await world.serving.start(a_job())

    async def cancel(request_id: str) -> None:
        world.say(request_id, ONE, FakeDelta(1, finish_reason="cancelled"))

    world.nodes.cancel = cancel  # type: ignore[method-assign]
    text = await suspected(world, call)
    assert orders(world) == [("n1", "req-1", ()), ("n2", "req-1_2", (7,))]
    world.say("req-1_2", TWO)
    assert await text == "ab"
    terminal = await call.finish()
    assert terminal is not None and [one.num_output_tokens for one in terminal.tries] == [1, 1]


async def test_two_passes_at_once_move_it_once(world: World) -> None:  # noqa: F811
    """The event of the log and the sweep may meet."""
    call = await world.serving.start(a_job())
    text = await reading(call)
    world.nodes.suspect.add("n1")
    await asyncio.gather(*(world.serving.leave_suspects() for _ in range(2)))
    await asyncio.sleep(0)
    assert [node for node, *_ in orders(world)] == ["n1", "n2"]
    world.say("req-1_2", ONE, TWO)
    assert await text == "ab"
    await call.finish()


async def test_who_has_left_is_not_moved(world: World) -> None:  # noqa: F811
    """Its end is under way, and bills what it was sent."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE)
    call.client_left()
    await suspected(world, call)
    assert len(world.nodes.orders) == 1
    world.nodes.suspect.clear()
    terminal = await call.finish()
    assert terminal is not None and (terminal.outcome, terminal.num_output_tokens) == (
        "cancelled",
        1,
    )


async def test_without_the_bus_no_node_is_left(world: World) -> None:  # noqa: F811
    """It is the gateway that hears nobody."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE)
    world.serving.watch_bus(10.0)
    await suspected(world, call)
    assert len(world.nodes.orders) == 1 and not world.nodes.cancelled
    call.client_left()
    await call.finish()


def test_a_true_loss_can_always_follow() -> None:
    """So often as it may be lost, less one, so that suspicion by itself never ends a request."""
    course, moves = Course(), 0
    while course.may_leave(moves + 1, has_tokens=True):
        assert course.lose("node_suspect", 5, moves + 1, True, 0.0)
        moves += 1
    assert moves == MAX_CONTINUATIONS - 1 and course.lose("node_lost", 5, 9, True, 1.0)
    assert Course().may_leave(1, False) and not Course().may_leave(MAX_ATTEMPTS - 1, False)


# --- the placer -------------------------------------------------------------------------------
def suspect(fleet: Fleet, node_id: str) -> None:
    event = nodes.NodeSuspected(node_id, 6.1, fleet.log.clock.now())  # type: ignore[arg-type]
    fleet.log.add(f"node-{node_id}", event)


def test_a_node_is_suspect_by_the_logs_word_and_by_our_own_ear() -> None:
    """One that is heard here is not: then it is the controller that does not hear it."""
    fleet = Fleet()
    fleet.hear({})
    fleet.log.clock.advance(QUIET_S + 0.1)
    assert not fleet.placer.is_suspect("n1")
    suspect(fleet, "n1")
    assert fleet.placer.is_suspect("n1") and not fleet.placer.is_suspect("n2")
    fleet.hear({}, seq=2)
    assert not fleet.placer.is_suspect("n1")
    assert not fleet.placer.is_suspect("n9")


def test_another_replica_has_to_be_ready_now() -> None:
    """Not one that is on a silent node, was tried, loads, or has to come onto its device."""
    fleet = Fleet()
    job = a_job()
    fleet.hear({})
    suspect(fleet, fleet.preferred)
    assert fleet.placer.has_other(job, frozenset())
    assert not fleet.placer.has_other(job, frozenset({fleet.replicas[fleet.other]}))
    load = fleet.log.loads.latest(fleet.other)
    assert load is not None
    away = changed(load.replicas[0], tier="host", expected_wait_s=1.0)
    fleet.placer.record(changed(load, seq=2, replicas=(away,)), {})
    assert not fleet.placer.has_other(job, frozenset())
    fleet.hear({}, seq=3)
    suspect(fleet, fleet.other)
    assert not fleet.placer.has_other(job, frozenset())
