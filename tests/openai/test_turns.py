"""A burst is begun a few requests at a time, in order, and other work comes in between."""

import asyncio

from controlplane.entrypoints.openai.turns import Turns


async def test_a_burst_is_begun_in_order_and_others_get_the_loop_in_between() -> None:
    turns = Turns(at_once=2)
    seen: list[int | str] = []

    async def begin(number: int) -> None:
        await turns.take()
        seen.append(number)
        if number == 0:  # as a token of a running stream would
            asyncio.get_running_loop().call_soon(seen.append, "token")

    await asyncio.gather(*(begin(number) for number in range(5)))
    assert [one for one in seen if one != "token"] == [0, 1, 2, 3, 4]
    assert seen.index("token") < seen.index(3)


async def test_one_that_is_given_up_leaves_its_turn_to_the_next() -> None:
    turns = Turns(at_once=1)
    await turns.take()
    second, third, fourth = (asyncio.ensure_future(turns.take()) for _ in range(3))
    asyncio.get_running_loop().call_soon(third.cancel)
    await asyncio.wait_for(asyncio.gather(second, fourth), 1)
    assert third.cancelled()
