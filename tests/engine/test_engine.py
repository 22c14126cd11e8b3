"""The torch engine on a small random model: outputs, endings, failures, numbers."""

import math
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpuagent.engine.engine import EngineFailed, TorchEngine
from gpuagent.engine.request import (
    GenerationRequest,
    LatencyClass,
    RequestRejected,
    SamplingParams,
)
from gpuagent.engine.scheduler import Policy
from gpuagent.engine.speculation import Speculation
from gpuagent.engine.speculator import SpeculationKind
from gpuagent.models.errors import LoadError
from tests.engine.tiny_model import EOS, tiny_model

TOKENIZER = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))


pytestmark = pytest.mark.usefixtures("one_thread")


def load(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 4}
    return TorchEngine.load(tiny_model(), **{**defaults, **options})


def ask(name, prompt=(1, 2, 3), latency_class=LatencyClass.STANDARD, salt=b"", **sampling):
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling)
    return GenerationRequest(name, tuple(prompt), params, latency_class, salt)


def run(engine, *requests, max_steps=500):
    """Outputs by request id, after checking what holds for every request."""
    for request in requests:
        engine.add(request)
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work(), "unfinished"
    for parts in outputs.values():
        check_parts(parts)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0
    return outputs


def check_parts(parts):
    """Exactly one terminal output, the last; indices and totals count what was delivered."""
    assert [p.finish_reason is not None for p in parts] == [False] * (len(parts) - 1) + [True]
    num_tokens = 0
    for part in parts:
        assert part.index == num_tokens
        num_tokens += len(part.token_ids)
        assert part.num_output_tokens == num_tokens


def tokens_of(parts):
    return [token for part in parts for token in part.token_ids]


def text_of(parts):
    return "".join(part.text for part in parts)


def greedy(prompt=(1, 2, 3), num=8):
    """The tokens a greedy request delivers, from a fresh engine."""
    return tokens_of(run(load(), ask("x", prompt, max_tokens=num))["x"])


def test_a_request_ends_by_length_with_its_text():
    parts = run(load(), ask("a", max_tokens=8))["a"]
    assert parts[-1].finish_reason == "length"
    assert len(tokens_of(parts)) == 8
    assert text_of(parts) == TOKENIZER.decode(tokens_of(parts))
    assert parts[-1].num_prompt_tokens == 3


def test_the_end_token_ends_the_request_and_is_not_delivered():
    bias = ((EOS, 100.0),)
    parts = run(load(), ask("a", logit_bias=bias, ignore_eos=False))["a"]
    assert len(parts) == 1
    assert (parts[0].finish_reason, parts[0].token_ids) == ("stop", ())
    assert parts[0].num_output_tokens == 0


def test_ignoring_the_end_token_delivers_it():
    parts = run(load(), ask("a", logit_bias=((EOS, 100.0),), max_tokens=2))["a"]
    assert tokens_of(parts) == [EOS, EOS]


def test_a_stop_token_ends_the_request_and_is_not_delivered():
    expected = greedy()
    parts = run(load(), ask("a", stop_token_ids=(expected[4],)))["a"]
    assert tokens_of(parts) == expected[: expected.index(expected[4])]
    assert parts[-1].finish_reason == "stop"


def test_tokens_of_a_stop_string_count_but_its_text_is_cut():
    letters = [(t, 50.0) for t in TOKENIZER.encode("abc").ids]
    plain = run(load(), ask("a", logit_bias=tuple(letters)))["a"]
    text = text_of(plain)
    stop = text[3:5]
    parts = run(load(), ask("a", logit_bias=tuple(letters), stop=(stop,)))["a"]
    assert parts[-1].finish_reason == "stop"
    assert text_of(parts) == text[: text.find(stop)]
    assert len(tokens_of(parts)) == text.find(stop) + 2


def test_the_context_ends_a_request():
    parts = run(load(max_model_len=10), ask("a", range(7), max_tokens=50))["a"]
    assert (parts[-1].finish_reason, len(tokens_of(parts))) == ("length", 3)


def test_a_cancelled_request_has_one_final_output_and_frees_its_blocks():
    engine = load()
    engine.add(ask("a", max_tokens=50))
    engine.add(ask("b", max_tokens=5))
    outputs = {output.request_id: [output] for output in engine.step()}
    for request_id in ("a", "a", "nobody"):
        engine.cancel(request_id)
    assert engine.stats().num_running == 1
    run_on(engine, outputs)
    check_parts(outputs["a"])
    assert [p.finish_reason for p in outputs["a"]] == [None, "cancelled"]
    assert len(tokens_of(outputs["b"])) == 5
    assert engine.stats().num_free_blocks == 64


def test_a_waiting_request_can_be_cancelled():
    engine = load(max_num_seqs=1)
    engine.add(ask("a"))
    engine.add(ask("b"))
    engine.step()
    engine.cancel("b")
    assert [o.finish_reason for o in engine.step() if o.request_id == "b"] == ["cancelled"]


def test_a_cancelled_id_can_be_used_again():
    engine = load()
    engine.add(ask("a"))
    engine.cancel("a")
    engine.step()
    assert tokens_of(run(engine, ask("a"))["a"]) == greedy()


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("empty_prompt", ask("x", ())),
        ("invalid_token_id", ask("x", (1, 259))),
        ("invalid_token_id", ask("x", (-1,))),
        ("invalid_token_id", ask("x", stop_token_ids=(259,))),
        ("context_length_exceeded", ask("x", range(250), max_tokens=9)),
        ("invalid_sampling", ask("x", max_tokens=0)),
        ("invalid_sampling", ask("x", temperature=math.nan)),
        ("duplicate_request_id", ask("busy")),
    ],
)
def test_the_callers_mistakes_are_refused_with_a_code(code, request_):
    engine = load(max_model_len=200)
    engine.add(ask("busy"))
    with pytest.raises(RequestRejected) as refusal:
        engine.add(request_)
    assert refusal.value.code == code
    assert engine.stats().num_waiting == 1


def test_a_request_that_never_fits_the_pool_is_refused():
    with pytest.raises(RequestRejected, match="kv_capacity"):
        TorchEngine.load(tiny_model(), num_blocks=4, block_size=4, max_model_len=64).add(
            ask("x", range(10), max_tokens=10)
        )


def test_nan_ends_only_the_request_it_belongs_to():
    """A token whose embedding is NaN spoils its request, not a neighbour, nor a later request
    that gets its blocks."""
    engine = load(num_blocks=16)
    sound = engine.executor.model.embedding
    engine.executor.model.embedding = sound.clone()
    engine.executor.model.embedding[200] = math.nan
    outputs = run(engine, ask("good"), ask("bad", (1, 200, 3)), ask("also", (9, 9)))
    assert outputs["bad"][-1].finish_reason == "error"
    assert outputs["bad"][-1].error_code == "numerical_error"
    assert tokens_of(outputs["good"]) == greedy()
    engine.executor.model.embedding = sound
    again = run(engine, *[ask(f"r{i}", (1, 2, 3, i), max_tokens=12) for i in range(4)])
    for i in range(4):
        assert tokens_of(again[f"r{i}"]) == greedy((1, 2, 3, i), 12)


class Picky:
    """A model that raises whenever a token is among its inputs."""

    def __init__(self, model, token):
        self._model, self._token = model, token
        self.num_raised = 0

    def forward(self, tokens, positions, attention):
        if self._token in tokens.tolist():
            self.num_raised += 1
            raise ValueError("cannot compute this")
        return self._model.forward(tokens, positions, attention)

    def logits(self, hidden):
        return self._model.logits(hidden)


def test_an_exception_in_a_step_fails_only_the_request_it_belongs_to():
    engine = load()
    engine.executor.model = Picky(engine.executor.model, 200)
    outputs = run(engine, ask("good"), ask("bad", (1, 200, 3)))
    last = outputs["bad"][-1]
    assert (last.error_code, last.error_type) == ("engine_error", "ValueError")
    assert last.error_trace.endswith("ValueError: cannot compute this\n")
    assert "in forward" in last.error_trace, "where it happened"
    assert tokens_of(outputs["good"]) == greedy()


@pytest.mark.parametrize("place", ["sample", "_logprobs"])
def test_an_exception_beside_the_forward_pass_says_where_it_was(monkeypatch, place):
    def broken(*_):
        raise IndexError("out of range")

    monkeypatch.setattr(f"gpuagent.engine.engine.{place}", broken)
    (last,) = run(load(), ask("bad"))["bad"]
    assert (last.error_code, last.error_type) == ("engine_error", "IndexError")
    assert "in broken" in last.error_trace


def test_a_bad_request_among_many_is_found_by_halving():
    engine = load(max_num_seqs=8, max_batch_tokens=64)
    engine._runner.executor.model = model = Picky(engine.executor.model, 200)
    prompts = {f"r{i}": (1, 2, i) for i in range(8)} | {"r5": (1, 200, 3)}
    outputs = run(engine, *[ask(name, prompt) for name, prompt in prompts.items()])
    assert [n for n, parts in outputs.items() if parts[-1].error_code == "engine_error"] == ["r5"]
    assert tokens_of(outputs["r4"]) == greedy((1, 2, 4))
    assert model.num_raised == 4, "all, a half, a quarter, itself"


def test_an_engine_in_which_every_step_fails_gives_up():
    engine = load(max_num_seqs=2)
    engine._runner.executor.model = Picky(engine.executor.model, 3)
    for i in range(8):
        engine.add(ask(f"r{i}"))
    with pytest.raises(EngineFailed, match="step_failed"):
        for _ in range(8):
            engine.step()


def test_the_age_of_the_last_step_counts_only_while_there_is_work():
    engine = load()
    assert engine.stats().last_step_age == 0.0
    engine.add(ask("a"))
    time.sleep(0.02)
    assert engine.stats().last_step_age >= 0.02
    engine.step()
    assert engine.stats().last_step_age < 0.02
    engine.cancel("a")
    assert engine.stats().last_step_age == 0.0


def test_guesses_by_the_model_itself_are_all_accepted():
    """In int8, as drafts are."""
    options = {"quantization": "int8", "max_batch_tokens": 32}
    engine = load(speculation="draft", draft_path=tiny_model(), **options)
    guess_always(engine)
    requests = [ask(f"r{i}", (i, 7, i), max_tokens=13) for i in range(3)]
    outputs, plain = run(engine, *requests), run(load(**options), *requests)
    for name, parts in plain.items():
        assert tokens_of(outputs[name]) == tokens_of(parts)
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens == 27
    assert stats.spec_decode_num_drafts == 9
    assert stats.num_steps == 4, "one token, then three times 4"


def test_guesses_that_are_sometimes_wrong_change_nothing():
    """A float32 model's own copy, rounded to int8: most guesses are right."""
    engine = load(speculation="draft", draft_path=tiny_model(), max_batch_tokens=32)
    guess_always(engine)
    requests = [ask(f"r{i}", (i, 7, i), max_tokens=40) for i in range(3)]
    outputs = run(engine, *requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == greedy(request.prompt_token_ids, 40)
    stats = engine.stats()
    accepted, guessed = stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens
    assert 0.5 * guessed < accepted < guessed


def test_a_stop_token_among_accepted_guesses_ends_the_request_there():
    plain = greedy((1, 2, 3), 12)
    stop = plain[6]
    engine = load(speculation="draft", draft_path=tiny_model())
    guess_always(engine)
    parts = run(engine, ask("a", stop_token_ids=(stop,), max_tokens=12))["a"]
    assert tokens_of(parts) == plain[: plain.index(stop)]
    assert parts[-1].finish_reason == "stop"


def test_logprobs_come_with_guessed_tokens_too():
    params = {"max_tokens": 9, "logprobs": 2, "temperature": 1.0, "seed": 3}
    engine = load(speculation="draft", draft_path=tiny_model())
    guess_always(engine)
    guessed = [e for part in run(engine, ask("a", **params))["a"] for e in part.logprobs]
    plain = [e for part in run(load(), ask("a", **params))["a"] for e in part.logprobs]
    assert [e.token_id for e in guessed] == [e.token_id for e in plain]
    for one, other in zip(guessed, plain, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    """Also one of the same size whose ids mean something else."""
    with pytest.raises(LoadError, match="draft_model_unsupported"):
        load(speculation="draft")
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"A":', '"a ":').replace('"B":', '"A":'))
    with pytest.raises(LoadError, match="other texts"):
        load(speculation="draft", draft_path=tmp_path)


def test_a_draft_models_cache_is_a_part_of_the_bytes_given():
    """Half the blocks, when it is as large as its target; its bytes are counted in the stats."""
    alone, with_draft = (
        load(num_blocks=None, kv_bytes=1 << 20, speculation=kind, draft_path=tiny_model()).stats()
        for kind in ("none", "draft")
    )
    assert with_draft.num_blocks == alone.num_blocks // 2
    assert 1.3 * alone.weights_bytes < with_draft.weights_bytes < 2 * alone.weights_bytes
    assert alone.kv_bytes - (16 << 10) < with_draft.kv_bytes <= (1 << 20) + (16 << 10)


def test_a_prefix_of_another_request_is_reused_but_not_across_salts():
    engine = load()
    prompt = range(10, 30)
    expected = greedy(prompt)
    first = run(engine, ask("a", prompt, salt=b"t1"))["a"]
    second = run(engine, ask("b", prompt, salt=b"t1"))["b"]
    other = run(engine, ask("c", prompt, salt=b"t2"))["c"]
    assert [p[-1].num_cached_tokens for p in (first, second, other)] == [0, 19, 0]
    assert tokens_of(first) == tokens_of(second) == tokens_of(other) == expected
    assert engine.stats().num_cached_tokens == 19


def test_a_swapped_request_goes_on_where_it_was():
    """A realtime request takes the only slot of a batch request, which gives the same tokens
    as undisturbed and is not computed again."""
    engine = load(max_num_seqs=1, prefix_caching=False)
    engine.add(ask("bulk", range(40), LatencyClass.BATCH, max_tokens=20))
    outputs = {}
    for _ in range(6):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.add(ask("now", (9,), LatencyClass.REALTIME, max_tokens=3))
    run_on(engine, outputs)
    assert tokens_of(outputs["bulk"]) == greedy(range(40), 20)
    stats = engine.stats()
    assert (stats.num_swapped_out, stats.num_recomputed) == (1, 0)
    assert stats.num_prefill_tokens == 41
    assert stats.num_free_host_blocks == engine._scheduler.config.num_host_blocks


def test_static_and_continuous_batching_deliver_the_same_tokens():
    requests = [ask(f"r{i}", (i, 7, i), max_tokens=2 + i) for i in range(6)]
    continuous = run(load(), *requests)
    static = run(load(policy=Policy.STATIC), *requests)
    for request_id, parts in continuous.items():
        assert tokens_of(parts) == tokens_of(static[request_id])


def test_logprobs_describe_each_delivered_token():
    parts = run(load(), ask("a", logprobs=3))["a"]
    entries = [entry for part in parts for entry in part.logprobs]
    assert [entry.token_id for entry in entries] == tokens_of(parts)
    for entry in entries:
        assert entry.top[0][0] == entry.token_id, "greedy takes the most likely"
        assert entry.top[0][2] == pytest.approx(entry.logprob)
        assert len(entry.top) == 3


def test_statistics_count_what_happened():
    engine = load()
    run(engine, ask("a", range(20), max_tokens=5))
    stats = engine.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (20, 4)
    assert stats.num_steps == 6
    assert 0 < stats.last_step_seconds <= stats.busy_seconds
    assert stats.weights_bytes == 4 * engine.executor.model.config.num_parameters
    # (64 + the null block) * 4 tokens * 2 layers * keys and values * 2 heads * 8 * 4 bytes
    assert stats.kv_bytes == 65 * 4 * 2 * 2 * 2 * 8 * 4


def test_bfloat16_runs():
    parts = run(load(dtype="bfloat16"), ask("a", range(20)), ask("b", (1,)))["a"]
    assert len(tokens_of(parts)) == 8


random_requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.lists(st.integers(0, 3), min_size=1, max_size=24),
        st.integers(1, 10),
        st.sampled_from(list(LatencyClass)),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25, deadline=None)
@given(
    random_requests,
    st.integers(9, 20),
    st.integers(4, 30),
    st.booleans(),
    st.sampled_from([0, 1 << 14, 1 << 20]),
    st.sampled_from(list(SpeculationKind)),
)
def test_output_does_not_depend_on_company_memory_or_cache(
    events, num_blocks, budget, caching, swap_bytes, speculation
):
    """Whatever joins, leaves, is preempted, swapped, cached or guessed, each request's tokens,
    greedy or seeded, are those it gets alone without guesses."""
    engine = load(
        num_blocks=num_blocks,
        max_batch_tokens=budget,
        prefix_caching=caching,
        swap_bytes=swap_bytes,
        speculation=speculation,
        draft_path=tiny_model(),
    )
    guess_always(engine)
    outputs, requests = {}, []
    for i, (delay, prompt, max_tokens, latency_class, temperature) in enumerate(events):
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": i}
        requests.append(ask(f"r{i}", prompt, latency_class, **sampling))
        for _ in range(delay):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        engine.add(requests[-1])
    for request_id, parts in run_on(engine, outputs).items():
        check_parts(parts)
        alone = run(load(), next(r for r in requests if r.request_id == request_id))
        assert tokens_of(parts) == tokens_of(alone[request_id])


class Eager(Speculation):
    """Has no choice how many tokens to guess."""

    def num_drafts(self, request_id, batch):
        return 3


def guess_always(engine):
    if engine._speculator:
        engine._speculator.speculation = Eager()


def run_on(engine, outputs):
    """Step to the end, adding to outputs."""
    num_steps = 0
    while engine.has_work():
        num_steps += 1
        assert num_steps < 1000, "unfinished"
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs
