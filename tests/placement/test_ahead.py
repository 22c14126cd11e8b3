"""Loads ahead go where there is room, or in the place of what is expected less; never of more."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.placement.ahead import Load, loads_ahead, room_for
from controlplane.placement.plan import plan
from controlplane.placement.snapshot import FleetSnapshot
from tests.placement.fleets import assigned, fleet, node, snapshots, version


def full_device() -> FleetSnapshot:
    """One device of 10: a and b fill it, c is not there."""
    versions = [version("a", 6), version("b", 4), version("c", 4, 0)]
    placed = [assigned("a", "n1", 0, 6), assigned("b", "n1", 0, 4)]
    return fleet([node("n1", 10)], versions, placed)


def test_the_least_expected_leaves_for_what_is_expected_more() -> None:
    hopes = {"c@v1": 2.0, "a@v1": 1.0, "b@v1": 0.1}
    assert loads_ahead(full_device(), hopes, hopes, ["a@v1", "b@v1"]) == [Load("c@v1", ("b@v1",))]


def test_two_that_are_expected_alike_do_not_push_each_other_out() -> None:
    hopes = {"c@v1": 2.0, "a@v1": 1.99, "b@v1": 1.95}
    assert loads_ahead(full_device(), hopes, hopes, ["a@v1", "b@v1"]) == []


def test_what_is_busy_stays() -> None:
    assert loads_ahead(full_device(), {"c@v1": 9.0}, {"c@v1": 9.0}, []) == []
    assert loads_ahead(full_device(), {"c@v1": 9.0}, {"c@v1": 9.0}, ["a@v1"]) == [
        Load("c@v1", ("a@v1",))
    ]


def test_what_is_unlikely_is_not_loaded_even_where_there_is_room() -> None:
    roomy = fleet([node("n1", 10)], [version("c", 4, 0)])
    assert loads_ahead(roomy, {"c@v1": 0.69}, {"c@v1": 9.0}, []) == []
    assert loads_ahead(roomy, {"c@v1": 0.7}, {}, []) == [Load("c@v1", ())]


def test_only_who_stands_in_the_way_leaves() -> None:
    """b stands on a device too small for c, so its leaving would not help."""
    versions = [version("a", 6), version("b", 3), version("c", 6, 0)]
    placed = [assigned("a", "n1", 0, 6), assigned("b", "n2", 0, 3)]
    snapshot = fleet([node("n1", 7), node("n2", 4)], versions, placed)
    assert room_for(snapshot, "c@v1", ["b@v1", "a@v1"]) == ("a@v1",)


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots(), data=st.data())
def test_a_load_ahead_evicts_nothing_and_leaves_no_new_gap(
    snapshot: FleetSnapshot, data: st.DataObject
) -> None:
    """On any fleet: with all that is loaded ahead wanted, the plan loses nothing it had."""
    names = [one.version_id for one in snapshot.versions]
    expected = {name: data.draw(st.floats(0, 3)) for name in names}
    rates = {name: data.draw(st.floats(-1, 3)) for name in names}
    idle = [one.version_id for one in snapshot.versions if one.num_replicas == 1]
    before = sum(gap.num_missing for gap in plan(snapshot, 1).unplaced)
    for load in loads_ahead(snapshot, expected, rates, idle):
        numbers = {load.version_id: 1, **dict.fromkeys(load.leaving, 0)}
        snapshot = _with(snapshot, numbers)
        made = plan(snapshot, 1)
        assert not [stop for stop in made.stopped if stop.code == "evicted"]
        assert sum(gap.num_missing for gap in made.unplaced) <= before
        assert set(load.leaving) <= set(idle)


def _with(snapshot: FleetSnapshot, numbers: dict[str, int]) -> FleetSnapshot:
    versions = tuple(
        replace(one, num_replicas=numbers.get(one.version_id, one.num_replicas))
        for one in snapshot.versions
    )
    return replace(snapshot, versions=versions)
