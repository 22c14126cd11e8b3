"""Fleets for placement tests: a short way to write them down, and random ones."""

from dataclasses import replace

from hypothesis import strategies as st

from controlplane.domain.ids import NodeId, ReplicaId, VersionId
from controlplane.domain.placement import Assignment
from controlplane.domain.version_spec import Colocation, VersionSpec
from controlplane.placement.plan import PlacementPlan
from controlplane.placement.snapshot import (
    AssignedView,
    DeviceView,
    FailureView,
    FleetSnapshot,
    NodeView,
    VersionView,
)

GB = 1_000_000_000


def node(name: str, *gigabytes: float, status: str = "ready", draining: bool = False,
         zone: str = "") -> NodeView:  # fmt: skip
    devices = tuple(DeviceView(i, int(gb * GB)) for i, gb in enumerate(gigabytes))
    return NodeView(NodeId(name), devices, status, draining, zone)


def version(name: str, gigabytes: float, replicas: int = 1, priority: str = "normal",
            colocation: Colocation = Colocation(), tensor_parallel: int = 1,  # noqa: B008
            guaranteed: int = 0, engine: str = "builtin") -> VersionView:  # fmt: skip
    spec = VersionSpec(
        version="v1",
        source="simulated://m",
        gpu_memory=int(gigabytes * GB),
        priority=priority,
        min_replicas=replicas,
        max_replicas=max(1, replicas),
        colocation=colocation,
        tensor_parallel=tensor_parallel,
        guaranteed_percent=guaranteed,
        engine=engine,
    )
    return VersionView(VersionId(f"{name}@v1"), spec, replicas)


def assigned(name: str, node_id: str, device: int, gigabytes: float, number: int = 0,
             state: str = "ready", idle_s: float = 0.0) -> AssignedView:  # fmt: skip
    placed = Assignment(
        ReplicaId(f"{name}.v1.g1.{number}"), VersionId(f"{name}@v1"), NodeId(node_id), device,
        int(gigabytes * GB),
    )  # fmt: skip
    return AssignedView(placed, state, idle_s)


def fleet(nodes: list[NodeView], versions: list[VersionView],
          placed: list[AssignedView] | None = None, failures: list[FailureView] | None = None,
          now: float = 1000.0) -> FleetSnapshot:  # fmt: skip
    return FleetSnapshot(
        tuple(nodes), tuple(versions), tuple(placed or ()), tuple(failures or ()), 7, now
    )


def after(snapshot: FleetSnapshot, made: PlacementPlan, state: str = "ready") -> FleetSnapshot:
    """The fleet once the plan is carried out, every new replica in ``state``."""
    gone = {stop.assignment.replica_id for stop in made.stopped}
    kept = [view for view in snapshot.assigned if view.assignment.replica_id not in gone]
    new = [AssignedView(start.assignment, state) for start in made.started]
    return replace(snapshot, assigned=tuple(kept + new))


# --- random fleets ----------------------------------------------------------------------------
LABELS = st.lists(st.sampled_from(["x", "y"]), max_size=1).map(tuple)


@st.composite
def snapshots(draw: st.DrawFn) -> FleetSnapshot:
    """Up to 4 nodes of up to 3 devices, 8 versions, and any assignments, lawful or not."""
    nodes = [
        NodeView(
            NodeId(f"n{i}"),
            tuple(
                DeviceView(d, draw(st.integers(4, 24)) * GB, draw(st.sampled_from([0, GB])),
                           draw(st.sampled_from([0, 0, GB])))
                for d in range(draw(st.integers(0, 3)))
            ),
            draw(st.sampled_from(["ready"] * 6 + ["suspect", "lost"])),
            draw(st.sampled_from([False] * 5 + [True])),
            draw(st.sampled_from(["a", "b"])),
            engines=draw(st.sampled_from([("builtin",), ("builtin", "vllm")])),
        )
        for i in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    versions = [
        version(
            f"m{i}",
            draw(st.integers(1, 12)),
            draw(st.integers(0, 4)),
            draw(st.sampled_from(["high", "normal", "best-effort"])),
            Colocation(draw(LABELS), draw(LABELS), draw(LABELS)),
            draw(st.sampled_from([1, 1, 1, 2])),
            engine=draw(st.sampled_from(["builtin", "builtin", "vllm"])),
        )
        for i in range(draw(st.integers(1, 8)))
    ]
    placed = [_placed(draw, nodes, versions, number) for number in range(draw(st.integers(0, 9)))]
    failures = [
        FailureView(one.version_id, NodeId("n0"), "load_error", draw(st.integers(1, 9)), 990.0)
        for one in versions
        if draw(st.integers(0, 3)) == 0
    ]
    return fleet(nodes, versions, placed, failures)


def _placed(
    draw: st.DrawFn, nodes: list[NodeView], versions: list[VersionView], number: int
) -> AssignedView:
    """Usually a known version on a known device with its own size; now and then nonsense."""
    known = [(one.node_id, device.index) for one in nodes for device in one.devices]
    place = ("n6", 2)
    if known and draw(st.integers(0, 9)):
        place = draw(st.sampled_from(known))
    name, size = "m9", draw(st.integers(1, 12))
    if versions and draw(st.integers(0, 9)):
        chosen = draw(st.sampled_from(versions))
        name, size = chosen.version_id.partition("@")[0], chosen.spec.gpu_memory // GB
    state = draw(st.sampled_from(["ready", "ready", "pending", "failed", "stuck"]))
    return assigned(name, *place, size, number, state, draw(st.sampled_from([0.0, 60.0])))
