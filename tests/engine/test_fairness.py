"""Tenants of one class share by tokens: nobody waits behind another's line, nobody starves."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.engine.batch import Sequence
from gpuagent.engine.fairness import MAX_ACCOUNTS, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairLine
from gpuagent.engine.request import LatencyClass
from gpuagent.engine.scheduler import Scheduler, SchedulerConfig
from tests.engine.drive import Driver, request

A, B, C = b"a", b"b", b"c"


def driver(**config):
    defaults = {"num_blocks": 512, "block_size": 4, "max_batch_tokens": 64, "max_num_seqs": 4}
    return Driver(Scheduler(SchedulerConfig(**{**defaults, **config})))


def starts(d, until=lambda d: not d.scheduler.has_work(), max_steps=5000):
    """Request ids in the order in which they first computed something."""
    seen = {}
    for _ in range(max_steps):
        if until(d):
            return list(seen)
        seen |= dict.fromkeys(work.request_id for work in d.step().work)
    raise AssertionError(f"not within {max_steps} steps")


def served(d, salt):
    """Weighted tokens of a tenant, counted from outside. Prompts are not cached in these tests."""
    total = 0.0
    for name, new in d.requests.items():
        sequence = d.scheduler.sequence(name)
        if new.cache_salt == salt and (sequence is None or sequence.has_started):
            total += PROMPT_WEIGHT * len(new.prompt_token_ids)
            total += OUTPUT_WEIGHT * len(d.outputs[name])
    return total


class Remembering(Driver):
    """Keeps what has ended among its requests, to count it."""

    def check_blocks(self):
        pass

    def _deliver(self, request_id, chosen):
        kept = self.requests[request_id]
        super()._deliver(request_id, chosen)
        self.requests[request_id] = kept


def test_the_worked_example():
    d = driver(max_num_seqs=1, prefix_caching=False)
    for name in ("a1", "a2", "a3"):
        d.add(request(name, range(10), max_tokens=20, salt=A))
    first = d.step()
    assert [work.request_id for work in first.work] == ["a1"]
    for name in ("b1", "b2"):
        d.add(request(name, range(10), max_tokens=20, salt=B))
    assert starts(d) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_single_request_gets_the_next_slot_before_another_tenants_line():
    d = driver()
    for i in range(200):
        d.add(request(f"a{i}", [i, 1, 2], max_tokens=8, salt=A))
    for _ in range(3):
        d.step()
    d.add(request("b", [1, 2, 3], max_tokens=8, salt=B))
    began = len(d.finished)
    starts(d, until=lambda d: "b" in d.scheduler.running)
    assert len(d.finished) - began <= 4, "at most one turnover of the slots"


def test_many_lone_requests_never_wait_longer_than_one_turnover():
    """Also the hundredth: what a tenant was served is not held against it beyond its share."""
    d = driver()
    for i in range(400):
        d.add(request(f"a{i}", [i, 1, 2], max_tokens=8, salt=A))
    for i in range(40):
        d.add(request(f"b{i}", [i], max_tokens=1, salt=B))
        began = d.scheduler.num_steps
        starts(d, until=lambda d, i=i: f"b{i}" in d.finished)
        assert d.scheduler.num_steps - began <= 9
        for _ in range(5):
            d.step()


def test_without_others_a_tenant_gets_everything():
    d = driver(max_num_seqs=2)
    for i in range(6):
        d.add(request(f"a{i}", [i], max_tokens=4, salt=A))
    d.run()
    assert d.scheduler.num_steps == 12, "three times two requests of four tokens"


@pytest.mark.parametrize("weight", [2.0, 4.0])
def test_tokens_are_shared_in_proportion_to_the_weights(weight):
    d = Remembering(driver(prefix_caching=False).scheduler)
    for i in range(300):
        d.add(request(f"a{i}", [1, 2, 3, 4], max_tokens=6, salt=A))
        d.add(request(f"b{i}", [1, 2, 3, 4], max_tokens=6, salt=B, weight=weight))
    for _ in range(300):
        d.step()
    assert served(d, B) / served(d, A) == pytest.approx(weight, rel=0.05)


def test_a_tenant_of_long_answers_gets_no_more_tokens_than_one_of_short_ones():
    d = Remembering(driver(prefix_caching=False).scheduler)
    for i in range(40):
        d.add(request(f"a{i}", [1], max_tokens=60, salt=A))
    for i in range(400):
        d.add(request(f"b{i}", [1], max_tokens=3, salt=B))
    for _ in range(400):
        d.step()
    assert served(d, B) / served(d, A) == pytest.approx(1.0, rel=0.15)


def test_who_comes_back_has_not_saved_up():
    """``b`` was away while ``a`` was served; its burst then gets half, and ``a`` the other half."""
    d = Remembering(driver(prefix_caching=False).scheduler)
    for i in range(300):
        d.add(request(f"a{i}", [i, 1], max_tokens=6, salt=A))
    for _ in range(150):
        d.step()
    before = served(d, A)
    for i in range(300):
        d.add(request(f"b{i}", [i, 1], max_tokens=6, salt=B))
    for _ in range(150):
        d.step()
    assert served(d, B) == pytest.approx(served(d, A) - before, rel=0.15)


def test_classes_keep_their_own_accounts():
    """What a tenant takes as batch work is not held against its realtime requests."""
    line, other = FairLine(), FairLine()
    line.add(waiting("bulk", 0, A))
    line.head().account.charge_output(1000, 1.0)
    other.add(waiting("a", 1, A))
    other.add(waiting("b", 2, B))
    assert other.head().request_id == "a"


# --- under random loads --------------------------------------------------------------------------
loads = st.lists(
    st.tuples(
        st.integers(0, 4),  # steps before it arrives
        st.integers(1, 12),  # prompt tokens
        st.integers(1, 12),  # generated tokens
        st.sampled_from([A, B, C]),
        st.sampled_from(list(LatencyClass)),
    ),
    max_size=40,
)
WEIGHTS = {A: 1.0, B: 2.0, C: 4.0}


@settings(max_examples=100, deadline=None)
@given(loads, st.integers(1, 4))
def test_everybody_is_served_and_each_tenant_in_the_order_of_arrival(load, num_slots):
    d = driver(max_num_seqs=num_slots, prefix_caching=False)
    names = {}
    order = {}
    for i, (delay, num_prompt, max_tokens, salt, latency_class) in enumerate(load):
        for _ in range(delay):
            order |= dict.fromkeys(work.request_id for work in d.step().work)
        new = request(f"r{i}", [i] * num_prompt, max_tokens, latency_class, salt, WEIGHTS[salt])
        d.add(new)
        names.setdefault((salt, latency_class), []).append(new.request_id)
    order |= dict.fromkeys(starts(d))
    for mine in names.values():
        assert [name for name in order if name in mine] == mine
    assert sorted(d.finished) == sorted(name for mine in names.values() for name in mine)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 60),
)
def test_two_tenants_that_always_wait_are_served_alike(of_a, of_b, num_slots, head_start):
    """The paper's bound (theorem 4.4): the difference never exceeds twice the larger of a
    longest prompt and what the slots can hold, however long it goes on, whatever they ask and
    whoever was there first."""
    d = Remembering(driver(max_num_seqs=num_slots, prefix_caching=False).scheduler)
    numbers = count()

    def fill(salt, shapes):
        queued = [s for s in d.scheduler.waiting if s.request.cache_salt == salt]
        for _ in range(8 - len(queued)):
            n = next(numbers)
            num_prompt, max_tokens = shapes[n % len(shapes)]
            d.add(request(f"r{n}", [1] * num_prompt, max_tokens, salt=salt))

    for _ in range(head_start):
        fill(A, of_a)
        d.step()
    before = served(d, A)
    for _ in range(150):
        fill(A, of_a)
        fill(B, of_b)
        d.step()
        bound = 2 * max(16 * PROMPT_WEIGHT, num_slots * (16 + 16) * OUTPUT_WEIGHT)
        assert abs(served(d, A) - before - served(d, B)) <= bound


def waiting(name, arrival, salt):
    new = request(name, [1], salt=salt)
    return Sequence(new, arrival, [1])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "return", "take", "leave", "serve"]),
            st.sampled_from([A, B, C]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_the_head_is_what_looking_at_everybody_finds(moves):
    line, queued, taken = FairLine(), [], []
    for arrival, (move, salt, number) in enumerate(moves):
        if move == "add":
            queued.append(waiting(f"r{arrival}", arrival, salt))
            line.add(queued[-1])
        elif move == "return" and taken:
            queued.append(taken.pop(number % len(taken)))
            line.add(queued[-1])
        elif move == "take" and queued:
            taken.append(line.head())
            queued.remove(taken[-1])
            line.remove(taken[-1])
            taken[-1].account.charge_prompt(number, 1.0)
        elif move == "leave" and queued:
            line.remove(queued.pop(number % len(queued)))
        elif move == "serve" and taken:
            taken[number % len(taken)].account.charge_output(number, 1.0)
        expected = min(queued, key=lambda s: (s.account.served, first(queued, s)), default=None)
        found = line.head()
        assert (found is None) == (expected is None) and len(line) == len(queued)
        if found:
            assert found.account is expected.account
            assert found.arrival == first(queued, found)


def first(queued, sequence):
    """When the earliest request of the same tenant has arrived."""
    return min(s.arrival for s in queued if s.account is sequence.account)


def test_tenants_that_are_gone_are_forgotten():
    line = FairLine()
    for arrival in range(10 * MAX_ACCOUNTS):
        sequence = waiting(f"r{arrival}", arrival, b"%d" % arrival)
        line.add(sequence)
        assert line.head() is sequence
        line.remove(sequence)
        sequence.account.charge_output(1, 1.0)
    assert len(line._accounts) <= MAX_ACCOUNTS
    assert line.head() is None and not line._heap
