"""A node ends what a lost gateway asked for, and says to the token what it came to."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.agent.inference import RETENTION_S, Inference
from gpuagent.agent.tallies import KEPT_S, MAX_KEPT, Tallies
from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import Close, Closed, Delta, Generate, Produced, Sampling


class Node:
    """Engines and a bus that only remember; a clock that is set by hand."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.cancelled: list[str] = []
        self.answers: list[tuple[str, Closed]] = []
        self.now = 0.0
        self.inference = Inference("n1", "boot", self, self.publish, lambda: self.now, 100)

    def refusal(self, replica_id: str) -> str:
        return ""

    def add(self, request: Generate) -> None:
        self.added.append(request.request_id)

    def cancel(self, replica_id: str, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def publish(self, subject: str, payload: bytes) -> None:
        if subject.startswith("engine.closed."):
            self.answers.append((subject, codec.decode(payload, Closed)))

    async def generate(
        self, name: str, gateway: str = "gw-a", record: str = "", prompt: tuple[int, ...] = (1,)
    ) -> None:
        message = Generate(
            request_id=name, gateway=gateway, replica_id="r", prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=9), record_id=record,
        )  # fmt: skip
        await self.inference.generate(codec.encode(message))

    @property
    def computed(self) -> dict[str, int]:
        """Of the last answer."""
        return {
            key: number for _, answer in self.answers for key, number in answer.computed.items()
        }

    async def step(self, name: str, index: int, count: int, end: str = "") -> None:
        ids = tuple(range(count))
        await self.inference.outputs([Delta(name, index, ids, "", end, num_cached_tokens=1)])

    async def close(self, *records: str, gateway: str = "gw-a") -> tuple[Produced, ...]:
        message = Close(asker="gw-b", number=7, gateway=gateway, record_ids=records)
        self.answers.clear()
        await self.inference.close(codec.encode(message))
        assert {subject for subject, _ in self.answers} == {subjects.closed("gw-b", "n1")}
        assert [answer.more for _, answer in self.answers][-1] is False
        return tuple(one for _, answer in self.answers for one in answer.generations)


async def test_what_runs_is_ended_and_counted_to_its_last_token() -> None:
    """First as it runs, then as it ended; what ended by itself is counted as it was."""
    node = Node()
    await node.generate("r1")
    await node.generate("r2")
    await node.step("r1", 0, 3)
    await node.step("r2", 0, 2, "stop")
    running, ended = await node.close("r1", "r2")
    assert (running.num_output_tokens, running.finish_reason) == (3, "")
    assert (ended.num_output_tokens, ended.finish_reason, ended.num_cached_tokens) == (2, "stop", 1)
    assert node.cancelled == ["r1"]
    await node.step("r1", 3, 1)
    await node.step("r1", 4, 0, "cancelled")
    (closed,) = await node.close("r1")
    assert (closed.num_output_tokens, closed.finish_reason) == (4, "cancelled")


async def test_a_record_that_was_closed_starts_no_generation_any_more() -> None:
    """Whether it was known then or not: its gateway may only have been paused."""
    node = Node()
    assert await node.close("late", "many") == ()
    await node.generate("late")
    await node.generate("many-1", record="many")
    await node.generate("other")
    assert node.added == ["other"]
    (late,) = await node.close("late")
    assert (late.num_output_tokens, late.finish_reason) == (0, "cancelled")


async def test_every_choice_of_a_record_is_told_of() -> None:
    """Under the record's own id, each with its count; those of other records are not."""
    node = Node()
    for choice in range(3):
        await node.generate(f"r1-{choice}", record="r1")
        await node.step(f"r1-{choice}", 0, choice + 1, "length")
    await node.generate("r1-9")
    told = await node.close("r1")
    assert [(one.request_id, one.num_output_tokens) for one in told] == [
        ("r1-0", 1), ("r1-1", 2), ("r1-2", 3),
    ]  # fmt: skip
    assert {one.record_id for one in told} == {"r1"}


async def test_a_gateway_is_told_of_no_other_ones_requests() -> None:
    """Nor are they ended."""
    node = Node()
    await node.generate("r1", "gw-c")
    assert await node.close("r1", gateway="gw-a") == ()
    assert node.cancelled == []


async def test_counts_outlive_the_tokens_and_are_forgotten_in_the_end() -> None:
    """A minute after the end nothing can be sent again; a quarter of an hour later it is over."""
    node = Node()
    await node.generate("r1-0", record="r1")
    node.now = 5.0
    await node.step("r1-0", 0, 4, "stop")
    node.now = 6 + RETENTION_S
    await node.inference.tick()
    (kept,) = await node.close("r1")
    assert (kept.num_output_tokens, kept.ran_s, kept.age_s) == (4, 5.0, node.now)
    node.now += KEPT_S
    await node.inference.tick()
    assert await node.close("r1") == ()


async def test_what_is_kept_is_bounded() -> None:
    """The oldest goes first; nothing of it is left behind."""
    node = Node()
    for number in range(3):
        await node.generate(f"r{number}-0", record=f"r{number}")
        await node.step(f"r{number}-0", 0, 1, "stop")
    tallies = Tallies(lambda: 0.0)
    for number in range(MAX_KEPT + 2):
        generation = node.inference._known[f"r{number % 3}-0"]
        generation.request_id, generation.record_id = f"{number}-0", str(number)
        tallies.open(generation)
        tallies.shrink(generation)
    assert len(tallies._ended) == len(tallies._choices) == MAX_KEPT
    assert list(tallies.counts("gw-a", "1")) == []
    assert len(list(tallies.counts("gw-a", "2"))) == 1


async def embedded(node: Node, name: str, end: str, **fields: Any) -> None:
    """The engine ends a request for vectors."""
    await node.inference.outputs([Delta(name, 0, (), "", end, **fields)])


async def test_what_was_computed_of_inputs_is_told_though_no_token_came_of_them() -> None:
    """All of those whose vectors are there, part of those that were stopped, and nothing of what
    runs; as long as the counts are kept, also when the vectors no longer are."""
    node = Node()
    for name in ("whole", "part", "runs"):
        await node.generate(name, prompt=(1, 2, 3, 4))
    await embedded(node, "whole", "stop", embeddings=(b"1234",) * 2)
    await node.close("whole", "part", "runs")
    assert node.computed == {"whole": 4}
    await embedded(node, "part", "cancelled", num_computed_tokens=3)
    node.now = 1 + RETENTION_S
    await node.inference.tick()
    await node.close("whole", "part", "runs")
    assert node.computed == {"whole": 4, "part": 3}
    node.now += KEPT_S
    await node.inference.tick()
    assert node.inference._tallies._computed == {}


async def test_a_long_answer_comes_in_parts() -> None:
    node = Node()
    names = [f"r{number}" for number in range(1500)]
    for name in names:
        await node.generate(name)
    told = await node.close(*names)
    assert [one.request_id for one in told] == names
    assert [len(answer.generations) for _, answer in node.answers] == [1000, 500]


async def test_malformed_closings_are_counted_and_change_nothing() -> None:
    node = Node()
    await node.inference.close(b"\xc1")
    bad = Close(asker="gw.>", number=1, gateway="gw-a", record_ids=("r1",))
    await node.inference.close(codec.encode(bad))
    assert node.answers == [] and node.cancelled == []
    assert node.inference.counts["malformed"] == node.inference.counts["refused_names"] == 1


Step = tuple[str, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["generate", "tokens", "end", "tick", "close"]),
        st.sampled_from(["r1", "r2", "r3-0", "r3-1"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
async def test_the_count_is_what_the_engine_generated(steps: list[Step]) -> None:
    """Whatever order things happen in, also when it is asked for in the middle, and again."""
    node = Node()
    generated: dict[str, int] = {}
    running: set[str] = set()
    for kind, name, number in steps:
        record = "r3" if name.startswith("r3") else ""
        if kind == "generate" and name not in generated:
            await node.generate(name, record=record)
            generated[name] = 0
            running |= {name} & set(node.added)
        elif kind in ("tokens", "end") and name in running:
            await node.step(name, generated[name], number, "stop" if kind == "end" else "")
            generated[name] += number
            running -= {name} if kind == "end" else set()
        elif kind == "tick":
            node.now += 30 * number
            await node.inference.tick()
        elif kind == "close":
            await node.close(record or name)
    told = await node.close("r1", "r2", "r3")
    assert {one.request_id: one.num_output_tokens for one in told} == generated
    assert {one.request_id for one in told if not one.finish_reason} == running
