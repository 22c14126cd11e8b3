"""Nodes are asked what a lost gateway's requests came to, over a real bus; what then is billed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

from controlplane.adapters.natsbus import closing
from controlplane.adapters.natsbus.closing import NodeClosing
from controlplane.adapters.natsbus.connection import Bus
from controlplane.application.orphans import CONFIRMED, UNCONFIRMED, Orphan, Produced, end_of
from gpuagent.wire import messages, subjects
from gpuagent.wire.codec import decode, encode
from tests.application.bus import control, node
from tests.natsserver import NatsServer, nats  # noqa: F401

ENDED = messages.Produced("r1", "r1", 1, "m.1", 5, 2, "cancelled", "", 1.0, 9.0, 4.0)
RUNNING = replace(ENDED, num_output_tokens=3, finish_reason="")


@asynccontextmanager
async def fleet(server: NatsServer, monkeypatch: Any, **expected: bool) -> AsyncIterator[Any]:
    """The asking side, whose pauses are short, and node n1; with the bus that asks."""
    monkeypatch.setattr(closing, "PAUSES_S", (0.05, 0.1, 0.2))
    async with control(server) as bus, node(server, "n1") as far:
        asking = NodeClosing(bus, "gw-b", lambda: expected or {"n1": True})
        await asking.start()
        yield asking, far, bus


async def answering(
    far: Bus,
    bus: Bus,
    answer: Callable[[messages.Close], list[Any]],
    computed: dict[str, int] = {},  # noqa: B006  # never changed
) -> None:
    """Node n1 answers with what ``answer`` gives; returns once it hears the control plane."""
    heard = asyncio.Event()

    async def closed(message: Msg) -> None:
        order = decode(message.data, messages.Close)
        heard.set()
        for generations, more in answer(order) if order.number else ():
            said = messages.Closed(
                node_id="n1", number=order.number, generations=generations, more=more,
                computed=computed,
            )  # fmt: skip
            await far.client.publish(subjects.closed("gw-b", "n1"), encode(said))

    await far.client.subscribe(subjects.close("n1"), cb=closed)
    await far.client.flush()
    hello = messages.Close(asker="gw-b", number=0, gateway="", record_ids=())
    while not heard.is_set():
        await bus.client.publish(subjects.close("n1"), encode(hello))
        await asyncio.sleep(0.02)


async def test_a_node_is_asked_until_all_has_ended(nats: NatsServer, monkeypatch: Any) -> None:  # noqa: F811
    """The last answer counts; it may come in parts."""
    asked: list[messages.Close] = []
    choices = [replace(ENDED, record_id="r2", request_id=f"r2-{i}") for i in range(2)]

    def answer(order: messages.Close) -> list[Any]:
        asked.append(order)
        first = (RUNNING if len(asked) < 3 else ENDED,)
        return [(first, True), (tuple(choices), False)]

    async with fleet(nats, monkeypatch) as (asking, far, bus):
        await answering(far, bus, answer)
        answers = await asking.close("gw-a", ["r1", "r2"])
    assert len(asked) == 3 and asked[0].gateway == "gw-a" and asked[0].record_ids == ("r1", "r2")
    assert answers.is_complete
    assert [one.num_output_tokens for one in answers.produced["r1"]] == [5]
    assert [(one.choice, one.node_id) for one in answers.produced["r2"]] == [(0, "n1"), (1, "n1")]


async def test_what_was_computed_of_inputs_comes_with_its_generation(
    nats: NatsServer,  # noqa: F811
    monkeypatch: Any,
) -> None:
    """By its id: two parts of one request, of which one was computed; an old node tells nothing."""
    parts = tuple(replace(ENDED, request_id=f"r1-{i}", num_output_tokens=0) for i in range(2))
    async with fleet(nats, monkeypatch) as (asking, far, bus):
        await answering(far, bus, lambda _: [(parts, False)], {"r1-1": 96})
        answers = await asking.close("gw-a", ["r1"])
    assert [one.num_computed_tokens for one in answers.produced["r1"]] == [0, 96]


@pytest.mark.parametrize(("expected", "complete"), [(True, False), (False, True)])
async def test_a_node_that_says_nothing_leaves_the_answer_incomplete(
    nats: NatsServer,  # noqa: F811
    monkeypatch: Any,
    expected: bool,
    complete: bool,
) -> None:
    """Unless it is lost anyway; what the others say is there. It takes a bounded time."""
    async with fleet(nats, monkeypatch, n1=True, n2=expected) as (asking, far, bus):
        await answering(far, bus, lambda _: [((ENDED,), False)])
        began = time.monotonic()
        answers = await asking.close("gw-a", ["r1"])
    assert time.monotonic() - began < 5
    assert answers.is_complete is complete and len(answers.produced["r1"]) == 1


@pytest.mark.parametrize(
    "bad",
    [
        replace(ENDED, num_output_tokens=-1),
        replace(ENDED, num_output_tokens=2**40),
        replace(ENDED, replica_id="x\x00"),
        replace(ENDED, error_code="e" * 65),
        replace(ENDED, age_s=float("nan")),
        replace(ENDED, attempt=2**40),
    ],
)
async def test_what_cannot_be_put_on_record_is_no_answer(
    nats: NatsServer,  # noqa: F811
    monkeypatch: Any,
    bad: Any,
) -> None:
    async with fleet(nats, monkeypatch) as (asking, far, bus):
        await answering(far, bus, lambda _: [((bad,), False)])
        answers = await asking.close("gw-a", ["r1"])
    assert answers.produced == {} and not answers.is_complete and asking.num_rejected


async def test_a_node_speaks_of_nothing_that_it_was_not_asked_for(
    nats: NatsServer,  # noqa: F811
    monkeypatch: Any,
) -> None:
    """Nor can another node speak for it: its credentials do not reach that subject."""
    other = replace(ENDED, record_id="r9", request_id="r9")
    async with fleet(nats, monkeypatch) as (asking, far, bus):
        await answering(far, bus, lambda _: [((ENDED, other), False)])
        answers = await asking.close("gw-a", ["r1"])
        before = far.errors.total()
        await far.client.publish(subjects.closed("gw-b", "n2"), b"x")
        await far.client.flush()
        await asyncio.sleep(0.02)
        assert far.errors.total() == before + 1
    assert list(answers.produced) == ["r1"]


# --- what is billed -----------------------------------------------------------------------------
def produced(tokens: int, node_id: str = "n1", **changes: Any) -> Produced:
    fields = {"choice": -1, "attempt": 1, "replica_id": "m.1", "num_cached_tokens": 8,
              "finish_reason": "cancelled", "error_code": "", "queue_ms": 2.0, "age_s": 30.0,
              "ran_s": 4.0}  # fmt: skip
    return Produced(node_id=node_id, num_output_tokens=tokens, **(fields | changes))


@pytest.mark.parametrize(
    ("noted", "told", "complete", "billed", "code"),
    [
        (180, [produced(231)], True, 231, CONFIRMED),
        (180, [produced(231)], False, 231, CONFIRMED),
        (0, [], True, 0, CONFIRMED),
        (180, [], False, 180, UNCONFIRMED),
        (180, [], True, 180, UNCONFIRMED),
        (0, [], False, 0, UNCONFIRMED),
        (0, [produced(0, "n1"), produced(7, "n2", attempt=2)], True, 7, CONFIRMED),
        (0, [produced(9, "n1"), produced(7, "n2", attempt=2)], True, 7, CONFIRMED),
        (0, [produced(9, choice=0), produced(7, "n2", choice=1)], True, 16, CONFIRMED),
        (0, [produced(9, choice=0)], False, 9, UNCONFIRMED),
        (0, [produced(9, finish_reason="")], False, 9, UNCONFIRMED),
        (0, [produced(10**9)], True, 500, UNCONFIRMED),
    ],
)
def test_the_nodes_counts_are_billed_and_the_record_says_when_they_are_not(
    noted: int, told: list[Produced], complete: bool, billed: int, code: str
) -> None:
    """The table in the module's docstring, several tries and choices, and no more than reserved."""
    orphan = Orphan("r1", "gw-a", noted, 40, 500, 1000.0)
    end = end_of(orphan, told, complete, 1060.0)
    assert (end.num_output_tokens, end.error_code, end.outcome) == (billed, code, "unknown")
    assert end.num_prompt_tokens == (40 if billed else 0) and end.duration_ms == 60_000
    assert len(end.tries) == len(told)
    assert all(one.started_at == 1030.0 and one.duration_ms == 4000 for one in end.tries)


@pytest.mark.parametrize(
    ("told", "complete", "billed", "code"),
    [
        ([produced(0, num_computed_tokens=30)], True, 30, CONFIRMED),
        ([produced(0, num_computed_tokens=30)], False, 30, CONFIRMED),
        ([produced(0)], True, 0, CONFIRMED),
        ([produced(0)], False, 0, UNCONFIRMED),
        ([produced(0, num_computed_tokens=30, finish_reason="")], False, 30, UNCONFIRMED),
        (
            [
                produced(0, choice=0, num_computed_tokens=20),
                produced(0, choice=1, finish_reason="error"),
                produced(0, "n2", choice=1, attempt=2, num_computed_tokens=5),
            ],
            True,
            25,
            CONFIRMED,
        ),
        ([produced(0, num_computed_tokens=41)], True, 40, UNCONFIRMED),
    ],
)
def test_of_inputs_to_embed_what_was_computed_is_billed(
    told: list[Produced], complete: bool, billed: int, code: str
) -> None:
    """Of each part its last try's, and no more than was reserved."""
    orphan = Orphan("r1", "gw-a", 0, 40, 0, 1000.0)
    end = end_of(orphan, told, complete, 1060.0)
    assert (end.num_prompt_tokens, end.num_output_tokens, end.error_code) == (billed, 0, code)
    assert end.num_cached_tokens == 0
