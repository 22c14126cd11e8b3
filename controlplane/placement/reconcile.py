"""What is against what should be: which replicas stay, go, leave soon, or are missing.

This step moves nothing and looks at no free memory. A replica that may stay, stays: the only
reasons to stop one are named in ``Stopped.code``. Replicas on a draining node, and those that an
assignment ``replaces`` (``repack``), are *leaving*: they are replaced first and stopped when as
many others are ready as there should be. Worked example, two replicas of a are wanted and n1, which
holds a.0, is draining::

    a.0 ready on n1, a.1 ready on n2              keep a.1, a.0 is leaving, 1 missing
    a.2 started on n3, loading                    keep a.1 a.2, a.0 is leaving, 0 missing
    a.2 ready                                     keep a.1 a.2, stop a.0 (node_draining)

A replica too many goes from the node that holds most of them. If what is kept instead is not ready
yet, it is leaving too: that is how ``plan`` spreads replicas again after a node came back.

A replica that failed, or has waited for room beyond its time, is *failing*: it stays unless another
node is better, or others have taken its place (``failing``). One that is needless goes first.

A worker that died is its agent's business first: the agent starts it again within a second, waiting
longer each time. Only when that has failed ``LOCAL_RETRIES`` times in a row may the replica move.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from controlplane.domain.placement import Assignment, Stopped, shards_of
from controlplane.placement.explain import bytes_text
from controlplane.placement.snapshot import (
    FAILING,
    AssignedView,
    FleetSnapshot,
    NodeView,
    VersionView,
)

LOCAL_RETRIES = 2


@dataclass(slots=True)
class Difference:
    """``missing`` counts, by version id, the replicas to be placed. ``spare``: the version of those
    ``leaving`` replicas that are only too many; they can stay should a kept one have to go.
    ``failing`` are kept, too, if there is no better place for them."""

    kept: list[AssignedView] = field(default_factory=list)
    failing: list[AssignedView] = field(default_factory=list)
    leaving: list[AssignedView] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    spare: dict[str, str] = field(default_factory=dict)


def difference(snapshot: FleetSnapshot) -> Difference:
    """Compare the assignments with the versions and nodes of ``snapshot``."""
    nodes: dict[str, NodeView] = {node.node_id: node for node in snapshot.nodes}
    versions = snapshot.versions_by_id()
    failing = _failing(snapshot)
    found = Difference()
    by_version: dict[str, list[AssignedView]] = defaultdict(list)
    for view in sorted(snapshot.assigned, key=lambda one: one.assignment.replica_id):
        end = _must_stop(view, versions, nodes)
        if end is None and not snapshot.keeps_failing and view.assignment.replica_id in failing:
            end = _failed(view)
        if end:
            found.stopped.append(end)
        else:
            by_version[view.assignment.version_id].append(view)
    for version_id in sorted(versions):
        _count(versions[version_id], by_version.get(version_id, []), nodes, failing, found)
    return found


def _failing(snapshot: FleetSnapshot) -> set[str]:
    restarting = _restarting(snapshot)
    return {
        one.assignment.replica_id
        for one in snapshot.assigned
        if one.state in FAILING
        and (one.assignment.node_id, one.assignment.version_id) not in restarting
    }


def _failed(view: AssignedView) -> Stopped:
    reason = f"The replica failed on {view.assignment.node_id}."
    return Stopped(view.assignment, "failed", reason)


def _restarting(snapshot: FleetSnapshot) -> set[tuple[str, str]]:
    """(node, version) of the replicas whose agents are starting a dead worker again."""
    return {
        (failure.node_id, failure.version_id)
        for failure in snapshot.failures
        if failure.code == "engine_lost" and failure.count <= LOCAL_RETRIES
    }


def _must_stop(
    view: AssignedView,
    versions: dict[str, VersionView],
    nodes: dict[str, NodeView],
) -> Stopped | None:
    """Why the replica cannot go on whatever else happens; None if it can."""
    placed = view.assignment
    if placed.version_id not in versions:
        return Stopped(placed, "retired", f"{placed.version_id} is retired.")
    for shard in shards_of(placed, versions[placed.version_id].spec.tensor_parallel):
        node = nodes.get(shard.node_id)
        if node is None or node.status in ("lost", "absent"):
            return Stopped(placed, "node_lost", f"Node {shard.node_id} is lost.")
        if shard.device_index not in {device.index for device in node.devices}:
            reason = f"Node {shard.node_id} has no device {shard.device_index} now."
            return Stopped(placed, "node_lost", reason)
    return None


def _why_leaving(
    view: AssignedView,
    version: VersionView,
    nodes: dict[str, NodeView],
    replaced: Collection[str | None],
) -> tuple[str, str] | None:
    """Why it stops once enough others are ready, as code and sentence; None if it stays."""
    for shard in shards_of(view.assignment, version.spec.tensor_parallel):
        if nodes[shard.node_id].draining:
            reason = f"Node {shard.node_id} is draining, its replacement is ready."
            return "node_draining", reason
    if view.assignment.replica_id in replaced:
        return "moved", f"It has moved from {view.assignment.node_id}, its replacement is ready."
    return None


def _count(
    version: VersionView,
    views: list[AssignedView],
    nodes: dict[str, NodeView],
    failing: set[str],
    found: Difference,
) -> None:
    """Sort the version's replicas into kept, leaving and surplus, and count what is missing."""
    if not views:
        found.missing[version.version_id] = version.num_replicas
        return
    replaced = {view.assignment.replaces for view in views}
    leaving = [view for view in views if _why_leaving(view, version, nodes, replaced)]
    staying = _best_spread_first([view for view in views if view not in leaving])
    staying.sort(key=lambda view: view.assignment.replica_id in failing)  # the others first
    kept, surplus = staying[: version.num_replicas], staying[version.num_replicas :]
    for view in kept:
        is_failing = view.assignment.replica_id in failing
        (found.failing if is_failing else found.kept).append(view)
    found.missing[version.version_id] = version.num_replicas - len(kept)
    num_ready = sum(view.state == "ready" for view in kept)
    for view in surplus:
        if view.state == "ready" and num_ready < len(kept):
            found.leaving.append(view)
            found.spare[view.assignment.replica_id] = version.version_id
        else:
            reason = f"{version.version_id} should have {version.num_replicas} replicas."
            found.stopped.append(Stopped(view.assignment, "surplus", reason))
    for view in leaving:
        if view.assignment.replica_id in failing:
            found.stopped.append(_failed(view))
        elif num_ready >= version.num_replicas:
            code, reason = _why_leaving(view, version, nodes, replaced) or ("", "")
            found.stopped.append(Stopped(view.assignment, code, reason))
        else:
            found.leaving.append(view)


def _best_spread_first(views: list[AssignedView]) -> list[AssignedView]:
    """The first of each node before any second one; among these the ready ones, then by id."""
    views = sorted(views, key=lambda view: (view.state != "ready", view.assignment.replica_id))
    num_before: dict[str, int] = defaultdict(int)
    order = {}
    for view in views:
        order[view.assignment.replica_id] = num_before[view.assignment.node_id]
        num_before[view.assignment.node_id] += 1
    return sorted(
        views, key=lambda view: (order[view.assignment.replica_id], view.state != "ready")
    )


def over_capacity(assignment: Assignment, needed: int, capacity: int) -> Stopped:
    """The end of a replica whose device has become too small for all it holds."""
    return Stopped(
        assignment,
        "evicted",
        f"Device {assignment.node_id}/{assignment.device_index} holds {bytes_text(needed)}, "
        f"but has only {bytes_text(capacity)} now.",
    )
