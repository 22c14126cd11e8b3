"""The plan: which replicas start where, which stop, and which fit nowhere, all with reasons.

Best-fit decreasing, by priority: what is missing is placed high priority first, within a class the
largest first, each on the feasible device of the best score. A replica that fits nowhere may evict
replicas of *strictly lower* priority, best effort first; what it evicts is missing then, and is
placed again if there is room. So the plan ends: each eviction goes down in priority.

Worked example: two devices of 10 GB, n1 holds best-effort b (6), n2 holds normal c (6)::

    high a (8) is missing   fits nowhere; on n1 it can evict b, on n2 c; b is the cheaper victim
                            stop b (evicted), start a on n1/0
    b (6) is missing now    4 GB free on n2, 2 GB on n1: unplaced, insufficient_memory

Kept replicas do not move, with one exception: of replicas that crowd on one node while another has
room, one is started there, and the crowded one stops when that is ready (``reconcile``). So a fleet
spreads again after a drain or an outage, one replica of a version at a time. Two replicas of a, n2
comes back empty::

    a.0 ready on n1/0, a.1 ready on n1/1          start a.2 on n2/0
    a.2 ready                                     stop a.1 (surplus)

Otherwise planning again from the outcome changes nothing. Rejected for this step: an integer
program over the whole fleet, whose optimum moves running replicas for small gains and changes with
every input.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field

from controlplane.domain.ids import ReplicaId
from controlplane.domain.placement import (
    Assignment,
    Candidate,
    Rejection,
    Started,
    Stopped,
    Unplaced,
)
from controlplane.placement import explain
from controlplane.placement.feasible import (
    Fleet,
    Resident,
    Slot,
    must_not_meet,
    rejection,
    shard_bytes,
)
from controlplane.placement.reconcile import Difference, difference, over_capacity
from controlplane.placement.score import candidate, score
from controlplane.placement.snapshot import AssignedView, FleetSnapshot, VersionView

HELPFUL_CODES = (
    "backoff",
    "anti_affinity",
    "insufficient_memory",
    "insufficient_time",
    "already_here",
    "too_small",
    "too_few_devices",
)
MAX_CANDIDATES = 16  # stored with a start; the best ones, so that an event stays small


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The difference to the placement planned from; empty if all is as it should be."""

    started: tuple[Started, ...] = ()
    stopped: tuple[Stopped, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()


class _Queue:
    """Missing replicas: by priority, then the largest first, then by name."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str, int, VersionView]] = []
        self._num_pushed = 0

    def push(self, version: VersionView) -> None:
        self._num_pushed += 1  # before the version in the tuple: versions have no order
        size = -version.spec.gpu_memory
        entry = (version.rank, size, version.version_id, self._num_pushed, version)
        heapq.heappush(self._heap, entry)

    def pop(self) -> VersionView:
        return heapq.heappop(self._heap)[-1]

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(slots=True)
class _Draft:
    """The plan while it grows. A replica started and evicted in one plan leaves no trace."""

    fleet: Fleet
    generation: int
    started: dict[str, Started] = field(default_factory=dict)
    stopped: list[Stopped] = field(default_factory=list)
    gaps: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, int] = field(default_factory=dict)
    queue: _Queue = field(default_factory=_Queue)


def plan(snapshot: FleetSnapshot, generation: int) -> PlacementPlan:
    """Decide everything for ``snapshot``; ``generation`` names the new replicas.

    Pure: the same snapshot and generation give the same plan.
    """
    versions = snapshot.versions_by_id()
    found = difference(snapshot)
    draft = _Draft(Fleet(snapshot), generation, stopped=found.stopped)
    for view in (*found.kept, *found.leaving):
        version = versions[view.assignment.version_id]
        draft.fleet.add(Resident(view.assignment, version, view.idle_s))
    for version_id, number in found.missing.items():
        for _ in range(number):
            draft.queue.push(versions[version_id])
    _fit_shrunken(draft, {view.assignment.replica_id for view in found.kept})
    while draft.queue:
        _place(draft, draft.queue.pop())
    for version_id, views in _settled(found, draft):
        _spread(draft, versions[version_id], views)
    unplaced = tuple(_unplaced(draft, versions[name]) for name in sorted(draft.gaps))
    return PlacementPlan(tuple(draft.started.values()), tuple(draft.stopped), unplaced)


# --- one replica ------------------------------------------------------------------------------
def _place(draft: _Draft, version: VersionView) -> None:
    candidates, rejections = _survey(draft.fleet, version)
    if not candidates:
        victims = _victims(draft.fleet, version)
        if victims is None:
            draft.gaps[version.version_id] += 1
            return
        for victim in victims:
            _evict(draft, victim, version)
        candidates, rejections = _survey(draft.fleet, version)
    _start(draft, version, candidates, rejections)


def _survey(fleet: Fleet, version: VersionView) -> tuple[list[Candidate], list[Rejection]]:
    """The best devices with their terms, best first, and every device that cannot take it."""
    scored: list[tuple[float, int, Slot]] = []
    rejections: list[Rejection] = []
    for order, slot in enumerate(fleet.slots):  # in the order of their ids, which settles ties
        refused = rejection(fleet, slot, version)
        if refused is None:
            scored.append((-score(fleet, slot, version), order, slot))
        else:
            rejections.append(refused)
    best = heapq.nsmallest(MAX_CANDIDATES, scored, key=lambda one: one[:2])
    return [candidate(fleet, slot, version, -total) for total, _, slot in best], rejections


def _start(
    draft: _Draft,
    version: VersionView,
    candidates: list[Candidate],
    rejections: list[Rejection],
    remark: str = "",
) -> None:
    best = candidates[0]
    num_candidates = len(draft.fleet.slots) - len(rejections)
    number = draft.numbers[version.version_id] = draft.numbers.get(version.version_id, -1) + 1
    name = version.version_id.replace("@", ".", 1)
    assignment = Assignment(
        ReplicaId(f"{name}.g{draft.generation}.{number}"),
        version.version_id,
        best.node_id,
        best.device_index,
        version.spec.gpu_memory,
    )
    draft.fleet.add(Resident(assignment, version))
    draft.started[assignment.replica_id] = Started(
        assignment,
        explain.placed(version.version_id, best, num_candidates, rejections) + remark,
        tuple(candidates),
        tuple(rejections),
    )


def _unplaced(draft: _Draft, version: VersionView) -> Unplaced:
    """One entry per version, with the reasons as they are when all else is placed."""
    name, number = version.version_id, draft.gaps[version.version_id]
    _, rejections = _survey(draft.fleet, version)
    reason = explain.unplaced(name, version.spec.gpu_memory, number, rejections)
    return Unplaced(name, number, _main_code(rejections), reason, tuple(rejections))


def _main_code(rejections: list[Rejection]) -> str:
    """The code that says best what would help: a wait, another neighbour, more memory, a node."""
    codes = {one.code for one in rejections}
    for code in HELPFUL_CODES:
        if code in codes:
            return code
    return "no_ready_node" if codes else "no_device"


# --- spreading --------------------------------------------------------------------------------
def _settled(found: Difference, draft: _Draft) -> list[tuple[str, list[AssignedView]]]:
    """The versions of several replicas, all ready, for which nothing else is under way."""
    busy = {start.assignment.version_id for start in draft.started.values()} | set(draft.gaps)
    busy |= {view.assignment.version_id for view in found.leaving}
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
    candidates, rejections = _survey(draft.fleet, version)
    if candidates and _on_node(draft.fleet, candidates[0], version) <= number - 2:
        _start(draft, version, candidates, rejections, explain.relieves(node_id, number))


def _on_node(fleet: Fleet, place: Candidate, version: VersionView) -> int:
    return fleet.num_on_node.get((place.node_id, version.version_id), 0)


# --- eviction ---------------------------------------------------------------------------------
def _victims(fleet: Fleet, version: VersionView) -> list[Resident] | None:
    """The cheapest residents of one place whose eviction lets ``version`` in; None if none do.

    Cheapest: the least important class hurt, then the fewest bytes, then the first device.
    """
    best: tuple[tuple[int, int, int], list[Resident]] | None = None
    for slot in fleet.slots:
        chosen = _victims_at(fleet, slot, version)
        if not chosen:
            continue
        cost = (
            -min(victim.version.rank for victim in chosen),
            sum(victim.assignment.memory_bytes for victim in chosen),
            len(chosen),
        )
        if best is None or cost < best[0]:
            best = cost, chosen
    return best[1] if best else None


def _victims_at(fleet: Fleet, slot: Slot, version: VersionView) -> list[Resident]:
    """A small set of lower-priority residents to evict at ``slot``; empty if that cannot help."""
    lower: dict[str, Resident] = {}
    for one in fleet.span(slot.node.node_id, slot.device.index, version):
        for replica_id, resident in one.residents.items():
            if resident.version.rank > version.rank:
                lower[replica_id] = resident
    if not lower or rejection(fleet, slot, version, lower) is not None:
        return []
    # From all of them, spare one after the other, the most important and busiest first.
    order = sorted(lower.values(), key=lambda r: (r.version.rank, r.idle_s, _spare_key(r)))
    chosen = dict(lower)
    for resident in order:
        if must_not_meet(version, resident.version):
            continue
        rest = {rid: one for rid, one in chosen.items() if one is not resident}
        if rejection(fleet, slot, version, rest) is None:
            chosen = rest
    return [chosen[replica_id] for replica_id in sorted(chosen)]


def _spare_key(resident: Resident) -> tuple[int, str]:
    return -shard_bytes(resident.assignment, resident.version), resident.assignment.replica_id


def _evict(draft: _Draft, victim: Resident, winner: VersionView) -> None:
    draft.fleet.remove(victim)
    draft.queue.push(victim.version)
    if draft.started.pop(victim.assignment.replica_id, None) is None:
        reason = explain.evicted(
            victim.assignment.replica_id,
            winner.version_id,
            victim.version.spec.priority,
            winner.spec.priority,
        )
        draft.stopped.append(Stopped(victim.assignment, "evicted", reason))


def _fit_shrunken(draft: _Draft, kept: set[str]) -> None:
    """Evict from devices that hold more than they have, e.g. after joining with less memory.

    Only a replica in ``kept`` is missing then: a leaving one is counted as missing already.
    """
    for slot in draft.fleet.slots:
        while slot.used_bytes > slot.device.capacity_bytes and slot.residents:
            victim = max(
                slot.residents.values(),
                key=lambda r: (r.version.rank, r.idle_s, r.assignment.replica_id),
            )
            end = over_capacity(victim.assignment, slot.used_bytes, slot.device.capacity_bytes)
            draft.stopped.append(end)
            draft.fleet.remove(victim)
            if victim.assignment.replica_id in kept:
                draft.queue.push(victim.version)
