from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.domain.errors import Invalid, NotFound
from controlplane.domain.placement import shards_of
from controlplane.placement.snapshot import FleetSnapshot
from controlplane.simulation.whatif import Change, Load, Place, _end, alter, what_if
from tests.placement.fleets import assigned, fleet, node, snapshots, version


def example() -> FleetSnapshot:
    return fleet(
        [node("n1", 10), node("n2", 10)],
        [version("a", 6), version("b", 6, priority="best-effort")],
        [assigned("a", "n1", 0, 6), assigned("b", "n2", 0, 6)],
    )


def test_the_example_of_the_module():
    found = what_if(example(), 1, Change(lose=("n1",)))
    assert found.left == (Place("a@v1", "n1", 0, 1), Place("b@v1", "n2", 0, 1))
    assert found.joined == (Place("a@v1", "n2", 0, 1),)
    assert [one.assignment.version_id for one in found.evicted] == ["b@v1"]
    (gap,) = found.unplaced
    assert (gap.version_id, gap.num_missing, gap.code) == ("b@v1", 1, "insufficient_memory")
    assert found.loads == (Load("b@v1", 1, 0, None),) and found.settled


def test_what_the_planner_does_anyway_is_no_consequence():
    """b is unplaced as it is, on a node already lost: losing that node again tells nothing."""
    stated = fleet(
        [node("n1", 10, status="lost"), node("n2", 10)],
        [version("a", 6), version("b", 6)],
        [assigned("a", "n1", 0, 6), assigned("b", "n2", 0, 6)],
    )
    found = what_if(stated, 1, Change(lose=("n1",)))
    assert (found.joined, found.left, found.unplaced, found.loads) == ((), (), (), ())


def test_an_added_node_takes_what_was_missing():
    stated = replace(example(), versions=(*example().versions, version("c", 8)))
    found = what_if(stated, 1, Change(add=(("n3", "n1"),)))
    assert found.relieved == (("b@v1", 1),)
    assert {one.node_id for one in found.joined} >= {"n3"}


def test_load_is_told_per_replica():
    stated = fleet(
        [node("n1", 10), node("n2", 10), node("n3", 10)],
        [version("a", 6, replicas=3)],
        [assigned("a", f"n{i}", 0, 6, i) for i in (1, 2, 3)],
    )
    assert what_if(stated, 1, Change(lose=("n3",))).loads == (Load("a@v1", 3, 2, 1.5),)
    assert what_if(stated, 1, Change(load=2.0)).loads == (Load("a@v1", 3, 3, 2.0),)
    assert what_if(stated, 1, Change(replicas=(("a@v1", 1),))).loads == (Load("a@v1", 3, 1, 3.0),)


@pytest.mark.parametrize("change, error", [
    (Change(lose=("n9",)), NotFound),
    (Change(add=(("n3", "n9"),)), NotFound),
    (Change(add=(("n1", "n2"),)), Invalid),
    (Change(replicas=(("z@v1", 1),)), NotFound),
    (Change(replicas=(("a@v1", -1),)), Invalid),
    (Change(load=0.0), Invalid),
])  # fmt: skip
def test_a_wrong_change_is_refused(change: Change, error: type[Exception]):
    with pytest.raises(error):
        what_if(example(), 1, change)


@settings(max_examples=60, deadline=None)
@given(snapshots(), st.data())
def test_same_answer_no_device_above_memory_and_none_on_a_lost_node(stated, data):
    names = [one.node_id for one in stated.nodes]
    change = (
        Change(lose=tuple(data.draw(st.lists(st.sampled_from(names), unique=True))))
        if names
        else Change()
    )
    assert what_if(stated, 1, change) == what_if(stated, 1, change)
    altered = alter(stated, change)
    end = _end(altered, 1)
    room = {(n.node_id, d.index): d.capacity_bytes for n in altered.nodes for d in n.devices}
    versions, used = altered.versions_by_id(), defaultdict(int)
    for one in end.assigned:
        known = versions[one.version_id]
        for shard in shards_of(one, known.spec.tensor_parallel):
            used[shard.node_id, shard.device_index] += known.shard_bytes
    assert all(held <= room[place] for place, held in used.items())
    if end.settled:
        assert not {one.node_id for one in end.assigned} & set(change.lose)
