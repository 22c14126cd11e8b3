"""What is computed for all devices at once is what the plain rules and formulas say of each."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.placement.feasible import Fleet, Resident, Slot
from controlplane.placement.plan import plan
from controlplane.placement.score import (
    AFFINITY_WEIGHT,
    BALANCE_WEIGHT,
    FIT_WEIGHT,
    LINK_WEIGHT,
    NODE_WEIGHT,
    STRANDED_WEIGHT,
    ZONE_WEIGHT,
)
from controlplane.placement.snapshot import FleetSnapshot
from controlplane.placement.survey import survey
from tests.placement import plain
from tests.placement.fleets import after, fleet, node, snapshots, version

random_fleets = settings(max_examples=120, deadline=None)
WEIGHTS = {
    "fit": FIT_WEIGHT,
    "link_free": -LINK_WEIGHT,
    "stranded": -STRANDED_WEIGHT,
    "balance": BALANCE_WEIGHT,
    "affinity": AFFINITY_WEIGHT,
    "replicas_in_zone": -ZONE_WEIGHT,
    "replicas_on_node": -NODE_WEIGHT,
}


def workbench(snapshot: FleetSnapshot) -> Fleet:
    """The fleet with everything on it that the planner would have there."""
    done = after(snapshot, plan(snapshot, 2))
    bench, versions = Fleet(done), done.versions_by_id()
    for view in done.assigned:
        placed = view.assignment
        bench.add(Resident(placed, versions[placed.version_id], view.idle_s))
    return bench


@random_fleets
@given(snapshots())
def test_every_device_is_ruled_out_by_the_rule_that_the_plain_check_names(
    snapshot: FleetSnapshot,
) -> None:
    """Single devices by the same code; groups apart from those the plain check knows nothing of."""
    bench = workbench(snapshot)
    for wanted in snapshot.versions:
        found = survey(bench, wanted)
        ours = [(one.node_id, one.device_index, one.code) for one in found.rejections(whole=True)]
        joint = {"in_group", "too_few_free"}
        assert [one for one in ours if one[2] not in joint] == plain.rejections(bench, wanted)
        assert sum(number for _, number in found.ruled_out()) == len(ours)
        assert found.num_candidates == len(found.candidates(whole=True))


@random_fleets
@given(snapshots())
def test_a_score_is_the_sum_of_its_terms(snapshot: FleetSnapshot) -> None:
    bench = workbench(snapshot)
    for wanted in snapshot.versions:
        for one in survey(bench, wanted).candidates(whole=True):
            terms = {term.name: term.value for term in one.terms}
            total = sum(weight * terms[name] for name, weight in WEIGHTS.items())
            assert one.score == pytest.approx(total, abs=1e-9)


def _rows(bench: Fleet) -> list[list[Slot]]:
    rows: dict[int, list[Slot]] = {}
    for cell, slot in bench.slots.items():
        rows.setdefault(cell // bench.board.width, []).append(slot)
    return list(rows.values())


@random_fleets
@given(snapshots())
def test_stranded_memory_is_what_the_formula_says(snapshot: FleetSnapshot) -> None:
    bench = workbench(snapshot)
    rows, free = _rows(bench), {cell: s.free_bytes for cell, s in bench.slots.items()}
    boundless = {one.node_id: (2**60, 2**60) for one in snapshot.nodes}
    total = sum(weight for _, weight in plain.typical(snapshot, rows))
    before = plain.usable(snapshot, rows, free, boundless)
    for wanted in snapshot.versions:
        found = survey(bench, wanted)
        for one in found.candidates(whole=True):
            cells = found.group(bench.board.cells[one.node_id, one.device_index])
            left = dict(free)
            for cell in cells:
                left[cell] -= wanted.shard_bytes
            lost = before - plain.usable(snapshot, rows, left, boundless)
            stranded = lost / total - len(cells) * wanted.shard_bytes
            terms = {term.name: term.value for term in one.terms}
            capacity = max(1, bench.slots[cells[0]].device.capacity_bytes)
            assert terms["stranded"] == pytest.approx(stranded / capacity, abs=1e-9)


@random_fleets
@given(snapshots(), st.lists(st.integers(0, 7), max_size=12))
def test_what_is_kept_between_placements_is_what_a_new_workbench_finds(
    snapshot: FleetSnapshot, choices: list[int]
) -> None:
    """Standings brought up to date row by row equal those computed from nothing."""
    bench, placed = workbench(snapshot), list(workbench(snapshot).slots)
    for wanted in snapshot.versions:
        survey(bench, wanted)
    residents = {r.assignment.replica_id: r for s in bench.slots.values()
                 for r in s.residents.values()}  # fmt: skip
    for choice in choices:
        if residents:
            bench.remove(residents.pop(sorted(residents)[choice % len(residents)]))
    fresh = Fleet(snapshot)
    for view in after(snapshot, plan(snapshot, 2)).assigned:  # a neighbour named is the first one
        if view.assignment.replica_id in residents:
            fresh.add(residents[view.assignment.replica_id])
    assert placed == list(fresh.slots)
    for wanted in snapshot.versions:
        old, new = survey(bench, wanted), survey(fresh, wanted)
        assert old.candidates(whole=True) == new.candidates(whole=True)
        assert old.rejections(whole=True) == new.rejections(whole=True)


def test_a_large_fleet_keeps_a_few_of_each_and_counts_all() -> None:
    """And the whole table of one replica can be had by planning again."""
    nodes = [node(f"n{i:02}", *[80.0] * 8) for i in range(5)]
    nodes[0] = replace(nodes[0], status="suspect")
    snapshot = fleet(nodes, [version("a", 30, 40), version("b", 90)])
    made = plan(snapshot, 2)
    first = made.started[0]
    assert (len(first.candidates), first.num_candidates) == (4, 32)
    assert first.ruled_out == (("node_suspect", 8),) and len(first.rejections) == 2
    whole = plan(snapshot, 2, first.assignment.replica_id).started[0]
    assert len(whole.candidates) == 32 and len(whole.rejections) == 8
    assert whole.candidates[:4] == first.candidates and whole.reason == first.reason
    gap = next(one for one in made.unplaced if one.version_id == "b@v1")
    assert "of 40 devices: 32 too small even when empty, 8 not heard lately" in gap.reason
