"""How each version stands in the fleet: what is wanted of it, what is ready, and why not.

The one place that joins two projections: the catalog's version row repeats figures of the fleet's
replica rows, since every list of models shows them. It runs after both.
"""

from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace

from controlplane.domain import model, node
from controlplane.domain.placement import PlacementDecided, Rejection
from controlplane.projections.base import Projection, Recorded, Row, Rows
from controlplane.projections.catalog import NOT_PLANNED, Version
from controlplane.projections.fleet import LoadFailure, Node, Replica

SCALED_TO_ZERO = "It is scaled to zero."


class Unplaced(Row, frozen=True):
    """Replicas that the last plan found no room for."""

    version_id: str
    num_missing: int
    code: str
    reason: str
    rejections: tuple[Rejection, ...]
    decision_id: str


def refresh(rows: Rows, version_id: str) -> None:
    """Say again how ``version_id`` stands; nothing if the catalog does not know it."""
    version = rows.get(Version, version_id)
    if version is None:
        return
    wanted = [row for row in rows.find(Replica, "version_id", version_id) if row.desired]
    gap = rows.get(Unplaced, version_id)
    leaving = [row for row in wanted if _is_draining(rows, row.node_id)] if gap else []
    desired = len(wanted) + (gap.num_missing - len(leaving) if gap else 0)
    if wanted:
        told = _of_replicas(rows, version, wanted, desired)
        if gap and leaving and not told[1]:
            told = told[0], _why_drains_wait(leaving, gap), *told[2:]
    else:
        told = _of_none(rows, version, gap, desired)
    if told != _told(version):  # most reports change nothing here
        rows.put(replace(version, **dict(zip(_TOLD, told, strict=True))))


def _is_draining(rows: Rows, node_id: str) -> bool:
    found = rows.get(Node, node_id)
    return found is not None and found.draining


def _why_drains_wait(leaving: Sequence[Replica], gap: Unplaced) -> str:
    """Of replicas that stay on draining nodes for want of room: what is missing is their
    successors, so these are not counted beside them."""
    nodes = " and ".join(sorted({row.node_id for row in leaving}))
    one = len(leaving) == 1
    subject = "The replica on" if one else "The replicas on"
    return (
        f"{subject} {nodes} {'has' if one else 'have'} no other place, so the drain waits. "
        f"{gap.reason}"
    )


Told = tuple[str, str, int, int, int, float | None]
_TOLD = ("status", "reason", "ready_replicas", "desired_replicas", "stuck_replicas", "retry_at")
_told = attrgetter(*_TOLD)


def _of_none(rows: Rows, version: Version, gap: Unplaced | None, desired: int) -> Told:
    """Of a version of which no plan wants a replica."""
    if version.retired:
        return "retired", "", 0, desired, 0, None
    unplaced = _why_unplaced(rows, gap) if gap else ""
    if not unplaced and not version.min_replicas:
        return "idle", SCALED_TO_ZERO, 0, desired, 0, None
    retry_at = _next_place(rows, gap) if gap else None
    return "unplaced", unplaced or NOT_PLANNED, 0, desired, 0, retry_at


def _of_replicas(rows: Rows, version: Version, wanted: list[Replica], desired: int) -> Told:
    """A version that answers is ready, whatever else is the matter."""
    observed = [row.observed for row in wanted]
    ready = observed.count("ready")
    status, reason = ("retired", "") if version.retired else ("ready", "")
    if ready == len(wanted):
        return status, reason, ready, desired, 0, None
    num_failed = observed.count("failed")
    stuck = [row for row in wanted if row.stuck_since is not None]
    loading = not ready and not version.retired and num_failed < len(wanted)
    retry_at = None
    if loading or num_failed:
        failures = rows.find(LoadFailure, "version_id", version.version_id)
        retry_at = _next_try(wanted, failures) if failures and num_failed else None
    if loading:
        status, reason = "loading", _why_loading(stuck, failures)
    elif not ready and not version.retired:
        status, reason = "failed", max(wanted, key=_changed).reason
    return status, reason, ready, desired, len(stuck), retry_at


def _why_loading(stuck: list[Replica], failures: Sequence[LoadFailure]) -> str:
    """Why it takes so long: what is stuck, else what the last try came to; "" if all is well."""
    if stuck:
        first = min(stuck, key=_since)
        return f"Stuck on {first.node_id}: {first.stuck_reason}"
    if failures:
        last = max(failures, key=_at)
        return f"Tried again; on {last.node_id} {last.code}: {last.detail}"
    return ""


def _since(row: Replica) -> tuple[float, str]:
    return row.stuck_since or 0.0, row.replica_id


_at = attrgetter("at", "key")
_changed = attrgetter("since", "replica_id")


def _next_try(wanted: list[Replica], failures: Sequence[LoadFailure]) -> float | None:
    """When the next of the failed replicas is tried again; None if none is."""
    waiting = {row.node_id for row in wanted if row.observed == "failed"}
    due = [row.retry_at for row in failures if row.node_id in waiting and row.retry_at is not None]
    return min(due, default=None)


def _next_place(rows: Rows, gap: Unplaced) -> float | None:
    """When the first of the nodes that failures keep it off may be tried; None if none do. The
    planner's own reckoning, as no node has a replica that it would try again by itself."""
    kept_off = {one.node_id for one in gap.rejections if one.code == "backoff"}
    failures = rows.find(LoadFailure, "version_id", gap.version_id) if kept_off else ()
    due = [one.at + node.backoff_s(one.num_failures) for one in failures if one.node_id in kept_off]
    return min(due, default=None)


def _why_unplaced(rows: Rows, gap: Unplaced) -> str:
    """The planner's sentence; where failures keep the version off nodes, also the last node's own.

    Joined here, not in the plan: a decision is made again from its event, word for word.
    """
    if all(one.code != "backoff" for one in gap.rejections):
        return gap.reason
    told = [one for one in rows.find(LoadFailure, "version_id", gap.version_id) if one.detail]
    last = max(told, key=_at, default=None)
    return f"{gap.reason} Node {last.node_id} says: {last.detail}" if last else gap.reason


def _version_changed(
    rows: Rows,
    event: model.ModelVersionScaled | model.ModelVersionRetired,
    recorded: Recorded,
) -> None:
    refresh(rows, f"{event.name}@{event.version}")


def _version_added(rows: Rows, event: model.ModelVersionAdded, recorded: Recorded) -> None:
    refresh(rows, f"{event.name}@{event.spec.version}")


def _node_changed(
    rows: Rows,
    event: node.NodeJoined
    | node.NodeRecovered
    | node.NodeLost
    | node.NodeDrainStarted
    | node.NodeDrainEnded
    | node.NodeRemoved,
    recorded: Recorded,
) -> None:
    for version_id in {row.version_id for row in rows.find(Replica, "node_id", event.node_id)}:
        refresh(rows, version_id)


def _replica_changed(
    rows: Rows,
    event: node.ReplicaStateChanged
    | node.ReplicaBecameReady
    | node.ReplicaFailed
    | node.ReplicaOverdue
    | node.ReplicaStopped,
    recorded: Recorded,
) -> None:
    refresh(rows, event.version_id)


def _decided(rows: Rows, event: PlacementDecided, recorded: Recorded) -> None:
    touched = {start.assignment.version_id for start in event.started}
    touched |= {stop.assignment.version_id for stop in event.stopped}
    for version_id in touched | _replace_unplaced(rows, event):
        refresh(rows, version_id)


def _replace_unplaced(rows: Rows, event: PlacementDecided) -> set[str]:
    """The versions whose gaps were or are now known."""
    before = {row.version_id for row in rows.all(Unplaced)}
    now = {gap.version_id for gap in event.unplaced}
    for version_id in before - now:
        rows.delete(Unplaced, version_id)
    for gap in event.unplaced:
        rows.put(
            Unplaced(
                gap.version_id,
                gap.num_missing,
                gap.code,
                gap.reason,
                gap.rejections,
                event.decision_id,
            )
        )
    return before | now


PROJECTION = Projection(
    "standing",
    7,
    (Unplaced,),
    {
        model.ModelVersionAdded: _version_added,
        model.ModelVersionScaled: _version_changed,
        model.ModelVersionRetired: _version_changed,
        node.NodeJoined: _node_changed,
        node.NodeRecovered: _node_changed,
        node.NodeLost: _node_changed,
        node.NodeDrainStarted: _node_changed,
        node.NodeDrainEnded: _node_changed,
        node.NodeRemoved: _node_changed,
        node.ReplicaStateChanged: _replica_changed,
        node.ReplicaBecameReady: _replica_changed,
        node.ReplicaFailed: _replica_changed,
        node.ReplicaOverdue: _replica_changed,
        node.ReplicaStopped: _replica_changed,
        PlacementDecided: _decided,
    },
)
