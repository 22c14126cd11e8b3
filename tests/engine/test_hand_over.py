"""A request that one engine begins and another ends is the same request: tokens, text, scores."""

import pytest

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, HandOver, RequestRejected, SamplingParams
from tests.engine.tiny_model import tiny_model, wide_tiny_model

KINDS = [  # torch, then the native kernels; float32 and int8 keys and values
    (tiny_model, "none", "float32"),
    (tiny_model, "none", "int8"),
    (wide_tiny_model, "none", "float32"),
    (wide_tiny_model, "none", "int8"),
    (wide_tiny_model, "int8", "int8"),
]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11, "logprobs": 2},
    "unseeded": {"temperature": 1.0, "top_p": 0.9},
    "penalised": {
        "temperature": 0.7,
        "seed": 3,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


def load(kind=KINDS[2], **options):
    make_model, quantization, kv_cache_dtype = kind
    defaults = {"num_blocks": 40, "max_num_seqs": 4, "swap_bytes": 4 << 20}
    formats = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    return TorchEngine.load(make_model(), **{**defaults, **formats, **options})


def ask(name="a", num_prompt=37, max_tokens=24, **sampling):
    params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, **sampling}
    return GenerationRequest(name, tuple(range(1, 1 + num_prompt)), SamplingParams(**params))


def collect(engine, into):
    for output in engine.step():
        into.setdefault(output.request_id, []).append(output)
    return into


def finish(engine, into):
    while engine.has_work():
        collect(engine, into)
    return into


def move(source, target, request, parts, num_steps=1):
    """Let `source` decode `num_steps` tokens, then hand over; the state."""
    source.add(request)
    while request.request_id not in source.decoding():
        collect(source, parts)
    for _ in range(num_steps - 1):
        collect(source, parts)
    contents = memoryview(bytearray(source.num_bytes_of(request.request_id)))
    state = source.detach(request.request_id, contents)
    assert target.adopt(request, state, contents)
    return state


def whole(parts):
    return [
        [token for part in parts for token in part.token_ids],
        "".join(part.text for part in parts),
        [entry for part in parts for entry in part.logprobs],
        parts[-1].finish_reason,
    ]


def assert_nothing_held(engine):
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and not engine.has_work()
    assert stats.num_free_host_blocks == engine._scheduler.config.num_host_blocks
    assert not engine._live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_steps", [1, 5])
def test_the_rest_is_what_it_would_have_been(kind, sampling, num_steps):
    """For an unseeded request the first engine's own seed goes with it."""
    prefill, decode, parts = load(kind), load(kind), {}
    request = ask(**SAMPLINGS[sampling])
    state = move(prefill, decode, request, parts, num_steps)
    assert len(state.token_ids) == num_steps
    together = whole(finish(decode, parts)["a"])
    alone = load(kind)
    alone.add(request)
    alone._live["a"].seed = state.seed
    assert together == whole(finish(alone, {})["a"])
    indices = [part.index for part in parts["a"]]
    assert indices == sorted(set(indices)), "no token is delivered twice"
    assert_nothing_held(prefill)
    assert_nothing_held(decode)


def test_it_goes_on_among_others_and_computes_no_prompt():
    prefill, decode, parts = load(), load(), {}
    for i in range(3):
        decode.add(ask(f"other{i}", num_prompt=20 + i))
        collect(decode, {})
    before = decode.stats().num_prefill_tokens
    move(prefill, decode, ask(), parts)
    finish(decode, parts)
    assert decode.stats().num_prefill_tokens == before
    alone = finish_alone(ask())
    assert whole(parts["a"]) == alone


def finish_alone(request):
    engine = load()
    engine.add(request)
    return whole(finish(engine, {})[request.request_id])


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_the_second_engine_may_guess_ahead(speculation):
    prefill, parts = load(), {}
    decode = load(speculation=speculation, draft_path=wide_tiny_model())
    move(prefill, decode, ask(max_tokens=40), parts)
    assert whole(finish(decode, parts)["a"]) == finish_alone(ask(max_tokens=40))


def test_text_held_back_by_the_first_is_delivered_by_the_second():
    """A stop string may begin in one engine's tokens and end in the other's."""
    sampling = {"max_tokens": 80, "temperature": 1.0, "seed": 5}
    engine = load()
    engine.add(ask(**sampling))
    deltas = [part.text for part in finish(engine, {})["a"]]
    text, starts = "".join(deltas), [len("".join(deltas[:i])) for i in range(len(deltas))]
    pairs = [
        i
        for i in range(2, len(deltas))
        if len(deltas[i - 1]) == len(deltas[i]) == 1
        and text.find(deltas[i - 1] + deltas[i]) == starts[i - 1]
    ]
    for i in pairs[:3]:
        request = ask(stop=(deltas[i - 1] + deltas[i],), **sampling)
        parts, decode = {}, load()
        move(load(), decode, request, parts, num_steps=i)
        assert "".join(part.text for part in parts["a"]) == text[: starts[i - 1]], "one is held"
        assert whole(finish(decode, parts)["a"]) == finish_alone(request)
        assert parts["a"][-1].finish_reason == "stop"
    assert pairs, "two characters in two tokens"


def test_without_room_nothing_has_changed_and_later_it_is_taken():
    block = 16 * 2 * 2 * 2 * 32 * 4
    prefill, decode, parts = load(), load(swap_bytes=3 * block, max_num_seqs=1), {}
    move(prefill, decode, ask("a"), parts)
    late = ask("b")
    prefill.add(late)
    while "b" not in prefill.decoding():
        collect(prefill, parts)
    contents = memoryview(bytearray(prefill.num_bytes_of("b")))
    state = prefill.detach("b", contents)
    assert not decode.adopt(late, state, contents), "the host blocks are a's still"
    collect(decode, parts)
    assert decode.adopt(late, state, contents)
    finish(decode, parts)
    assert whole(parts["a"]) == whole(parts["b"])
    assert_nothing_held(decode)


def test_without_its_keys_and_values_they_are_computed_anew():
    prefill, decode, parts = load(), load(swap_bytes=0), {}
    prefill.add(ask())
    collect(prefill, parts)
    contents = memoryview(bytearray(prefill.num_bytes_of("a")))
    state = prefill.detach("a", contents)
    assert not decode.adopt(ask(), state, contents)
    assert decode.adopt(ask(), state, None)
    assert whole(finish(decode, parts)["a"]) == finish_alone(ask())
    assert decode.stats().num_prefill_tokens == 38


CONTINUED = {
    **{name: options for name, options in SAMPLINGS.items() if name != "unseeded"},
    "stopped": {"temperature": 1.0, "seed": 5, "stop": ("ab", "e")},
}


def continued(token_ids, **options):
    """An engine that has the prompt and ``token_ids`` and nothing else of the first one."""
    engine, seed = load(), options.get("seed") or 0
    assert engine.adopt(ask(**options), HandOver(tuple(token_ids), seed, 0), None)
    return engine


@pytest.mark.parametrize("sampling", CONTINUED)
def test_a_lost_request_goes_on_from_its_tokens_alone(sampling):
    """Cut after any token, in the middle of characters and stop strings too: text, scores and end
    are those of the undisturbed run, and no token comes twice."""
    options = CONTINUED[sampling]
    alone = load()
    alone.add(ask(**options))
    outputs = finish(alone, {})["a"]
    for cut in range(1, len(outputs)):
        begun = outputs[:cut]
        engine = continued([t for part in begun for t in part.token_ids], **options)
        assert whole(begun + finish(engine, {})["a"]) == whole(outputs)
        assert_nothing_held(engine)


def test_where_only_the_end_is_missing_it_is_said_without_a_token():
    """The last token was delivered, and the word that it was the last was lost: it was the
    longest allowed, or completed a stop string."""
    options = {"temperature": 1.0, "seed": 5}
    alone = load()
    alone.add(ask(**options))
    _, text, *_ = whole(finish(alone, {})["a"])
    for asked, reason in (({"max_tokens": 3}, "length"), ({"stop": (text[:1],)}, "stop")):
        first = load()
        first.add(ask(**options, **asked))
        tokens = [t for part in finish(first, {})["a"] for t in part.token_ids]
        engine = continued(tokens, **options, **asked)
        (end,) = finish(engine, {})["a"]
        assert (end.index, end.token_ids, end.finish_reason) == (len(tokens), (), reason)
        assert_nothing_held(engine)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_request_leaves_nothing_behind(is_running):
    prefill, decode, parts = load(), load(), {}
    move(prefill, decode, ask(), parts)
    if is_running:
        collect(decode, parts)
    decode.cancel("a")
    last = finish(decode, parts)["a"][-1]
    assert last.finish_reason == "cancelled"
    assert last.num_output_tokens == sum(len(part.token_ids) for part in parts["a"])
    assert_nothing_held(decode)


def test_a_request_that_can_never_run_here_is_refused_and_holds_nothing():
    prefill, decode, parts = load(), load(), {}
    move(prefill, decode, ask(), parts)
    state = move(load(), load(), ask("b"), {})
    contents = memoryview(bytearray(3 * 16 * 2 * 2 * 2 * 32 * 4))
    with pytest.raises(RequestRejected, match="duplicate_request_id"):
        decode.adopt(ask("a"), state, contents)
    finish(decode, parts)
    assert_nothing_held(decode)
