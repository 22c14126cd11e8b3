import itertools
import random

import pytest

from controlplane.placement.preload import ROOMY, SCARCE
from controlplane.simulation.policies import Clairvoyant, Lru, compare, distance_closed
from controlplane.simulation.residency import Node, Request, replay
from controlplane.simulation.trace import BadTrace, read

LOAD_S = 3.0


class NoForecasts:
    def at(self, at):
        return {}


def requests(*asked: tuple[float, str]) -> list[Request]:
    return [Request(*one) for one in asked]


def random_trace(seed: int, num: int = 60, models: str = "abcde") -> list[Request]:
    draw = random.Random(seed)
    return [Request(10.0 * i, draw.choice(models)) for i in range(num)]


def test_the_example_of_the_module():
    trace = requests((0, "a"), (1, "a"), (9, "b"), (9, "a"))
    outcome = replay(trace, Lru(), [1], LOAD_S)[1]
    assert [one.wait_s for one in outcome.served] == [3, 2, 3, 3]
    assert (outcome.hit_rate(), outcome.num_cold, outcome.num_loads) == (0.25, 3, 3)


def test_the_least_recently_used_leaves():
    trace = requests((0, "a"), (1, "b"), (2, "a"), (3, "c"), (4, "a"), (5, "b"))
    outcome = replay(trace, Lru(), [2], LOAD_S)[2]
    assert outcome.num_cold == 4, "only a at 2 s and at 4 s is warm: c took b's place"


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_victims_beats_the_clairvoyant(seed: int):
    trace = random_trace(seed, num=9, models="abcd")
    best = replay(trace, Clairvoyant(trace), [2], LOAD_S)[2].hit_rate()
    assert best * len(trace) == max(
        _warm_hits(trace, 2, choices) for choices in itertools.product((0, 1), repeat=len(trace))
    )


def _warm_hits(trace: list[Request], room: int, choices: tuple[int, ...]) -> int:
    held: list[str] = []
    hits = 0
    for request, choice in zip(trace, choices, strict=True):
        if request.model in held:
            hits += 1
            continue
        if len(held) == room:
            held.pop(choice)
        held.append(request.model)
    return hits


class Scheduled:
    """Wants one model from each time on."""

    loads_ahead = True

    def __init__(self, *wanted: tuple[float, str]) -> None:
        self._wanted = wanted

    def note(self, index, request):
        pass

    def keep(self, at):
        return {[model for since, model in self._wanted if since <= at][-1]: 1.0}


def test_a_load_ahead_makes_the_next_request_warm():
    policy = Scheduled((0, "a"), (10, "b"))
    outcome = replay(requests((0, "a"), (100, "b")), policy, [1], LOAD_S)[1]
    assert (outcome.num_cold, outcome.num_ahead) == (1, 1)
    assert [one.wait_s for one in outcome.served] == [3, 0]
    assert outcome.wasted_s == 0


def test_a_load_ahead_that_nobody_asked_for_is_wasted_until_it_leaves():
    policy = Scheduled((0, "a"), (10, "c"), (50, "b"))
    outcome = replay(requests((0, "a"), (100, "b")), policy, [1], LOAD_S)[1]
    assert (outcome.num_cold, outcome.num_ahead) == (1, 2)
    assert outcome.wasted_s == 40, "c was there from 20 s to 60 s"


def test_the_rate_can_be_that_of_the_last_days_alone():
    trace = requests((0, "a"), (1, "b"), (2, "b"), (3, "b"))
    outcome = replay(trace, Lru(), [2], LOAD_S)[2]
    assert (outcome.hit_rate(), outcome.hit_rate(since=2)) == (0.5, 1)


def test_the_distance_is_zero_for_lru_and_one_for_the_optimum():
    outcomes = compare(random_trace(2, num=200), NoForecasts(), [2], LOAD_S)
    assert distance_closed(outcomes, "lru", 2) == 0
    assert distance_closed(outcomes, "clairvoyant", 2) == 1


def test_a_trace_is_read_in_the_order_of_time():
    text = "time,model,status\n2024-11-15 16:57:51,b,OK\n2024-11-15 16:57:50,a,OK\n"
    assert [one.model for one in read(text)] == ["a", "b"]
    assert read("model,time\na,12.5\n") == [Request(12.5, "a")]


@pytest.mark.parametrize(
    ("text", "told"), [("when,model\n1,a\n", "no column time"), ("time,model\nsoon,a\n", "Line 2")]
)
def test_a_trace_that_cannot_be_read_says_where(text: str, told: str):
    with pytest.raises(BadTrace, match=told):
        read(text)


def test_what_was_loaded_ahead_stays_a_while_where_there_is_room():
    """Eight places, all taken by the margin's rule at once; a ninth model waits half a minute."""
    node = Node(8, LOAD_S, terms=ROOMY)
    for i in range(8):
        node.serve(Request(float(i), f"m{i}"), {})
    node.load_ahead({"b": 1.0}, 12.0)
    assert "b" not in node.resident
    node.load_ahead({"b": 1.0}, 37.5)
    assert "b" in node.resident


def test_a_price_keeps_small_gains_from_loading():
    """Of 1.0 in all 0.02 is the price: 0.03 more pays, 0.01 more does not."""
    node = Node(1, LOAD_S, terms=SCARCE)
    node.serve(Request(0.0, "a"), {"a": 1.0})
    node.load_ahead({"a": 0.20, "b": 0.225, "rest": 0.0}, 1.0)
    assert list(node.resident) == ["b"]
    node.load_ahead({"a": 0.505, "b": 0.475, "rest": 0.0}, 2.0)
    assert list(node.resident) == ["b"]
