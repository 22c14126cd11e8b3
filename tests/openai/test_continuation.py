"""The serving core by itself: a choice whose replica is gone goes on elsewhere, within bounds."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from controlplane.application.call import Call
from controlplane.application.continuation import (
    MAX_CONTINUATIONS,
    MOVABLE,
    REST_S,
    Course,
    cause_of,
)
from controlplane.application.hold import UNPLACED_S
from controlplane.application.inference import Gap, SamplingOptions
from controlplane.entrypoints.openai.answers import heartbeat
from tests.openai.test_serving import (  # noqa: F401
    LOST,
    ONE,
    RETIRED,
    TWO,
    FakeDelta,
    World,
    a_job,
    drain,
    world,
)

DIED = FakeDelta(finish_reason="error", error_code="engine_lost")


async def reading(call: Call) -> "asyncio.Future[str]":
    """The consumer, which has had its turn."""
    task = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    return task


def orders(world: World) -> list[tuple[str, str, tuple[int, ...]]]:  # noqa: F811
    return [(node, one.request_id, one.sent_token_ids) for node, one in world.nodes.orders]


@pytest.mark.parametrize(
    "end",
    [LOST, DIED, RETIRED, FakeDelta(finish_reason="cancelled"),
     FakeDelta(finish_reason="error", error_code="stream_corrupt")],
)  # fmt: skip
async def test_the_rest_comes_from_another_replica(world: World, end: FakeDelta) -> None:  # noqa: F811
    """It is given what was sent; on record is one request with an attempt for each replica."""
    call = await world.serving.start(a_job(sampling=SamplingOptions(seed=5)))
    world.say("req-1", replace(ONE, num_cached_tokens=2), replace(end, index=1))
    text = await reading(call)
    assert orders(world) == [("n1", "req-1", ()), ("n2", "req-1_2", (7,))]
    second = world.nodes.orders[1][1]
    assert (second.max_tokens, second.sampling.seed, second.num_cached_tokens) == (10, 5, 2)
    assert (second.record_id, second.attempt) == ("req-1", 2)
    world.say("req-1_2", TWO)
    assert await text == "ab" and call.error is None
    terminal = await call.finish()
    assert terminal is not None and terminal.outcome == "ok" and terminal.attempts == 2
    assert (terminal.num_prompt_tokens, terminal.num_output_tokens) == (3, 2)
    assert terminal.num_cached_tokens == 2 and len(world.ledger.terminals) == 1
    assert [one.num_output_tokens for one in terminal.tries] == [1, 1]
    assert [one.node_id for one in terminal.tries] == ["n1", "n2"]
    assert world.serving.continued.total() == 1 and not world.serving.num_local.total()


async def test_the_last_words_of_a_lost_attempt_are_not_lost(world: World) -> None:  # noqa: F811
    """A resend may bring tokens together with the end: they are shown and not asked for again."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE, FakeDelta(1, (8,), "b", "error", "engine_lost"))
    text = await reading(call)
    await asyncio.sleep(0)
    assert orders(world)[1] == ("n2", "req-1_2", (7, 8))
    world.say("req-1_2", FakeDelta(2, (9,), "c", "stop"))
    assert await text == "abc"
    await call.finish()


async def test_each_choice_goes_on_by_itself(world: World) -> None:  # noqa: F811
    """Only that of the lost replica moves, with its own tokens, id and seed."""
    job = a_job(num_choices=2, sampling=SamplingOptions(seed=5))
    call = await world.serving.start(job)
    world.say("req-1-0", ONE)
    world.say("req-1-1", ONE, replace(DIED, index=1))
    task = await reading(call)
    await asyncio.sleep(0)
    assert orders(world)[2:] == [("n2", "req-1-1_2", (7,))]
    assert world.nodes.orders[2][1].sampling.seed == 6
    world.say("req-1-1_2", TWO)
    world.say("req-1-0", TWO)
    await task
    terminal = await call.finish()
    assert terminal is not None and terminal.num_output_tokens == 4


async def waits(world: World, **changes: Any) -> "tuple[Call, asyncio.Future[str]]":  # noqa: F811
    """A call with one token whose replica is gone, and no other is there."""
    world.nodes.replicas[1:] = []
    call = await world.serving.start(a_job(**changes))
    world.say("req-1", ONE, replace(DIED, index=1))
    return call, await reading(call)


async def test_without_a_replica_it_waits_and_says_so(world: World) -> None:  # noqa: F811
    """The one that failed is asked again once its telemetry could have said that it is back."""
    call, text = await waits(world)
    await asyncio.sleep(0)
    world.clock.time += 1
    assert heartbeat(call, world.clock.time) == (
        b": waiting reason=continuation choice=0 attempt=2 class=standard waited=1s\n\n"
    )
    assert world.serving.continuations.num_waiting == 1 and len(world.nodes.orders) == 1
    world.clock.time += REST_S
    await asyncio.sleep(0.25)
    assert orders(world)[1] == ("n1", "req-1_2", (7,)) and not call.waiting
    world.say("req-1_2", TWO)
    assert await text == "ab"
    await call.finish()


async def test_what_had_no_token_waits_too(world: World) -> None:  # noqa: F811
    """Its only worker died as the request came; the next one answers it from the start."""
    world.nodes.replicas[1:] = []
    call = await world.serving.start(a_job())
    world.say("req-1", DIED)
    text = await reading(call)
    await asyncio.sleep(0)
    assert call.error is None and world.serving.continuations.num_waiting == 1
    world.clock.time += REST_S
    await asyncio.sleep(0.25)
    assert orders(world) == [("n1", "req-1", ()), ("n1", "req-1_2", ())]
    world.say("req-1_2", ONE, TWO)
    assert await text == "ab"
    terminal = await call.finish()
    assert terminal is not None and (terminal.outcome, terminal.attempts) == ("ok", 2)
    assert not world.serving.continued, "nothing of it was continued, all was done again"


async def test_a_full_queue_is_said_at_once(world: World) -> None:  # noqa: F811
    world.nodes.replicas[1:] = []
    call = await world.serving.start(a_job())
    world.say("req-1", FakeDelta(finish_reason="error", error_code="overloaded"))
    assert await asyncio.wait_for(reading(call), 1) and call.error is not None
    assert call.error.code == "overloaded" and world.serving.continuations.num_waiting == 0
    await call.finish()


async def test_the_wait_is_that_of_the_class_for_a_cold_model(world: World) -> None:  # noqa: F811
    """Then it ends typed, with what was produced on record."""
    call, text = await waits(world, latency_class="realtime")
    world.nodes.replicas.clear()
    world.clock.time += 11
    assert await asyncio.wait_for(text, 2) == "a"
    terminal = await call.finish()
    assert call.error is not None and call.error.code == "engine_lost"
    assert terminal is not None and (terminal.outcome, terminal.num_output_tokens) == ("error", 1)


@pytest.mark.parametrize("never", ["retired", "gap"])
async def test_what_can_never_be_is_not_waited_for(world: World, never: str) -> None:  # noqa: F811
    """A version that is gone, or that no device can hold any more."""
    world.nodes.retired = never == "retired"
    world.nodes.unplaced = Gap("it fits nowhere", lasts=True) if never == "gap" else None
    call, text = await waits(world)
    assert await asyncio.wait_for(text, 1) == "a" and call.error is not None
    await call.finish()


NOWHERE = Gap("No node is ready.")


async def test_what_fits_nowhere_is_told_so_as_a_new_request_is(world: World) -> None:  # noqa: F811
    """With the planner's reason, after the same time; what came is billed."""
    call, text = await waits(world)
    await asyncio.sleep(0)
    world.nodes.replicas.clear()
    world.nodes.loads_in, world.nodes.unplaced = 12.0, NOWHERE
    new = await world.serving.start(a_job(request_id="req-2"))
    await asyncio.sleep(0.25)
    assert call.error is None and new.error is None
    world.clock.time += UNPLACED_S
    assert await asyncio.wait_for(text, 1) == "a"
    await asyncio.sleep(0.25)
    assert call.error is not None and new.error is not None
    told = [(one.error.code, one.error.message, one.error.retry_after) for one in (call, new)]
    assert told[0] == told[1] == ("model_not_ready", NOWHERE.reason, 10.0)
    terminals = [await one.finish() for one in (call, new)]
    assert [one.num_output_tokens for one in terminals if one] == [1, 0]
    assert world.serving.continuations.num_waiting == 0


async def test_a_place_that_is_found_again_is_waited_for(world: World) -> None:  # noqa: F811
    """The time without one counts anew: its node is back, and loads."""
    call, text = await waits(world)
    replicas = world.nodes.replicas.copy()
    world.nodes.replicas.clear()
    for gap in (NOWHERE, None, NOWHERE, None):
        world.nodes.loads_in, world.nodes.unplaced = 12.0, gap
        await asyncio.sleep(0.25)
        world.clock.time += UNPLACED_S - 0.1
    world.nodes.replicas.extend(replicas)
    await asyncio.sleep(0.25)
    assert call.error is None and orders(world)[1:] == [("n1", "req-1_2", (7,))]
    world.say("req-1_2", TWO)
    assert await text == "ab"
    await call.finish()


async def test_a_client_that_leaves_while_it_waits_is_not_continued(world: World) -> None:  # noqa: F811
    """Nothing is left behind, and nothing is sent for it."""
    call, text = await waits(world)
    call.client_left()
    await text
    await call.finish()
    world.clock.time += REST_S
    await asyncio.sleep(0.25)
    assert len(world.nodes.orders) == 1 and world.serving.continuations.num_waiting == 0


async def test_all_tokens_without_the_end_are_the_whole(world: World) -> None:  # noqa: F811
    """Only the word that it ended was lost: nothing is left to be asked for."""
    call = await world.serving.start(a_job(max_tokens=(1,)))
    world.say("req-1", ONE, replace(LOST, index=1))
    assert await drain(call) == "a" and call.error is None
    assert call.parts[0].finish_reason == "length" and len(world.nodes.orders) == 1
    await call.finish()


async def test_what_the_request_itself_caused_is_not_continued(world: World) -> None:  # noqa: F811
    """Another replica would fail at the same token."""
    call = await world.serving.start(a_job())
    bad = FakeDelta(1, finish_reason="error", error_code="numerical_error")
    world.say("req-1", ONE, bad)
    assert await drain(call) == "a" and len(world.nodes.orders) == 1
    assert call.error is not None and call.error.code == "numerical_error"
    await call.finish()


async def test_what_cannot_be_rebuilt_ends_typed_with_its_tokens_on_record(
    world: World,  # noqa: F811
) -> None:
    """Some other replica would refuse it too: it is asked once."""
    call = await world.serving.start(a_job())
    world.say("req-1", ONE, replace(DIED, index=1))
    text = await reading(call)
    refusal = FakeDelta(1, finish_reason="error", error_code="continuation_unsupported")
    world.say("req-1_2", refusal)
    assert await text == "a" and len(world.nodes.orders) == 2
    assert call.error is not None and call.error.code == "continuation_unsupported"
    terminal = await call.finish()
    assert terminal is not None and (terminal.outcome, terminal.num_output_tokens) == ("error", 1)
    assert [one.num_output_tokens for one in terminal.tries] == [1, 0]


def test_causes() -> None:
    assert cause_of("error", "node_lost") == "node_lost" and "node_lost" in MOVABLE
    assert cause_of("cancelled", "") == "cancelled"
    assert not cause_of("error", "engine_error") and not cause_of("stop", "")


def test_a_choice_is_moved_so_often_and_refusals_do_not_count() -> None:
    """What did not begin costs nothing; the wait bounds it."""
    course = Course()
    for number in range(MAX_CONTINUATIONS):
        assert course.lose("node_lost", 5, 2 * number, True, 10.0)
        assert course.lose("replica_not_ready", 0, 2 * number + 1, True, 11.0)
    assert course.lost_at == 10.0
    assert not course.lose("node_lost", 5, 9, True, 12.0)


def test_two_engines_that_die_before_a_token_are_enough() -> None:
    """The request may be what kills them."""
    course = Course()
    assert course.lose("engine_lost", 3, 1, True, 0.0)
    assert course.lose("engine_lost", 0, 2, True, 1.0)
    assert not course.lose("engine_lost", 0, 3, True, 2.0)


def test_a_failed_replica_rests() -> None:
    course = Course(failed={"r1": 0.0})
    assert course.excluded(1.0) == {"r1"} and course.excluded(REST_S) == frozenset()
