"""What is true of every plan for every fleet."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations

from hypothesis import assume, given, settings

from controlplane.domain.placement import Assignment, shards_of
from controlplane.placement.feasible import must_not_meet
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import FleetSnapshot, NodeView, VersionView
from tests.placement.fleets import after, snapshots

random_fleets = settings(max_examples=200, deadline=None)


def spans(snapshot: FleetSnapshot, placed: Assignment) -> list[tuple[tuple[str, int], int]]:
    """The devices an assignment takes and the bytes on each."""
    version = snapshot.versions_by_id()[placed.version_id]
    count = version.spec.tensor_parallel
    share = -(-placed.memory_bytes // count)
    return [((one.node_id, one.device_index), share) for one in shards_of(placed, count)]


def used(snapshot: FleetSnapshot) -> Counter[tuple[str, int]]:
    total: Counter[tuple[str, int]] = Counter()
    for view in snapshot.assigned:
        for place, share in spans(snapshot, view.assignment):
            total[place] += share
    return total


def num_beyond(snapshot: FleetSnapshot, made: PlacementPlan) -> Counter[str]:
    """Replicas more than wanted that a plan may leave, by version: the ready ones that stay until
    a better spread one has loaded."""
    nodes = nodes_by_id(snapshot)
    done = after(snapshot, made, "loading")
    staying = [v for v in done.assigned if not nodes[v.assignment.node_id].draining]
    num_ready = Counter(v.assignment.version_id for v in staying if v.state == "ready")
    num_all = Counter(v.assignment.version_id for v in staying)
    for version in snapshot.versions:
        name, wanted = version.version_id, version.num_replicas
        num_all[name] = max(0, num_all[name] - wanted) if num_ready[name] <= wanted else 0
    return num_all


def is_at_odds(snapshot: FleetSnapshot) -> bool:
    """Whether a device holds two replicas of one version, or two that must not meet."""
    versions, there = snapshot.versions_by_id(), defaultdict(list)
    for placed in (view.assignment for view in snapshot.assigned):
        if version := versions.get(placed.version_id):
            for place, _ in spans(snapshot, placed):
                there[place].append(version)
    pairs = (pair for found in there.values() for pair in combinations(found, 2))
    return any(one is other or must_not_meet(one, other) for one, other in pairs)


def nodes_by_id(snapshot: FleetSnapshot) -> dict[str, NodeView]:
    return {node.node_id: node for node in snapshot.nodes}


@random_fleets
@given(snapshots())
def test_no_device_holds_more_than_it_has(snapshot: FleetSnapshot) -> None:
    """Also after devices shrank under what they held."""
    done = after(snapshot, plan(snapshot, 2))
    capacity = {
        (node.node_id, device.index): device.capacity_bytes
        for node in snapshot.nodes
        for device in node.devices
    }
    for place, num_bytes in used(done).items():
        assert num_bytes <= capacity[place]


@random_fleets
@given(snapshots())
def test_only_living_versions_run_and_never_too_many(snapshot: FleetSnapshot) -> None:
    """No replica of an unknown (retired) version, none on a lost node, none beyond the count but
    for one that will relieve a crowd; started ones stand on nodes that are ready, not draining."""
    made = plan(snapshot, 2)
    done = after(snapshot, made)
    wanted = {version.version_id: version.num_replicas for version in snapshot.versions}
    nodes = nodes_by_id(snapshot)
    staying = Counter(
        view.assignment.version_id
        for view in done.assigned
        if not nodes[view.assignment.node_id].draining
    )
    assert all(view.assignment.version_id in wanted for view in done.assigned)
    beyond = num_beyond(snapshot, made)
    assert all(number <= wanted[name] + beyond[name] for name, number in staying.items())
    assert all(nodes[view.assignment.node_id].status != "lost" for view in done.assigned)
    for start in made.started:
        node = nodes[start.assignment.node_id]
        assert node.status == "ready" and not node.draining


@random_fleets
@given(snapshots())
def test_what_is_missing_is_accounted_for(snapshot: FleetSnapshot) -> None:
    """Wanted = running (not leaving) + unplaced, for every version."""
    made = plan(snapshot, 2)
    beyond = num_beyond(snapshot, made)
    nodes = nodes_by_id(snapshot)
    running = Counter(
        view.assignment.version_id
        for view in after(snapshot, made).assigned
        if not nodes[view.assignment.node_id].draining
    )
    gaps = {gap.version_id: gap.num_missing for gap in made.unplaced}
    for version in snapshot.versions:
        name = version.version_id
        assert running[name] + gaps.get(name, 0) == version.num_replicas + beyond[name]


@random_fleets
@given(snapshots())
def test_planning_again_changes_nothing(snapshot: FleetSnapshot) -> None:
    """Minimal movement: neither while the new replicas load nor when they are ready (then only
    those that were waiting on a draining node go).

    What no plan puts side by side may take two plans to part.
    """
    assume(not is_at_odds(snapshot))
    made = plan(snapshot, 2)
    loading = plan(after(snapshot, made, "loading"), 3)
    assert (loading.started, loading.stopped) == ((), ())
    assert [(g.version_id, g.num_missing, g.code) for g in loading.unplaced] == [
        (g.version_id, g.num_missing, g.code) for g in made.unplaced
    ]
    ready = plan(after(snapshot, made, "ready"), 3)
    assert {stop.code for stop in ready.stopped} <= {"node_draining", "surplus"}
    assert all("It will take over from" in start.reason for start in ready.started)


@random_fleets
@given(snapshots())
def test_spreading_ends_and_never_takes_the_last_ready_one(snapshot: FleetSnapshot) -> None:
    """Planned again and again, the fleet comes to rest; on the way no version with all its
    replicas ready falls below its count."""
    wanted = {version.version_id: version.num_replicas for version in snapshot.versions}
    state = after(snapshot, plan(snapshot, 2), "ready")
    for generation in range(3, 40):
        before = num_ready(state)
        made = plan(state, generation)
        if not made.started and not made.stopped:
            return
        state = after(state, made, "loading")
        for name, number in num_ready(state).items():
            assert number >= min(before[name], wanted[name])
        state = after(state, plan(state, generation), "ready")
        state = replace(state, assigned=tuple(replace(v, state="ready") for v in state.assigned))
    raise AssertionError("the plan never comes to rest")


def num_ready(snapshot: FleetSnapshot) -> Counter[str]:
    nodes = nodes_by_id(snapshot)
    return Counter(
        view.assignment.version_id
        for view in snapshot.assigned
        if view.state == "ready" and not nodes[view.assignment.node_id].draining
    )


@random_fleets
@given(snapshots())
def test_every_decision_has_its_reasons(snapshot: FleetSnapshot) -> None:
    """Each device is a candidate or a rejection of each start; each gap has a sentence, and one
    rejection per device."""
    made = plan(snapshot, 2)
    devices = {(node.node_id, device.index) for node in snapshot.nodes for device in node.devices}
    for start in made.started:
        chosen = {(one.node_id, one.device_index) for one in start.candidates}
        refused = {(one.node_id, one.device_index) for one in start.rejections}
        assert chosen | refused == devices and not chosen & refused
        assert start.candidates[0].score == max(one.score for one in start.candidates)
        assert start.assignment.node_id == start.candidates[0].node_id
        assert start.reason.endswith(".")
    for gap in made.unplaced:
        refused = {(one.node_id, one.device_index) for one in gap.rejections}
        assert refused == devices and gap.reason.endswith(".")
        assert all(one.code and one.detail for one in gap.rejections)
    assert all(stop.code and stop.reason.endswith(".") for stop in made.stopped)


@random_fleets
@given(snapshots())
def test_nobody_is_displaced_by_equals_or_lesser_ones(snapshot: FleetSnapshot) -> None:
    """An eviction is paid for by somebody more important on that very device, unless the device
    itself shrank."""
    made = plan(snapshot, 2)
    versions = snapshot.versions_by_id()
    for stop in made.stopped:
        if stop.code != "evicted" or "has only" in stop.reason:
            continue
        places = {place for place, _ in spans(snapshot, stop.assignment)}
        rank = versions[stop.assignment.version_id].rank
        assert any(
            versions[start.assignment.version_id].rank < rank
            for start in made.started
            if places & {place for place, _ in spans(snapshot, start.assignment)}
        )


@random_fleets
@given(snapshots())
def test_a_gap_means_that_nothing_would_have_fitted(snapshot: FleetSnapshot) -> None:
    """No usable device has the free memory of an unplaced version without a forbidden neighbour,
    and none would by evicting everybody less important."""
    made = plan(snapshot, 2)
    done = after(snapshot, made)
    residents: dict[tuple[str, int], list[tuple[VersionView, int]]] = defaultdict(list)
    versions = snapshot.versions_by_id()
    for view in done.assigned:
        for place, share in spans(snapshot, view.assignment):
            residents[place].append((versions[view.assignment.version_id], share))
    failing = {(f.node_id, f.version_id) for f in snapshot.failures if f.retry_at > snapshot.now}
    for gap in made.unplaced:
        wanted = versions[gap.version_id]
        if wanted.spec.tensor_parallel > 1:
            continue
        for node in snapshot.nodes:
            if node.status != "ready" or node.draining or (node.node_id, gap.version_id) in failing:
                continue
            if wanted.spec.engine not in node.engines:
                continue
            for device in node.devices:
                there = residents[node.node_id, device.index]
                stay = [(v, s) for v, s in there if v.rank <= wanted.rank]
                if any(v is wanted or must_not_meet(v, wanted) for v, _ in there if v in
                       [v for v, _ in stay] or v is wanted):  # fmt: skip
                    continue
                free = device.capacity_bytes - device.foreign_bytes - sum(s for _, s in stay)
                assert free < wanted.spec.gpu_memory


@random_fleets
@given(snapshots())
def test_the_same_snapshot_gives_the_same_plan(snapshot: FleetSnapshot) -> None:
    """Bit for bit, and in whatever order nodes and versions were listed."""
    shuffled = FleetSnapshot(
        snapshot.nodes[::-1],
        snapshot.versions[::-1],
        snapshot.assigned[::-1],
        snapshot.failures[::-1],
        snapshot.position,
        snapshot.now,
    )
    made: PlacementPlan = plan(snapshot, 2)
    assert plan(snapshot, 2) == made
    assert plan(shuffled, 2) == made
