"""A node and what its agent reported: transitions, not heartbeats. Stream ``node-<id>``.

What should have happened and has not is recorded when its time has passed, like a node's silence
(``application.overdue`` watches). Worked example, a replica for which its node finds no room::

    PlacementDecided(r on n1)           n1 should run r
    ReplicaStateChanged(r pending)      it waits, code not_resident, "needs 6 GB, 2 GB are free"
    60 s later: ReplicaOverdue(r)       r is stuck; once failed on n1, as far as the planner goes
    ReplicaStateChanged(r loading)      there was room after all: not stuck any more
"""

import msgspec
from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Conflict, NotFound
from controlplane.domain.ids import NodeId, ReplicaId, VersionId, checked_name


class DeviceInfo(msgspec.Struct, frozen=True):
    """``link`` names the symmetric interconnect (NVLink) that it shares with others of its node;
    devices without one are joined by what the node itself offers (PCIe)."""

    index: int
    kind: str
    name: str
    memory_bytes: int
    link: str = ""


class HostInfo(msgspec.Struct, frozen=True):
    """What a node offers beside its devices; 0 is not known, and bounds nothing. ``fabric`` names
    the network (InfiniBand) over which its devices reach those of other nodes alike, and
    ``fabric_address`` is where its agent meets others there for groups over nodes; "": it takes
    part in none. ``engines`` are what its agent can load models with."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    fabric: str = ""
    engines: tuple[str, ...] = ("builtin",)
    fabric_address: str = ""


UNKNOWN_HOST = HostInfo()


# --- events -----------------------------------------------------------------------------------
class NodeJoined(Event, frozen=True, tag_field="type", tag="NodeJoined"):
    """First report of an agent, or of one with another ``boot_id`` or other devices."""

    node_id: NodeId
    boot_id: str
    zone: str
    devices: tuple[DeviceInfo, ...]
    at: float
    host: HostInfo = HostInfo()


class NodeSuspected(Event, frozen=True, tag_field="type", tag="NodeSuspected"):
    node_id: NodeId
    silent_seconds: float
    at: float


class NodeRecovered(Event, frozen=True, tag_field="type", tag="NodeRecovered"):
    """A suspected or lost node was heard again."""

    node_id: NodeId
    boot_id: str
    at: float


class NodeLost(Event, frozen=True, tag_field="type", tag="NodeLost"):
    node_id: NodeId
    silent_seconds: float
    at: float


class NodeDrainStarted(Event, frozen=True, tag_field="type", tag="NodeDrainStarted"):
    node_id: NodeId
    reason: str
    at: float


class NodeDrainEnded(Event, frozen=True, tag_field="type", tag="NodeDrainEnded"):
    node_id: NodeId
    at: float


class NodeRemoved(Event, frozen=True, tag_field="type", tag="NodeRemoved"):
    """It is not coming back. An agent that reports under its name joins as a new node."""

    node_id: NodeId
    at: float


class NodeAcknowledged(Event, frozen=True, tag_field="type", tag="NodeAcknowledged"):
    node_id: NodeId
    generation: int
    at: float


class NodeOverdue(Event, frozen=True, tag_field="type", tag="NodeOverdue"):
    """It was told what to run, and has not accepted it in time. ``code``: refused (its reason, or
    that it accepted something newer) | silent (it lives, and says nothing of it). ``epoch`` and
    ``generation`` are what it was told."""

    node_id: NodeId
    epoch: int
    generation: int
    code: str
    reason: str
    waited_s: float
    at: float


class ReplicaStateChanged(Event, frozen=True, tag_field="type", tag="ReplicaStateChanged"):
    """``state``: pending | downloading | loading | stopping. ``code`` and ``detail``: why it waits,
    in its node's words. The same state again says that the code is another, or that it goes on."""

    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    state: str
    at: float
    code: str = ""
    detail: str = ""


class ReplicaBecameReady(Event, frozen=True, tag_field="type", tag="ReplicaBecameReady"):
    """``warning``: why it will serve less well than it could, such as bf16 computed slowly."""

    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    device_index: int
    weights_bytes: int
    kv_bytes: int
    peak_bytes: int
    load_seconds: float
    sha256: str
    at: float
    warning: str = ""


class ReplicaFailed(Event, frozen=True, tag_field="type", tag="ReplicaFailed"):
    """``retry_s``: until its node tries again by itself, 0 if it did not say. ``since``: when it
    failed by the node's clock, which tells one failure from the next."""

    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    code: str
    detail: str
    at: float
    retry_s: float = 0.0
    since: float = 0.0


class ReplicaOverdue(Event, frozen=True, tag_field="type", tag="ReplicaOverdue"):
    """It is not ready, and for ``waited_s`` nothing has moved. ``state`` as the node last said,
    "" if it said nothing. Said again, ever more seldom, of one that waits for room."""

    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    state: str
    code: str
    detail: str
    waited_s: float
    at: float


class ReplicaStopped(Event, frozen=True, tag_field="type", tag="ReplicaStopped"):
    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    at: float


NodeEvent = (
    NodeJoined
    | NodeSuspected
    | NodeRecovered
    | NodeLost
    | NodeDrainStarted
    | NodeDrainEnded
    | NodeRemoved
    | NodeAcknowledged
    | NodeOverdue
    | ReplicaStateChanged
    | ReplicaBecameReady
    | ReplicaFailed
    | ReplicaOverdue
    | ReplicaStopped
)

WAITING, NO_ROOM = "pending", "no_room"
BACKOFF_FIRST_S, BACKOFF_LIMIT_S = 10.0, 300.0


def backoff_s(num_failures: int) -> float:
    """Seconds until the next try: 10 after the first failure, then doubling, at most 5 minutes."""
    return min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2.0 ** min(num_failures - 1, 16))


# --- state ------------------------------------------------------------------------------------
class Node(State, frozen=True):
    """``status``: absent | ready | suspect | lost. ``replicas``: id -> (version, state, since).
    ``codes``: of those that wait, why. ``failed_since``: of those that last failed, when, by the
    node's clock. ``overdue``: id -> why, of those that are stuck. ``late``: why it has not accepted
    what it was told, if it should have."""

    status: str = "absent"
    boot_id: str = ""
    zone: str = ""
    devices: tuple[DeviceInfo, ...] = ()
    host: HostInfo = UNKNOWN_HOST
    draining: bool = False
    acked_generation: int = 0
    replicas: dict[str, tuple[str, str, float]] = msgspec.field(default_factory=dict)
    failures: dict[str, tuple[str, int, float]] = msgspec.field(default_factory=dict)
    codes: dict[str, str] = msgspec.field(default_factory=dict)
    failed_since: dict[str, float] = msgspec.field(default_factory=dict)
    overdue: dict[str, str] = msgspec.field(default_factory=dict)
    late: str = ""


def evolve(node: Node, event: NodeEvent) -> Node:
    match event:
        case NodeJoined(boot_id=boot, zone=zone, devices=devices, host=host):
            found = node if boot == node.boot_id else _forgotten(node)
            told = replace(found, boot_id=boot, zone=zone, devices=devices, host=host)
            return replace(told, status="ready")
        case NodeSuspected():
            return replace(node, status="suspect")
        case NodeRecovered(boot_id=boot):
            return replace(node, status="ready", boot_id=boot)
        case NodeLost():
            return replace(_forgotten(node), status="lost")
        case NodeDrainStarted():
            return replace(node, draining=True)
        case NodeDrainEnded():
            return replace(node, draining=False)
        case NodeRemoved():
            return Node()
        case NodeAcknowledged(generation=generation):
            return replace(node, acked_generation=generation, late="")
        case NodeOverdue(code=code):
            return replace(node, late=code)
        case ReplicaOverdue(replica_id=rid, code=code):
            return _failed_to_start(node, event, {**node.overdue, rid: code})
    return _evolve_replica(_moved_on(node, event), event)


def _forgotten(node: Node) -> Node:
    """Nothing that it reported before holds any more."""
    return replace(node, replicas={}, codes={}, failed_since={}, overdue={}, late="")


def _failed_to_start(node: Node, event: ReplicaOverdue, overdue: dict[str, str]) -> Node:
    """Stuck; one that waits counts as a failure there, so that it is looked at anew."""
    if event.state != WAITING:
        return replace(node, overdue=overdue)
    count = node.failures.get(event.version_id, ("", 0, 0.0))[1] + 1
    failures = {**node.failures, event.version_id: (NO_ROOM, count, event.at)}
    return replace(node, overdue=overdue, failures=failures)


def _moved_on(node: Node, event: NodeEvent) -> Node:
    """Something was heard of a replica: whatever it was, it is not stuck at this moment."""
    replica_id = getattr(event, "replica_id", "")
    codes = {name: code for name, code in node.codes.items() if name != replica_id}
    if code := getattr(event, "code", "") if isinstance(event, ReplicaStateChanged) else "":
        codes[replica_id] = code
    overdue = {name: code for name, code in node.overdue.items() if name != replica_id}
    return replace(node, codes=codes, overdue=overdue)


def _evolve_replica(node: Node, event: NodeEvent) -> Node:
    match event:
        case ReplicaStateChanged(replica_id=rid, version_id=version, state=state, at=at):
            before = node.replicas.get(rid)
            since = before[2] if before and before[1] == state else at
            return replace(node, replicas={**node.replicas, rid: (version, state, since)})
        case ReplicaBecameReady(replica_id=rid, version_id=version, at=at):
            failures = {v: f for v, f in node.failures.items() if v != version}
            return replace(
                node,
                replicas={**node.replicas, rid: (version, "ready", at)},
                failures=failures,
            )
        case ReplicaFailed(replica_id=rid, version_id=version, code=code, at=at, since=since):
            count = node.failures.get(version, ("", 0, 0.0))[1] + 1
            return replace(
                node,
                replicas={**node.replicas, rid: (version, "failed", at)},
                failures={**node.failures, version: (code, count, at)},
                failed_since={**node.failed_since, rid: since},
            )
        case ReplicaStopped(replica_id=rid):
            left = {name: one for name, one in node.replicas.items() if name != rid}
            failed = {name: one for name, one in node.failed_since.items() if name != rid}
            return replace(node, replicas=left, failed_since=failed)
    return node


# --- commands ---------------------------------------------------------------------------------
class DrainNode(Command, frozen=True):
    node_id: NodeId
    reason: str
    now: float


class UndrainNode(Command, frozen=True):
    node_id: NodeId
    now: float


class RemoveNode(Command, frozen=True):
    node_id: NodeId
    now: float


class RecordNodeEvents(Command, frozen=True):
    """What the controller concluded from an agent's reports (see ``application.ingest``)."""

    node_id: NodeId
    events: tuple[Event, ...]
    now: float


NodeCommand = DrainNode | UndrainNode | RemoveNode | RecordNodeEvents


# --- decisions --------------------------------------------------------------------------------
def decide(node: Node, command: NodeCommand) -> list[Event]:
    if isinstance(command, RecordNodeEvents):
        checked_name(command.node_id, "node_id")
        is_known = node.status != "absent" or isinstance(
            next(iter(command.events), None), NodeJoined
        )
        return list(command.events) if is_known else []  # removed since they were concluded
    if node.status == "absent":
        raise NotFound("node", command.node_id)
    match command:
        case DrainNode(node_id, reason, now):
            return [] if node.draining else [NodeDrainStarted(node_id, reason, now)]
        case UndrainNode(node_id, now):
            return [NodeDrainEnded(node_id, now)] if node.draining else []
        case RemoveNode(node_id, now):
            if node.status == "ready":
                text = f"Node '{node_id}' reports. Drain it and stop its agent first."
                raise Conflict("node_is_ready", text)
            return [NodeRemoved(node_id, now)]
    raise AssertionError(command)


DECIDER = Decider("node", Node(), decide, evolve)
