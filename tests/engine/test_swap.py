"""Keys and values that went to host memory come back bit by bit, whatever computes."""

import pytest
import torch

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.preemption import Swap
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.swap import HostBuffer
from tests.engine.tiny_model import tiny_model, wide_tiny_model

KINDS = [  # the first two on torch, the others on the native kernels
    (tiny_model, ("none", "auto")),
    (tiny_model, ("none", "int8")),
    (wide_tiny_model, ("none", "auto")),
    (wide_tiny_model, ("none", "int8")),
    (wide_tiny_model, ("int8", "auto")),
    (wide_tiny_model, ("int8", "float32")),
]


def load(make_model, formats, **options):
    quantization, kv_cache_dtype = formats
    return TorchEngine.load(
        make_model(),
        num_blocks=24,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        prefix_caching=False,
        **options,
    )


def ask(name, prompt, latency_class=LatencyClass.STANDARD, max_tokens=12):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling, latency_class)


def run(engine, tokens):
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize(("make_model", "formats"), KINDS)
def test_blocks_return_to_other_places_unchanged(make_model, formats):
    engine = load(make_model, formats)
    run_prompt = ask("a", range(40), max_tokens=1)
    engine.add(run_prompt)
    engine.step()
    executor, buffer = engine.executor, HostBuffer(engine.executor, 4)
    before = executor.read_blocks([0, 1, 2])
    assert before.any(), "the prompt is in these blocks"
    buffer.swap_out([Swap(0, 3), Swap(1, 0), Swap(2, 1)])
    executor.write_blocks([0, 1, 2], torch.zeros_like(before))
    buffer.swap_in([Swap(7, 3), Swap(5, 0), Swap(9, 1)])
    assert torch.equal(executor.read_blocks([7, 5, 9]), before)
    assert buffer.num_moved == 6


@pytest.mark.parametrize(("make_model", "formats"), KINDS)
def test_a_preempted_request_continues_as_if_undisturbed(make_model, formats):
    plain = run_alone(make_model, formats)
    engine, tokens = load(make_model, formats, max_num_seqs=1), {}
    engine.add(ask("bulk", range(40), LatencyClass.BATCH))
    for _ in range(4):
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.add(ask("now", range(60, 90), LatencyClass.REALTIME, max_tokens=2))
    assert run(engine, tokens)["bulk"] == plain
    assert engine.stats().num_swapped_out == 1
    assert engine.stats().num_prefill_tokens == 70


def run_alone(make_model, formats):
    engine = load(make_model, formats)
    engine.add(ask("bulk", range(40)))
    return run(engine, {})["bulk"]
