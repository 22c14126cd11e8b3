"""Whether a device can take a replica: one code and one detail for each that cannot.

``Fleet`` is the planner's workbench: free memory and residents per device while the plan grows.
A replica with ``tensor_parallel = t`` takes t devices side by side on one node, from its
``device_index`` on, an equal share of its memory on each.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.domain.placement import Assignment, Rejection
from controlplane.placement.explain import bytes_text
from controlplane.placement.snapshot import (
    DeviceView,
    FailureView,
    FleetSnapshot,
    NodeView,
    VersionView,
)


@dataclass(slots=True)
class Resident:
    """A replica on the workbench; ``idle_s`` orders evictions within a class."""

    assignment: Assignment
    version: VersionView
    idle_s: float = 0.0


@dataclass(slots=True)
class Slot:
    """One device: what an empty one offers, what is free of that, and who is on it.

    ``closed`` is why the node takes nothing new at all, ``num_anti`` how many residents forbid
    any label; both spare the common case a closer look.
    """

    node: NodeView
    device: DeviceView
    room_bytes: int
    free_bytes: int
    closed: tuple[str, str] | None
    used_bytes: int = 0
    num_anti: int = 0
    guaranteed: int = 0  # percent of its time
    residents: dict[str, Resident] = field(default_factory=dict)
    version_ids: Counter[str] = field(default_factory=Counter)

    def take(self, resident: Resident, sign: int) -> None:
        """Put the replica on the device (1) or take it off (-1)."""
        placed, version = resident.assignment, resident.version
        num_bytes = sign * shard_bytes(placed, version)
        self.used_bytes += num_bytes
        self.free_bytes -= num_bytes
        self.version_ids[placed.version_id] += sign
        self.num_anti += sign * bool(version.spec.colocation.anti_affinity)
        self.guaranteed += sign * version.spec.guaranteed_percent
        if sign > 0:
            self.residents[placed.replica_id] = resident
        else:
            del self.residents[placed.replica_id]


def _slot(node: NodeView, device: DeviceView) -> Slot:
    closed = None
    if node.status != "ready":
        closed = (f"node_{node.status}", f"node {node.node_id} is {node.status}")
    elif node.draining:
        closed = ("node_draining", f"node {node.node_id} is draining")
    room = device.capacity_bytes - device.foreign_bytes
    return Slot(node, device, room, room, closed)


class Fleet:
    """All devices, in the order of their ids, and the failures that keep versions off nodes."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self.now = snapshot.now
        self.slots: list[Slot] = []
        self.groups: dict[tuple[str, int], list[Slot]] = {}  # a slot and its right-hand neighbours
        self.num_on_node: dict[tuple[str, str], int] = {}
        self.num_in_zone: dict[tuple[str, str], int] = {}
        self._failures: dict[tuple[str, str], FailureView] = {
            (one.node_id, one.version_id): one for one in snapshot.failures
        }
        for node in sorted(snapshot.nodes, key=lambda one: one.node_id):
            row = [_slot(node, device) for device in sorted(node.devices, key=lambda d: d.index)]
            self.slots += row
            for position, slot in enumerate(row):
                self.groups[node.node_id, slot.device.index] = row[position:]

    def span(self, node_id: str, device_index: int, version: VersionView) -> list[Slot]:
        """The devices a replica of ``version`` takes from there on; fewer if there are not."""
        return self.groups[node_id, device_index][: version.spec.tensor_parallel]

    def add(self, resident: Resident) -> None:
        self._move(resident, 1)

    def remove(self, resident: Resident) -> None:
        self._move(resident, -1)

    def _move(self, resident: Resident, sign: int) -> None:
        placed, version = resident.assignment, resident.version
        span = self.span(placed.node_id, placed.device_index, version)
        for slot in span:
            slot.take(resident, sign)
        on_node, in_zone = (
            (span[0].node.node_id, placed.version_id),
            (span[0].node.zone, placed.version_id),
        )
        self.num_on_node[on_node] = self.num_on_node.get(on_node, 0) + sign
        self.num_in_zone[in_zone] = self.num_in_zone.get(in_zone, 0) + sign

    def failure(self, node_id: str, version_id: str) -> FailureView | None:
        """The failure that keeps the version off the node now, if any."""
        found = self._failures.get((node_id, version_id))
        return found if found and found.retry_at > self.now else None


def shard_bytes(placed: Assignment, version: VersionView) -> int:
    return -(-placed.memory_bytes // version.spec.tensor_parallel)


def rejection(
    fleet: Fleet, slot: Slot, version: VersionView, without: Iterable[str] = ()
) -> Rejection | None:
    """Why a replica of ``version`` cannot start at ``slot``; None if it can.

    ``without``: replica ids to think away, to ask whether evicting them would help.
    """
    found = _unusable(fleet, slot, version) or _full(fleet, slot, version, frozenset(without))
    if found is None:
        return None
    return Rejection(slot.node.node_id, slot.device.index, *found)


def _unusable(fleet: Fleet, slot: Slot, version: VersionView) -> tuple[str, str] | None:
    """Reasons that no eviction changes."""
    if slot.closed:
        return slot.closed
    failure = fleet.failure(slot.node.node_id, version.version_id)
    if failure:
        return "backoff", (
            f"failed {failure.count} times there, last with {failure.code}; "
            f"next try in {failure.retry_at - fleet.now:.0f} s"
        )
    span = fleet.span(slot.node.node_id, slot.device.index, version)
    if len(span) < version.spec.tensor_parallel:
        return "too_few_devices", f"needs {version.spec.tensor_parallel} devices side by side"
    for one in span:
        if version.shard_bytes > one.room_bytes:
            return "too_small", (
                f"needs {bytes_text(version.shard_bytes)}, "
                f"the device offers {bytes_text(one.room_bytes)} when empty"
            )
    return None


def _full(
    fleet: Fleet, slot: Slot, version: VersionView, without: frozenset[str]
) -> tuple[str, str] | None:
    """Reasons that lie in who is on the devices now."""
    for one in fleet.span(slot.node.node_id, slot.device.index, version):
        found = _company(one, version, without)
        found = found or _promised(one, version, without)
        if found:
            return found
        free = one.free_bytes
        for replica_id in without:
            resident = one.residents.get(replica_id)
            free += shard_bytes(resident.assignment, resident.version) if resident else 0
        if version.shard_bytes > free:
            return "insufficient_memory", (
                f"needs {bytes_text(version.shard_bytes)}, {bytes_text(max(0, free))} is free"
            )
    return None


def _promised(slot: Slot, version: VersionView, without: frozenset[str]) -> tuple[str, str] | None:
    """More of the device's time promised than there is."""
    wanted = version.spec.guaranteed_percent
    if not wanted or slot.guaranteed + wanted <= 100:
        return None
    gone = (slot.residents[one] for one in without if one in slot.residents)
    left = 100 - slot.guaranteed + sum(one.version.spec.guaranteed_percent for one in gone)
    if wanted <= left:
        return None
    return "insufficient_time", f"needs {wanted} % of the device's time, {left} % is not promised"


def _company(slot: Slot, version: VersionView, without: frozenset[str]) -> tuple[str, str] | None:
    """A resident that the version must not share the device with."""
    picky = slot.num_anti or version.spec.colocation.anti_affinity
    if not picky and not slot.version_ids.get(version.version_id):
        return None
    for replica_id, resident in slot.residents.items():
        if replica_id in without:
            continue
        if resident.version.version_id == version.version_id:
            return "already_here", f"{replica_id} runs there"
        if must_not_meet(version, resident.version):
            return "anti_affinity", f"must not share a device with {replica_id}"
    return None


def must_not_meet(one: VersionView, other: VersionView) -> bool:
    """Whether either forbids a label of the other on its device."""
    mine, theirs = one.spec.colocation, other.spec.colocation
    if not mine.anti_affinity and not theirs.anti_affinity:
        return False
    return not set(mine.anti_affinity).isdisjoint(theirs.labels) or not set(
        theirs.anti_affinity
    ).isdisjoint(mine.labels)
