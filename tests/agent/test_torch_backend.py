"""A real model, SmolLM2-135M-Instruct, through agent, worker and bus."""

import asyncio
from contextlib import suppress

import pytest
from nats.js.errors import ObjectNotFoundError
from tokenizers import Tokenizer

from gpuagent.wire import codec
from gpuagent.wire.messages import Sampling, TokenizerBundle
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Control, spec
from tests.engine.real_model import SMOLLM2, cache_root


async def stored_tokenizer(plane: Control, version_id: str) -> bytes:
    """Its bundle, which the agent stores beside saying that the replica is ready."""
    store = await plane.bus.jetstream().object_store("tokenizers")
    for _ in range(100):
        with suppress(ObjectNotFoundError):
            return (await store.get(version_id)).data or b""
        await asyncio.sleep(0.1)
    raise AssertionError(f"no tokenizer of {version_id} was stored")


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_a_real_model_answers_over_the_bus(plane: Control, start_agent: StartAgent) -> None:
    """Downloaded or cached, verified, loaded within its budget, and it knows France's capital."""
    start_agent("n1", "--devices", "cpu:3GiB", "--model-cache", str(cache_root()))
    await plane.place("n1", spec(source=SMOLLM2, memory_bytes=2 * GIB, max_batch=4))
    status = await plane.replica("n1", "ready", deadline_s=500)
    assert status.sha256.startswith("3f85eb6c") and status.max_model_len == 2048
    assert 0 < status.weights_bytes + status.kv_bytes < 2 * GIB

    stored = await stored_tokenizer(plane, "m@1")
    bundle = codec.decode(stored, TokenizerBundle, max_bytes=64 << 20)
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    prompt = (
        "<|im_start|>user\nWhat is the capital of France? Answer with one word.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    request_id = await plane.generate(
        "n1",
        prompt_token_ids=tuple(tokenizer.encode(prompt).ids),
        sampling=Sampling(max_tokens=12, temperature=0.0),
    )
    last = await plane.terminal(request_id, 60)
    token_ids = plane.assert_contiguous(request_id)
    assert last.finish_reason in ("stop", "length")
    assert "Paris" in plane.text(request_id)
    assert tokenizer.decode(token_ids) == plane.text(request_id)


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_a_real_model_without_room_is_refused(
    plane: Control, start_agent: StartAgent
) -> None:
    """The estimate is made from the model's shape before its weights are read."""
    start_agent("n1", "--devices", "cpu:3GiB", "--model-cache", str(cache_root()))
    await plane.place("n1", spec(source=SMOLLM2, memory_bytes=GIB // 4))
    status = await plane.replica("n1", "failed", deadline_s=500)
    assert status.reason_code == "insufficient_memory"
