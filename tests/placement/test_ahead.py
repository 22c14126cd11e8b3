"""Loads ahead go where there is room, or in the place of what is expected less; never of more."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.placement.ahead import (
    HORIZON_MINUTES,
    Load,
    loads_ahead,
    num_places,
    room_for,
)
from controlplane.placement.plan import plan
from controlplane.placement.preload import FEW_PLACES, Memory, swaps, terms_of
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


def test_nobody_leaves_of_whom_more_is_expected_whatever_the_rates_say() -> None:
    """b was not asked for lately, but is at this hour every day."""
    expected, rates = {"c@v1": 2.0, "b@v1": 2.5, "a@v1": 9.0}, {"c@v1": 3.0}
    assert loads_ahead(full_device(), expected, rates, ["a@v1", "b@v1"]) == []
    expected["b@v1"] = 1.5
    assert loads_ahead(full_device(), expected, rates, ["a@v1", "b@v1"]) == [
        Load("c@v1", ("b@v1",))
    ]


def test_a_load_has_a_price_where_there_are_few_places() -> None:
    """A fiftieth of all that is asked for, as in the replay of a trace; with many places less."""
    expected, rates = {"c@v1": 1.0, "a@v1": 50.0, "b@v1": 0.0}, {"c@v1": 0.4, "a@v1": 30.0}
    idle = ["b@v1"]
    assert num_places(full_device(), {*expected, *idle}) < FEW_PLACES
    assert loads_ahead(full_device(), expected, rates, idle) == [], "0.4 < 0.02 x 30.4"
    rates["a@v1"] = expected["a@v1"] = 10.0
    assert loads_ahead(full_device(), expected, rates, idle) == [Load("c@v1", ("b@v1",))]
    roomy = replace(full_device(), nodes=(node("n1", 10), node("n2", 60)))
    rates["a@v1"] = 30.0
    assert loads_ahead(roomy, expected, rates, []) == [Load("c@v1", ())]


def models_of_one_size(
    data: st.DataObject,
) -> tuple[FleetSnapshot, Memory, list[str]]:
    """One device of two to nine places, full of idle models, and others that are absent."""
    room, num_absent = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4))
    names = [f"m{number}" for number in range(room + num_absent)]
    resident, busy = names[:room], set(data.draw(st.lists(st.sampled_from(names[:room]))))
    versions = [version(name, 1, int(name in resident)) for name in names]
    placed = [assigned(name, "n1", 0, 1) for name in resident]
    ids = [f"{name}@v1" for name in names]
    memory = Memory(room, dict.fromkeys(ids, 1.0), ids[:room], {f"{one}@v1" for one in busy})
    return fleet([node("n1", room)], versions, placed), memory, ids


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_live_preloader_decides_as_the_replay_of_a_trace_does(data: st.DataObject) -> None:
    """On a device of models of one size, all expected by their rates: the same loads, and the same
    models leave for them."""
    snapshot, memory, ids = models_of_one_size(data)
    rates = {name: data.draw(st.floats(0.2, 5.0)) for name in ids}
    expected = {name: rate * HORIZON_MINUTES for name, rate in rates.items()}
    idle = [name for name in memory.resident if name not in memory.busy]
    price = terms_of(memory.room).price
    replayed = [(one.model, one.evicted) for one in swaps(memory, rates, price=price)]
    live = [(one.version_id, one.leaving) for one in loads_ahead(snapshot, expected, rates, idle)]
    assert live == replayed
    for model, leaving in live:
        assert all(rates[one] < rates[model] for one in leaving)


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
