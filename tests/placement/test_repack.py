"""What moving gains, and that it is carried out by ordinary decisions without a gap in service."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from controlplane.adapters.packing import solve
from controlplane.domain.version_spec import Colocation
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.repack import Repack, outcome, problem, starts
from controlplane.placement.snapshot import FleetSnapshot
from tests.placement.fleets import after, assigned, fleet, node, snapshots, version
from tests.placement.test_plan import codes, places
from tests.placement.test_plan_properties import used


def repacked(snapshot: FleetSnapshot, max_moves: int = 8) -> tuple[Repack, PlacementPlan]:
    """The best moves, and the decision that starts them."""
    gaps = [(gap.version_id, gap.num_missing) for gap in plan(snapshot, 2).unplaced]
    stated = problem(snapshot, gaps, max_moves)
    found = outcome(stated, solve(stated, 5.0))
    return found, PlacementPlan(starts(stated, found, 50))  # a generation of their own


def test_the_worked_example() -> None:
    """Moving a beside b lets c in: by three ordinary decisions, and a is served all the while."""
    holes = fleet(
        [node("n1", 10), node("n2", 10)],
        [version("a", 4), version("b", 4), version("c", 8)],
        [assigned("a", "n1", 0, 4), assigned("b", "n2", 0, 4)],
    )
    found, decision = repacked(holes)
    assert len(found.moves) == 1 and found.placed == (("c@v1", 1),)
    assert found.moved_bytes == 4_000_000_000
    moved = after(holes, decision, "loading")
    waiting = plan(moved, 3)
    assert not waiting.started and not waiting.stopped
    ready = after(holes, decision, "ready")
    done = plan(ready, 3)
    assert set(codes(done).values()) == {"moved"}
    assert [place.partition(".")[0] for place in places(done)] == ["c"]
    assert plan(after(ready, done), 4) == PlacementPlan()


def test_a_device_is_emptied_if_it_costs_little() -> None:
    spread = fleet(
        [node("n1", 80), node("n2", 80)],
        [version("a", 10), version("b", 10)],
        [assigned("a", "n1", 0, 10), assigned("b", "n2", 0, 10)],
    )
    found, _ = repacked(spread)
    assert len(found.moves) == 1 and len(found.emptied) == 1


def test_models_kept_apart_are_not_moved_together() -> None:
    """Nor is anything moved that would not gain."""
    apart = Colocation(labels=("noisy",), anti_affinity=("noisy",))
    spread = fleet(
        [node("n1", 80), node("n2", 80)],
        [version("a", 10, colocation=apart), version("b", 10, colocation=apart)],
        [assigned("a", "n1", 0, 10), assigned("b", "n2", 0, 10)],
    )
    assert repacked(spread)[0] == Repack()


def test_no_more_is_moved_than_allowed() -> None:
    spread = fleet(
        [node(f"n{i}", 80) for i in range(4)],
        [version(f"m{i}", 10) for i in range(4)],
        [assigned(f"m{i}", f"n{i}", 0, 10) for i in range(4)],
    )
    assert [len(repacked(spread, most)[0].moves) for most in (0, 1, 3)] == [0, 1, 3]


def test_an_answer_that_breaks_a_bound_is_refused() -> None:
    holes = fleet(
        [node("n1", 10), node("n2", 10)],
        [version("a", 4), version("b", 4)],
        [assigned("a", "n1", 0, 4), assigned("b", "n2", 0, 4)],
    )
    stated = problem(holes, [], 0)
    with pytest.raises(ValueError, match="breaks a bound"):
        outcome(stated, [0])


@settings(max_examples=40, deadline=None)
@given(snapshots())
def test_copies_fit_beside_what_is_there_and_the_rest_comes_to_rest(
    snapshot: FleetSnapshot,
) -> None:
    """From a fleet at rest: no device holds more than it has while both copies stand, nothing else
    is stopped, and as many are ready as before when all is done."""
    state = after(snapshot, plan(snapshot, 2), "ready")
    for generation in range(3, 12):
        made = plan(state, generation)
        state = after(state, made, "ready")
    state = replace(state, assigned=tuple(replace(v, state="ready") for v in state.assigned))
    found, decision = repacked(state)
    both = after(state, decision, "ready")
    capacity = {(n.node_id, d.index): d.capacity_bytes for n in state.nodes for d in n.devices}
    assert all(num_bytes <= capacity[place] for place, num_bytes in used(both).items())
    done = plan(both, 20)
    moved = {one.assignment.replica_id for one in found.moves}
    assert {stop.assignment.replica_id for stop in done.stopped if stop.code == "moved"} == moved
