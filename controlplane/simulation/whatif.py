"""What would change if the fleet were another: the product's planner, on an altered snapshot.

The fleet is planned twice, once as it is and once altered, each until the planner changes nothing
more, every new replica taken as loaded. So what the planner would do anyway is not told as a
consequence. Worked example: n1 and n2 of 10 GB each; a (6, normal) on n1, b (6, best effort) on
n2. What if n1 is lost::

    as it is    a on n1/0, b on n2/0                 nothing to do
    altered     n1 lost: a is missing, evicts b      a on n2/0, b unplaced: insufficient_memory
    told        a leaves n1/0, joins n2/0; b leaves n2/0 (evicted); 1 of b is missing

Load is told per replica, relative to now: a version of three replicas that keeps two of them
carries 1.5 times as much on each. Latencies are not told: they need rates that the log has not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from controlplane.domain.errors import Invalid, NotFound
from controlplane.domain.ids import NodeId
from controlplane.domain.placement import Assignment, Stopped, Unplaced
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import AssignedView, FleetSnapshot, NodeView, VersionView

MAX_REPLICAS = 1000  # of a version, and as many times the load
MAX_ROUNDS = 50  # of planning; a fleet that spreads moves one replica of a version a round


@dataclass(frozen=True)
class Change:
    """``lose``: node ids. ``add``: (new node's id, id of the node it is like). ``replicas``:
    (version id, number). ``load``: times the present requests, of every version."""

    lose: tuple[str, ...] = ()
    add: tuple[tuple[str, str], ...] = ()
    replicas: tuple[tuple[str, int], ...] = ()
    load: float = 1.0


@dataclass(frozen=True)
class Place:
    """``number`` replicas (more than 0) of the version led by this device."""

    version_id: str
    node_id: str
    device_index: int
    number: int


@dataclass(frozen=True)
class Load:
    """Replicas before and after. ``per_replica``: requests on each, relative to now; None where
    none is left, or none was."""

    version_id: str
    before: int
    after: int
    per_replica: float | None


@dataclass(frozen=True)
class Outcome:
    """``unplaced`` and ``relieved`` count missing replicas, more and fewer than without the change.
    ``settled`` is False if the planner still moved something after ``MAX_ROUNDS``."""

    joined: tuple[Place, ...]
    left: tuple[Place, ...]
    evicted: tuple[Stopped, ...]
    unplaced: tuple[Unplaced, ...]
    relieved: tuple[tuple[str, int], ...]
    loads: tuple[Load, ...]
    settled: bool


@dataclass(frozen=True)
class _End:
    """Where planning comes to rest."""

    assigned: tuple[Assignment, ...]
    evicted: tuple[Stopped, ...]
    unplaced: tuple[Unplaced, ...]
    settled: bool


def what_if(snapshot: FleetSnapshot, generation: int, change: Change) -> Outcome:
    """Compare the ends of both plannings. Pure; raises NotFound, Invalid for a wrong change."""
    altered = alter(snapshot, change)
    before, after = _end(snapshot, generation), _end(altered, generation)
    then, now = _places(before.assigned), _places(after.assigned)
    usual = {stop.assignment.replica_id for stop in before.evicted}
    gaps = {str(one.version_id): one.num_missing for one in before.unplaced}
    return Outcome(
        joined=_told(now - then),
        left=_told(then - now),
        evicted=tuple(s for s in after.evicted if s.assignment.replica_id not in usual),
        unplaced=tuple(_more(after.unplaced, gaps)),
        relieved=tuple(_fewer(before.unplaced, after.unplaced)),
        loads=tuple(_loads(before.assigned, after.assigned, change.load)),
        settled=before.settled and after.settled,
    )


# --- the altered fleet ------------------------------------------------------------------------
def alter(snapshot: FleetSnapshot, change: Change) -> FleetSnapshot:
    """The fleet with the change made; what ran on a lost node is still assigned to it."""
    if not 0 < change.load <= MAX_REPLICAS:
        raise Invalid(
            "invalid_load", "The load is more than 0 and at most 1000 times the present one."
        )
    nodes: dict[str, NodeView] = {node.node_id: node for node in snapshot.nodes}
    for node_id, like in change.add:
        if node_id in nodes:
            raise Invalid("node_exists", f"There is a node '{node_id}' already.")
        nodes[node_id] = _empty(_known(nodes, like), node_id)
    for node_id in change.lose:
        nodes[node_id] = replace(_known(nodes, node_id), status="lost")
    return replace(
        snapshot, nodes=tuple(nodes.values()), versions=_resized(snapshot, change.replicas)
    )


def _known(nodes: dict[str, NodeView], node_id: str) -> NodeView:
    if node_id not in nodes:
        raise NotFound("node", node_id)
    return nodes[node_id]


def _empty(like: NodeView, node_id: str) -> NodeView:
    devices = tuple(replace(device, foreign_bytes=0) for device in like.devices)
    return replace(like, node_id=NodeId(node_id), devices=devices, status="ready", draining=False)


def _resized(
    snapshot: FleetSnapshot, replicas: Iterable[tuple[str, int]]
) -> tuple[VersionView, ...]:
    versions = snapshot.versions_by_id()
    for version_id, number in replicas:
        if version_id not in versions:
            raise NotFound("version", version_id)
        if not 0 <= number <= MAX_REPLICAS:
            raise Invalid("invalid_replicas", "A version has from 0 to 1000 replicas.")
        versions[version_id] = replace(versions[version_id], num_replicas=number)
    return tuple(versions.values())


# --- planning to the end ----------------------------------------------------------------------
def _end(snapshot: FleetSnapshot, generation: int) -> _End:
    evicted: list[Stopped] = []
    for number in range(1, MAX_ROUNDS + 1):
        made = plan(snapshot, generation + number)
        if not made.started and not made.stopped:
            break
        evicted += [stop for stop in made.stopped if stop.code == "evicted"]
        snapshot = carried_out(snapshot, made)
    settled = not made.started and not made.stopped
    assigned = tuple(view.assignment for view in snapshot.assigned)
    return _End(assigned, tuple(evicted), made.unplaced, settled)


def carried_out(snapshot: FleetSnapshot, made: PlacementPlan) -> FleetSnapshot:
    """The fleet once every node has done what the plan says."""
    gone = {stop.assignment.replica_id for stop in made.stopped}
    kept = [
        replace(view, state="ready") if view.state != "failed" else view
        for view in snapshot.assigned
        if view.assignment.replica_id not in gone
    ]
    new = [AssignedView(start.assignment, "ready") for start in made.started]
    return replace(snapshot, assigned=(*kept, *new))


# --- the difference ---------------------------------------------------------------------------
def _places(assigned: Iterable[Assignment]) -> Counter[tuple[str, str, int]]:
    return Counter((one.version_id, one.node_id, one.device_index) for one in assigned)


def _told(places: Counter[tuple[str, str, int]]) -> tuple[Place, ...]:
    return tuple(Place(*place, number) for place, number in sorted(places.items()))


def _more(after: Iterable[Unplaced], before: dict[str, int]) -> Iterator[Unplaced]:
    for one in after:
        if one.num_missing > before.get(one.version_id, 0):
            yield one


def _fewer(before: Iterable[Unplaced], after: Iterable[Unplaced]) -> Iterator[tuple[str, int]]:
    left = {one.version_id: one.num_missing for one in after}
    for one in before:
        fewer = one.num_missing - left.get(one.version_id, 0)
        if fewer > 0:
            yield one.version_id, fewer


def _loads(before: Iterable[Assignment], after: Iterable[Assignment], load: float) -> list[Load]:
    """Of the versions whose load on a replica changes."""
    then = Counter(str(one.version_id) for one in before)
    now = Counter(str(one.version_id) for one in after)
    told = [
        Load(name, then[name], now[name], load * then[name] / now[name] if now[name] else None)
        for name in sorted(then | now)
    ]
    return [
        replace(one, per_replica=None) if not one.before else one
        for one in told
        if one.before != one.after or load != 1.0
    ]
