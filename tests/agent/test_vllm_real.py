"""vLLM itself with a real model, compared with the built-in engine.

One server for all of this, on one thread: it takes most of a minute to start.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from gpuagent.agent.backends import vllm
from gpuagent.agent.backends.base import LoadedModel
from gpuagent.agent.backends.torch import load_torch
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.engine.request import GenerationRequest, HandOver, RequestOutput, SamplingParams
from gpuagent.engine.shared_pool import SharedPool
from gpuagent.wire.messages import Device
from tests.agent.harness import GIB, spec
from tests.engine.real_model import SMOLLM2, cache_root, real_model
from tests.engine.vllm import vllm_python

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

QUESTION = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
COUNT = 12


@pytest.fixture(scope="module")
def config() -> WorkerConfig:
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=4 * GIB)
    options = {"vllm_python": vllm_python(), "vllm_options": ("--enforce-eager",)}
    return WorkerConfig(device, 1, str(cache_root()), **options, stall_seconds=120.0)


@pytest.fixture(scope="module")
def model(config: WorkerConfig) -> Iterator[LoadedModel]:
    real_model()
    loaded = vllm.load_vllm(_spec("vllm"), config, lambda *_: None)
    yield loaded
    loaded.close()
    assert not psutil.Process().children(recursive=True)


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    file = Path(real_model().path, "tokenizer.json")
    return tuple(Tokenizer.from_file(str(file)).encode(QUESTION, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def reference(config: WorkerConfig, prompt: tuple[int, ...]) -> list[RequestOutput]:
    """What the built-in engine says, with log probabilities."""
    builtin = load_torch(_spec("builtin"), config, lambda *_: None)
    SharedPool().join(builtin.engine.lease)
    return _ask(builtin, prompt, max_tokens=COUNT, logprobs=2)


def _spec(engine: str):
    return spec(source=SMOLLM2, memory_bytes=GIB, max_batch=4, max_model_len=512, engine=engine)


def _ask(
    model: LoadedModel, prompt: tuple[int, ...], sent: tuple[int, ...] = (), **sampling
) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    request = GenerationRequest(f"r{time.monotonic_ns()}", prompt, params)
    if sent:
        model.engine.adopt(request, HandOver(sent, 1, 0), None)
    else:
        model.engine.add(request)
    return _drive(model)


def _drive(model: LoadedModel) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    give_up = time.monotonic() + 300
    while model.engine.has_work():
        assert time.monotonic() < give_up, outputs
        outputs += model.engine.step()
    return outputs


def _tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _text(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_its_greedy_answer_is_the_built_in_engines(model, prompt, reference) -> None:
    """The same weights in the same number format: equal tokens, text, counts and probabilities."""
    found = _ask(model, prompt, max_tokens=COUNT, logprobs=2)
    assert "Paris" in _text(found)
    assert (_tokens(found), _text(found)) == (_tokens(reference), _text(reference))
    ends = [(one[-1].finish_reason, one[-1].num_output_tokens) for one in (found, reference)]
    assert ends[0] == ends[1]
    pairs = zip(
        (entry for one in found for entry in one.logprobs),
        (entry for one in reference for entry in one.logprobs),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours.token_id, ours.token) == (theirs.token_id, theirs.token)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.02)
        assert [row[:2] for row in ours.top] == [row[:2] for row in theirs.top]


def test_it_goes_on_from_tokens_of_the_built_in_engine(model, prompt, reference) -> None:
    """What a client was sent by one engine is continued by the other, token for token."""
    whole = _tokens(reference)
    found = _ask(model, prompt, tuple(whole[:4]), max_tokens=COUNT)
    assert _tokens(found) == whole[4:] and found[0].index == 4
    assert found[-1].num_output_tokens == len(whole)


def test_a_stop_string_and_a_stop_token_end_it_where_they_should(model, prompt, reference) -> None:
    whole = _tokens(reference)
    found = _ask(model, prompt, max_tokens=COUNT, stop=("Paris",))
    assert found[-1].finish_reason == "stop" and "Paris" not in _text(found)
    assert (
        _text(reference).startswith(_text(found)) and _tokens(found) == whole[: len(_tokens(found))]
    )
    found = _ask(model, prompt, max_tokens=COUNT, stop_token_ids=(whole[3],))
    assert (_tokens(found), found[-1].finish_reason) == (whole[:3], "stop")


def test_a_seed_makes_a_draw_repeatable(model, prompt) -> None:
    sampling = {"max_tokens": 5, "temperature": 1.5, "top_p": 0.95, "top_k": 40, "min_p": 0.01,
                "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.3,
                "logit_bias": ((504, -5.0),)}  # fmt: skip
    first = _tokens(_ask(model, prompt, seed=7, **sampling))
    assert first == _tokens(_ask(model, prompt, seed=7, **sampling))
    assert 504 not in first


def test_a_cancelled_generation_is_forgotten_by_vllm(model, prompt) -> None:
    """Its own metrics say so within a second or two."""
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    model.engine.add(GenerationRequest("long", prompt, params))
    while not model.engine.step():
        pass
    model.engine.cancel("long")
    assert [one.finish_reason for one in _drive(model)][-1] == "cancelled"
    told: list[str] = []
    give_up = time.monotonic() + 10
    while not any('num_requests_running{engine="0",model_name="model"} 0.0' in one for one in told):
        assert time.monotonic() < give_up, told[-1:]
        model.engine.client.get("/metrics", lambda _, text: told.append(text))
        time.sleep(0.1)


def test_its_figures_are_those_of_the_cache_it_was_given(model) -> None:
    stats = model.engine.stats()
    assert stats.num_blocks * stats.block_size >= 4 * 512  # of four sequences of full length
    assert 0 < stats.weights_bytes + stats.kv_bytes <= GIB
    assert stats.num_free_blocks == stats.num_blocks and stats.num_decode_tokens > 0


def test_what_remains_of_a_killed_server_is_ended_too(model) -> None:
    """SIGKILL of its first process leaves others: none of them stays, and the descriptor tells."""
    family = psutil.Process().children(recursive=True)
    (api,) = [one for one in family if "--uds" in one.cmdline() and "-I" not in one.cmdline()]
    assert len(family) >= 3
    os.kill(api.pid, signal.SIGKILL)
    give_up = time.monotonic() + 10
    while model.describe_end() != "vLLM was ended by signal 9":
        assert time.monotonic() < give_up, model.describe_end()
        time.sleep(0.05)
    assert not [one for one in family if one.is_running()]
