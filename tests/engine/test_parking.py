"""A model that leaves the device in the middle of its work says what it would have said."""

import pytest
import torch

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.shared_pool import SharedPool
from gpuagent.engine.weights_swap import offload, restore
from gpuagent.models.llama import LlamaModel
from tests.engine.test_hand_over import ask, collect, finish, whole
from tests.engine.tiny_model import tiny_model, wide_tiny_model

KINDS = {
    "torch": (tiny_model, "none", "auto"),
    "torch int8 cache": (tiny_model, "none", "int8"),
    "native": (wide_tiny_model, "none", "auto"),
    "native int8": (wide_tiny_model, "int8", "auto"),
}
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.0})


pytestmark = pytest.mark.usefixtures("one_thread")


def load(kind, **options):
    make_model, quantization, kv_cache_dtype = KINDS[kind]
    formats = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    defaults = {"kv_bytes": 256 << 10, "kv_limit_bytes": 1 << 20, "swap_bytes": 1 << 20}
    return TorchEngine.load(make_model(), **{**defaults, **formats, **options})


def asks():
    numbered = enumerate(SAMPLINGS)
    return [ask(f"r{i}", 20 + 9 * i, max_tokens=12, **sampling) for i, sampling in numbered]


def answers(engine, pauses=()):
    """Everybody's tokens; before each step in ``pauses`` the engine leaves the device."""
    parts = {}
    for request in asks():
        engine.add(request)
    for number in range(200):
        if number in pauses:
            engine.park()
            engine.unpark()
        if not engine.has_work():
            return {name: whole(its) for name, its in parts.items()}
        collect(engine, parts)
    raise AssertionError("unfinished")


def shared(engine):
    pool = SharedPool()
    pool.join(engine.lease)
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_pauses_change_nothing(kind):
    """Prefill, decoding, sampled and greedy; twice in a row too."""
    assert answers(shared(load(kind)), (0, 1, 2, 5, 5 + 1, 9)) == answers(shared(load(kind)))


@pytest.mark.parametrize("kind", ["torch", "torch int8 cache"])
def test_weights_and_blocks_that_move_come_back_as_they_were(kind):
    """The way of a device with memory of its own, walked on one that has none."""
    engine = load(kind, kv_limit_bytes=None)
    engine.executor.is_apart = True
    assert answers(engine, (0, 1, 4, 8)) == answers(load(kind, kv_limit_bytes=None))


def test_a_draft_model_and_its_cache_may_be_apart_too():
    options = {"kv_limit_bytes": None, "speculation": "draft", "draft_path": tiny_model()}
    engine = load("torch", **options)
    for executor in (engine.executor, engine.draft):
        if hasattr(executor, "_kv"):
            executor.is_apart = True
    assert answers(engine, (1, 4, 8)) == answers(load("torch", **options))


def test_memory_is_free_for_others_while_parked():
    """What is held stays, what is borrowed is given up before, and prefixes are forgotten."""
    pool, engine, other = SharedPool(), load("native"), load("native")
    for each in (engine, other):
        pool.join(each.lease)
    for request in asks():
        engine.add(request)
    parts = collect(engine, {})
    before = pool.capacity_bytes
    engine.park()
    assert pool.capacity_bytes == before - engine.lease.guarantee_bytes
    assert engine.lease.taken_bytes <= engine.lease.guarantee_bytes
    assert other.lease.num_obtainable() * other.lease.chunk_bytes <= pool.capacity_bytes
    engine.unpark()
    assert pool.taken_bytes == engine.lease.taken_bytes > 0
    assert len(finish(engine, parts)) == 3


def test_a_parked_engine_takes_and_cancels_requests_and_does_not_step():
    engine = shared(load("native"))
    first, second, third = asks()
    engine.add(first)
    parts = collect(engine, {})
    engine.park()
    engine.add(second)
    engine.add(third)
    engine.cancel(first.request_id)
    assert [(o.request_id, o.finish_reason) for o in engine.flush()] == [("r0", "cancelled")]
    assert engine.flush() == []
    with pytest.raises(AssertionError):
        engine.step()
    engine.unpark()
    assert {"r1", "r2"} <= set(finish(engine, parts))
    assert engine.lease.num_idle() * engine.lease.chunk_bytes == engine.lease.taken_bytes


def test_moving_weights_keeps_what_is_shared_shared():
    model = LlamaModel.load(tiny_model(), torch.float32, "cpu")
    num_bytes, embedding = model.weights_bytes, model.embedding.clone()
    before = model.embedding
    assert offload(model) >= num_bytes
    assert model.embedding is not before
    restore(model, "cpu")
    assert torch.equal(model.embedding, embedding)
    assert model.weights_bytes == num_bytes, "an embedding that is the head too counts once"
