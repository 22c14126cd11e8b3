"""Embedding models on a node: what is loaded, what comes over the bus, what is refused."""

import math
from array import array

import msgspec
import pytest

from gpuagent.agent.backends import torch as backend
from gpuagent.agent.backends.base import LoadedModel, LoadError
from gpuagent.agent.inference import MAX_INPUTS, RESEND_BYTES
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.models.encoder_config import read_encoder_config
from gpuagent.wire import codec
from gpuagent.wire.messages import Delta, Device, ReplicaSpec, Sampling, TokenizerBundle
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Control, eventually, spec
from tests.engine.real_model import MINILM, cache_root
from tests.engine.tiny_encoder import DIMENSIONS, POSITIONS, tiny_encoder
from tests.engine.tiny_model import tiny_model

FAST = "simulated://m?step_ms=5&prefill_tps=1000000&dims=16"
SLOW = "simulated://m?step_ms=100&dims=16"


def embedder(source: str = FAST, **fields: object) -> ReplicaSpec:
    return spec(source=source, task="embed", **fields)


async def embed(plane: Control, *inputs: tuple[int, ...], **fields: object) -> str:
    """Ask for the inputs' vectors; the request id."""
    tokens = tuple(token for each in inputs for token in each)
    asked = {"prompt_token_ids": tokens, "input_lengths": tuple(map(len, inputs)), **fields}
    return await plane.generate("n1", sampling=Sampling(max_tokens=0), **asked)


def floats(delta: Delta) -> list[list[float]]:
    return [array("f", vector).tolist() for vector in delta.embeddings]


async def test_vectors_come_with_the_end(plane: Control, start_agent: StartAgent) -> None:
    """One for each input, of length 1, the same in every batch; with no token and no text."""
    start_agent()
    await plane.place("n1", embedder(max_batch=4))
    await plane.replica("n1", "ready")
    inputs = [(1, 2, 3), (9,), (1, 2, 3), (4, 4), (5,)]
    last = await plane.terminal(await embed(plane, *inputs))
    vectors = floats(last)
    assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == ("stop", 10, 0)
    assert [len(vector) for vector in vectors] == [16] * 5
    assert vectors[0] == vectors[2] != vectors[1]
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-6) for vector in vectors)
    alone = await plane.terminal(await embed(plane, (9,)))
    assert floats(alone) == [vectors[1]]

    store = await plane.bus.jetstream().object_store("tokenizers")
    bundle = codec.decode((await store.get("m@1")).data or b"", TokenizerBundle)
    assert (bundle.dimensions, bundle.chat_template) == (16, "")


async def test_lost_vectors_are_sent_again(plane: Control, start_agent: StartAgent) -> None:
    start_agent()
    await plane.place("n1", embedder())
    await plane.replica("n1", "ready")
    plane.drop_next = 1
    request_id = await embed(plane, (1, 2), (3,))
    await eventually(lambda: plane.drop_next == 0)
    await plane.resend("n1", {request_id: 0})
    last = await plane.terminal(request_id)
    assert len(last.embeddings) == 2 and last.finish_reason == "stop"


async def test_many_vectors_are_several_messages(plane: Control, start_agent: StartAgent) -> None:
    """What ends in one step together would not fit into one message of the bus."""
    start_agent()
    source = "simulated://m?step_ms=500&prefill_tps=1000000&dims=4096"
    await plane.place("n1", embedder(source, max_batch=256))
    await plane.replica("n1", "ready")
    request_ids = [await embed(plane, *[(number, n) for n in range(30)]) for number in range(5)]
    ends = [await plane.terminal(request_id) for request_id in request_ids]
    assert all(len(end.embeddings) == 30 for end in ends)
    sizes = [len(msgspec.msgpack.encode(frame)) for frame in plane.frames]
    assert max(sizes) < RESEND_BYTES + 100_000


async def test_cancelled_is_over_at_once(plane: Control, start_agent: StartAgent) -> None:
    """A long list ends between two of its steps, and the node is free."""
    start_agent()
    await plane.place("n1", embedder(SLOW, max_batch=1))
    await plane.replica("n1", "ready")
    request_id = await embed(plane, *[(n,) for n in range(MAX_INPUTS)])
    await eventually(lambda: (load := plane.load("n1")) and load.num_running)
    await plane.cancel("n1", request_id)
    last = await plane.terminal(request_id, 2)
    assert (last.finish_reason, last.embeddings) == ("cancelled", ())
    idle = await eventually(
        lambda: (load := plane.load("n1")) and not load.num_running and load.num_steps and load
    )
    assert 1 <= last.num_computed_tokens < MAX_INPUTS
    assert last.num_computed_tokens == idle.num_steps == idle.prompt_tokens


async def test_telemetry_counts_tokens_and_no_blocks(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", embedder())
    await plane.replica("n1", "ready")
    await plane.terminal(await embed(plane, (1, 2, 3), (4,)))
    load = await eventually(lambda: (load := plane.load("n1")) and load.prompt_tokens and load)
    assert (load.prompt_tokens, load.generated_tokens, load.num_blocks) == (4, 0, 0)
    assert load.num_steps == 1
    page = agent.get("/metrics")[1]
    assert "engine:prompt_tokens_total{" in page and "engine:kv_cache_usage_perc" in page


@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_what_the_model_does_not_do_is_refused(
    plane: Control, start_agent: StartAgent, task: str
) -> None:
    """By the engine, as a caller's mistake; the replica goes on."""
    start_agent()
    await plane.place("n1", spec(source=FAST, task=task))
    await plane.replica("n1", "ready")
    wrong = await (plane.generate("n1") if task == "embed" else embed(plane, (1,)))
    assert (await plane.terminal(wrong)).error_code == "task_unsupported"
    right = await (embed(plane, (1,)) if task == "embed" else plane.generate("n1"))
    assert (await plane.terminal(right)).finish_reason in ("stop", "length")


async def test_more_vectors_than_a_message_holds_are_refused(
    plane: Control, start_agent: StartAgent
) -> None:
    start_agent()
    await plane.place("n1", embedder())
    await plane.replica("n1", "ready")
    last = await plane.terminal(await embed(plane, *[(n,) for n in range(MAX_INPUTS + 1)]))
    assert (last.finish_reason, last.error_code) == ("error", "invalid_request")


# --- with weights -------------------------------------------------------------------------------
def load(wanted: ReplicaSpec) -> LoadedModel:
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB)
    config = WorkerConfig(device, 1, "/tmp/engine-test-models", (str(tiny_encoder().parent),))
    return backend.load_torch(wanted, config, lambda *_: None)


def tiny(**fields: object) -> ReplicaSpec:
    return embedder(f"file://{tiny_encoder()}", **fields)


def test_an_encoder_is_weights_and_workspace() -> None:
    loaded = load(tiny(max_model_len=1000))
    stats = loaded.engine.stats()
    shape = read_encoder_config(tiny_encoder())
    assert stats.weights_bytes == shape.weights_bytes("float32") and stats.kv_bytes == 0
    assert loaded.peak_bytes == stats.weights_bytes + loaded.workspace_bytes
    assert loaded.workspace_bytes >= shape.workspace_bytes("float32", 512) > 0
    assert (loaded.max_model_len, loaded.bundle.dimensions) == (POSITIONS, DIMENSIONS)
    assert load(tiny(max_model_len=12)).max_model_len == 12
    assert load(tiny(quantization="bf16")).engine.stats().weights_bytes * 2 == stats.weights_bytes


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (tiny(memory_bytes=50_000), "insufficient_memory"),
        (tiny(quantization="int8"), "quantization_unsupported"),
        (tiny(tensor_parallel=2), "tensor_parallel_unsupported"),
        (tiny(sha256="00"), "checksum_mismatch"),
        (embedder(f"file://{tiny_model()}"), "checkpoint_mismatch"),
        (spec(source=f"file://{tiny_encoder()}"), "checkpoint_mismatch"),
        (embedder("file:///etc"), "source_not_allowed"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_a_code(wanted: ReplicaSpec, code: str) -> None:
    with pytest.raises(LoadError) as refused:
        load(wanted)
    assert refused.value.code == code


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_minilm_over_the_bus(plane: Control, start_agent: StartAgent) -> None:
    """Fetched or cached, verified, loaded within its budget, beside nothing."""
    start_agent("n1", "--model-cache", str(cache_root()))
    await plane.place("n1", embedder(MINILM, memory_bytes=GIB // 4))
    status = await plane.replica("n1", "ready", deadline_s=500)
    assert status.sha256.startswith("cbf231bb")
    assert (status.max_model_len, status.kv_bytes) == (256, 0)
    last = await plane.terminal(await embed(plane, (101, 7592, 102), (101, 2088, 102)), 60)
    assert [len(vector) for vector in floats(last)] == [384, 384]
