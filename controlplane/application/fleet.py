"""What the application tells nodes and hears from them, free of the wire format.

``adapters.natsbus.translate`` turns these into wire messages and back. ``FleetLoads`` keeps the
newest figures of every node in memory, with their age by a monotonic clock: whether a node is
alive never depends on what its wall clock says.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from controlplane.domain.node import DeviceInfo, HostInfo
from controlplane.domain.version_spec import VersionSpec


# --- control plane -> node --------------------------------------------------------------------
class GroupPart(msgspec.Struct, frozen=True):
    """The ranks of a group over several nodes that one of them runs, where the agent of rank 0
    meets the others, and by which secret they know each other."""

    ranks: tuple[int, ...]
    address: str
    secret: bytes


class DesiredReplica(msgspec.Struct, frozen=True):
    """One assignment joined with its version's specification. ``tier``: what is intended where
    replicas share a device by turns (``wire.DesiredState``), else empty. ``device_indices``: of a
    tensor-parallel group, those of its devices that are this node's; ``group``: if others are
    another node's."""

    replica_id: str
    version_id: str
    model: str
    device_index: int
    memory_bytes: int
    spec: VersionSpec
    tier: str = ""
    device_indices: tuple[int, ...] = ()
    group: GroupPart | None = None


class DesiredNode(msgspec.Struct, frozen=True):
    """Everything one node should run. Order: ``(epoch, generation)``, lexicographically."""

    node_id: str
    epoch: int
    generation: int
    drain: bool
    replicas: tuple[DesiredReplica, ...] = ()


class Delivery(msgspec.Struct, frozen=True):
    """What the bus now holds for a node. Not ``written`` when the same was there already: then
    the numbers are those it was first written with, and those are what the node acknowledges."""

    epoch: int
    generation: int
    written: bool


class StaleDesired(Exception):
    """The bus holds a newer desired state than this one: another controller leads by now."""


# --- node -> control plane --------------------------------------------------------------------
class ReplicaReport(msgspec.Struct, frozen=True):
    """``state``: pending | downloading | loading | ready | stopping | failed. Sizes in bytes.
    ``retry_s``: until its node tries again by itself. ``since``: of the state, by its clock."""

    replica_id: str
    version_id: str
    device_index: int
    state: str
    code: str = ""
    detail: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    peak_bytes: int = 0
    load_seconds: float = 0.0
    sha256: str = ""
    retry_s: float = 0.0
    since: float = 0.0


class NodeReport(msgspec.Struct, frozen=True):
    """What a node really runs, the newest desired state it has accepted, and why not a newer."""

    node_id: str
    boot_id: str
    acked_epoch: int
    acked_generation: int
    zone: str
    devices: tuple[DeviceInfo, ...]
    replicas: tuple[ReplicaReport, ...]
    host: HostInfo = HostInfo()
    refusal: str = ""


class DeviceLoad(msgspec.Struct, frozen=True):
    """``utilization`` is the busy fraction of the step loop, 0 to 1. ``host_bytes``: what the node
    keeps for weights that are swapped out, of all its devices."""

    index: int
    utilization: float
    memory_used_bytes: int
    memory_total_bytes: int
    foreign_bytes: int
    temperature_c: float
    power_w: float
    host_bytes: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Counts are totals since it was loaded; ``swapped_bytes`` went to host memory or back.

    ``tier``: resident | host | storage, "" from nodes without tiers; ``expected_wait_s`` until a
    request sent now reaches its engine. ``charged_bytes`` of its device, 0 if not measured yet.
    ``load_work`` grows while it downloads or loads (``wire.ReplicaLoad``). ``tier_since``: Unix
    seconds by the node's clock, 0 if it was never in another."""

    replica_id: str
    version_id: str
    device_index: int
    state: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    block_size: int
    prefill_tokens_per_s: float
    decode_step_s: float
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    num_preemptions: int
    last_step_age_s: float
    step_s: float = 0.0
    num_steps: int = 0
    num_swapped_out: int = 0
    num_recomputed: int = 0
    swapped_bytes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    tier: str = ""
    expected_wait_s: float = 0.0
    charged_bytes: int = 0
    load_work: float = 0.0
    tier_since: float = 0.0

    @property
    def is_away(self) -> bool:
        """Not on the device now."""
        return self.tier in ("host", "storage")


class NodeLoad(msgspec.Struct, frozen=True):
    """One telemetry message: the node's heartbeat. ``seq`` counts up within one boot."""

    node_id: str
    boot_id: str
    seq: int
    at: float
    acked_epoch: int
    acked_generation: int
    draining: bool
    devices: tuple[DeviceLoad, ...]
    replicas: tuple[ReplicaLoad, ...]
    prefix_filters: dict[str, bytes] = {}  # by replica, of those that have something cached


OnReport = Callable[[NodeReport], None]
OnLoad = Callable[[NodeLoad], None]


class DesiredStates(Protocol):
    """The bus as the publisher of desired state sees it; one whole value per node."""

    async def deliver(self, node: DesiredNode) -> Delivery:
        """Tell the node, unless it is told the same already.

        Raises StaleDesired rather than overwrite something newer, BusUnavailable.
        """


class BusUnavailable(Exception):
    """The bus cannot take this now; nothing was sent, or nobody knows whether it was."""

    code = "bus_unavailable"

    def __init__(self, message: str = "The message bus is not connected.") -> None:
        super().__init__(message)
        self.retry_after = 2.0


class DesiredTooLarge(BusUnavailable):
    """What one node should run is larger than a message may be; it alone cannot be told."""

    code = "desired_too_large"


STEADY_S, PAUSE_S = 300.0, 60.0  # working for so long, without such a pause


class FleetLoads:
    """The newest ``NodeLoad`` of every node and when it came, in monotonic seconds."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[NodeLoad, float]] = {}
        self._worked: dict[str, tuple[int, float]] = {}  # replica -> (tokens generated, since)
        self._working_since: dict[str, float] = {}
        self._charged: dict[str, int] = {}
        self._local_then: dict[str, int] = {}
        self.num_recorded = 0

    def record(
        self, load: NodeLoad, monotonic: float, num_local: Mapping[str, int] | None = None
    ) -> bool:
        """Keep it, and what of ours is on each replica now; False if it is a repetition or older
        than what this boot said before."""
        known = self._loads.get(load.node_id)
        if known and known[0].boot_id == load.boot_id and load.seq <= known[0].seq:
            return False
        self._loads[load.node_id] = (load, monotonic)
        for replica in load.replicas if num_local else ():
            self._local_then[replica.replica_id] = (num_local or {}).get(replica.replica_id, 0)
        self.num_recorded += 1
        before = known[0].replicas if known else ()
        gone = {one.replica_id for one in before} - {one.replica_id for one in load.replicas}
        for replica_id in gone:
            for table in (self._worked, self._working_since, self._charged, self._local_then):
                table.pop(replica_id, None)
        for replica in load.replicas:
            self._note(replica, monotonic)
        return True

    def _note(self, replica: ReplicaLoad, monotonic: float) -> None:
        name, worked = replica.replica_id, self._worked.get(replica.replica_id)
        if replica.charged_bytes:
            self._charged[name] = replica.charged_bytes
        if replica.num_running or worked is None or worked[0] != replica.generated_tokens:
            if worked is None or monotonic - worked[1] > PAUSE_S:
                self._working_since[name] = monotonic
            self._worked[name] = (replica.generated_tokens, monotonic)

    def num_local_then(self, replica_id: str) -> int:
        """Requests of ours that were on it when its load came."""
        return self._local_then.get(replica_id, 0)

    def charged_bytes(self, replica_id: str) -> int:
        """Of its device, as its node counts it; 0 if it has not measured it."""
        return self._charged.get(replica_id, 0)

    def is_steady(self, replica_id: str, monotonic: float) -> bool:
        """Whether it has worked for ``STEADY_S`` with no pause of more than ``PAUSE_S``."""
        since = self._working_since.get(replica_id, monotonic)
        is_idle = self.idle_s(replica_id, monotonic) > PAUSE_S
        return not is_idle and monotonic - since >= STEADY_S

    def idle_s(self, replica_id: str, monotonic: float) -> float:
        """Seconds since the replica last generated anything; 0 if it was never heard of."""
        worked = self._worked.get(replica_id)
        return monotonic - worked[1] if worked else 0.0

    def latest(self, node_id: str) -> NodeLoad | None:
        known = self._loads.get(node_id)
        return known[0] if known else None

    def age_s(self, node_id: str, monotonic: float) -> float | None:
        """Seconds since the node was last heard; None if never."""
        known = self._loads.get(node_id)
        return monotonic - known[1] if known else None

    def all(self) -> list[NodeLoad]:
        return [load for load, _ in list(self._loads.values())]
