"""Requests for a model that is not there: held in order, answered, refused or left."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.application.call import Call
from controlplane.application.hold import MAX_HELD, POLL_S, NotLoadedYet, parse_deadlines
from controlplane.application.inference import Gap, Job, Target
from controlplane.application.refused import Refused
from tests.openai.test_serving import ONE, TWO, World, a_job, drain, world  # noqa: F401

R1 = Target("n1", "r1")


@pytest.fixture
async def cold(world: World) -> AsyncIterator[World]:  # noqa: F811
    """A version of which no replica is ready for 12 s."""
    world.nodes.replicas.clear()
    world.nodes.loads_in = 12.0
    yield world
    for call in list(world.serving.calls.values()):
        call.client_left()
        await call.finish()


def ready(world: World) -> None:  # noqa: F811
    world.nodes.replicas.append(R1)
    world.nodes.loads_in = None


async def until(check: Any) -> None:
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(POLL_S / 2)


async def test_held_requests_are_sent_in_order_once_the_model_is_there(cold: World) -> None:
    calls = [await cold.serving.start(a_job(request_id=f"req-{i}")) for i in range(3)]
    assert [call.held and call.held.position(call) for call in calls] == [1, 2, 3]
    assert [intent.request_id for intent in cold.ledger.intents] == ["req-0", "req-1", "req-2"]
    assert cold.nodes.orders == []
    ready(cold)
    await until(lambda: len(cold.nodes.orders) == 3)
    assert [order.request_id for _, order in cold.nodes.orders] == ["req-0", "req-1", "req-2"]
    for call in calls:
        assert call.held is None
        cold.say(call.job.request_id, ONE, TWO)
        assert await drain(call) == "ab"
        await call.finish()
    assert [one.outcome for one in cold.ledger.terminals] == ["ok"] * 3
    assert cold.serving.holds.num_held == 0


async def test_the_consumer_is_told_at_once_and_again_every_two_seconds(cold: World) -> None:
    call = await cold.serving.start(a_job())
    assert await call.next() == [] and not call.is_over
    waiting = asyncio.ensure_future(call.next())
    await asyncio.sleep(0)
    cold.clock.time += 2.1
    cold.serving.sweep(lambda job: None)
    assert await waiting == [] and call.held is not None


async def test_an_estimate_beyond_the_class_is_refused_at_once_with_it(cold: World) -> None:
    """And is on record, once, with no token."""
    with pytest.raises(Refused) as refused:
        await cold.serving.start(a_job(latency_class="realtime"))
    assert refused.value.code == "model_cold" and refused.value.retry_after == 12.0
    assert "about 12 s" in refused.value.message and "10 s at most" in refused.value.message
    (terminal,) = cold.ledger.terminals
    assert (terminal.error_code, terminal.num_output_tokens) == ("model_cold", 0)
    assert cold.serving.calls == {}


async def test_a_deadline_that_passes_ends_the_hold(cold: World) -> None:
    call = await cold.serving.start(a_job())
    cold.clock.time += 59.9
    await asyncio.sleep(2 * POLL_S)
    assert call.error is None
    cold.clock.time += 0.1
    await until(lambda: call.error is not None)
    assert call.error.code == "hold_expired" and call.error.retry_after == 12.0
    await call.finish()
    assert [one.outcome for one in cold.ledger.terminals] == ["error"]


async def test_a_client_that_leaves_costs_nothing_and_is_never_sent(cold: World) -> None:
    leaver = await cold.serving.start(a_job())
    stayer = await cold.serving.start(a_job(request_id="req-2"))
    leaver.client_left()
    await leaver.finish()
    await until(lambda: stayer.held.position(stayer) == 1 and cold.serving.holds.num_held == 1)
    (terminal,) = cold.ledger.terminals
    counts = (terminal.num_prompt_tokens, terminal.num_output_tokens)
    assert (terminal.outcome, counts) == ("cancelled", (0, 0))
    ready(cold)
    await until(lambda: cold.nodes.orders)
    assert [order.request_id for _, order in cold.nodes.orders] == ["req-2"]
    assert cold.limits.given_back == [0]


async def test_what_is_sent_in_the_moment_its_client_leaves_is_cancelled(cold: World) -> None:
    """Sending and ending exclude each other: nothing runs on for nobody."""
    call = await cold.serving.start(a_job())
    gate, send = asyncio.Event(), cold.nodes.generate

    async def slowly(*order: Any) -> None:
        await gate.wait()
        await send(*order)

    cold.nodes.generate = slowly  # type: ignore[method-assign]
    ready(cold)
    await until(lambda: call.sending.locked())
    call.client_left()
    ending = asyncio.ensure_future(call.finish())
    await asyncio.sleep(0)
    gate.set()
    await ending
    assert cold.nodes.cancelled == ["req-1"]
    assert len(cold.ledger.terminals) == 1


async def test_what_fits_nowhere_is_given_up_with_the_planners_reason(cold: World) -> None:
    """After three seconds, in which an idle model may make room."""
    call = await cold.serving.start(a_job())
    cold.nodes.unplaced = Gap("1 replica of m@v1 cannot be placed.")
    await asyncio.sleep(2 * POLL_S)
    assert call.error is None
    cold.clock.time += 3.0
    await until(lambda: call.error is not None)
    assert (call.error.code, call.error.message) == ("model_not_ready", cold.nodes.unplaced.reason)


async def test_what_is_held_for_a_retired_version_ends_at_once_as_a_new_request_does(
    cold: World,
) -> None:
    calls = [await cold.serving.start(a_job(request_id=f"req-{i}")) for i in range(2)]
    cold.nodes.retired = True
    await until(lambda: all(call.error is not None for call in calls))
    assert {call.error.code for call in calls} == {"model_not_found"}
    assert cold.clock.time == 100.0, "nobody waited"
    with pytest.raises(Refused) as refused:
        await cold.serving.start(a_job(request_id="late"))
    assert (refused.value.code, refused.value.message) == ("model_not_found", "no m@v1")


async def test_what_keeps_failing_is_refused_at_once_with_the_time_of_its_next_try(
    cold: World,
) -> None:
    """Though the next try and its load would end in time, be it that it loads again already."""
    for retry_s, loads_in in ((10.0, 23.0), (0.0, 13.0)):
        gap = cold.nodes.unplaced = Gap("It failed.", retry_s=retry_s, num_failures=2)
        cold.nodes.loads_in = loads_in
        with pytest.raises(Refused) as refused:
            await cold.serving.start(a_job(request_id=f"req-{loads_in}"))
        assert (refused.value.code, refused.value.message) == ("model_not_ready", gap.reason)
        assert refused.value.retry_after == loads_in
    assert cold.clock.time == 100.0, "nobody waited"


async def test_what_is_held_waits_for_the_try_after_a_failure_and_not_for_a_third(
    cold: World,
) -> None:
    """20 s are over: 23 s of 40 left are enough. After the second failure nothing is."""
    call = await cold.serving.start(a_job())
    cold.clock.time += 20.0
    cold.nodes.unplaced = Gap("It failed.", retry_s=10.0, num_failures=1)
    cold.nodes.loads_in = 23.0
    await asyncio.sleep(2 * POLL_S)
    cold.clock.time += 5.0
    await asyncio.sleep(2 * POLL_S)
    assert call.error is None and call.held is not None
    cold.nodes.unplaced = Gap("It failed again.", retry_s=10.0, num_failures=2)
    await until(lambda: call.error is not None)
    assert (call.error.code, call.error.message) == ("model_not_ready", "It failed again.")
    assert call.error.retry_after == 23.0


async def test_a_failure_is_no_end_where_another_node_loads_it(cold: World) -> None:
    """The planner has moved it within the three seconds."""
    call = await cold.serving.start(a_job())
    cold.nodes.unplaced = Gap("It failed.", retry_s=10.0, num_failures=2)
    cold.nodes.loads_in = 23.0
    await asyncio.sleep(2 * POLL_S)
    cold.nodes.unplaced = None
    await asyncio.sleep(2 * POLL_S)
    cold.clock.time += 12.0
    ready(cold)
    await until(lambda: cold.nodes.orders)
    cold.say("req-1", ONE, TWO)
    assert await drain(call) == "ab"
    await call.finish()


async def test_what_no_try_can_mend_ends_at_once(cold: World) -> None:
    call = await cold.serving.start(a_job())
    cold.nodes.unplaced = Gap("last with checksum_mismatch", lasts=True, retry_s=10.0)
    await until(lambda: call.error is not None)
    assert (call.error.code, call.error.message) == (
        "model_not_ready",
        "last with checksum_mismatch",
    )
    with pytest.raises(Refused, match="checksum_mismatch") as late:
        await cold.serving.start(a_job(request_id="late"))
    assert (call.error.retry_after, late.value.retry_after) == (None, None)
    assert cold.clock.time == 100.0, "nobody waited"


@pytest.mark.parametrize("known", [False, True], ids=["never planned", "planned"])
async def test_what_no_device_can_hold_is_told_so_and_not_that_it_loads(
    cold: World, known: bool
) -> None:
    """Be it long to load or not, and from the first request on."""
    gap = Gap("1 too small even when empty.", lasts=True)
    cold.nodes.unplaced, cold.nodes.too_large = (gap, None) if known else (None, gap)
    for seconds in (12.0, 70375.0):
        cold.nodes.loads_in = seconds
        with pytest.raises(Refused) as refused:
            await cold.serving.start(a_job(request_id=f"req-{seconds}"))
        assert (refused.value.code, refused.value.message) == ("model_not_ready", gap.reason)
        assert refused.value.retry_after is None


async def test_a_full_fleet_is_named_before_an_estimate_beyond_the_class(cold: World) -> None:
    """A replica that nowhere has room for is not being loaded."""
    cold.nodes.unplaced, cold.nodes.loads_in = Gap("1 too full."), 61.0
    with pytest.raises(Refused, match="1 too full"):
        await cold.serving.start(a_job())


async def test_a_queue_is_bounded(cold: World) -> None:
    calls: list[Call] = []
    for i in range(MAX_HELD):
        calls.append(await cold.serving.start(a_job(request_id=f"req-{i}")))
    with pytest.raises(Refused) as refused:
        await cold.serving.start(a_job(request_id="one-more"))
    assert refused.value.code == "overloaded"
    assert len(cold.ledger.terminals) == 1


async def test_what_is_encoded_late_is_sent_as_encoded_and_billed_as_such(cold: World) -> None:
    """The tokenizer came with the model. Reserved was the most; used counts what it was."""
    attempts = []

    async def encode(job: Job) -> None:
        attempts.append(job.request_id)
        if len(attempts) < 3:
            raise NotLoadedYet(job.version_id)
        job.prompts, job.max_tokens = ((4, 5),), (7,)

    job = a_job(prompts=((),), max_tokens=(10,), max_prompt_tokens=100, encode=encode)
    call = await cold.serving.start(job)
    assert cold.ledger.intents[0].num_prompt_tokens == 100
    ready(cold)
    await until(lambda: cold.nodes.orders)
    order = cold.nodes.orders[0][1]
    assert (order.prompt_token_ids, order.max_tokens) == ((4, 5), 7)
    cold.say("req-1", ONE, TWO)
    await drain(call)
    await call.finish()
    (terminal,) = cold.ledger.terminals
    assert (terminal.num_prompt_tokens, terminal.num_output_tokens) == (2, 2)
    assert cold.limits.given_back == [4]


async def test_a_prompt_found_wrong_late_is_refused_as_ever(cold: World) -> None:
    async def encode(job: Job) -> None:
        raise Refused("context_length_exceeded", "Too long.", "messages")

    call = await cold.serving.start(a_job(prompts=((),), max_prompt_tokens=9, encode=encode))
    await until(lambda: call.error is not None)
    assert call.error.code == "context_length_exceeded"


def test_deadlines_are_of_known_classes() -> None:
    assert parse_deadlines('{"batch": 5}') == {"realtime": 10.0, "standard": 60.0, "batch": 5.0}
    for wrong in ('{"flex": 5}', '{"batch": -1}', '{"batch": 9999}'):
        with pytest.raises(ValueError, match="hold deadlines"):
            parse_deadlines(wrong)
