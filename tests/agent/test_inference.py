"""What is kept of a generation and sent again, and the frames that gateways get."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.agent.generation import Generation
from gpuagent.agent.inference import RETENTION_S, Inference
from gpuagent.wire import codec
from gpuagent.wire.messages import Delta, Frame, Generate, Resend, Sampling, TokenLogprob
from tests.wire.samples import SAMPLES, mutated


class Node:
    """Engines that only remember, a bus that only records, a clock that is set by hand."""

    def __init__(self, max_queue: int = 100) -> None:
        self.added: list[str] = []
        self.cancelled: list[str] = []
        self.sent: list[tuple[str, Frame]] = []
        self.is_down = False
        self.now = 0.0
        self.inference = Inference("n1", "boot", self, self.publish, lambda: self.now, max_queue)

    def refusal(self, replica_id: str) -> str:
        return "" if replica_id == "r" else "the replica is not on this node"

    def add(self, request: Generate) -> None:
        self.added.append(request.request_id)

    def cancel(self, replica_id: str, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.is_down:
            raise ConnectionError
        self.sent.append((subject, codec.decode(payload, Frame)))

    async def generate(
        self,
        request_id: str,
        gateway: str = "gw",
        attempt: int = 1,
        lease_s: float = 0.0,
        salt: bytes = b"",
        weight: float = 1.0,
    ) -> None:
        message = Generate(
            request_id=request_id,
            gateway=gateway,
            replica_id="r",
            prompt_token_ids=(1, 2),
            sampling=Sampling(max_tokens=9),
            attempt=attempt,
            lease_s=lease_s,
            cache_salt=salt,
            weight=weight,
        )
        await self.inference.generate(codec.encode(message))

    def of(self, request_id: str) -> list[Delta]:
        return [d for _, frame in self.sent for d in frame.deltas if d.request_id == request_id]


def delta(request_id: str, index: int, *token_ids: int, end: str = "") -> Delta:
    text = "".join(f"w{token} " for token in token_ids)
    return Delta(request_id, index, token_ids, text, end, num_output_tokens=index + len(token_ids))


async def test_one_frame_per_gateway_and_step() -> None:
    node = Node()
    for request_id, gateway in (("a", "g1"), ("b", "g1"), ("c", "g2")):
        await node.generate(request_id, gateway)
    await node.inference.outputs([delta("a", 0, 5), delta("b", 0, 6), delta("c", 0, 7)])
    subjects = [(s, f.seq, [d.request_id for d in f.deltas]) for s, f in node.sent]
    assert subjects == [
        ("engine.frames.g1.n1", 1, ["a", "b"]),
        ("engine.frames.g2.n1", 1, ["c"]),
    ]


async def test_a_frame_that_cannot_leave_leaves_a_gap_that_resend_fills() -> None:
    node = Node()
    await node.generate("a")
    await node.inference.outputs([delta("a", 0, 5)])
    node.is_down = True
    await node.inference.outputs([delta("a", 1, 6)])
    node.is_down = False
    await node.inference.outputs([delta("a", 2, 7)])
    assert [f.seq for _, f in node.sent] == [1, 3]
    await node.inference.resend(codec.encode(Resend(gateway="gw", requests={"a": 1})))
    assert node.of("a")[-1].token_ids == (6, 7) and node.of("a")[-1].text == "w6 w7 "


async def test_nothing_follows_a_terminal_delta() -> None:
    node = Node()
    await node.generate("a")
    await node.inference.outputs([delta("a", 0, 5, end="stop")])
    await node.inference.outputs([delta("a", 1, 6), delta("a", 1, end="stop")])
    await node.inference.lose_replica("r", "engine_lost", "late")
    assert [d.finish_reason for d in node.of("a")] == ["stop"]
    assert node.inference.counts["stray_deltas"] == 2 and node.inference.num_active == 0


async def test_an_engine_that_skips_a_token_ends_the_stream_as_corrupt() -> None:
    node = Node()
    await node.generate("a")
    await node.inference.outputs([delta("a", 0, 5)])
    await node.inference.outputs([delta("a", 2, 7)])
    assert [(d.index, d.error_code) for d in node.of("a")] == [(0, ""), (1, "stream_corrupt")]
    assert node.cancelled == ["a"]


async def test_a_repeated_generate_runs_once_and_a_new_attempt_runs_again() -> None:
    node = Node()
    await node.generate("a")
    await node.generate("a")
    await node.inference.lose_replica("r", "engine_lost", "killed")
    await node.generate("a")
    assert node.added == ["a"] and node.inference.counts["duplicates"] == 2
    await node.generate("a", attempt=2)
    assert node.added == ["a", "a"]


async def test_a_full_replica_refuses_instead_of_queueing_without_end() -> None:
    node = Node(max_queue=2)
    for name in "abc":
        await node.generate(name)
    assert node.added == ["a", "b"]
    assert [d.error_code for d in node.of("c")] == ["overloaded"]


async def test_no_tenant_fills_a_queue_alone_and_the_refusal_says_its_share() -> None:
    """Four fifths at most, and never the last place; a second tenant finds room, and so does a
    third; what has ended is given back."""
    node = Node(max_queue=100)
    for number in range(100):
        await node.generate(f"a{number}", salt=b"a")
    assert len(node.added) == 80
    (refused,) = node.of("a80")
    assert refused.error_code == "tenant_queue_full"
    assert refused.error_message == (
        "You have 80 unfinished requests at this replica; of its queue of 100 one tenant may hold "
        "80 now."
    )
    for number in range(20):
        await node.generate(f"b{number}", salt=b"b")
    assert len(node.added) == 96 and node.of("b16")[0].error_code == "tenant_queue_full"
    await node.generate("c", salt=b"c")
    assert node.added[-1] == "c"
    for number in range(40):
        await node.inference.outputs([delta(f"a{number}", 0, end="stop")])
    await node.generate("again", salt=b"a")
    assert node.added[-1] == "again"


async def test_a_queue_that_many_share_is_full_to_the_last_place_and_says_so() -> None:
    node = Node(max_queue=20)
    for number in range(30):
        await node.generate(f"r{number}", salt=b"%d" % number)
    assert len(node.added) == 20
    (refused,) = node.of("r29")
    assert refused.error_code == "overloaded"
    assert refused.error_message == "The replica's queue is full: 20 requests, 0 of them yours."


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_weight_that_no_queue_could_order_is_refused(weight: float) -> None:
    node = Node()
    await node.generate("a", weight=weight)
    assert node.added == [] and [d.error_code for d in node.of("a")] == ["invalid_request"]


async def test_a_foreign_gateway_can_neither_read_nor_cancel() -> None:
    node = Node()
    await node.generate("a")
    await node.inference.outputs([delta("a", 0, 5)])
    node.sent.clear()
    await node.inference.resend(codec.encode(Resend(gateway="other", requests={"a": 0})))
    node.now += 5
    await node.inference.tick()
    assert [(s, f.deltas) for s, f in node.sent] == [("engine.frames.gw.n1", ())]


async def test_an_ended_generation_is_kept_a_minute_and_then_forgotten() -> None:
    node = Node()
    await node.generate("a")
    await node.inference.outputs([delta("a", 0, 5, end="length")])
    node.now = RETENTION_S - 1
    await node.inference.tick()
    await node.inference.resend(codec.encode(Resend(gateway="gw", requests={"a": 0})))
    assert [d.finish_reason for d in node.of("a")] == ["length", "length"]
    node.now = RETENTION_S + 1
    await node.inference.tick()
    node.sent.clear()
    await node.inference.resend(codec.encode(Resend(gateway="gw", requests={"a": 0})))
    node.now += 2
    await node.inference.tick()
    assert [d.error_code for d in node.of("a")] == ["engine_lost"]


async def test_five_thousand_mutated_messages_leave_the_node_as_it_was() -> None:
    """Each is refused, counted or harmless; none raises, and the next request is served."""
    rng = random.Random(3)
    node = Node(max_queue=10**6)
    of_kind = {type(sample).__name__: codec.encode(sample) for sample in SAMPLES}
    inference = node.inference
    for _ in range(5_000):
        kind, handle = rng.choice(
            [
                ("Generate", inference.generate),
                ("Cancel", inference.cancel),
                ("Resend", inference.resend),
            ]
        )
        await handle(mutated(rng, of_kind[kind]))
        node.now += 0.01
        await inference.tick()
    assert inference.counts["malformed"] > 1_000, "the mutations bite"
    await node.generate("good")
    assert node.added[-1] == "good"


tokens = st.lists(st.integers(0, 10**6), min_size=0, max_size=4)


@given(st.lists(tokens, max_size=30), st.text(max_size=3), st.booleans(), st.integers(0, 130))
def test_what_is_sent_again_is_exactly_what_was_missed(
    steps: list[list[int]], tail: str, ends: bool, cut: int
) -> None:
    """For every boundary between deltas: tokens, text and end are the same as the first time."""
    generation = Generation("a", "gw", "r", 1, 2, 0.0)
    sent = list(_deltas(steps, tail, ends))
    for part in sent:
        generation.record(part)
    boundaries = sorted({d.index for d in sent} | {len(generation.token_ids)})
    index = boundaries[cut % len(boundaries)]
    missed = [d for d in sent if d.index >= index]
    again = list(generation.since(index))
    assert [t for d in again for t in d.token_ids] == [t for d in missed for t in d.token_ids]
    assert "".join(d.text for d in again) == "".join(d.text for d in missed)
    assert [d.finish_reason for d in again if d.finish_reason] == (["stop"] if ends else [])
    expected = index
    for d in again:
        assert d.index == expected
        expected += len(d.token_ids)


def _deltas(steps: list[list[int]], tail: str, ends: bool) -> Iterable[Delta]:
    index = 0
    for step in steps:
        if step:
            yield delta("a", index, *step)
            index += len(step)
    if ends:
        yield Delta("a", index, (), tail, "stop", num_output_tokens=index)


def test_long_generations_are_sent_again_in_parts_with_their_logprobs() -> None:
    generation = Generation("a", "gw", "r", 1, 2, 0.0)
    for n in range(600):
        logprob = TokenLogprob(n, f"w{n} ", -0.5)
        generation.record(Delta("a", n, (n,), f"w{n} ", logprobs=(logprob,)))
    parts = list(generation.since(10))
    assert [(p.index, len(p.token_ids)) for p in parts] == [(10, 256), (266, 256), (522, 78)]
    assert all(
        lp.token_id == t for p in parts for lp, t in zip(p.logprobs, p.token_ids, strict=True)
    )


async def beat(node: Node, gateway: str) -> None:
    await node.inference.resend(codec.encode(Resend(gateway=gateway, requests={})))


async def test_what_a_silent_gateway_asked_for_is_cancelled_and_only_that() -> None:
    """A heartbeat renews the lease; without a lease nothing ends; each is cancelled once."""
    node = Node()
    await node.generate("dead", "gw-a", lease_s=10)
    await node.generate("alive", "gw-b", lease_s=10)
    await node.generate("old", "gw-c")
    for node.now in (4.0, 8.0, 9.0, 10.1, 12.0):
        await beat(node, "gw-b")
        await node.inference.tick()
        assert node.cancelled == (["dead"] if node.now > 10 else [])
    await node.inference.outputs([delta("dead", 0, end="cancelled")])
    assert node.of("dead")[-1].finish_reason == "cancelled"
    assert node.inference.counts["leases_expired"] == 1
    assert node.inference.counts["resends"] == 0


async def test_the_time_without_a_bus_counts_for_no_lease() -> None:
    """An outage of the bus must not end what gateways still wait for."""
    node = Node()
    await node.generate("kept", "gw-a", lease_s=10)
    for node.now in (9.0, 18.0, 27.0):
        node.inference.extend_leases()
        await node.inference.tick()
    assert node.cancelled == []
