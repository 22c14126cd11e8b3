"""The plan: which replicas start where, which stop, and which fit nowhere, all with reasons.

Best-fit decreasing, by priority: what is missing is placed high priority first, within a class the
largest first, each on the feasible device (or group of devices on one link) of the best score. A
group that no node has room for may go over several nodes of one fabric (``groups``). A replica that
fits nowhere may evict replicas of *strictly lower* priority, best effort first (``evict``); what it
evicts is missing then, and is placed again if there is room. So the plan ends: each eviction goes
down in priority.

Worked example: two devices of 10 GB, n1 holds best-effort b (6), n2 holds normal c (6)::

    high a (8) is missing   fits nowhere; on n1 it can evict b, on n2 c; b is the cheaper victim
                            stop b (evicted), start a on n1/0
    b (6) is missing now    4 GB free on n2, 2 GB on n1: unplaced, insufficient_memory

Kept replicas do not move, with two exceptions. One that fails where it is goes where it may fare
better, else its node tries on (``failing``); within its priority it comes after what is missing,
but for what is missing of its own version.
And of replicas that crowd on one node while another has room, one is started there, and the crowded
one stops when that is ready (``reconcile``). So a fleet spreads again after a drain or an outage,
one replica of a version at a time. Two replicas of a, n2
comes back empty::

    a.0 ready on n1/0, a.1 ready on n1/1          start a.2 on n2/0
    a.2 ready                                     stop a.1 (surplus)

Once nothing is to start or stop, replicas that share devices may change their tier (``tiering``).
Otherwise planning again from the outcome changes nothing. Rejected for this step: an integer
program over the whole fleet, whose optimum moves running replicas for small gains and changes with
every input; ``repack`` states one, for an operator to ask for.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.domain.ids import ReplicaId
from controlplane.domain.placement import (
    Assignment,
    Retiered,
    Shard,
    Started,
    Stopped,
    Unplaced,
)
from controlplane.placement import explain, failing, groups, sharing, tiering
from controlplane.placement.evict import victims
from controlplane.placement.feasible import Fleet, Resident, Slot
from controlplane.placement.reconcile import Difference, difference, over_capacity
from controlplane.placement.snapshot import AssignedView, FleetSnapshot, VersionView
from controlplane.placement.survey import Survey, survey

PLANNER = 7  # stored with each decision; one more whenever rules or weights change
PLANNERS_WITHOUT_WHOLES = frozenset({2, 3})
PLANNERS_THAT_STOP_FAILING = PLANNERS_WITHOUT_WHOLES | {1, 4, 5}
# 2 knew nothing that is swappable or measured, 4 nothing of other engines
PLANNERS_WITHOUT_TIERING = PLANNERS_WITHOUT_WHOLES | {0, 1, 4, 5}
PLANNERS_THAT_JOIN_ALL = frozenset(range(7))  # nodes of a fabric, whatever their agents can
PLANNERS_THAT_TAKE_TURNS = PLANNERS_THAT_JOIN_ALL  # a missing replica takes a failing one's place
PLANNERS_THAT_SAY_NOT_WHOSE = frozenset(range(7))  # replicas are on the node of a new one
REPLAYED = PLANNERS_WITHOUT_WHOLES | {4, 5, 6, PLANNER}
HELPFUL_CODES = (
    "backoff",
    "anti_affinity",
    "insufficient_memory",
    "insufficient_time",
    "insufficient_host",
    "too_few_free",
    "already_here",
    "too_small",
    "too_few_devices",
    "wrong_class",
    "no_engine",
)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The difference to the placement planned from; empty if all is as it should be."""

    started: tuple[Started, ...] = ()
    stopped: tuple[Stopped, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    retiered: tuple[Retiered, ...] = ()


class _Queue:
    """Missing replicas: by priority, then the largest first, then by name; and, behind those of its
    priority, each that is failing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, str, int, VersionView, AssignedView | None]] = []
        self._num_pushed = 0

    def push(self, version: VersionView, view: AssignedView | None = None) -> None:
        self._num_pushed += 1  # before the version in the tuple: versions have no order
        order = version.rank, view is not None, -version.spec.gpu_memory
        heapq.heappush(self._heap, (*order, version.version_id, self._num_pushed, version, view))

    def pop(self) -> tuple[VersionView, AssignedView | None]:
        return heapq.heappop(self._heap)[-2:]

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(slots=True)
class _Draft:
    """The plan while it grows. A replica started and evicted in one plan leaves no trace.

    ``whole``: the replica (or version that has a gap) whose comparison is told of every device.
    ``found``: what was kept and is leaving at first; ``leaving``: what still is; ``failing``: what
    is, by version.
    """

    fleet: Fleet
    generation: int
    found: Difference
    whole: str = ""
    keeps_failing: bool = True
    started: dict[str, Started] = field(default_factory=dict)
    stopped: list[Stopped] = field(default_factory=list)
    gaps: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, int] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    failing: dict[str, list[AssignedView]] = field(default_factory=dict)
    queue: _Queue = field(default_factory=_Queue)


def plan(snapshot: FleetSnapshot, generation: int, whole: str = "") -> PlacementPlan:
    """Decide everything for ``snapshot``; ``generation`` names the new replicas.

    Pure: the same snapshot and generation give the same plan. Of the replica (or version that has
    a gap) named ``whole`` every candidate and rejection is told, however large the fleet.
    """
    versions = snapshot.versions_by_id()
    found = difference(snapshot)
    keeps = snapshot.keeps_failing
    draft = _Draft(Fleet(snapshot), generation, found, whole, keeps, stopped=found.stopped)
    draft.leaving = {view.assignment.replica_id for view in found.leaving}
    for view in (*found.kept, *found.leaving):
        version = versions[view.assignment.version_id]
        seen = view.charged_bytes, view.is_steady, view.retiered_at
        draft.fleet.add(Resident(view.assignment, version, view.idle_s, *seen))
    for version_id, number in found.missing.items():
        for _ in range(number):
            draft.queue.push(versions[version_id])
    for view in found.failing:
        draft.queue.push(versions[view.assignment.version_id], view)
        draft.failing.setdefault(view.assignment.version_id, []).append(view)
    _fit_shrunken(draft)
    while draft.queue:
        version, failed = draft.queue.pop()
        if failed is None:
            _place_missing(draft, version, snapshot.keeps_siblings)
        else:
            _place_again(draft, version, failed)
    for version_id, views in _settled(found, draft):
        _spread(draft, versions[version_id], views)
    unplaced = tuple(_unplaced(draft, versions[name]) for name in sorted(draft.gaps))
    started, stopped = tuple(draft.started.values()), tuple(draft.stopped)
    is_settled = snapshot.retiers and not started and not stopped
    retiered = tiering.retiered(draft.fleet, snapshot) if is_settled else ()
    return PlacementPlan(started, stopped, unplaced, retiered)


# --- one replica ------------------------------------------------------------------------------
def _place_missing(draft: _Draft, version: VersionView, keeps_siblings: bool) -> None:
    """Start one, but not where another of the version fails: that would be a decision at each of
    its tries, and the same replica under another name."""
    fleet, siblings = draft.fleet, []
    if keeps_siblings:
        found = [_resident(view, version) for view in draft.failing.get(version.version_id, ())]
        siblings = [one for one in found if failing.has_place(fleet, one)]
    for one in siblings:
        fleet.add(one)
    _place(draft, version)
    for one in siblings:
        fleet.remove(one)


def _resident(view: AssignedView, version: VersionView) -> Resident:
    return Resident(view.assignment, version, view.idle_s, view.charged_bytes, view.is_steady)


def _place(draft: _Draft, version: VersionView) -> None:
    if not _is_placed(draft, version):
        draft.gaps[version.version_id] += 1


def _place_again(draft: _Draft, version: VersionView, view: AssignedView) -> None:
    """Move a failing replica to a better node, or leave it where it is, if it still has room."""
    fleet, name = draft.fleet, version.version_id
    resident = _resident(view, version)
    if not failing.has_place(fleet, resident):
        draft.stopped.append(failing.stop(view, " Its place is taken."))
        return _place(draft, version)
    worse, usual = failing.no_better(fleet, view), fleet.failures.get(name, [])
    if worse is not None:
        fleet.failures[name] = worse
        is_moved = _is_placed(draft, version)
        fleet.failures[name] = usual
        if is_moved:
            return draft.stopped.append(failing.stop(view))
    return fleet.add(resident)


def _is_placed(draft: _Draft, version: VersionView) -> bool:
    """Start one where it fits, or where it does once others have left; False if nowhere."""
    found = survey(draft.fleet, version)
    if found.num_candidates:
        _start(draft, found)
        return True
    if joined := groups.across(draft.fleet, version):
        _start_across(draft, found, joined)
        return True
    if shared := sharing.place(draft.fleet, version):
        _start_shared(draft, found, shared)
        return True
    leaving = victims(draft.fleet, version)
    if leaving is None:
        is_stored = draft.fleet.retiers and version.is_swappable
        if is_stored and (stored := sharing.place(draft.fleet, version, "storage")):
            _start_shared(draft, found, stored)
            return True
        return False
    _start_instead(draft, version, leaving)
    return True


def _start_instead(draft: _Draft, version: VersionView, leaving: list[Resident]) -> None:
    for victim in leaving:
        _evict(draft, victim, version)
    found = survey(draft.fleet, version)
    shared = None if found.num_candidates else sharing.place(draft.fleet, version)
    if shared:
        _start_shared(draft, found, shared)
    else:
        _start(draft, found)


def _start(draft: _Draft, found: Survey, remark: str = "") -> None:
    """Start one on the best device, or on the group that it leads."""
    assignment = _assigned(draft, found.version, found.group(found.best))
    whole = assignment.replica_id == draft.whole
    candidates, rejections = found.candidates(whole), found.rejections(whole)
    ruled_out, number = found.ruled_out(), found.num_candidates
    remark += explain.MAY_LEAVE if found.version.is_swappable else ""
    whose = draft.fleet.says_whose
    reason = explain.placed(assignment, candidates[0], number, ruled_out, whose) + remark
    draft.started[assignment.replica_id] = Started(
        assignment, reason, candidates, rejections, number, ruled_out
    )


def _start_across(draft: _Draft, found: Survey, joined: groups.Across) -> None:
    """Start one on devices of several nodes; every device by itself was ruled out."""
    assignment = _assigned(draft, found.version, joined.cells)
    whole = assignment.replica_id == draft.whole
    members = {(one.node_id, one.device_index) for one in assignment.shards}
    rejections = tuple(
        one for one in found.rejections(whole) if (one.node_id, one.device_index) not in members
    )
    draft.started[assignment.replica_id] = Started(
        assignment,
        explain.joined(assignment, joined.fabric),
        (joined.candidate,),
        rejections,
        1,
        found.ruled_out(),
    )


def _start_shared(draft: _Draft, found: Survey, place: sharing.Shared) -> None:
    """Start one beside others that take turns; no device has its memory free."""
    assignment = _assigned(draft, found.version, [place.cell], place.tier)
    whole = assignment.replica_id == draft.whole
    here = assignment.node_id, assignment.device_index
    rejections = tuple(
        one for one in found.rejections(whole) if (one.node_id, one.device_index) != here
    )
    draft.started[assignment.replica_id] = Started(
        assignment,
        explain.shared(assignment, place),
        (place.candidate,),
        rejections,
        1,
        found.ruled_out(),
    )


def _assigned(
    draft: _Draft, version: VersionView, cells: list[int], tier: str = "resident"
) -> Assignment:
    """Name the new replica and put it on the workbench."""
    number = draft.numbers[version.version_id] = draft.numbers.get(version.version_id, -1) + 1
    name = version.version_id.replace("@", ".", 1)
    slots = [draft.fleet.slots[cell] for cell in cells]
    assignment = Assignment(
        ReplicaId(f"{name}.g{draft.generation}.{number}"),
        version.version_id,
        slots[0].node.node_id,
        slots[0].device.index,
        version.spec.gpu_memory,
        _shards(slots) if len(slots) > 1 else (),
        tier=tier,
    )
    draft.fleet.add(Resident(assignment, version))
    return assignment


def _shards(slots: list[Slot]) -> tuple[Shard, ...]:
    return tuple(Shard(slot.node.node_id, slot.device.index) for slot in slots)


def _unplaced(draft: _Draft, version: VersionView) -> Unplaced:
    """One entry per version, with the reasons as they are when all else is placed."""
    name, number = version.version_id, draft.gaps[version.version_id]
    found = survey(draft.fleet, version)
    whole = name == draft.whole
    rejections, ruled_out = found.rejections(whole), found.ruled_out()
    reason = explain.unplaced(name, version.spec.gpu_memory, number, ruled_out, rejections)
    reason += explain.not_shared(version.is_swappable)
    return Unplaced(name, number, _main_code(dict(ruled_out)), reason, rejections)


def _main_code(codes: Iterable[str]) -> str:
    """The code that says best what would help: a wait, another neighbour, more memory, a node."""
    found = set(codes)
    for code in HELPFUL_CODES:
        if code in found:
            return code
    return "no_ready_node" if found else "no_device"


# --- spreading --------------------------------------------------------------------------------
def _settled(found: Difference, draft: _Draft) -> list[tuple[str, list[AssignedView]]]:
    """The versions of several replicas, all ready, for which nothing else is under way."""
    busy = {start.assignment.version_id for start in draft.started.values()} | set(draft.gaps)
    busy |= {view.assignment.version_id for view in (*found.leaving, *found.failing)}
    by_version: dict[str, list[AssignedView]] = {}
    for view in found.kept:
        by_version.setdefault(view.assignment.version_id, []).append(view)
    return [
        (version_id, views)
        for version_id, views in by_version.items()
        if len(views) > 1
        and version_id not in busy
        and all(view.state == "ready" for view in views)
    ]


def _spread(draft: _Draft, version: VersionView, views: list[AssignedView]) -> None:
    """Start one more on a node with at least two fewer of them than the fullest; evict nobody."""
    node_id, number = Counter(view.assignment.node_id for view in views).most_common(1)[0]
    if number < 2:
        return
    found = survey(draft.fleet, version)
    if found.num_candidates and _on_node(found) <= number - 2 and not _is_risky(draft, found):
        _start(draft, found, explain.relieves(node_id, number))


def _is_risky(draft: _Draft, found: Survey) -> bool:
    node_id = found.fleet.slots[found.best].node.node_id
    name = found.version.version_id
    return draft.keeps_failing and failing.failed_lately(found.fleet, name, node_id)


def _on_node(found: Survey) -> int:
    """How many of the version are on the node of the best device already."""
    node_id = found.fleet.slots[found.best].node.node_id
    return found.fleet.num_on_node.get(found.version.version_id, {}).get(node_id, 0)


# --- eviction ---------------------------------------------------------------------------------
def _evict(draft: _Draft, victim: Resident, winner: VersionView) -> None:
    _remove(draft, victim)
    if draft.started.pop(victim.assignment.replica_id, None) is None:
        reason = explain.evicted(
            victim.assignment.replica_id,
            winner.version_id,
            victim.version.spec.priority,
            winner.spec.priority,
        )
        draft.stopped.append(Stopped(victim.assignment, "evicted", reason))


def _fit_shrunken(draft: _Draft) -> None:
    """Evict from devices that hold more than they have, e.g. after joining with less memory."""
    for slot in draft.fleet.slots.values():
        while sharing.over_bytes(slot) > 0 and slot.residents:
            victim = max(
                sharing.helpful(slot),
                key=lambda r: (r.version.rank, r.idle_s, r.assignment.replica_id),
            )
            needed = sharing.needed_bytes(slot.residents.values())
            end = over_capacity(victim.assignment, needed, slot.device.capacity_bytes)
            draft.stopped.append(end)
            _remove(draft, victim)


def _remove(draft: _Draft, victim: Resident) -> None:
    """Take it off. It is missing then, unless it was leaving (and so counted already, or one too
    many), or a spare one can stay in its place."""
    draft.fleet.remove(victim)
    name, spare, leaving = victim.assignment.replica_id, draft.found.spare, draft.leaving
    spare.pop(name, None)
    if name in leaving:
        return
    stays = next((one for one, known in spare.items() if known == victim.version.version_id), None)
    if stays is None:
        draft.queue.push(victim.version)
    else:
        del spare[stays]
        leaving.remove(stays)
