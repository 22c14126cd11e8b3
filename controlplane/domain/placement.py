"""What should run where. One stream, ``placement``; its version is the generation.

The stream holds decisions only. A plan is appended with the version it was planned from as the
expected version, so of two planners one wins and the other plans again.
"""

import msgspec
from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.ids import NodeId, ReplicaId, VersionId

STREAM = "placement"


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A device that holds one share of a tensor-parallel replica."""

    node_id: NodeId
    device_index: int


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One replica on one device. ``replica_id`` names this placement and is never used again.

    ``shards`` are all devices of a tensor-parallel group, the one named here first. Groups placed
    before there were any took neighbouring devices; see ``shards_of``. ``replaces``: the replica
    of the same version that leaves once this one is ready. ``tier``: resident, or, if it was
    placed beyond the device's memory, warm (swapped in from its node's when it is asked for) or
    storage (loaded then).
    """

    replica_id: ReplicaId
    version_id: VersionId
    node_id: NodeId
    device_index: int
    memory_bytes: int
    shards: tuple[Shard, ...] = ()
    replaces: ReplicaId | None = None
    tier: str = "resident"


def shards_of(placed: Assignment, tensor_parallel: int) -> tuple[Shard, ...]:
    """The devices that it takes: ``shards``, else as many neighbours from ``device_index`` on."""
    return placed.shards or tuple(
        Shard(placed.node_id, placed.device_index + offset) for offset in range(tensor_parallel)
    )


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """Why a device was not chosen: a stable code, and the figures behind it."""

    node_id: NodeId
    device_index: int
    code: str
    detail: str


class ScoreTerm(msgspec.Struct, frozen=True, gc=False):
    name: str
    value: float


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A feasible device with its score; higher is better."""

    node_id: NodeId
    device_index: int
    score: float
    terms: tuple[ScoreTerm, ...]


class Started(msgspec.Struct, frozen=True, gc=False):
    """Of a large fleet only the best candidates and some rejections of each code are kept here;
    ``num_candidates`` and ``ruled_out`` (code, devices) count them all, and the rest is computed
    again from the decision's inputs (``application.replay``)."""

    assignment: Assignment
    reason: str
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    num_candidates: int = 0
    ruled_out: tuple[tuple[str, int], ...] = ()


class Stopped(msgspec.Struct, frozen=True, gc=False):
    assignment: Assignment
    code: str  # retired | node_lost | node_draining | evicted | surplus | moved | failed | no_room
    reason: str


class Retiered(msgspec.Struct, frozen=True, gc=False):
    """A replica that stays where it is, and is kept in another tier than ``before`` from now on:
    in that of ``assignment``. ``code``: more_asked | less_asked | room | crowded | host_full.
    ``rate``: requests a minute for it; ``instead_of``: who gives up that tier for it, or for whom
    it gives up the old one."""

    assignment: Assignment
    before: str
    code: str
    reason: str
    rate: float
    instead_of: tuple[ReplicaId, ...] = ()


class Unplaced(msgspec.Struct, frozen=True, gc=False):
    """A replica that is wanted but fits nowhere now."""

    version_id: VersionId
    num_missing: int
    code: str
    reason: str
    rejections: tuple[Rejection, ...]


class PlanInputs(msgspec.Struct, frozen=True, gc=False):
    """What the planner saw beside the log: with the log up to ``planned_from`` and the event's
    time it is all of it, so the decision can be made again. Zeros are left out.

    ``foreign_bytes``: (node, device index, bytes held by other processes). ``idle_s``: (replica,
    seconds since it last worked). ``reserved_bytes``: (kind of device, bytes kept free).
    ``planner``: which rules and weights decided; another planner may well decide otherwise.
    ``host_bytes``: (node, bytes it keeps for what is swapped out). ``charged_bytes``: (replica,
    bytes of its device that the node counts once it has measured them). ``steady``: replicas that
    have worked without a pause of late. ``rates``: (swappable version, requests a minute, those
    expected included).
    """

    foreign_bytes: tuple[tuple[NodeId, int, int], ...] = ()
    idle_s: tuple[tuple[ReplicaId, float], ...] = ()
    reserved_bytes: tuple[tuple[str, int], ...] = ()
    planner: int = 1
    host_bytes: tuple[tuple[NodeId, int], ...] = ()
    charged_bytes: tuple[tuple[ReplicaId, int], ...] = ()
    steady: tuple[ReplicaId, ...] = ()
    rates: tuple[tuple[VersionId, float], ...] = ()


# --- events -----------------------------------------------------------------------------------
class PlacementDecided(Event, frozen=True, tag_field="type", tag="PlacementDecided"):
    """One plan: the difference to its parent, why, and the log position it was planned from.

    ``inputs`` is None in events of schema version 1, which did not say.
    """

    decision_id: str
    planned_from: int
    started: tuple[Started, ...]
    stopped: tuple[Stopped, ...]
    unplaced: tuple[Unplaced, ...]
    at: float
    inputs: PlanInputs | None = None
    retiered: tuple[Retiered, ...] = ()


PlacementEvent = PlacementDecided


# --- state ------------------------------------------------------------------------------------
class Placement(State, frozen=True):
    """``retiered_at``: of the replicas there are, when each last changed its tier."""

    generation: int = 0
    assignments: dict[str, Assignment] = msgspec.field(default_factory=dict)
    unplaced: tuple[Unplaced, ...] = ()
    retiered_at: dict[str, float] = msgspec.field(default_factory=dict)


def evolve(placement: Placement, event: PlacementEvent) -> Placement:
    match event:
        case PlacementDecided(
            started=started, stopped=stopped, unplaced=unplaced, retiered=retiered, at=at
        ):
            kept, changed = dict(placement.assignments), dict(placement.retiered_at)
            for stop in stopped:
                kept.pop(stop.assignment.replica_id, None)
                changed.pop(stop.assignment.replica_id, None)
            for one in retiered:
                kept[one.assignment.replica_id] = one.assignment
                changed[one.assignment.replica_id] = at
            for start in started:
                kept[start.assignment.replica_id] = start.assignment
            return replace(
                placement,
                generation=placement.generation + 1,
                assignments=kept,
                unplaced=unplaced,
                retiered_at=changed,
            )
    return placement


# --- commands ---------------------------------------------------------------------------------
class DecidePlacement(Command, frozen=True):
    decision_id: str
    planned_from: int
    started: tuple[Started, ...]
    stopped: tuple[Stopped, ...]
    unplaced: tuple[Unplaced, ...]
    now: float
    inputs: PlanInputs | None = None
    retiered: tuple[Retiered, ...] = ()


def decide(placement: Placement, command: DecidePlacement) -> list[Event]:
    same_gaps = [(u.version_id, u.num_missing, u.code) for u in command.unplaced] == [
        (u.version_id, u.num_missing, u.code) for u in placement.unplaced
    ]
    changes = command.started or command.stopped or command.retiered
    if not changes and same_gaps:
        return []
    return [
        PlacementDecided(
            command.decision_id,
            command.planned_from,
            command.started,
            command.stopped,
            command.unplaced,
            command.now,
            command.inputs,
            command.retiered,
        )
    ]


DECIDER = Decider("placement", Placement(), decide, evolve)
