"""An agent on a real bus with the simulated backend: join, load, generate, cancel, resend."""

import asyncio
import random
import time
from itertools import pairwise

import msgspec

from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import Generate, Sampling, TokenizerBundle
from tests.agent.conftest import StartAgent
from tests.agent.harness import Control, eventually, spec
from tests.wire.samples import mutated


async def test_a_placed_model_is_loaded_and_generates(
    plane: Control, start_agent: StartAgent
) -> None:
    """From an empty node to a finished stream: observed state, tokenizer, contiguous frames."""
    agent = start_agent("n1", "--zone", "z1")
    await plane.place("n1", spec(), generation=7, epoch=3)
    status = await plane.replica("n1", "ready")
    observed = await plane.observed("n1")
    assert observed is not None
    assert (observed.acked_epoch, observed.acked_generation) == (3, 7)
    assert observed.zone == "z1"
    assert observed.devices[0].memory_bytes == 1 << 30
    assert status.sha256 and status.max_model_len == 2048

    request_ids = [await plane.generate("n1", max_tokens=40) for _ in range(5)]
    for request_id in request_ids:
        last = await plane.terminal(request_id)
        assert (last.finish_reason, last.num_output_tokens) == ("length", 40)
        assert len(plane.assert_contiguous(request_id)) == 40
    assert len({plane.text(request_id) for request_id in request_ids}) == 1, "same prompt"
    assert [f.seq for f in plane.frames] == list(range(1, len(plane.frames) + 1))
    assert {f.boot_id for f in plane.frames} == {observed.boot_id}

    store = await plane.bus.jetstream().object_store("tokenizers")
    bundle = codec.decode((await store.get("m@1")).data or b"", TokenizerBundle)
    assert bundle.version_id == "m@1" and bundle.chat_template
    assert agent.get("/readyz")[0] == 200


async def test_one_step_is_one_frame_for_all_streams_of_a_gateway(
    plane: Control, start_agent: StartAgent
) -> None:
    """16 streams of 50 tokens need about 50 frames, not 800."""
    start_agent()
    await plane.place("n1", spec(source="simulated://m?step_ms=20"))
    await plane.replica("n1", "ready")
    request_ids = [await plane.generate("n1", max_tokens=50) for _ in range(16)]
    for request_id in request_ids:
        await plane.terminal(request_id)
        plane.assert_contiguous(request_id)
    assert len([f for f in plane.frames if f.deltas]) < 100


async def test_cancelling_ends_a_stream_within_a_second(
    plane: Control, start_agent: StartAgent
) -> None:
    """The terminal delta says cancelled, and the slot is free again."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", max_tokens=1500)
    await plane.started(request_id, 3)
    asked_at = time.monotonic()
    await plane.cancel("n1", request_id)
    last = await plane.terminal(request_id)
    assert time.monotonic() - asked_at < 1.0
    assert last.finish_reason == "cancelled"
    assert last.num_output_tokens == len(plane.assert_contiguous(request_id))
    load = await eventually(
        lambda: load if (load := plane.load("n1")) and load.num_running == 0 else None
    )
    assert load.num_free_blocks == load.num_blocks > 0


async def test_a_cancel_that_overtakes_its_generate_still_counts(
    plane: Control, start_agent: StartAgent
) -> None:
    """Subscriptions are read side by side, so the order of two messages is not certain."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    await plane.cancel("n1", "req-early")
    await plane.bus.client.flush()
    await asyncio.sleep(0.2)
    await plane.generate("n1", max_tokens=1500, request_id="req-early")
    assert (await plane.terminal("req-early")).finish_reason == "cancelled"


async def test_what_a_lost_frame_held_can_be_sent_again(
    plane: Control, start_agent: StartAgent
) -> None:
    """After a gap in seq the rest comes again from the token the gateway names, text and all."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    whole = await plane.generate("n1", max_tokens=60)
    await plane.terminal(whole)
    request_id = await plane.generate("n1", max_tokens=60)
    await plane.started(request_id, 10)
    plane.drop_next = 3
    await plane.terminal(request_id)
    seqs = [frame.seq for frame in plane.frames]
    assert any(b - a == 4 for a, b in pairwise(seqs)), "three frames are missing"

    have = _contiguous_prefix(plane, request_id)
    kept = [d for d in plane.deltas(request_id) if d.index < have]
    before = len(plane.deltas(request_id))
    await plane.resend("n1", {request_id: have})
    await eventually(lambda: len(plane.deltas(request_id)) > before)
    again = plane.deltas(request_id)[before:]
    assert again[0].index == have and again[-1].finish_reason == "length"
    text = "".join(d.text for d in [*kept, *again])
    assert text == plane.text(whole)


def _contiguous_prefix(plane: Control, request_id: str) -> int:
    num_tokens = 0
    for delta in plane.deltas(request_id):
        if delta.index == num_tokens:
            num_tokens += len(delta.token_ids)
    return num_tokens


async def test_a_quiet_gateway_learns_the_last_sequence_number(
    plane: Control, start_agent: StartAgent
) -> None:
    """If the last frame of a stream is lost, an empty frame shows the gap within seconds."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    plane.drop_next = 1
    request_id = await plane.generate("n1", max_tokens=1)
    frame = await eventually(lambda: plane.frames[0] if plane.frames else None)
    assert (frame.seq, frame.deltas) == (2, ())
    await plane.resend("n1", {request_id: 0})
    await plane.terminal(request_id)
    assert sum(len(d.token_ids) for d in plane.deltas(request_id)) == 1


async def test_an_unknown_replica_is_refused_with_a_terminal_delta(
    plane: Control, start_agent: StartAgent
) -> None:
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", replica_id="m.1.g9.9")
    last = await plane.terminal(request_id)
    assert (last.finish_reason, last.error_code) == ("error", "replica_not_ready")


async def test_a_request_that_nobody_knows_ends_when_it_is_asked_for(
    plane: Control, start_agent: StartAgent
) -> None:
    """A generate that was lost on the way must not leave its gateway waiting."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    await plane.resend("n1", {"req-lost": 0})
    assert (await plane.terminal("req-lost")).error_code == "engine_lost"


async def test_the_engines_refusals_reach_the_gateway_as_typed_errors(
    plane: Control, start_agent: StartAgent
) -> None:
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    too_long = await plane.generate("n1", prompt_token_ids=(1,) * 3000)
    foreign = await plane.generate("n1", prompt_token_ids=(10**6,))
    nothing = await plane.generate("n1", prompt_token_ids=())
    vague = await plane.generate("n1", latency_class="soon")
    assert (await plane.terminal(too_long)).error_code == "context_length_exceeded"
    assert (await plane.terminal(foreign)).error_code == "invalid_token_id"
    assert (await plane.terminal(nothing)).error_code == "empty_prompt"
    assert (await plane.terminal(vague)).error_code == "invalid_request"


async def test_what_cannot_be_continued_is_refused_for_that_reason(
    plane: Control, start_agent: StartAgent
) -> None:
    """The refusal stands after the tokens that were sent before, or it would be taken for a
    stream whose order is broken."""
    start_agent()
    await plane.place("n1", spec(source="simulated://m?continues=0"))
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", sent_token_ids=(300, 301))
    last = await plane.terminal(request_id)
    assert (last.finish_reason, last.error_code) == ("error", "continuation_unsupported")
    assert (last.index, last.num_output_tokens) == (2, 2)


async def test_malformed_messages_are_counted_and_change_nothing(
    plane: Control, start_agent: StartAgent
) -> None:
    """Junk, newer versions and names that would leave the node's subjects are dropped."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    for junk in (b"", b"\xff" * 50, b"\x80", b"not msgpack", b"\x81\xa1v\xcd\x27\x0f"):
        for subject in (subjects.generate("n1"), subjects.cancel("n1"), subjects.resend("n1")):
            await plane.bus.client.publish(subject, junk)
    for gateway in ("gw.*", "a.b", ">", "", "$JS.API.STREAM.DELETE.KV_desired", "x" * 100):
        await plane.generate("n1", gateway=gateway)
    good = await plane.generate("n1", max_tokens=5)
    await plane.terminal(good)
    plane.assert_contiguous(good)
    metrics = agent.get("/metrics")[1]
    assert 'engine:agent_messages_total{kind="malformed",node="n1"} 15.0' in metrics
    assert 'engine:agent_messages_total{kind="refused_names",node="n1"} 6.0' in metrics


async def test_mutated_generates_kill_neither_agent_nor_worker(
    plane: Control, start_agent: StartAgent
) -> None:
    """A thousand broken requests for a loaded replica, and the next good one is served."""
    agent = start_agent()
    await plane.place("n1", spec(source="simulated://m?step_ms=0"))
    await plane.replica("n1", "ready")
    worker = agent.workers()[0].pid
    rng = random.Random(5)
    sample = Generate(
        request_id="req-1",
        gateway=plane.gateway,
        replica_id="m.1.g1.0",
        prompt_token_ids=(1, 2, 3),
        sampling=Sampling(max_tokens=3, stop=("tok1",), logit_bias={5: 1.0}, logprobs=2, seed=1),
    )
    for n in range(1000):
        one = msgspec.structs.replace(sample, request_id=f"req-{n}")
        await plane.bus.client.publish(subjects.generate("n1"), mutated(rng, codec.encode(one)))
    good = await plane.generate("n1", max_tokens=5)
    assert (await plane.terminal(good)).finish_reason == "length"
    assert [process.pid for process in agent.workers()] == [worker]


async def test_a_draining_node_says_so_and_serves_what_it_still_has(
    plane: Control, start_agent: StartAgent
) -> None:
    """Routers avoid it by its telemetry; a request in flight to it is not lost."""
    start_agent()
    await plane.place("n1", spec(), drain=True)
    await plane.replica("n1", "ready")
    await eventually(lambda: plane.load("n1") and plane.telemetry["n1"].draining)
    request_id = await plane.generate("n1")
    assert (await plane.terminal(request_id)).finish_reason == "length"


async def test_two_agents_serve_side_by_side(plane: Control, start_agent: StartAgent) -> None:
    """Each node sees only its own desired state, and both stream to one gateway."""
    start_agent("n1")
    start_agent("n2")
    await plane.place("n1", spec("m.1.g1.0"))
    await plane.place("n2", spec("m.1.g1.1"))
    await plane.replica("n1", "ready", "m.1.g1.0")
    await plane.replica("n2", "ready", "m.1.g1.1")
    first = await plane.generate("n1", replica_id="m.1.g1.0")
    second = await plane.generate("n2", replica_id="m.1.g1.1")
    await plane.terminal(first)
    await plane.terminal(second)
    assert plane.text(first) == plane.text(second)
    await eventually(lambda: set(plane.telemetry) == {"n1", "n2"})


async def test_metrics_and_telemetry_tell_the_same_counts(
    plane: Control, start_agent: StartAgent
) -> None:
    """Tokens are counted exactly; names carry vLLM's suffixes under our prefix."""
    agent = start_agent()
    await plane.place("n1", spec(source="simulated://m?step_ms=20"))
    await plane.replica("n1", "ready")
    prompt = tuple(range(100))  # long enough by itself that its rate is believed
    asked = [await plane.generate("n1", 150, prompt_token_ids=prompt) for _ in range(4)]
    for request_id in asked:
        await plane.terminal(request_id)
    labels = 'engine="m.1.g1.0",model_name="m",node="n1"'
    metrics = agent.get("/metrics")[1]
    assert f"engine:generation_tokens_total{{{labels}}} 600.0" in metrics
    assert f"engine:prompt_tokens_total{{{labels}}} 400.0" in metrics
    assert f"engine:time_to_first_token_seconds_count{{{labels}}} 4.0" in metrics
    assert f"engine:inter_token_latency_seconds_count{{{labels}}} 596.0" in metrics
    assert 'engine:request_success_total{engine="m.1.g1.0",finished_reason="length"' in metrics
    load = await eventually(
        lambda: load if (load := plane.load("n1")) and load.generated_tokens == 600 else None
    )
    assert 0.015 < load.decode_step_s < 0.1
    assert load.prefill_tokens_per_s > 0
