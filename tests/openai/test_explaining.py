"""What goes on record of the choices of replicas that a request was sent by."""

import asyncio

import pytest

from controlplane.application.explaining import MOVED, ORDINARY, Explaining, _Bucket
from controlplane.application.refused import Refused
from controlplane.dispatch.record import Dispatch, recompute
from tests.openai.test_serving import LOST, ONE, TWO, World, a_job, drain, world  # noqa: F401


def kept(world: World) -> tuple[Dispatch, ...]:  # noqa: F811
    return world.ledger.terminals[-1].dispatches


async def served(world: World, **changes: object) -> tuple[Dispatch, ...]:  # noqa: F811
    call = await world.serving.start(a_job(**changes))
    for part in call.parts:
        world.say(part.request_id, ONE, TWO)
    await drain(call)
    await call.finish()
    return kept(world)


async def test_a_sampled_request_keeps_each_choice_with_what_it_saw(world: World) -> None:  # noqa: F811
    world.serving.explaining.share = 1.0
    one, two = await served(world, num_choices=2)
    assert [(d.choice, d.attempt, d.why) for d in (one, two)] == [
        (0, 1, "sampled"),
        (1, 1, "sampled"),
    ]
    assert (one.position, one.at, one.outcome.replica_id) == (812, 5.0, "r1")
    assert (
        [view.replica_id for view in one.replicas]
        == ["r1", "r2"]
        == [each.replica_id for each in one.outcome.candidates]
    )
    assert recompute(one) == () == recompute(two)


async def test_without_a_share_an_ordinary_request_keeps_nothing(world: World) -> None:  # noqa: F811
    world.serving.explaining.share = 0.0
    assert await served(world) == ()


async def test_of_few_requests_each_is_explained_and_of_many_one_a_second(
    world: World,  # noqa: F811
) -> None:
    world.serving.explaining.share = 1e-9
    burst = int(ORDINARY[1])
    why = [[one.why for one in await served(world)] for _ in range(burst + 1)]
    assert why == [["spare"]] * burst + [[]]


async def test_an_attempt_that_follows_a_lost_one_is_kept_though_not_sampled(
    world: World,  # noqa: F811
) -> None:
    world.serving.explaining.share = 0.0
    call = await world.serving.start(a_job())
    world.say("req-1", LOST)
    reading = asyncio.ensure_future(drain(call))
    await asyncio.sleep(0)
    world.say("req-1_2", ONE, TWO)
    await reading
    await call.finish()
    (one,) = kept(world)
    assert (one.attempt, one.why, one.excluded, one.outcome.replica_id) == (
        2,
        "followed",
        ("r1",),
        "r2",
    )
    assert [each.code for each in one.outcome.rejected] == ["failed_before"]
    assert recompute(one) == ()


async def test_a_request_that_no_replica_takes_keeps_why(world: World) -> None:  # noqa: F811
    world.serving.explaining.share = 0.0
    world.nodes.replicas.clear()
    with pytest.raises(Refused):
        await world.serving.start(a_job())
    (one,) = kept(world)
    assert (one.attempt, one.why, one.outcome.replica_id, one.replicas) == (1, "refused", "", ())


def test_a_fleet_that_is_down_does_not_make_the_ledger_write_for_every_request() -> None:
    """A burst is kept, and then so many a second."""
    per_s, burst = MOVED
    bucket = _Bucket(per_s, burst, 0.0)
    assert sum(bucket.take(0.0) for _ in range(1000)) == burst
    assert sum(bucket.take(3.0) for _ in range(1000)) == 3 * per_s


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Explaining(share, lambda: 0.0)
