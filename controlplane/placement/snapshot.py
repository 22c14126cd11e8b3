"""What the planner sees: the whole fleet as frozen values, at one log position and time.

Nothing here is looked up later, so a stored snapshot plans again to the same decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from controlplane.domain.ids import NodeId, VersionId
from controlplane.domain.node import backoff_s
from controlplane.domain.placement import Assignment
from controlplane.domain.version_spec import VersionSpec

RANK = {"high": 0, "normal": 1, "best-effort": 2}  # lower is more important
FAILING = frozenset({"failed", "stuck"})  # states of a replica that does not start where it is


@dataclass(frozen=True, slots=True)
class DeviceView:
    """``reserved_bytes`` is kept free for the driver and workspace, ``foreign_bytes`` is what
    other processes hold: it counts against new replicas, and evicts none. ``link``: the symmetric
    interconnect (NVLink) it is on; devices of a node without one are alike to each other."""

    index: int
    memory_bytes: int
    reserved_bytes: int = 0
    foreign_bytes: int = 0
    kind: str = ""
    name: str = ""
    link: str = ""

    @property
    def capacity_bytes(self) -> int:
        return max(0, self.memory_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class NodeView:
    """``status``: ready | suspect | lost, as the log has it. ``cpu_milli`` and ``host_memory`` of 0
    are not known and bound nothing; ``fabric``: the network (InfiniBand) over which its agent runs
    groups with other nodes, "" if it does not.
    ``host_bytes`` it keeps for what is swapped out of its devices, ``engines`` load models."""

    node_id: NodeId
    devices: tuple[DeviceView, ...]
    status: str = "ready"
    draining: bool = False
    zone: str = ""
    cpu_milli: int = 0
    host_memory: int = 0
    fabric: str = ""
    host_bytes: int = 0
    engines: tuple[str, ...] = ("builtin",)


class Shape(NamedTuple):
    """What decides where a version fits, apart from who is there already. ``shard_bytes``: on each
    of ``num_devices``; percents of each device's time; host needs of the whole replica."""

    num_devices: int
    shard_bytes: int
    guaranteed: int
    compute: int
    cpu_milli: int
    host_memory: int
    gpu_classes: tuple[str, ...]
    engine: str = "builtin"


@dataclass(frozen=True)
class VersionView:
    """A version that is not retired, and how many replicas of it there should be."""

    version_id: VersionId
    spec: VersionSpec
    num_replicas: int

    @cached_property
    def rank(self) -> int:
        return RANK[self.spec.priority]

    @cached_property
    def shard_bytes(self) -> int:
        """Memory on each of its ``tensor_parallel`` devices."""
        return -(-self.spec.gpu_memory // self.spec.tensor_parallel)

    @property
    def is_swappable(self) -> bool:
        """Whether others may have its memory on the device while it is idle."""
        return self.spec.residency == "swappable"

    @cached_property
    def shape(self) -> Shape:
        spec, needs = self.spec, self.spec.needs
        return Shape(
            spec.tensor_parallel,
            self.shard_bytes,
            spec.guaranteed_percent,
            needs.compute_percent,
            needs.cpu_milli,
            needs.host_memory,
            needs.gpu_classes,
            spec.engine,
        )


def is_of_class(device: DeviceView, gpu_classes: Iterable[str]) -> bool:
    """Whether any of the words is the device's kind or a part of its name; none asks for none::

    is_of_class(DeviceView(0, 80, name="NVIDIA H100 80GB HBM3"), ("h100", "h200")) is True
    """
    words = [word.lower() for word in gpu_classes]
    return not words or any(
        word == device.kind.lower() or word in device.name.lower() for word in words
    )


@dataclass(frozen=True, slots=True)
class AssignedView:
    """A replica as placed; ``state`` as its node last said, or stuck if it has waited for room
    there beyond its time; ``idle_s`` since it last worked. ``charged_bytes``: of its device, as the
    node counts it; 0: not measured yet. ``retiered_at``: when its tier last changed, 0 if never."""

    assignment: Assignment
    state: str = "pending"
    idle_s: float = 0.0
    charged_bytes: int = 0
    is_steady: bool = False
    retiered_at: float = 0.0


@dataclass(frozen=True, slots=True)
class FailureView:
    """A version failed on a node ``count`` times in a row, last at ``at``."""

    version_id: VersionId
    node_id: NodeId
    code: str
    count: int
    at: float

    @property
    def retry_at(self) -> float:
        """10 s after the first failure, then doubling, at most 5 minutes."""
        return self.at + backoff_s(self.count)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """``keeps_wholes``: whether nodes that are still whole are kept so, see ``fragmentation``;
    ``keeps_failing``: whether a replica that fails stays where no other place is better, see
    ``reconcile``; ``retiers``: whether there is a storage tier, and tiers follow the demand, see
    ``tiering``; ``keeps_siblings``: whether what is missing leaves a failing one of its version
    where it is; ``says_whose``: see ``explain.placed``. Earlier planners did none of it.
    ``rates``: requests a minute, by version."""

    nodes: tuple[NodeView, ...]
    versions: tuple[VersionView, ...]
    assigned: tuple[AssignedView, ...]
    failures: tuple[FailureView, ...]
    position: int
    now: float
    keeps_wholes: bool = True
    keeps_failing: bool = True
    retiers: bool = True
    keeps_siblings: bool = True
    says_whose: bool = True
    rates: Mapping[str, float] = field(default_factory=dict)

    def versions_by_id(self) -> dict[str, VersionView]:
        return {version.version_id: version for version in self.versions}
