"""Continuous batching: budgets, memory, order, preemption, and that everybody finishes."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.engine import scheduler as scheduling
from gpuagent.engine.admission import peak_tokens
from gpuagent.engine.request import LatencyClass, RequestRejected
from gpuagent.engine.scheduler import Policy, Scheduler, SchedulerConfig
from tests.engine.drive import Driver, next_token, nothing, request

REALTIME, STANDARD, BATCH = LatencyClass.REALTIME, LatencyClass.STANDARD, LatencyClass.BATCH


def driver(**config):
    defaults = {"num_blocks": 64, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 4}
    return Driver(Scheduler(SchedulerConfig(**{**defaults, **config})))


def computed_tokens(output):
    return {work.request_id: len(work.token_ids) for work in output.work}


def test_a_long_prompt_is_chunked_and_never_stalls_decoding():
    d = driver(max_batch_tokens=6)
    d.add(request("a", [1, 2], max_tokens=6))
    d.step()
    d.add(request("b", range(9)))
    assert computed_tokens(d.step()) == {"a": 1, "b": 5}
    assert computed_tokens(d.step()) == {"a": 1, "b": 4}
    assert computed_tokens(d.step()) == {"a": 1, "b": 1}


def test_requests_join_at_any_step_and_leave_at_once():
    d = driver(max_num_seqs=2)
    d.add(request("a", [1], max_tokens=1))
    d.add(request("b", [2], max_tokens=5))
    d.add(request("c", [3], max_tokens=1))
    assert set(computed_tokens(d.step())) == {"a", "b"}
    assert set(computed_tokens(d.step())) == {"b", "c"}


def test_a_static_batch_runs_until_all_members_have_finished():
    d = driver(max_num_seqs=2, policy=Policy.STATIC)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1)):
        d.add(request(name, [1], max_tokens=max_tokens))
    steps = [set(computed_tokens(d.step())) for _ in range(4)]
    assert steps == [{"a", "b"}, {"b"}, {"b"}, {"c"}]


def test_a_static_batch_fills_all_its_slots_before_anybody_decodes():
    """Also where the prompts take several steps: a batch is not what one budget holds."""
    d = driver(max_num_seqs=3, max_batch_tokens=4, policy=Policy.STATIC)
    for i, name in enumerate("abcd"):
        d.add(request(name, [i, 10, 11, 12], max_tokens=2))
    steps = [computed_tokens(d.step()) for _ in range(5)]
    assert steps == [{"a": 4}, {"b": 4}, {"c": 4}, {"a": 1, "b": 1, "c": 1}, {"d": 4}]


def test_the_next_slot_goes_to_the_higher_class():
    d = driver(max_num_seqs=1)
    for name, latency_class in (("b", BATCH), ("s", STANDARD), ("r", REALTIME)):
        d.add(request(name, [1], max_tokens=1, latency_class=latency_class))
    d.run()
    assert d.finished == ["r", "s", "b"]


def test_within_a_class_the_order_is_that_of_arrival():
    d = driver(max_num_seqs=1)
    for name in "abcdef":
        d.add(request(name, [1], max_tokens=2))
    d.run()
    assert d.finished == list("abcdef")


def test_batch_is_served_under_endless_realtime_load():
    """A new realtime request in every step holds a batch request up for a bounded time."""
    d = driver(max_num_seqs=1)
    d.add(request("patient", [1], max_tokens=3, latency_class=BATCH))
    for i in count():
        d.add(request(f"r{i}", [1], max_tokens=1, latency_class=REALTIME))
        d.step()
        if "patient" in d.finished:
            break
        assert i < 2000
    assert i > 20, "and it does not overtake either"


def test_realtime_takes_the_slot_of_a_batch_request_which_resumes_unchanged():
    d = driver(max_num_seqs=2)
    for name in "ab":
        d.add(request(name, [1, 2, 3], max_tokens=8, latency_class=BATCH))
    for _ in range(3):
        d.step()
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    output = d.step()
    assert output.preempted == ("b",)
    assert set(computed_tokens(output)) == {"a", "now"}
    expected = {r.request_id: d.expected(r) for r in d.requests.values()}
    d.run()
    assert d.outputs == expected


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_realtime_into_a_full_batch_load_starts_in_the_next_step(num_host_blocks):
    """However long the line of batch work and however long it has stood there; and the
    victims' tokens are those of an undisturbed run."""
    d = driver(num_host_blocks=num_host_blocks, max_num_seqs=3)
    for i in range(40):
        d.add(request(f"b{i}", [i, 2, 3], max_tokens=20, latency_class=BATCH))
    expected = {r.request_id: d.expected(r) for r in d.requests.values()}
    for i in range(30):
        for _ in range(7):
            d.step()
        d.add(request(f"r{i}", [9, i], max_tokens=2, latency_class=REALTIME))
        assert f"r{i}" in computed_tokens(d.step())
    d.run()
    assert {name: d.outputs[name] for name in expected} == expected
    num_kept = d.scheduler.num_swapped_out if num_host_blocks else d.scheduler.num_recomputed
    assert num_kept == d.scheduler.num_preemptions > 0


def test_an_aged_standard_request_does_not_hold_up_realtime_among_batch_work():
    d = driver(max_num_seqs=2)
    for name in "abcd":
        d.add(request(name, [1], max_tokens=200, latency_class=BATCH))
    d.step()
    d.add(request("s", [1], max_tokens=2))
    for _ in range(50):
        assert "s" not in computed_tokens(d.step())
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    assert "now" in computed_tokens(d.step())


def test_a_swapped_request_computes_nothing_twice():
    d = driver(num_host_blocks=64, max_num_seqs=1, prefix_caching=False)
    d.add(request("bulk", range(13), max_tokens=6, latency_class=BATCH))
    d.step()
    d.step()
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    output = d.step()
    assert len(output.swap_outs) == 4, "14 computed tokens in blocks of 4"
    d.step()
    output = d.step()
    assert len(output.swap_ins) == 4
    assert computed_tokens(output) == {"bulk": 1}
    d.run()


def test_what_is_cheaper_to_compute_again_is_not_swapped():
    d = driver(num_host_blocks=64, max_num_seqs=1)
    d.scheduler.observe_swaps(1, seconds=5.0)
    d.scheduler.pace.cost.observe(10, seconds=0.1)
    d.add(request("bulk", range(13), max_tokens=6, latency_class=BATCH))
    d.step()
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    assert d.step().swap_outs == ()
    assert (d.scheduler.num_swapped_out, d.scheduler.num_recomputed) == (0, 1)


def test_a_cancelled_request_frees_its_host_blocks():
    d = driver(num_host_blocks=8, max_num_seqs=1)
    d.add(request("bulk", range(13), max_tokens=6, latency_class=BATCH))
    d.step()
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    d.step()
    assert d.scheduler.host.num_free == 4
    d.cancel("bulk")
    assert d.scheduler.host.num_free == 8


def test_prefill_first_decodes_only_when_no_prompt_is_left():
    d = driver(max_batch_tokens=6, policy=Policy.PREFILL_FIRST)
    d.add(request("a", [1, 2], max_tokens=6))
    d.step()
    d.add(request("b", range(9)))
    steps = [computed_tokens(d.step()) for _ in range(3)]
    assert steps == [{"b": 6}, {"b": 3}, {"a": 1, "b": 1}]


def test_prompts_get_what_the_target_inter_token_time_leaves():
    """40 ms a step and 5 ms a prompt token: 100 ms leave 16 (the least) of a prompt's tokens,
    200 ms leave 32, and without anybody decoding there is no limit."""
    for target, expected in ((0.1, 16), (0.2, 32), (None, 63)):
        d = driver(max_batch_tokens=64, num_blocks=200, target_itl_seconds=target)
        for num_extra in (0, 8, 16):
            d.scheduler.pace.cost.observe(num_extra, 0.04 + 0.005 * num_extra)
        d.add(request("a", [1], max_tokens=30))
        d.step()
        d.add(request("b", range(200)))
        assert computed_tokens(d.step()) == {"a": 1, "b": expected}


def test_many_prompts_are_held_back_less_than_one():
    """1, 2 and 3 waiting beside one decoding let a step take 100, 200 and 300 ms."""
    for num_waiting, expected in ((1, 16), (2, 32), (3, 52)):
        d = driver(max_batch_tokens=64, num_blocks=200, target_itl_seconds=0.1)
        for num_extra in (0, 8, 16):
            d.scheduler.pace.cost.observe(num_extra, 0.04 + 0.005 * num_extra)
        d.add(request("a", [1], max_tokens=30))
        d.step()
        for i in range(num_waiting):
            d.add(request(f"b{i}", range(i, 200 + i)))
        assert computed_tokens(d.step()) == {"a": 1, "b0": expected}


@pytest.mark.parametrize(
    ("decoding", "arriving", "expected"),
    [(BATCH, BATCH, 63), (STANDARD, REALTIME, 63), (STANDARD, BATCH, 16), (REALTIME, REALTIME, 16)],
)
def test_a_prompt_is_held_back_only_for_those_whose_tokens_are_waited_for(
    decoding, arriving, expected
):
    d = driver(max_batch_tokens=64, num_blocks=200, target_itl_seconds=0.1)
    for num_extra in (0, 8, 16):
        d.scheduler.pace.cost.observe(num_extra, 0.04 + 0.005 * num_extra)
    d.add(request("a", [1], max_tokens=30, latency_class=decoding))
    d.step()
    d.add(request("b", range(200), latency_class=arriving))
    assert computed_tokens(d.step()) == {"a": 1, "b": expected}


def test_nobody_is_admitted_whom_the_running_will_crowd_out():
    """When requests are known to run for 20 tokens, a pool of 8 blocks of 4 takes one beside
    another only if it was told nothing."""
    preemptions = []
    for num_known in (0, 40):
        d = driver(num_blocks=8, max_num_seqs=4)
        for _ in range(num_known):
            d.scheduler.lengths.record(20)
        for i in range(6):
            d.add(request(f"r{i}", [i, 1], max_tokens=20))
        d.run()
        preemptions.append(d.scheduler.num_preemptions)
    assert preemptions[0] > 4
    assert preemptions[1] == 0


def test_realtime_takes_the_blocks_of_a_batch_request():
    d = driver(num_blocks=4)
    d.add(request("bulk", range(13), max_tokens=3, latency_class=BATCH))
    d.step()
    d.add(request("now", [9], max_tokens=2, latency_class=REALTIME))
    assert d.step().preempted == ("bulk",)
    d.run()
    assert d.finished == ["now", "bulk"]


def test_realtime_does_not_push_out_a_standard_request():
    d = driver(max_num_seqs=1)
    d.add(request("s", [1], max_tokens=3))
    d.step()
    d.add(request("r", [1], max_tokens=1, latency_class=REALTIME))
    d.run()
    assert d.finished == ["s", "r"]


def test_short_of_blocks_the_lowest_class_gives_way_then_the_latest():
    d = driver(num_blocks=5, max_num_seqs=3)
    d.add(request("b", [1, 2, 3], max_tokens=9, latency_class=BATCH))
    d.add(request("s", [4, 5, 6], max_tokens=9))
    d.add(request("t", [7, 8, 9], max_tokens=9))
    preempted = []
    while not d.finished:
        preempted += d.step().preempted
    assert preempted == ["b", "t"]


def test_a_preempted_request_comes_before_later_ones_of_its_class():
    d = driver(num_blocks=5, max_num_seqs=2)
    for name in ("a", "b", "c"):
        d.add(request(name, [ord(name)] * 7, max_tokens=8))
    d.run()
    assert d.finished == ["a", "b", "c"]
    assert d.scheduler.num_preemptions > 0


def test_a_repeated_prompt_is_found_in_the_cache():
    d = driver()
    d.add(request("a", range(12), max_tokens=1))
    d.run()
    d.add(request("b", range(12), max_tokens=1))
    d.run()
    assert d.cached == {"a": 0, "b": 11}


def test_a_cancelled_request_frees_its_blocks_at_once():
    d = driver()
    d.add(request("a", range(12), max_tokens=9))
    d.step()
    d.cancel("a")
    d.check_blocks()
    assert d.scheduler.kv.pool.num_free == 64
    assert not d.scheduler.has_work()


@pytest.mark.parametrize(
    ("code", "prompt", "max_tokens"),
    [
        ("empty_prompt", [], 1),
        ("context_length_exceeded", range(40), 1),
        ("kv_capacity", range(20), 20),
        ("duplicate_request_id", [1], 1),
    ],
)
def test_what_can_never_run_is_refused_and_queued_nowhere(code, prompt, max_tokens):
    d = driver(num_blocks=8, max_model_len=40)
    if code == "duplicate_request_id":
        d.add(request("x", prompt))
    waiting = d.scheduler.num_waiting
    with pytest.raises(RequestRejected) as refusal:
        d.scheduler.add(request("x", prompt, max_tokens))
    assert refusal.value.code == code
    assert d.scheduler.num_waiting == waiting


def test_a_token_budget_below_the_number_of_slots_is_refused():
    with pytest.raises(ValueError, match="max_batch_tokens"):
        SchedulerConfig(num_blocks=1, max_batch_tokens=3, max_num_seqs=4)


# Few distinct tokens and salts, so that prompts share prefixes by chance.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        prompts,
        st.integers(1, 12),  # max_tokens
        st.sampled_from(list(LatencyClass)),
        st.sampled_from([b"", b"x"]),
        st.one_of(st.none(), st.integers(0, 20)),  # cancelled that many steps later
    ),
    max_size=14,
)
configs = st.builds(
    SchedulerConfig,
    num_blocks=st.integers(8, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_batch_tokens=st.integers(5, 24),
    max_num_seqs=st.integers(1, 5),
    policy=st.sampled_from(list(Policy)),
    prefix_caching=st.booleans(),
    num_host_blocks=st.integers(0, 12),
    target_itl_seconds=st.sampled_from([None, 0.05]),
)


def sometimes_right(tokens):
    """Up to three proposals, some of them wrong."""
    chosen = list(tokens)
    for i in range(sum(tokens) % 4):
        chosen.append((next_token(chosen) + (sum(chosen) + i) % 2) % 7)
    return tuple(chosen[len(tokens) :])


def replay(d, events):
    """Add and cancel as the events say while stepping; return the survivors' expectations."""
    expected, cancels = {}, {}
    for i, (delay, prompt, max_tokens, latency_class, salt, cancel_after) in enumerate(events):
        for _ in range(delay):
            d.step()
            for name in [n for n, at in cancels.items() if at <= d.scheduler.num_steps]:
                del cancels[name]
                if name not in d.finished:
                    expected.pop(name, None)
                    d.cancel(name)
                    d.check_blocks()
        new = request(f"r{i}", prompt, max_tokens, latency_class, salt)
        try:
            d.add(new)
        except RequestRejected as refusal:
            assert refusal.code == "kv_capacity"
            continue
        expected[new.request_id] = d.expected(new)
        if cancel_after is not None:
            cancels[new.request_id] = d.scheduler.num_steps + cancel_after
    return expected


@settings(max_examples=300, deadline=None)
@given(configs, arrivals, st.sampled_from([nothing, sometimes_right]))
def test_everybody_finishes_with_the_right_tokens_and_no_block_leaks(config, events, propose):
    """Under random arrivals, cancels, classes, pool sizes, policies and proposals: every read
    returns the request's own tokens, no budget is passed, everybody finishes with the tokens
    it would have got alone, and at the end every block, the host's too, is free."""
    d = Driver(Scheduler(config), propose)
    expected = replay(d, events)
    d.run()
    for request_id, tokens in expected.items():
        assert d.outputs[request_id] == tokens
    assert d.scheduler.kv.pool.num_free == config.num_blocks
    assert d.scheduler.host.num_free == config.num_host_blocks


def fits_by_formula(scheduler, newcomer):
    """Whether the peak of `admission` fits, from everybody who runs, as that module has it."""
    kv, sequences = scheduler.kv, [*scheduler.running.values(), newcomer]
    own = [kv.num_blocks_for(len(s.token_ids) - s.num_cached) for s in sequences]
    remaining = [
        scheduler.lengths.expected_remaining(s.num_output, s.request.sampling.max_tokens)
        for s in sequences
    ]
    num_shared = kv.pool.num_blocks - kv.pool.num_free - sum(own[:-1])
    peak = peak_tokens(zip(own, map(kv.num_blocks_for, remaining), strict=True))
    return max(num_shared, 0) + peak <= kv.pool.num_blocks


@settings(max_examples=200, deadline=None)
@given(configs, arrivals, st.lists(st.integers(1, 12), min_size=32, max_size=40))
def test_who_will_fit_is_what_the_formula_says(config, events, lengths):
    """However little of it is computed anew for each newcomer."""
    d = Driver(Scheduler(config))
    for length in lengths:
        d.scheduler.lengths.record(length)
    asked = scheduling._Step._will_fit

    def compared(step, newcomer):
        is_urgent = newcomer.request.latency_class is REALTIME
        is_certain = is_urgent or not d.scheduler.running
        expected = is_certain or fits_by_formula(d.scheduler, newcomer)
        assert asked(step, newcomer) == expected
        return expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling._Step, "_will_fit", compared)
        replay(d, events)
        d.run()
