"""Small fleets whose best plan anyone can see."""

import time
from dataclasses import replace

import pytest

from controlplane.domain.ids import NodeId, VersionId
from controlplane.domain.placement import PlacementDecided
from controlplane.domain.version_spec import Colocation
from controlplane.placement.explain import bytes_text, explain
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import AssignedView, FailureView
from tests.placement.fleets import GB, after, assigned, fleet, node, version


def places(made: PlacementPlan) -> dict[str, str]:
    return {
        start.assignment.replica_id: f"{start.assignment.node_id}/{start.assignment.device_index}"
        for start in made.started
    }


def codes(made: PlacementPlan) -> dict[str, str]:
    return {stop.assignment.replica_id: stop.code for stop in made.stopped}


def test_best_fit_leaves_the_large_hole_whole() -> None:
    """3 GB go beside 6 on the 10 GB device, not onto the empty 24 GB one."""
    made = plan(
        fleet([node("n1", 24), node("n2", 10)],
              [version("a", 3), version("b", 6)], [assigned("b", "n2", 0, 6)]),
        2,
    )  # fmt: skip
    assert places(made) == {"a.v1.g2.0": "n2/0"}


def test_replicas_spread_over_nodes_then_zones() -> None:
    nodes = [
        node("n1", 24, 24, zone="east"),
        node("n2", 24, zone="east"),
        node("n3", 24, zone="west"),
    ]
    made = plan(fleet(nodes, [version("a", 3, replicas=2)]), 2)
    assert sorted(places(made).values()) == ["n2/0", "n3/0"]
    made = plan(fleet(nodes, [version("a", 3, replicas=4)]), 2)
    assert sorted(places(made).values()) == ["n1/0", "n1/1", "n2/0", "n3/0"]


def test_no_more_of_a_devices_time_is_promised_than_there_is() -> None:
    """60 and 50 % do not go together, 60 and 40 do; what promises nothing fits anywhere."""
    promised = [
        version("a", 3, priority="high", guaranteed=60),
        version("b", 3, priority="high", guaranteed=50),
    ]
    made = plan(fleet([node("n1", 24)], promised), 2)
    assert len(made.started) == 1
    assert [one.code for one in made.unplaced] == ["insufficient_time"]
    assert made.unplaced[0].rejections[0].detail == (
        "needs 50 % of the device's time, 40 % is not promised"
    )
    assert len(plan(fleet([node("n1", 24), node("n2", 24)], promised), 2).started) == 2
    fitting = [promised[0], version("b", 3, priority="high", guaranteed=40), version("c", 3)]
    assert len(plan(fleet([node("n1", 24)], fitting), 2).started) == 3


def test_two_replicas_never_share_a_device() -> None:
    made = plan(fleet([node("n1", 24)], [version("a", 3, replicas=2)]), 2)
    assert len(made.started) == 1
    assert (made.unplaced[0].num_missing, made.unplaced[0].code) == (1, "already_here")


def test_the_worked_example_of_the_docstring() -> None:
    """High a evicts best-effort b rather than normal c; b fits nowhere then."""
    made = plan(
        fleet(
            [node("n1", 10), node("n2", 10)],
            [version("a", 8, priority="high"), version("b", 6, priority="best-effort"),
             version("c", 6)],
            [assigned("b", "n1", 0, 6), assigned("c", "n2", 0, 6)],
        ),
        2,
    )  # fmt: skip
    assert places(made) == {"a.v1.g2.0": "n1/0"}
    assert codes(made) == {"b.v1.g1.0": "evicted"}
    assert [(gap.version_id, gap.code) for gap in made.unplaced] == [
        ("b@v1", "insufficient_memory")
    ]


def test_no_more_is_evicted_than_must_be_and_the_idle_go_first() -> None:
    """Of three best-effort replicas one makes enough room: the one that idles longest."""
    crowd = [version(name, 3, priority="best-effort") for name in "bcd"]
    placed = [
        assigned("b", "n1", 0, 3, idle_s=5),
        assigned("c", "n1", 0, 3, idle_s=90),
        assigned("d", "n1", 0, 3, idle_s=30),
    ]
    made = plan(fleet([node("n1", 10)], [version("a", 3, priority="high"), *crowd], placed), 2)
    assert codes(made) == {"c.v1.g1.0": "evicted"}


def test_equals_do_not_displace_each_other() -> None:
    made = plan(
        fleet([node("n1", 10)], [version("a", 8), version("b", 6)], [assigned("b", "n1", 0, 6)]), 2
    )
    assert not made.started and not made.stopped
    assert made.unplaced[0].code == "insufficient_memory"


def test_a_lost_node_is_replaced_at_once() -> None:
    made = plan(
        fleet([node("n1", 10, status="lost"), node("n2", 10)], [version("a", 3)],
              [assigned("a", "n1", 0, 3)]),
        2,
    )  # fmt: skip
    assert codes(made) == {"a.v1.g1.0": "node_lost"}
    assert places(made) == {"a.v1.g2.0": "n2/0"}


def test_a_suspect_node_keeps_what_it_has_and_gets_nothing() -> None:
    made = plan(
        fleet([node("n1", 10, status="suspect")], [version("a", 3), version("b", 3)],
              [assigned("a", "n1", 0, 3)]),
        2,
    )  # fmt: skip
    assert not made.stopped
    assert [(gap.version_id, gap.code) for gap in made.unplaced] == [("b@v1", "no_ready_node")]


def test_a_draining_node_is_left_when_the_replacement_is_ready() -> None:
    """Service never stops: start elsewhere, then stop; and stay if there is nowhere to go."""
    nodes = [node("n1", 10, draining=True), node("n2", 10)]
    snapshot = fleet(nodes, [version("a", 3)], [assigned("a", "n1", 0, 3)])
    made = plan(snapshot, 2)
    assert places(made) == {"a.v1.g2.0": "n2/0"} and not made.stopped
    assert codes(plan(after(snapshot, made, "loading"), 3)) == {}
    assert codes(plan(after(snapshot, made, "ready"), 3)) == {"a.v1.g1.0": "node_draining"}
    alone = plan(fleet(nodes[:1], [version("a", 3)], [assigned("a", "n1", 0, 3)]), 2)
    assert not alone.stopped and alone.unplaced[0].code == "no_ready_node"


def test_replicas_spread_again_when_a_node_is_back() -> None:
    """Start on the empty node, stop the crowded one once that is ready, then rest."""
    snapshot = fleet(
        [node("n1", 24, 24), node("n2", 24)],
        [version("a", 3, replicas=2)],
        [assigned("a", "n1", 0, 3, 0), assigned("a", "n1", 1, 3, 1)],
    )
    made = plan(snapshot, 2)
    assert places(made) == {"a.v1.g2.0": "n2/0"} and not made.stopped
    reason = made.started[0].reason
    assert reason.endswith(" It will take over from one of the 2 on n1.")
    loading = plan(after(snapshot, made, "loading"), 3)
    assert not loading.started and not loading.stopped
    ready = after(snapshot, made, "ready")
    spread = plan(ready, 3)
    assert not spread.started and codes(spread) == {"a.v1.g1.1": "surplus"}
    assert plan(after(ready, spread), 4) == PlacementPlan()


def test_spreading_evicts_nobody_and_waits_for_what_is_loading() -> None:
    crowd = [assigned("a", "n1", 0, 3, 0), assigned("a", "n1", 1, 3, 1)]
    nodes, versions = [node("n1", 24, 24), node("n2", 4)], [version("a", 3, replicas=2)]
    least = version("b", 3, priority="best-effort")
    full = fleet(nodes, [*versions, least], [*crowd, assigned("b", "n2", 0, 3)])
    assert plan(full, 2) == PlacementPlan()
    loading = fleet(nodes, versions, [crowd[0], assigned("a", "n1", 1, 3, 1, state="loading")])
    assert plan(loading, 2) == PlacementPlan()


def test_retired_and_surplus_replicas_stop() -> None:
    """Surplus goes from the node that has two first."""
    made = plan(
        fleet([node("n1", 24, 24), node("n2", 24)], [version("a", 3, replicas=2)],
              [assigned("a", "n1", 0, 3, 0), assigned("a", "n1", 1, 3, 1),
               assigned("a", "n2", 0, 3, 2), assigned("gone", "n2", 0, 3)]),
        2,
    )  # fmt: skip
    assert codes(made) == {"gone.v1.g1.0": "retired", "a.v1.g1.1": "surplus"}


def test_scale_to_zero_stops_everything() -> None:
    made = plan(fleet([node("n1", 10)], [version("a", 3, 0)], [assigned("a", "n1", 0, 3)]), 2)
    assert codes(made) == {"a.v1.g1.0": "surplus"} and not made.unplaced


@pytest.mark.parametrize(
    ("count", "seconds"), [(1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (60, 300)]
)
def test_a_failed_version_waits_longer_each_time(count: int, seconds: float) -> None:
    """10 s doubling to 5 minutes, on that node; then it is tried again."""
    failure = FailureView(version("a", 3).version_id, node("n1").node_id, "oom", count, 1000.0)

    def at(now: float) -> PlacementPlan:
        return plan(fleet([node("n1", 10)], [version("a", 3)], [], [failure], now), 2)

    waiting = at(1000 + seconds - 1).unplaced[0]
    assert waiting.code == "backoff"
    assert waiting.reason.endswith(f"; it failed {count} times there, last with oom.")
    assert len(at(1000 + seconds).started) == 1


def test_a_failed_replica_goes_to_another_node_at_once() -> None:
    failed = assigned("a", "n1", 0, 3, state="failed")
    failure = FailureView(version("a", 3).version_id, node("n1").node_id, "oom", 1, 999.0)
    made = plan(fleet([node("n1", 10), node("n2", 20)], [version("a", 3)], [failed], [failure]), 2)
    assert codes(made) == {"a.v1.g1.0": "failed"}
    assert places(made) == {"a.v1.g2.0": "n2/0"}


@pytest.mark.parametrize("state", ["failed", "stuck"])
def test_a_failing_replica_that_has_nowhere_better_stays_and_takes_no_decision(state: str) -> None:
    """Its node tries again by itself, or starts it when there is room."""
    failing = assigned("a", "n1", 0, 3, state=state)
    for count, now in ((1, 1001.0), (1, 1400.0), (50, 90_000.0)):
        failure = FailureView(VersionId("a@v1"), NodeId("n1"), "download_failed", count, 1000.0)
        alone = fleet([node("n1", 10)], [version("a", 3)], [failing], [failure], now)
        assert plan(alone, 2) == PlacementPlan()


@pytest.mark.parametrize(("here", "moves"), [(1, False), (3, False), (4, True), (9, True)])
def test_it_goes_where_it_failed_a_quarter_as_often(here: int, moves: bool) -> None:
    failing = assigned("a", "n1", 0, 3, state="failed")
    failures = [
        FailureView(VersionId("a@v1"), NodeId("n1"), "download_failed", here, 1999.0),
        FailureView(VersionId("a@v1"), NodeId("n2"), "download_failed", 1, 1000.0),
    ]
    nodes = [node("n1", 10), node("n2", 10)]
    made = plan(fleet(nodes, [version("a", 3)], [failing], failures, 2000.0), 2)
    assert [start.assignment.node_id for start in made.started] == ["n2"] * moves
    assert codes(made) == ({"a.v1.g1.0": "failed"} if moves else {})


def test_what_nobody_can_load_is_tried_on_few_nodes_with_ever_fewer_decisions() -> None:
    """A thousand failures in a row on twelve nodes: each node tries, and hardly anything moves."""
    nodes = [node(f"n{i:02}", 10) for i in range(12)]
    counts: dict[str, int] = {}
    view, now, num_moves = assigned("a", "n00", 0, 3, state="failed"), 1000.0, []
    for number in range(1000):
        here = view.assignment.node_id
        counts[here] = counts.get(here, 0) + 1
        failures = [
            FailureView(VersionId("a@v1"), NodeId(name), "download_failed", count, now)
            for name, count in counts.items()
        ]
        now += 301
        made = plan(fleet(nodes, [version("a", 3)], [view], failures, now), number + 2)
        if made.started:
            num_moves.append(number)
            view = AssignedView(made.started[0].assignment, "failed")
    assert sum(move < 10 for move in num_moves) <= 4
    assert len(num_moves) <= 60 and sum(move >= 500 for move in num_moves) <= 6


def test_one_that_waits_in_vain_goes_where_there_is_room_and_comes_not_back() -> None:
    """The planner counts n1 as free; its node says otherwise. No oscillation for an hour."""
    waiting = assigned("a", "n1", 0, 3, state="stuck")
    failure = FailureView(VersionId("a@v1"), NodeId("n1"), "no_room", 1, 1000.0)
    nodes, versions = [node("n1", 10), node("n2", 10)], [version("a", 3)]
    made = plan(fleet(nodes, versions, [waiting], [failure], 1001.0), 2)
    assert codes(made) == {"a.v1.g1.0": "no_room"} and places(made) == {"a.v1.g2.0": "n2/0"}
    (refused,) = made.started[0].rejections
    assert refused.node_id == "n1"
    assert refused.detail.startswith("failed 1 times there, last with no_room")
    pair = [assigned("a", "n2", 0, 3, 0), assigned("a", "n2", 1, 3, 1)]
    nodes, versions = [node("n1", 10), node("n2", 10, 10)], [version("a", 3, replicas=2)]
    for now, starts in ((1001.0, 0), (1400.0, 0), (4500.0, 0), (4700.0, 1)):
        made = plan(fleet(nodes, versions, pair, [failure], now), 2)
        assert len(made.started) == starts, now


def test_a_failing_replica_keeps_no_room_from_a_healthy_one_of_its_priority() -> None:
    failing = assigned("a", "n1", 0, 6, state="failed")
    failure = FailureView(VersionId("a@v1"), NodeId("n1"), "download_failed", 1, 999.0)
    made = plan(
        fleet([node("n1", 10)], [version("a", 6), version("b", 6)], [failing], [failure]), 2
    )
    assert codes(made) == {"a.v1.g1.0": "failed"} and places(made) == {"b.v1.g2.0": "n1/0"}
    assert [gap.version_id for gap in made.unplaced] == ["a@v1"]
    high = fleet([node("n1", 10)], [version("a", 6, priority="high"), version("b", 6)],
                 [failing], [failure])  # fmt: skip
    assert [gap.version_id for gap in plan(high, 2).unplaced] == ["b@v1"]
    assert not plan(high, 2).stopped


@pytest.mark.parametrize("keeps_siblings", [True, False])
def test_a_missing_replica_leaves_a_failing_one_of_its_version_in_its_place(
    keeps_siblings: bool,
) -> None:
    """There is room for one of two, and that one fails: another in its place would be no other."""
    failing = assigned("a", "n1", 0, 8, state="failed")
    known = fleet([node("n1", 10)], [version("a", 8, 2)], [failing])
    made = plan(replace(known, keeps_siblings=keeps_siblings), 2)
    assert codes(made) == ({} if keeps_siblings else {"a.v1.g1.0": "failed"})
    assert [gap.num_missing for gap in made.unplaced] == [1]


def test_earlier_planners_stopped_what_failed() -> None:
    failing = assigned("a", "n1", 0, 3, state="failed")
    failure = FailureView(VersionId("a@v1"), NodeId("n1"), "oom", 1, 999.0)
    before = fleet([node("n1", 10)], [version("a", 3)], [failing], [failure])
    made = plan(replace(before, keeps_failing=False), 2)
    assert codes(made) == {"a.v1.g1.0": "failed"} and made.unplaced[0].code == "backoff"


@pytest.mark.parametrize(("count", "moves"), [(1, False), (2, False), (3, True)])
def test_a_dead_worker_is_left_to_its_agent_until_that_failed_twice(
    count: int, moves: bool
) -> None:
    failed = assigned("a", "n1", 0, 3, state="failed")
    failure = FailureView(
        version("a", 3).version_id, node("n1").node_id, "engine_lost", count, 999.0
    )
    made = plan(fleet([node("n1", 10), node("n2", 20)], [version("a", 3)], [failed], [failure]), 2)
    assert bool(made.stopped) == bool(made.started) == moves


def test_labels_keep_models_apart_and_bring_them_together() -> None:
    nodes = [node("n1", 10), node("n2", 24)]
    noisy = version("noisy", 3, colocation=Colocation(labels=("noisy",)))
    quiet = version("quiet", 3, colocation=Colocation(anti_affinity=("noisy",)))
    there = [assigned("noisy", "n1", 0, 3)]
    assert places(plan(fleet(nodes, [noisy, quiet], there), 2)) == {"quiet.v1.g2.0": "n2/0"}
    alone = plan(fleet(nodes[:1], [noisy, quiet], there), 2)
    assert alone.unplaced[0].code == "anti_affinity"
    friend = version("friend", 3, colocation=Colocation(affinity=("noisy",)))
    there = [assigned("noisy", "n2", 0, 3)]
    assert places(plan(fleet(nodes, [noisy, friend], there), 2)) == {"friend.v1.g2.0": "n2/0"}


def test_tensor_parallel_shards_take_devices_side_by_side() -> None:
    """16 GB over two devices of 10: eight on each, so nothing of 4 fits beside them."""
    made = plan(
        fleet([node("n1", 10), node("n2", 10, 10, 10)],
              [version("big", 16, tensor_parallel=2), version("small", 4, replicas=3)]),
        2,
    )  # fmt: skip
    assert places(made)["big.v1.g2.0"] == "n2/0"
    assert sorted(p for r, p in places(made).items() if r.startswith("small")) == ["n1/0", "n2/2"]
    assert made.unplaced[0].num_missing == 1


def test_foreign_memory_counts_against_new_replicas() -> None:
    from dataclasses import replace

    crowded = node("n1", 10)
    crowded = replace(crowded, devices=(replace(crowded.devices[0], foreign_bytes=8 * GB),))
    made = plan(
        fleet([crowded], [version("a", 3), version("b", 3)], [assigned("a", "n1", 0, 3)]), 2
    )
    assert not made.stopped and made.unplaced[0].version_id == "b@v1"


def test_an_empty_fleet_says_so() -> None:
    gap = plan(fleet([], [version("a", 3, 2)]), 1).unplaced[0]
    assert (gap.code, gap.num_missing) == ("no_device", 2)
    assert gap.reason == "2 replicas of a@v1 cannot be placed: no node has joined."


def test_the_explanation_reads_as_sentences() -> None:
    made = plan(
        fleet(
            [node("n1", 10), node("n2", 10, status="suspect"), node("n3", 2)],
            [version("a", 8, priority="high"), version("b", 6, priority="best-effort")],
            [assigned("b", "n1", 0, 6)],
        ),
        2,
    )
    decision = PlacementDecided("d", 7, made.started, made.stopped, made.unplaced, 0.0)
    assert explain(decision) == [
        "Stopped b.v1.g1.0: b.v1.g1.0 (best-effort) makes room for a@v1 (high), which fits "
        "nowhere else.",
        "Started a.v1.g2.0: a@v1 goes to n1/0: the only device that can take it; it leaves "
        "1.9 GiB free there; no other replica of it is on that node. Ruled out: 1 not heard "
        "lately, 1 too small even when empty.",
        "1 replica of b@v1 (5.6 GiB each) cannot be placed; of 3 devices: 1 too full, "
        "1 not heard lately, 1 too small even when empty.",
    ]


def test_earlier_planners_keep_their_words() -> None:
    """A decision of theirs is made again word for word; they did not say whose replicas count."""
    now = fleet([node("n1", 20)], [version("a", 8)])
    before = replace(now, says_whose=False)
    reasons = [plan(one, 2).started[0].reason for one in (now, before)]
    assert "; no other replica of it is on that node." in reasons[0]
    assert "; no other replica is on that node." in reasons[1]


def test_sizes_read_well() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 1610612736, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "1.5 GiB", "1048576.0 GiB",
    ]  # fmt: skip


def test_200_models_on_48_devices_plan_in_milliseconds() -> None:
    """Nothing to do: 5 ms; one node of eight devices lost: 50 ms; of a processor that adds up
    100,000 numbers in 2 ms (best of five)."""
    nodes = [node(f"n{i}", *[80.0] * 8) for i in range(6)]
    versions = [version(f"m{i:03}", 4 + i % 9, replicas=1) for i in range(200)]
    snapshot = fleet(nodes, versions)
    full = after(snapshot, plan(snapshot, 1))
    assert len(full.assigned) == 200
    unit = _best_of_five(lambda: _add_up(100_000)) / 2
    assert _best_of_five(lambda: plan(full, 2)) < 5 * unit
    lost = fleet([node("n0", *[80.0] * 8, status="lost"), *nodes[1:]], versions,
                 list(full.assigned))  # fmt: skip
    assert _best_of_five(lambda: plan(lost, 2)) < 50 * unit


def _add_up(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _best_of_five(work: object) -> float:
    times = []
    for _ in range(5):
        started = time.process_time()  # others may share the machine
        work()  # type: ignore[operator]
        times.append(time.process_time() - started)
    return min(times)
