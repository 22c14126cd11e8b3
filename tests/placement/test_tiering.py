"""Replicas that share a device change places as the demand shifts, seldom and for a reason."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from controlplane.domain.placement import Retiered
from controlplane.placement import tiering
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import (
    AssignedView,
    DeviceView,
    FleetSnapshot,
    NodeView,
)
from tests.placement.fleets import after, assigned, fleet, node, version
from tests.placement.test_sharing import by_device, crowded, sizes, swappable, with_host

PLACED = {"a": (6, "resident"), "d": (4, "resident"), "b": (6, "warm"), "e": (4, "storage")}


def kept(name: str, gigabytes: float, tier: str) -> AssignedView:
    view = assigned(name, "n1", 0, gigabytes)
    return replace(view, assignment=with_fields(view.assignment, tier=tier))


def device(placed: dict[str, tuple[float, str]] = PLACED, host: float = 16) -> FleetSnapshot:
    """The example of the module: one device of 10 GB, 16 GB of host memory."""
    versions = [swappable(name, size) for name, (size, _) in placed.items()]
    views = [kept(name, *one) for name, one in placed.items()]
    return with_host(fleet([node("n1", 10)], versions, views), host)


def asked(state: FleetSnapshot, **rates: float) -> FleetSnapshot:
    return replace(state, rates={f"{name}@v1": rate for name, rate in rates.items()})


def carried_out(state: FleetSnapshot, made: PlacementPlan) -> FleetSnapshot:
    """What the log's fold makes of it."""
    now = {one.assignment.replica_id: one.assignment for one in made.retiered}
    views = tuple(
        replace(view, assignment=now[name], retiered_at=state.now)
        if (name := view.assignment.replica_id) in now
        else view
        for view in after(state, made).assigned
    )
    return replace(state, assigned=views)


def later(state: FleetSnapshot, seconds: float = tiering.STAY_S) -> FleetSnapshot:
    return replace(state, now=state.now + seconds)


def moves(made: PlacementPlan) -> dict[str, str]:
    assert not made.started and not made.stopped
    return {
        one.assignment.version_id.partition("@")[0]: f"{one.before} {one.assignment.tier}"
        for one in made.retiered
    }


def by_name(made: PlacementPlan, name: str) -> Retiered:
    (found,) = (one for one in made.retiered if one.assignment.version_id == f"{name}@v1")
    return found


def test_the_example_of_the_module() -> None:
    state = device()
    assert moves(plan(asked(state, a=8, b=2, d=1), 2)) == {}
    shifted = asked(state, a=2, b=8, d=1)
    made = plan(shifted, 2)
    assert moves(made) == {"b": "warm resident", "a": "resident warm"}
    state = later(carried_out(shifted, made))
    assert moves(plan(asked(state, a=2, b=8, d=1, e=1.2), 3)) == {}
    wanted = asked(state, a=2, b=8, d=1, e=6)
    made = plan(wanted, 3)
    assert moves(made) == {"e": "storage warm", "d": "resident storage"}
    state = later(carried_out(wanted, made))
    made = plan(state, 4)
    assert moves(made) == {"e": "warm resident"}
    state = later(carried_out(state, made))
    assert moves(plan(state, 5)) == {}


def test_each_change_says_what_it_was_for() -> None:
    made = plan(asked(device(), a=2, b=8, d=1), 2)
    b, a = by_name(made, "b"), by_name(made, "a")
    assert (b.code, b.rate, b.instead_of) == ("more_asked", 8.0, (a.assignment.replica_id,))
    assert b.reason == (
        "b@v1 on n1/0 is resident from now on, no longer ready in host memory: it is asked for 8 "
        "times a minute, more than a@v1 (2) in its place."
    )
    assert (a.code, a.rate, a.instead_of) == ("less_asked", 2.0, (b.assignment.replica_id,))
    assert a.reason == (
        "a@v1 on n1/0 is ready in host memory from now on, no longer resident: it is asked for 2 "
        "times a minute, less than b@v1 (8), which takes its place."
    )


def test_a_small_gain_moves_nothing_and_what_has_just_moved_stays() -> None:
    assert moves(plan(asked(device(), a=6, b=8, d=1), 2)) == {}, "8 < 1.5 x 6"
    shifted = asked(device(), a=2, b=8, d=1)
    state = carried_out(shifted, plan(shifted, 2))
    back = asked(state, a=80, b=2, d=1)
    assert moves(plan(back, 3)) == {}
    assert moves(plan(later(back, tiering.STAY_S - 1), 3)) == {}
    assert moves(plan(later(back), 3)) == {"a": "warm resident", "b": "resident warm"}


def test_steady_traffic_is_never_moved_out() -> None:
    state = device()
    views = tuple(
        replace(view, is_steady=view.assignment.version_id == "a@v1") for view in state.assigned
    )
    assert moves(plan(asked(replace(state, assigned=views), a=2, b=80, d=1), 2)) == {}


def test_a_more_important_class_counts_ten_times() -> None:
    state = device()
    versions = tuple(
        replace(one, spec=with_fields(one.spec, priority="high"))
        if one.version_id == "a@v1"
        else one
        for one in state.versions
    )
    state = replace(state, versions=versions)
    assert moves(plan(asked(state, a=2, b=8, d=1), 2)) == {}
    assert moves(plan(asked(state, a=0.2, b=8, d=1), 2)) == {
        "b": "warm resident", "a": "resident warm"
    }  # fmt: skip


def test_a_device_that_is_not_crowded_any_more_keeps_all_of_its_own() -> None:
    """Whatever was asked for lately: nothing was, here."""
    made = plan(device({"a": (6, "warm"), "e": (4, "storage")}), 2)
    assert moves(made) == {"a": "warm resident", "e": "storage resident"}
    assert {one.code for one in made.retiered} == {"room"}


def test_what_does_not_fit_any_more_goes_down_the_least_asked_first() -> None:
    """On the device: something that must stay has come. In the host: it has become smaller."""
    state = device()
    state = replace(
        state,
        versions=(*state.versions, version("c", 4)),
        assigned=(*state.assigned, assigned("c", "n1", 0, 4)),
    )
    made = plan(asked(state, a=1, d=2), 2)
    assert moves(made) == {"a": "resident warm"}
    assert by_name(made, "a").code == "crowded"
    small = plan(asked(device(host=12), a=3, b=2, d=1), 2)
    assert moves(small) == {"d": "resident storage"}
    assert by_name(small, "d").code == "host_full"


def test_what_finds_no_room_in_the_host_is_kept_in_storage_rather_than_nowhere() -> None:
    state = device({"a": (6, "resident"), "b": (6, "warm"), "d": (4, "warm")})
    state = replace(state, versions=(*state.versions, swappable("e", 4), swappable("f", 11)))
    made = plan(state, 2)
    (start,) = made.started
    assert (start.assignment.version_id, start.assignment.tier) == ("e@v1", "storage")
    assert start.reason == (
        "e@v1 goes to n1/0 to be kept in storage and loaded when it is asked for: no device has "
        "3.7 GiB free; 4 take turns in 9.3 GiB there, without it 14.9 GiB of 14.9 GiB of host "
        "memory may be needed."
    )
    assert [gap.version_id for gap in made.unplaced] == ["f@v1"]


def test_an_older_planner_neither_stores_nor_moves() -> None:
    """So that what it decided is decided again as it was."""
    state = replace(device(), retiers=False)
    assert plan(asked(state, a=0.1, b=8), 2).retiered == ()
    crowded = replace(state, versions=(*state.versions, swappable("x", 4)))
    assert plan(crowded, 2).started == ()


@settings(max_examples=100, deadline=None)
@given(crowded(), st.data())
def test_under_a_demand_that_holds_the_tiers_come_to_rest(
    state: FleetSnapshot, data: st.DataObject
) -> None:
    """Within a few plans; then what is resident fits beside what must stay, and all the while no
    more waits in a node's memory than it keeps for that."""
    rates = {one.version_id: data.draw(st.floats(0, 20)) for one in state.versions}
    state = replace(state, rates=rates)
    for generation in range(2, 5):
        state = after(state, plan(state, generation))
    num_left = 3 * len(state.assigned)
    while (made := plan(state, 9)).retiered:
        num_left -= 1
        assert num_left >= 0, made.retiered
        state = later(carried_out(state, made))
        assert all(parked_bytes(state, one) <= one.host_bytes for one in state.nodes)
    if made.started or made.stopped:
        return  # a fleet that never comes to rest in other ways changes no tier
    for one in state.nodes:
        for each in one.devices if one.host_bytes and one.status == "ready" else ():
            stay, resident = resident_bytes(state, one, each)
            room = each.capacity_bytes - each.foreign_bytes
            assert one.draining or not resident or stay + resident <= room


def resident_bytes(state: FleetSnapshot, one: NodeView, each: DeviceView) -> tuple[int, int]:
    """Of a device: what must stay there, and the swappable replicas that are resident."""
    there = by_device(state)[one.node_id, each.index]
    stay, _ = sizes(state, there)
    resident = [view for view in there if view.assignment.tier == "resident"]
    return sum(stay), sum(sizes(state, resident)[1])


def parked_bytes(state: FleetSnapshot, one: NodeView) -> int:
    """What may have to wait in the node's memory: of devices that do not hold all they have."""
    found = 0
    for each in one.devices:
        there = by_device(state)[one.node_id, each.index]
        if sum(map(sum, sizes(state, there))) > each.capacity_bytes - each.foreign_bytes:
            parked = [view for view in there if view.assignment.tier != "storage"]
            found += sum(sizes(state, parked)[1])
    return found


@settings(max_examples=100, deadline=None)
@given(crowded(), st.data())
def test_few_move_at_once_and_who_goes_up_is_asked_for_more(
    state: FleetSnapshot, data: st.DataObject
) -> None:
    rates = {one.version_id: data.draw(st.floats(0, 20)) for one in state.versions}
    for generation in range(2, 5):
        state = after(state, plan(state, generation))
    made = plan(replace(state, rates=rates), 9)
    ups = [one for one in made.retiered if one.code == "more_asked"]
    devices = {(one.node_id, device.index) for one in state.nodes for device in one.devices}
    assert len(ups) <= len(devices) + len(state.nodes)
    by_id = {one.assignment.replica_id: one for one in made.retiered}
    ranks = {one.version_id: one.rank for one in state.versions}

    def worth(one: Retiered) -> float:
        return one.rate * tiering.CLASS_WEIGHT[ranks[one.assignment.version_id]]

    for up in ups:
        down = [by_id[name] for name in up.instead_of]
        assert worth(up) >= 1.49 * sum(map(worth, down))
        assert all(one.code == "less_asked" for one in down)
