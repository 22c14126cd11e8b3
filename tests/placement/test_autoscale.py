"""Replicas follow the load: quickly up, slowly down, within the bounds, and not to and fro."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.placement.autoscale import DEFAULT_POLICY, Load, Memory, changed, decide
from controlplane.simulation.autoscaling import Node, Step, scale

BUSY = Load(num=1, low=1, high=4, num_ready=1, num_open=9, num_slots=8, demand=60.0)


def after(load: Load, seconds: float, memory: Memory | None = None) -> int:
    """Replicas, if the load has been so for so long."""
    memory = memory or Memory()
    _, memory = decide(load, memory, 1000.0)
    verdict, _ = decide(load, memory, 1000.0 + seconds)
    return verdict.after if verdict else load.num


def test_a_queue_adds_replicas_once_it_has_lasted() -> None:
    assert after(BUSY, 14.9) == 1
    assert after(BUSY, 15.0) == 2
    assert after(replace(BUSY, num_open=100), 15.0) == 2  # at most twice what there is
    assert after(replace(BUSY, num=2, num_ready=2, num_open=100), 15.0) == 4


def test_kv_pressure_and_slow_first_tokens_add_one() -> None:
    calm = replace(BUSY, num_open=2)
    assert after(calm, 60.0) == 1
    assert after(replace(calm, kv_used=0.95), 15.0) == 2
    assert after(replace(calm, ttft=1.01), 15.0) == 2


def test_nothing_is_added_while_what_was_added_still_loads() -> None:
    assert after(replace(BUSY, num=2, num_open=40), 60.0) == 2


def test_the_cap_holds() -> None:
    assert after(replace(BUSY, num=4, num_ready=4, num_open=1000, ttft=9.0), 600.0) == 4


def test_slack_takes_one_away_only_where_the_rest_would_not_press_at_once() -> None:
    two = Load(num=2, low=1, high=4, num_ready=2, num_open=3, num_slots=8, demand=40.0)
    assert after(two, 119.0) == 2
    assert after(two, 120.0) == 1
    assert after(replace(two, num_open=5), 600.0) == 2
    assert after(replace(two, kv_used=0.35), 600.0) == 2
    assert after(replace(two, low=2), 600.0) == 2


def test_what_was_too_few_for_a_demand_is_not_tried_again_for_it() -> None:
    two = Load(num=2, low=1, high=4, num_ready=2, num_open=3, num_slots=8, demand=60.0)
    assert after(two, 600.0, Memory(too_few={1: 60.0})) == 2
    assert after(replace(two, demand=48.0), 120.0, Memory(too_few={1: 60.0})) == 1


def test_a_pile_that_drains_adds_nothing_though_it_is_within_the_slots_by_then() -> None:
    """Between nine and ten tenths of the slots are in use only because the rest is gone."""
    _, memory = decide(replace(BUSY, num_open=40), Memory(), 1000.0)
    verdict, memory = decide(replace(BUSY, num_open=8), memory, 1015.0)
    assert verdict is None
    verdict, _ = decide(replace(BUSY, num_open=8), memory, 1030.0)
    assert verdict is not None and verdict.after == 2, "it has not become less since"


def test_a_number_with_a_pile_before_it_is_not_known_to_be_too_few() -> None:
    piled = replace(BUSY, num_open=40)
    _, memory = decide(piled, Memory(), 1000.0)
    verdict, _ = decide(piled, memory, 1015.0)
    assert verdict is not None and (verdict.after, verdict.is_for_pile) == (2, True)
    assert changed(memory, piled, verdict, 1015.0).too_few == {}
    _, memory = decide(replace(BUSY, num_open=4), Memory(), 1000.0)
    _, memory = decide(piled, memory, 1001.0)
    verdict, _ = decide(piled, memory, 1016.0)
    assert verdict is not None and not verdict.is_for_pile, "it had no pile, and one grew"
    assert changed(memory, piled, verdict, 1016.0).too_few == {1: 60.0}


def test_what_was_added_for_a_pile_goes_again_as_far_as_the_rest_would_not_press() -> None:
    four = Load(num=4, low=1, high=8, num_ready=4, num_open=20, num_slots=8, demand=100.0)
    assert after(four, 600.0) == 4
    assert after(four, 120.0, Memory(for_pile=True)) == 3
    three = replace(four, num=3, num_ready=3)
    assert after(three, 600.0, Memory(for_pile=True)) == 3
    assert after(four, 600.0, Memory(for_pile=True, too_few={3: 100.0})) == 4


def test_the_last_replica_goes_when_nothing_is_asked_nor_expected() -> None:
    idle = Load(num=1, low=0, high=2, num_ready=1, idle_s=300.0)
    assert after(idle, 0.0) == 0
    assert after(replace(idle, idle_s=299.0), 0.0) == 1
    assert after(replace(idle, expected=0.4), 0.0) == 1
    assert after(replace(idle, low=1), 0.0) == 1
    assert after(replace(idle, num_open=1), 0.0) == 1
    assert after(idle, 0.0, Memory(since=900.0)) == 1  # it has only just started


def test_a_request_wakes_what_is_scaled_to_zero_at_once() -> None:
    asleep = Load(num=0, low=0, high=2)
    assert after(asleep, 600.0) == 0
    verdict, _ = decide(replace(asleep, num_open=3), Memory(), 1.0)
    assert verdict is not None and (verdict.after, verdict.code) == (1, "woken")


# --- over time --------------------------------------------------------------------------------
def run(
    rate: Callable[[float], float],
    seconds: int,
    node: Node,
    low: int,
    high: int,
    num_piled: int = 0,
) -> list[Step]:
    return list(scale(rate, seconds, node, low, high, num_piled=num_piled))


def turns(steps: list[Step]) -> int:
    """How often the number changed direction."""
    moves = [b.num - a.num for a, b in pairwise(steps) if b.num != a.num]
    return sum(one * other < 0 for one, other in pairwise(moves))


@settings(max_examples=40, deadline=None)
@given(
    a_minute=st.floats(0.2, 600.0),
    low=st.integers(0, 2),
    room=st.integers(1, 6),
    slots=st.integers(1, 16),
    service_s=st.floats(0.5, 30.0),
    load_s=st.floats(0.0, 60.0),
    jitter=st.integers(0, 2**20),
)
def test_under_a_steady_load_the_number_settles(
    a_minute: float, low: int, room: int, slots: int, service_s: float, load_s: float, jitter: int
) -> None:
    """Whatever the load, slots, service and loading times: within the bounds, at most an overshoot
    and its correction, and still in the last half of the time."""
    node = Node(slots, service_s, load_s, jitter)
    high = low + room
    steps = run(lambda at: a_minute, 3600, node, low, high)
    assert all(low <= step.num <= high for step in steps)
    if a_minute >= 2.0:  # below, scaling to zero between requests is the point of it
        assert turns(steps) <= 2
        assert len({step.num for step in steps[len(steps) // 2 :]}) == 1


@settings(max_examples=40, deadline=None)
@given(
    load=st.floats(0.2, 4.0),
    pile=st.one_of(st.just(0.0), st.floats(2.0, 20.0)),
    low=st.integers(0, 1),
    slots=st.sampled_from([1, 2, 4, 8, 16]),
    service_s=st.sampled_from([1.0, 2.0, 4.0, 10.0]),
    load_s=st.sampled_from([0.0, 5.0, 20.0, 60.0]),
    jitter=st.integers(1, 2**20),
)
def test_after_a_pile_the_number_returns_to_what_is_needed(
    load: float,
    pile: float,
    low: int,
    slots: int,
    service_s: float,
    load_s: float,
    jitter: int,
) -> None:
    """``load`` is in replicas. What waits at the beginning is served sooner or later, whatever was
    added for it goes again, and then the number stays: one less would press at times, or did."""
    a_minute = min(600.0, load * slots / service_s * 60)
    node = Node(slots, service_s, load_s, jitter)
    steps = run(lambda at: a_minute, 3000, node, low, 8, int(pile * slots))
    assert all(step.num <= 8 for step in steps) and turns(steps) <= 2
    late = steps[-360:]
    assert len({step.num for step in late}) == 1
    rest = late[0].num - 1
    most_open = max(one.num_running + one.num_waiting for one in steps[-600:])
    least = DEFAULT_POLICY.slots_up if pile >= 2 * max(1.0, load) else DEFAULT_POLICY.slots_down
    assert rest < max(1, low) or most_open / (slots * rest) >= least


def test_what_waited_while_the_first_replica_loaded_keeps_no_replica_for_good() -> None:
    """100 requests a minute of 12 s fill 20 slots, two and a half replicas of eight."""
    steps = run(lambda at: 100.0, 3600, Node(8, 12.0, 20.0, 1), 0, 8)
    assert max(step.num for step in steps) == 4
    assert {step.num for step in steps[900:]} == {3}
    assert turns(steps) == 1


def test_a_held_pile_adds_nothing_where_one_replica_does() -> None:
    """Three quarters of its slots are asked for, and a minute's requests were held meanwhile. They
    wait half a minute and more, which says nothing about who comes later."""
    steps = run(lambda at: 180.0, 1800, Node(8, 2.0, 60.0), 0, 4)
    assert {step.num for step in steps[1:]} == {1}
    assert max(step.num_waiting for step in steps) > 150 and steps[-1].num_waiting == 0


@settings(max_examples=25, deadline=None)
@given(
    levels=st.lists(st.floats(0.0, 400.0), min_size=1, max_size=6),
    high=st.integers(1, 5),
    slots=st.integers(1, 8),
    jitter=st.integers(0, 2**20),
)
def test_under_any_load_the_bounds_hold_and_changes_are_few(
    levels: list[float], high: int, slots: int, jitter: int
) -> None:
    steps = run(
        lambda at: levels[int(at // 300) % len(levels)],
        1800,
        Node(slots, 4.0, 10.0, jitter),
        0,
        high,
    )
    assert all(0 <= step.num <= high for step in steps)
    falls = sum(b.num < a.num for a, b in pairwise(steps))
    assert falls <= 1800 / DEFAULT_POLICY.down_after_s


@pytest.mark.parametrize("low", [0, 1])
def test_a_square_wave_is_followed_up_and_down(low: int) -> None:
    """40 requests a minute of 12 s each fill 8 slots; 160 need four times as many."""
    steps = run(lambda at: 160.0 if at % 3600 < 1800 else 0.0, 3600, Node(8, 12.0, 10.0), low, 8)
    high_half, last = steps[600:1800], steps[-1]
    assert min(step.num for step in high_half) >= 4
    assert last.num == low
    assert max(step.num_waiting for step in high_half[300:]) == 0
