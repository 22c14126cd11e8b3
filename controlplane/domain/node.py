"""A node and what its agent reported: transitions, not heartbeats. Stream ``node-<id>``."""

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
    the network (InfiniBand) over which its devices reach those of other nodes alike, ``engines``
    what its agent can load models with."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    fabric: str = ""
    engines: tuple[str, ...] = ("builtin",)


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


class ReplicaStateChanged(Event, frozen=True, tag_field="type", tag="ReplicaStateChanged"):
    """``state``: pending | downloading | loading | stopping."""

    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    state: str
    at: float


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
    node_id: NodeId
    replica_id: ReplicaId
    version_id: VersionId
    code: str
    detail: str
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
    | ReplicaStateChanged
    | ReplicaBecameReady
    | ReplicaFailed
    | ReplicaStopped
)


# --- state ------------------------------------------------------------------------------------
class Node(State, frozen=True):
    """``status``: absent | ready | suspect | lost. ``replicas``: id -> (version, state, since)."""

    status: str = "absent"
    boot_id: str = ""
    zone: str = ""
    devices: tuple[DeviceInfo, ...] = ()
    host: HostInfo = UNKNOWN_HOST
    draining: bool = False
    acked_generation: int = 0
    replicas: dict[str, tuple[str, str, float]] = msgspec.field(default_factory=dict)
    failures: dict[str, tuple[str, int, float]] = msgspec.field(default_factory=dict)


def evolve(node: Node, event: NodeEvent) -> Node:
    match event:
        case NodeJoined(boot_id=boot, zone=zone, devices=devices, host=host):
            kept = node.replicas if boot == node.boot_id else {}
            found = replace(node, boot_id=boot, zone=zone, devices=devices, host=host)
            return replace(found, status="ready", replicas=kept)
        case NodeSuspected():
            return replace(node, status="suspect")
        case NodeRecovered(boot_id=boot):
            return replace(node, status="ready", boot_id=boot)
        case NodeLost():
            return replace(node, status="lost", replicas={})
        case NodeDrainStarted():
            return replace(node, draining=True)
        case NodeDrainEnded():
            return replace(node, draining=False)
        case NodeRemoved():
            return Node()
        case NodeAcknowledged(generation=generation):
            return replace(node, acked_generation=generation)
    return _evolve_replica(node, event)


def _evolve_replica(node: Node, event: NodeEvent) -> Node:
    match event:
        case ReplicaStateChanged(replica_id=rid, version_id=version, state=state, at=at):
            return replace(node, replicas={**node.replicas, rid: (version, state, at)})
        case ReplicaBecameReady(replica_id=rid, version_id=version, at=at):
            failures = {v: f for v, f in node.failures.items() if v != version}
            return replace(
                node,
                replicas={**node.replicas, rid: (version, "ready", at)},
                failures=failures,
            )
        case ReplicaFailed(replica_id=rid, version_id=version, code=code, at=at):
            count = node.failures.get(version, ("", 0, 0.0))[1] + 1
            return replace(
                node,
                replicas={**node.replicas, rid: (version, "failed", at)},
                failures={**node.failures, version: (code, count, at)},
            )
        case ReplicaStopped(replica_id=rid):
            return replace(node, replicas={k: v for k, v in node.replicas.items() if k != rid})
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
