"""The embedding engine: whose inputs are computed when, and what each request gets."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.engine.embedding import MAX_FAILED_STEPS, EmbeddingEngine
from gpuagent.engine.encoder import TorchEmbedder, load_encoder
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import (
    GenerationRequest,
    LatencyClass,
    RequestRejected,
    SamplingParams,
)
from gpuagent.models.bert import BertEncoder
from tests.engine.tiny_encoder import DIMENSIONS, POSITIONS, VOCAB, tiny_encoder
from tests.engine.tiny_model import tiny_model

POISON, NOTHING = 66, 77  # tokens that make an embedder raise, or give a vector that is not finite


def asked(name, *inputs, salt=b"", latency_class=LatencyClass.STANDARD, weight=1.0):
    tokens = tuple(token for each in inputs for token in each)
    lengths = tuple(map(len, inputs))
    sampling = SamplingParams(max_tokens=0)
    return GenerationRequest(name, tokens, sampling, latency_class, salt, weight, lengths)


def text_of(inputs):
    return bytes(token for token in inputs)


@dataclass
class Recorder:
    """An embedder whose vectors are the inputs themselves; it keeps what each step was."""

    steps: list[list[bytes]] = field(default_factory=list)
    weights_bytes: int = 7
    broken: bool = False

    def embed(self, inputs):
        if self.broken or any(POISON in each for each in inputs):
            raise ValueError("poison")
        self.steps.append([text_of(each) for each in inputs])
        return [None if NOTHING in each else text_of(each) for each in inputs]

    def park(self):
        return 5

    def unpark(self):
        return 5


def engine(embedder, max_batch_tokens=8, max_num_inputs=64):
    return EmbeddingEngine(embedder, 100, 20, max_batch_tokens, max_num_inputs)


def drained(running, max_steps=500):
    """Everything that comes until there is no work, by request id."""
    outputs = {}
    for _ in range(max_steps):
        if not running.has_work():
            return outputs
        for output in running.step():
            assert output.request_id not in outputs, "one end for each request"
            outputs[output.request_id] = output
    raise AssertionError(f"not within {max_steps} steps")


def test_the_worked_example():
    """Three inputs of one request and one of another, in two steps."""
    embedder = Recorder()
    running = engine(embedder, max_batch_tokens=512)
    running._max_length = 200
    long = [(i,) * 200 for i in (1, 2, 3)]
    running.add(asked("a", *long, salt=b"a"))
    running.add(asked("b", (4,) * 100, salt=b"b"))
    assert [output.request_id for output in running.step()] == ["b"]
    (output,) = running.step()
    assert output.request_id == "a"
    assert output.embeddings == tuple(text_of(each) for each in long)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=9),
        st.sampled_from(LatencyClass),
        st.sampled_from([b"a", b"b", b"c"]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 30), st.integers(1, 6))
def test_everybody_gets_exactly_the_vectors_of_its_inputs(requests, max_tokens, max_inputs):
    """In order, whatever the batches; no step is over its budget, but one that has one input."""
    embedder = Recorder()
    running = engine(embedder, max_tokens, max_inputs)
    for number, (inputs, latency_class, salt) in enumerate(requests):
        each = map(tuple, inputs)
        running.add(asked(str(number), *each, salt=salt, latency_class=latency_class))
    outputs = drained(running)
    for number, (inputs, _, _) in enumerate(requests):
        output = outputs[str(number)]
        assert output.embeddings == tuple(map(text_of, inputs))
        assert (output.finish_reason, output.token_ids) == ("stop", ())
        assert output.num_prompt_tokens == sum(map(len, inputs))
        assert output.num_output_tokens == 0
    assert len(outputs) == len(requests)
    for step in embedder.steps:
        assert len(step) <= max_inputs
        assert len(step) == 1 or sum(map(len, step)) <= max_tokens
    stats = running.stats()
    assert stats.num_prefill_tokens == sum(len(each) for step in embedder.steps for each in step)
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (0, 0, 0)


def test_a_long_list_does_not_hold_up_another_tenant():
    """Its single input comes in the first step after it arrived, beside theirs."""
    running = engine(Recorder(), max_batch_tokens=8)
    running.add(asked("long", *[(i,) * 4 for i in range(50)], salt=b"a"))
    running.step()
    running.add(asked("short", (60,) * 4, salt=b"b"))
    assert [output.request_id for output in running.step()] == ["short"]


def test_a_realtime_request_comes_before_all_batch_work():
    embedder = Recorder()
    running = engine(embedder, max_batch_tokens=4)
    running.add(asked("later", (1,) * 4, (2,) * 4, latency_class=LatencyClass.BATCH))
    running.add(asked("now", (3,) * 4, latency_class=LatencyClass.REALTIME))
    assert running.urgency() == 10
    assert [output.request_id for output in running.step()] == ["now"]
    assert running.urgency() == 0.1


def test_what_is_cancelled_ends_once_and_computes_no_more():
    embedder = Recorder()
    running = engine(embedder, max_batch_tokens=4)
    running.add(asked("a", *[(i,) * 4 for i in range(9)]))
    running.step()
    running.cancel("a")
    running.cancel("never heard of")
    (output,) = running.step()
    assert (output.finish_reason, output.embeddings) == ("cancelled", ())
    assert not running.has_work() and len(embedder.steps) == 1


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    num_steps=st.integers(0, 13),
)
def test_what_is_cancelled_says_exactly_what_was_computed(lengths, max_tokens, num_steps):
    """Whole inputs, as many tokens as the embedder was given; none before the first step."""
    embedder = Recorder()
    running = engine(embedder, max_tokens)
    running.add(asked("a", *[(1,) * length for length in lengths]))
    outputs = [output for _ in range(num_steps) for output in running.step()]
    running.cancel("a")
    (output,) = outputs + running.step()
    num_computed = sum(len(each) for step in embedder.steps for each in step)
    assert output.num_computed_tokens == num_computed
    assert output.finish_reason == ("stop" if num_computed == sum(lengths) else "cancelled")


def test_a_request_that_raises_takes_only_itself_down():
    running = engine(Recorder(), max_batch_tokens=20)
    running.add(asked("good", (1, 2), (3,)))
    running.add(asked("bad", (POISON,)))
    outputs = drained(running)
    assert outputs["good"].embeddings == (b"\1\2", b"\3")
    assert (outputs["bad"].finish_reason, outputs["bad"].error_code) == ("error", "engine_error")
    assert outputs["bad"].error_type == "ValueError" and "poison" in outputs["bad"].error_trace


def test_a_vector_that_is_no_number_ends_its_request():
    running = engine(Recorder(), max_batch_tokens=20)
    running.add(asked("good", (1, 2)))
    running.add(asked("bad", (5,), (NOTHING,)))
    outputs = drained(running)
    assert outputs["good"].finish_reason == "stop"
    assert (outputs["bad"].error_code, outputs["bad"].embeddings) == ("numerical_error", ())


def test_an_engine_that_always_fails_gives_up():
    running = engine(Recorder(broken=True))
    for number in range(MAX_FAILED_STEPS - 1):
        running.add(asked(str(number), (1,)))
        assert running.step()[0].error_code == "engine_error"
    running.add(asked("last", (1,)))
    with pytest.raises(ValueError, match="poison"):
        running.step()


@pytest.mark.parametrize(
    "request_,code",
    [
        (asked("r", (1,) * 21), "context_length_exceeded"),
        (asked("r", (1, 100)), "invalid_token_id"),
        (asked("r", (1, -1)), "invalid_token_id"),
        (asked("r", (1,), ()), "empty_prompt"),
        (GenerationRequest("r", (1, 2), SamplingParams(0), input_lengths=(1,)), "empty_prompt"),
        (GenerationRequest("r", (1, 2), SamplingParams(5)), "task_unsupported"),
    ],
)
def test_a_callers_mistake_is_refused(request_, code):
    running = engine(Recorder())
    with pytest.raises(RequestRejected) as refusal:
        running.add(request_)
    assert refusal.value.code == code and not running.has_work()


def test_an_id_in_progress_is_refused():
    running = engine(Recorder())
    running.add(asked("r", (1,)))
    with pytest.raises(RequestRejected, match="duplicate"):
        running.add(asked("r", (2,)))


def test_an_engine_that_generates_refuses_to_embed():
    with pytest.raises(RequestRejected) as refusal:
        TorchEngine.load(tiny_model(), kv_bytes=1 << 20).add(asked("r", (1, 2)))
    assert refusal.value.code == "task_unsupported"


def test_requests_survive_a_swap():
    running = engine(Recorder(), max_batch_tokens=4)
    running.add(asked("a", (1,) * 4, (2,) * 4))
    running.step()
    assert running.park() == 5
    running.cancel("unknown")
    assert running.flush() == []
    running.unpark()
    assert drained(running)["a"].embeddings == (b"\1" * 4, b"\2" * 4)


# --- with weights -------------------------------------------------------------------------------
def numbers(output):
    rows = [torch.frombuffer(bytearray(row), dtype=torch.float32) for row in output.embeddings]
    return torch.stack(rows)


def test_vectors_are_the_models_whatever_the_batches():
    inputs = [(2, 5, 6, 3), (2, 7, 8, 10, 3), (2, 3), (2, 5, 6, 3)]
    model = BertEncoder.load(tiny_encoder(), torch.float32, "cpu")
    expected = model.embed(inputs)
    for max_batch_tokens in (4, 9, 512):
        running = load_encoder(tiny_encoder(), max_batch_tokens=max_batch_tokens)
        running.add(asked("r", *inputs))
        found = numbers(drained(running)["r"])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(4), rtol=1e-5, atol=1e-5)


def test_an_input_is_at_most_as_long_as_the_model_knows():
    running = load_encoder(tiny_encoder(), max_length=1000)
    running.add(asked("r", (1,) * POSITIONS))
    with pytest.raises(RequestRejected, match=f"takes {POSITIONS}"):
        running.add(asked("s", (1,) * (POSITIONS + 1)))
    assert len(drained(running)["r"].embeddings[0]) == 4 * DIMENSIONS
    with pytest.raises(RequestRejected, match="vocabulary"):
        running.add(asked("t", (len(VOCAB),)))


def test_weights_that_went_to_the_host_and_back_compute_the_same():
    """As on a device of its own, on a CPU: the same copies."""
    embedder = TorchEmbedder(BertEncoder.load(tiny_encoder(), torch.float32, "cpu"))
    before = embedder.embed([(2, 5, 3)])
    embedder._is_apart = True
    assert embedder.park() == embedder.unpark() == embedder.weights_bytes
    assert embedder.embed([(2, 5, 3)]) == before
