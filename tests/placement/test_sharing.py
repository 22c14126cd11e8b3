"""Devices that hold more models than fit at once."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import AssignedView, FleetSnapshot, VersionView
from tests.placement.fleets import GB, after, assigned, fleet, node, snapshots, version


def swappable(name: str, gigabytes: float, priority: str = "normal") -> VersionView:
    one = version(name, gigabytes, priority=priority)
    return replace(one, spec=with_fields(one.spec, residency="swappable"))


def with_host(snapshot: FleetSnapshot, gigabytes: float) -> FleetSnapshot:
    nodes = tuple(replace(one, host_bytes=int(gigabytes * GB)) for one in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


def tiers(made: PlacementPlan) -> dict[str, str]:
    return {
        one.assignment.version_id.partition("@")[0]: one.assignment.tier for one in made.started
    }


def test_what_has_no_memory_free_takes_turns_until_the_host_is_full() -> None:
    """The example of the module: a resident, b and d warm, c resident beside them, e in storage,
    and f nowhere."""
    state = with_host(fleet([node("n1", 10)], [swappable("a", 6)]), 16)
    placed: dict[str, str] = {}
    new = [swappable("b", 6), version("c", 4), swappable("d", 4), swappable("e", 1)]
    new.append(swappable("f", 7))
    for number, one in enumerate([None, *new]):
        versions = (*state.versions, one) if one else state.versions
        state = replace(state, versions=versions)
        made = plan(state, number + 2)
        assert not made.stopped
        placed |= tiers(made)
        state = after(state, made)
    assert placed == {
        "a": "resident", "b": "warm", "c": "resident", "d": "warm", "e": "storage"
    }  # fmt: skip
    (gap,) = made.unplaced
    assert gap.version_id == "f@v1" and gap.reason.endswith("room to let it take turns.")


def test_each_start_says_its_tier_and_why() -> None:
    state = with_host(fleet([node("n1", 10)], [swappable("a", 6), swappable("b", 6)]), 16)
    a, b = plan(state, 2).started
    assert a.reason.endswith(
        " It is resident while there is room, and swapped out when others need it."
    )
    assert b.reason == (
        "b@v1 goes to n1/0 as warm, ready in host memory and swapped in when it is asked for: no "
        "device has 5.6 GiB free; 2 take turns in 9.3 GiB there, for which 11.2 GiB of 14.9 GiB "
        "of host memory may be needed."
    )


def test_steady_traffic_keeps_its_memory() -> None:
    """Of 10 GB, 6 work without a pause: 6 more cannot take turns with them, 4 can."""
    busy = replace(assigned("a", "n1", 0, 6), is_steady=True)
    versions = [swappable("a", 6), swappable("b", 6)]
    state = with_host(fleet([node("n1", 10)], versions, [busy]), 99)
    assert [gap.version_id for gap in plan(state, 2).unplaced] == ["b@v1"]
    idle = replace(state, assigned=(replace(busy, is_steady=False),))
    assert tiers(plan(idle, 2)) == {"b": "warm"}


def test_a_node_that_keeps_no_host_memory_is_not_crowded() -> None:
    state = fleet([node("n1", 10)], [swappable("a", 6), swappable("b", 6)])
    assert tiers(plan(state, 2)) == {"a": "resident"}


def test_what_a_node_has_measured_counts() -> None:
    """6 GB were given, 4 are used: 5 more fit in 10."""
    placed = assigned("a", "n1", 0, 6)
    state = fleet([node("n1", 10)], [version("a", 6), version("b", 5)], [placed])
    assert plan(state, 2).unplaced
    measured = replace(state, assigned=(replace(placed, charged_bytes=4 * GB),))
    assert tiers(plan(measured, 2)) == {"b": "resident"}


@st.composite
def crowded(draw: st.DrawFn) -> FleetSnapshot:
    """Random fleets, nothing placed yet, most versions swappable, and any host memory."""
    found = draw(snapshots())
    versions = tuple(
        replace(one, spec=with_fields(one.spec, residency="swappable"))
        if one.spec.priority != "high" and one.spec.tensor_parallel == 1 and draw(st.booleans())
        else one
        for one in found.versions
    )
    nodes = tuple(replace(one, host_bytes=draw(st.integers(0, 40)) * GB) for one in found.nodes)
    return replace(found, nodes=nodes, versions=versions, assigned=())


def by_device(state: FleetSnapshot) -> dict[tuple[str, int], list[AssignedView]]:
    found: dict[tuple[str, int], list[AssignedView]] = defaultdict(list)
    for view in state.assigned:
        shards = view.assignment.shards or (view.assignment,)
        for one in shards:
            found[one.node_id, one.device_index].append(view)
    return found


def sizes(state: FleetSnapshot, there: list[AssignedView]) -> tuple[list[int], list[int]]:
    """Bytes on one device of those that must be resident, and of those that may leave."""
    versions = state.versions_by_id()
    stay, turns = [], []
    for view in there:
        one = versions[view.assignment.version_id]
        (turns if one.is_swappable else stay).append(one.shard_bytes)
    return stay, turns


@settings(max_examples=200, deadline=None)
@given(crowded())
def test_neither_device_nor_host_is_asked_for_more_than_it_has(state: FleetSnapshot) -> None:
    """Whoever must be resident fits at once, the largest of the others beside them, and all others
    of crowded devices but those in storage fit in their node's host memory; planned once and
    again."""
    for generation in (2, 3):
        state = after(state, plan(state, generation))
    rooms = {
        (one.node_id, device.index): device.capacity_bytes - device.foreign_bytes
        for one in state.nodes
        for device in one.devices
    }
    host: dict[str, int] = defaultdict(int)
    for place, there in by_device(state).items():
        stay, turns = sizes(state, there)
        assert sum(stay) + max(turns, default=0) <= rooms[place]
        if sum(stay) + sum(turns) > rooms[place]:
            parked = [view for view in there if view.assignment.tier != "storage"]
            host[place[0]] += sum(sizes(state, parked)[1])
    assert all(host[one.node_id] <= one.host_bytes for one in state.nodes)


@settings(max_examples=200, deadline=None)
@given(crowded())
def test_a_crowded_fleet_comes_to_rest(state: FleetSnapshot) -> None:
    """Planning again while the new replicas load changes nothing."""
    made = plan(state, 2)
    again = plan(after(state, made, "loading"), 3)
    assert (again.started, again.stopped) == ((), ())
