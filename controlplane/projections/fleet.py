"""Nodes and replicas: what is desired, what the node accepted, what it reported.

The three are kept apart. A replica's row appears when a plan wants it and goes when no plan wants
it and its node no longer runs it::

    PlacementDecided(started r)      desired                state assigned
    NodeAcknowledged                 desired acked          state accepted
    ReplicaBecameReady               desired acked ready    state ready
    PlacementDecided(stopped r)      ready                  state stopping
    ReplicaStopped                   the row is gone

What is overdue (``ReplicaOverdue``, ``NodeOverdue``) is *stuck* beside its state, with the reason,
until anything is heard that moves it.
"""

from typing import Any, ClassVar

from msgspec.structs import replace

from controlplane.domain import node as domain
from controlplane.domain.node import DeviceInfo, HostInfo
from controlplane.domain.placement import (
    PlacementDecided,
    Retiered,
    Started,
    Stopped,
)
from controlplane.projections.base import Projection, Recorded, Row, Rows

NOT_STUCK: dict[str, Any] = {"stuck_since": None, "stuck_code": "", "stuck_reason": ""}


class Node(Row, frozen=True):
    """``status``: ready | suspect | lost. ``desired_generation`` is that of the last plan that
    changed this node; it is settled once ``acked_generation`` has reached it. ``last_seen`` is
    the time of the node's last transition in the log, not of its last heartbeat. ``stuck_*``: since
    when, and why, it has not accepted what it was told."""

    node_id: str
    status: str
    zone: str
    boot_id: str
    devices: tuple[DeviceInfo, ...]
    host: HostInfo
    joined_at: float
    last_seen: float
    version: int
    draining: bool = False
    drain_reason: str = ""
    acked_generation: int = 0
    desired_generation: int = 0
    stuck_since: float | None = None
    stuck_code: str = ""
    stuck_reason: str = ""


class Replica(Row, frozen=True):
    """``observed``: pending | downloading | loading | ready | stopping | failed, or None while the
    node has said nothing of it. ``generation``, ``decision_id``: the plan that last wanted it so.
    ``since``: of ``state``. ``tier``: in which it is placed (resident, warm or storage) since
    ``tier_since``, and ``tier_reason`` why that changed, if it did; where it really is changes from
    moment to moment and is not in the log. Sizes in bytes, measured after loading (0: not yet).
    ``waiting``: why, in its node's words, while it is pending. ``stuck_*``: since when nothing
    moves, and why."""

    indexed: ClassVar = ("node_id", "version_id")

    replica_id: str
    version_id: str
    node_id: str
    device_index: int
    memory_bytes: int
    desired: bool
    generation: int
    decision_id: str
    since: float
    state: str
    reason: str = ""
    acked: bool = False
    observed: str | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    peak_bytes: int = 0
    load_seconds: float = 0.0
    sha256: str = ""
    tier: str = "resident"
    waiting: str = ""
    stuck_since: float | None = None
    stuck_code: str = ""
    stuck_reason: str = ""
    tier_since: float = 0.0
    tier_reason: str = ""


class LoadFailure(Row, frozen=True):
    """A version that failed on a node since it was last ready there, or found no room there. Key:
    "node/version id". ``retry_at``: when its node tries again; None: when there is room."""

    indexed: ClassVar = ("node_id", "version_id")

    key: str
    node_id: str
    version_id: str
    code: str
    detail: str
    num_failures: int
    at: float
    retry_at: float | None = None


# --- nodes ------------------------------------------------------------------------------------
def _joined(rows: Rows, event: domain.NodeJoined, recorded: Recorded) -> None:
    old = rows.get(Node, event.node_id)
    node = Node(
        event.node_id,
        "ready",
        event.zone,
        event.boot_id,
        event.devices,
        event.host,
        old.joined_at if old else event.at,
        event.at,
        recorded.version,
    )
    if old is not None:
        node = replace(
            node,
            draining=old.draining,
            drain_reason=old.drain_reason,
            acked_generation=old.acked_generation,
            desired_generation=old.desired_generation,
        )
    if old is not None and old.boot_id == event.boot_id:
        node = replace(node, **{name: getattr(old, name) for name in NOT_STUCK})
    rows.put(node)
    if old is not None and old.boot_id != event.boot_id:
        _forget_observed(rows, event.node_id, event.at)
    else:
        _sum_up_again(rows, event.node_id, event.at)


def _change(rows: Rows, event: domain.NodeEvent, recorded: Recorded, **fields: object) -> None:
    node = rows.get(Node, event.node_id)
    if node is not None:
        rows.put(replace(node, version=recorded.version, last_seen=event.at, **fields))


def _suspected(rows: Rows, event: domain.NodeSuspected, recorded: Recorded) -> None:
    _change(rows, event, recorded, status="suspect")


def _recovered(rows: Rows, event: domain.NodeRecovered, recorded: Recorded) -> None:
    _change(rows, event, recorded, status="ready", boot_id=event.boot_id)
    _sum_up_again(rows, event.node_id, event.at)


def _lost(rows: Rows, event: domain.NodeLost, recorded: Recorded) -> None:
    _change(rows, event, recorded, status="lost", **NOT_STUCK)
    _forget_observed(rows, event.node_id, event.at)


def _drain_started(rows: Rows, event: domain.NodeDrainStarted, recorded: Recorded) -> None:
    _change(rows, event, recorded, draining=True, drain_reason=event.reason)


def _drain_ended(rows: Rows, event: domain.NodeDrainEnded, recorded: Recorded) -> None:
    _change(rows, event, recorded, draining=False, drain_reason="")


def _removed(rows: Rows, event: domain.NodeRemoved, recorded: Recorded) -> None:
    """What it was to run is stopped by the next plan; what it ran was forgotten with it."""
    rows.delete(Node, event.node_id)
    _forget_observed(rows, event.node_id, event.at)
    for failure in rows.find(LoadFailure, "node_id", event.node_id):
        rows.delete(LoadFailure, failure.key)


def _acknowledged(rows: Rows, event: domain.NodeAcknowledged, recorded: Recorded) -> None:
    _change(rows, event, recorded, acked_generation=event.generation, **NOT_STUCK)
    for replica in rows.find(Replica, "node_id", event.node_id):
        acked = event.generation >= replica.generation
        if acked != replica.acked:
            _put_replica(rows, replace(replica, acked=acked), event.at)


def _node_overdue(rows: Rows, event: domain.NodeOverdue, recorded: Recorded) -> None:
    node = rows.get(Node, event.node_id)
    known = node.stuck_since if node else None
    since = event.at - event.waited_s if known is None else known
    told = {"stuck_since": since, "stuck_code": event.code, "stuck_reason": event.reason}
    _change(rows, event, recorded, **told)


def _forget_observed(rows: Rows, node_id: str, at: float) -> None:
    """The node went or started anew: nothing that it reported before holds any more."""
    for replica in rows.find(Replica, "node_id", node_id):
        _put_replica(rows, replace(replica, observed=None, waiting="", **NOT_STUCK), at)


def _sum_up_again(rows: Rows, node_id: str, at: float) -> None:
    """The node's status changed, and with it the state of what it runs."""
    for replica in rows.find(Replica, "node_id", node_id):
        _put_replica(rows, replica, at)


# --- what nodes report ------------------------------------------------------------------------
def _state_changed(rows: Rows, event: domain.ReplicaStateChanged, recorded: Recorded) -> None:
    _change(rows, event, recorded)
    _report(rows, event, observed=event.state, waiting=event.detail)


def _became_ready(rows: Rows, event: domain.ReplicaBecameReady, recorded: Recorded) -> None:
    _change(rows, event, recorded)
    rows.delete(LoadFailure, f"{event.node_id}/{event.version_id}")
    _report(
        rows,
        event,
        observed="ready",
        device_index=event.device_index,
        weights_bytes=event.weights_bytes,
        kv_bytes=event.kv_bytes,
        peak_bytes=event.peak_bytes,
        load_seconds=event.load_seconds,
        sha256=event.sha256,
        reason=event.warning,
    )


def _failed(rows: Rows, event: domain.ReplicaFailed, recorded: Recorded) -> None:
    _change(rows, event, recorded)
    key = f"{event.node_id}/{event.version_id}"
    before = rows.get(LoadFailure, key)
    count = before.num_failures + 1 if before else 1
    about = key, event.node_id, event.version_id, event.code, event.detail, count, event.at
    rows.put(LoadFailure(*about, event.at + (event.retry_s or domain.backoff_s(count))))
    reason = f"{event.code}: {event.detail}" if event.detail else event.code
    _report(rows, event, observed="failed", reason=reason)


def _overdue(rows: Rows, event: domain.ReplicaOverdue, recorded: Recorded) -> None:
    _change(rows, event, recorded)
    replica = rows.get(Replica, event.replica_id)
    if event.state == domain.WAITING:
        key = f"{event.node_id}/{event.version_id}"
        before = rows.get(LoadFailure, key)
        count = before.num_failures + 1 if before else 1
        about = key, event.node_id, event.version_id, domain.NO_ROOM, event.detail, count
        rows.put(LoadFailure(*about, event.at))
    if replica is not None:
        since = replica.stuck_since
        since = event.at - event.waited_s if since is None else since
        told = {"stuck_since": since, "stuck_code": event.code, "stuck_reason": event.detail}
        rows.put(replace(replica, **told))


def _stopped(rows: Rows, event: domain.ReplicaStopped, recorded: Recorded) -> None:
    _change(rows, event, recorded)
    replica = rows.get(Replica, event.replica_id)
    if replica is not None:
        _put_replica(rows, replace(replica, observed=None, waiting="", **NOT_STUCK), event.at)


ReplicaReport = domain.ReplicaStateChanged | domain.ReplicaBecameReady | domain.ReplicaFailed


def _report(rows: Rows, event: ReplicaReport, **fields: Any) -> None:
    """Change the row of a reported replica, which is then stuck no more and waits for nothing but
    what ``fields`` say; made if no plan wants it (then it should stop)."""
    known = rows.get(Replica, event.replica_id)
    if known is None:
        about = event.replica_id, event.version_id, event.node_id
        known = Replica(*about, 0, 0, False, 0, "", event.at, "stopping")
    _put_replica(rows, replace(known, **{"waiting": "", **NOT_STUCK, **fields}), event.at)


# --- plans ------------------------------------------------------------------------------------
def _decided(rows: Rows, event: PlacementDecided, recorded: Recorded) -> None:
    generation = recorded.version
    for stop in event.stopped:
        _stop(rows, stop, event, generation)
    for start in event.started:
        _start(rows, start, event, generation)
    for one in event.retiered:
        _retier(rows, one, event.at)
    touched = {stop.assignment.node_id for stop in event.stopped}
    touched |= {one.assignment.node_id for one in event.retiered}
    for node_id in touched | {start.assignment.node_id for start in event.started}:
        node = rows.get(Node, node_id)
        if node is not None:
            rows.put(replace(node, desired_generation=generation))


def _start(rows: Rows, start: Started, event: PlacementDecided, generation: int) -> None:
    to = start.assignment
    replica = Replica(
        to.replica_id,
        to.version_id,
        to.node_id,
        to.device_index,
        to.memory_bytes,
        True,
        generation,
        event.decision_id,
        event.at,
        "assigned",
        start.reason,
        tier=to.tier,
        tier_since=event.at,
    )
    _put_replica(rows, replica, event.at)


def _retier(rows: Rows, change: Retiered, at: float) -> None:
    """It stays where the plan that started it wanted it."""
    replica = rows.get(Replica, change.assignment.replica_id)
    if replica is not None:
        to = change.assignment.tier
        rows.put(replace(replica, tier=to, tier_since=at, tier_reason=change.reason))


def _stop(rows: Rows, stop: Stopped, event: PlacementDecided, generation: int) -> None:
    replica = rows.get(Replica, stop.assignment.replica_id)
    if replica is None:
        return
    stopping = replace(
        replica,
        desired=False,
        acked=False,
        generation=generation,
        decision_id=event.decision_id,
        reason=stop.reason,
        waiting="",
        **NOT_STUCK,
    )
    _put_replica(rows, stopping, event.at)


def _put_replica(rows: Rows, replica: Replica, at: float) -> None:
    """Keep the replica's row with its summed-up state, or drop it when nothing is left of it."""
    if not replica.desired and replica.observed in (None, "failed"):
        rows.delete(Replica, replica.replica_id)
    else:
        state = _state(rows, replica)
        if state != replica.state:
            replica = replace(replica, state=state, since=at)
        rows.put(replica)


def _state(rows: Rows, replica: Replica) -> str:
    if not replica.desired:
        return "stopping"
    node = rows.get(Node, replica.node_id)
    if node is not None and node.status == "lost":
        return "lost"
    return replica.observed or ("accepted" if replica.acked else "assigned")


PROJECTION = Projection(
    "fleet",
    6,
    (Node, Replica, LoadFailure),
    {
        domain.NodeJoined: _joined,
        domain.NodeSuspected: _suspected,
        domain.NodeRecovered: _recovered,
        domain.NodeLost: _lost,
        domain.NodeDrainStarted: _drain_started,
        domain.NodeDrainEnded: _drain_ended,
        domain.NodeRemoved: _removed,
        domain.NodeAcknowledged: _acknowledged,
        domain.NodeOverdue: _node_overdue,
        domain.ReplicaStateChanged: _state_changed,
        domain.ReplicaBecameReady: _became_ready,
        domain.ReplicaFailed: _failed,
        domain.ReplicaOverdue: _overdue,
        domain.ReplicaStopped: _stopped,
        PlacementDecided: _decided,
    },
)
