"""Stretches of time stand for the whole, without bias; arrivals follow trace and profile."""

from itertools import pairwise

import numpy as np
import pytest

from controlplane.simulation.arrivals import Lengths, arrivals, profile, read_lengths
from controlplane.simulation.sampling import AFTER_S, BEFORE_S, Window, outages, windows
from controlplane.simulation.scenario import MONDAY, Arrivals, Failures, NodeGroup, Outage
from controlplane.simulation.trace import BadTrace
from tests.simulation.fleets import CLASSES, ran, small

LOSS = Outage("h-1", 7000.0, 3000.0)


@pytest.mark.parametrize("sample", [2, 5, 20])
def test_weighted_seconds_are_all_seconds_and_losses_are_in_full(sample: int) -> None:
    scenario = small(seconds=86_400.0, sample=sample)
    found = windows(scenario, [LOSS], np.random.default_rng(1))
    assert sum(one.seconds * one.weight for one in found) == pytest.approx(86_400.0)
    for moment in (7000.0, 10_000.0):
        held = [one for one in found if one.wall <= moment < one.wall + one.seconds]
        assert len(held) == 1 and held[0].weight == 1.0
        assert held[0].wall <= moment - BEFORE_S
        assert held[0].wall + held[0].seconds >= moment + AFTER_S
    assert all(a.wall + a.seconds <= b.wall for a, b in pairwise(found))
    assert all(a.at + a.seconds == pytest.approx(b.at) for a, b in pairwise(found))


def test_a_sample_of_a_day_has_no_bias_to_speak_of() -> None:
    """The day in full against a fifth of it, in the mean of five draws: availability within 0.5 %,
    utilisation and tokens within 5 %, TTFT's median within 10 %."""
    day = dict(
        seconds=43_200.0,
        arrivals=Arrivals(per_second=1.0, day=0.5, classes=CLASSES),
        failures=Failures((LOSS,)),
    )
    whole = ran(small(**day)).outcome
    parts = [ran(small(**day, sample=5, seed=seed)).outcome for seed in range(1, 6)]
    assert all(part.num_arrived < 0.4 * whole.num_arrived for part in parts)
    assert all(part.num_losses == whole.num_losses == 1 for part in parts)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    assert mean([p.availability for p in parts]) == pytest.approx(whole.availability, abs=0.005)
    assert mean([p.utilisation for p in parts]) == pytest.approx(whole.utilisation, rel=0.05)
    assert mean([p.tokens_per_s for p in parts]) == pytest.approx(whole.tokens_per_s, rel=0.05)
    assert mean([p.ttft_s(0.5) for p in parts]) == pytest.approx(whole.ttft_s(0.5), rel=0.10)
    assert mean([p.asked for p in parts]) == pytest.approx(whole.asked, rel=0.05)


def test_random_outages_come_as_often_as_they_should_and_never_overlap_on_a_node() -> None:
    scenario = small(
        seconds=30 * 86_400.0,
        nodes=(NodeGroup("n", "h100-80gb", 20),),
        failures=Failures(mtbf_hours=48.0, mttr_hours=2.0),
    )
    found = outages(scenario, np.random.default_rng(7))
    assert 240 < len(found) < 340  # 20 nodes, 720 h, one in 50 h each: 288
    by_node: dict[str, float] = {}
    for one in found:
        assert one.at >= by_node.get(one.node, 0.0)
        by_node[one.node] = one.at + one.seconds


# --- arrivals -----------------------------------------------------------------------------------
TRACE = Lengths(np.array([0.0, 1.0, 5.0]), np.array([10, 20, 30]), np.array([1, 2, 3]), 7.5)


def test_the_week_has_its_mean_its_top_by_day_and_its_weekend() -> None:
    wanted = Arrivals(per_second=1.0, day=0.5, weekend=0.7)
    at = MONDAY + np.arange(0, 7 * 86_400, 600.0)
    found = profile(wanted, at)
    assert found.mean() == pytest.approx(1.0, abs=0.001)
    assert int(np.argmax(found) * 600 / 3600) % 24 == 15
    days = found.reshape(7, -1).mean(axis=1)
    assert days[5:] / days[0] == pytest.approx([0.7, 0.7])


def test_a_trace_lends_its_order_and_rhythm() -> None:
    """Requests follow each other as in the trace, with its gaps, faster."""
    scenario = small(arrivals=Arrivals(per_second=2.0))
    window = Window(100.0, 0.0, 60.0, 3.0)
    found = list(arrivals(scenario, window, TRACE, np.random.default_rng(1)))
    assert 115 <= len(found) <= 125
    assert {job.weight for job in found} == {3.0}
    assert all(100.0 <= job.at <= 160.0 for job in found)
    first = next(n for n, job in enumerate(found) if job.prompt == 10)
    told = [(job.prompt, job.output) for job in found[first : first + 4]]
    assert told == [(10, 1), (20, 2), (30, 3), (10, 1)]
    gaps = np.diff([job.at for job in found[first : first + 4]])
    assert gaps == pytest.approx([0.2, 0.8, 0.5], rel=0.01)


def test_shares_are_kept() -> None:
    scenario = small(arrivals=Arrivals(per_second=50.0, classes=CLASSES))
    window = Window(0.0, 0.0, 600.0)
    found = list(arrivals(scenario, window, None, np.random.default_rng(2)))
    assert len(found) == pytest.approx(30_000, rel=0.03)
    chat = sum(job.model == 0 for job in found) / len(found)
    assert chat == pytest.approx(6 / 9.1, abs=0.01)
    realtime = sum(job.latency_class == "realtime" for job in found) / len(found)
    assert realtime == pytest.approx(0.3, abs=0.01)


def test_a_trace_is_read_and_a_broken_one_says_where() -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
    found = read_lengths(head + rows)
    assert found.at.tolist() == [0.0, 4.0] and found.seconds == 8.0
    assert found.prompt.tolist() == [374, 396] and found.output.tolist() == [44, 109]
    for text, said in (
        ("time,model\n", "no column TIMESTAMP"),
        (head + rows + "2023-11-16 18:15:50.6805900,many,1\n", "Line 4"),
        (head + rows + "2023-11-16 18:15:50.6805900,-5,1\n", "Line 4"),
        (head, "at least two"),
    ):
        with pytest.raises(BadTrace, match=said):
            read_lengths(text)
