"""Whether a device can take a replica: one code and one detail for each that cannot.

``Fleet`` is the planner's workbench: free memory and residents per device while the plan grows. A
replica with ``tensor_parallel = t`` takes t devices joined by one symmetric interconnect (one link
of one node, see ``board``; over nodes, see ``groups``), an equal share of its memory on each.

The rules stand twice, once for a single device and what would be without some of its residents
(here), and once for all devices at a time (``board``, ``survey``); a property test compares them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from controlplane.domain.placement import Assignment, Rejection, shards_of
from controlplane.placement.board import NUM_RANKS, Board, Figures
from controlplane.placement.explain import bytes_text
from controlplane.placement.snapshot import (
    DeviceView,
    FailureView,
    FleetSnapshot,
    NodeView,
    VersionView,
    is_of_class,
)

_Key = TypeVar("_Key")


@dataclass(slots=True)
class Resident:
    """A replica on the workbench; ``idle_s`` orders evictions within a class."""

    assignment: Assignment
    version: VersionView
    idle_s: float = 0.0
    charged_bytes: int = 0
    is_steady: bool = False
    retiered_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """On each of its devices: as measured by the node, but no more than it was given."""
        given = shard_bytes(self.assignment, self.version)
        return min(self.charged_bytes or given, given)

    @property
    def is_stored(self) -> bool:
        """Whether it goes to storage when it leaves the device, and needs nothing of the host."""
        return self.assignment.tier == "storage"

    @property
    def may_leave(self) -> bool:
        """Whether its memory on the device counts for others too."""
        return self.version.is_swappable and not self.is_steady


@dataclass(slots=True)
class Slot:
    """One device: what an empty one offers, what is free of that, and who is on it.

    ``closed`` is why the node takes nothing new at all.
    """

    node: NodeView
    device: DeviceView
    cell: int
    room_bytes: int
    free_bytes: int
    closed: tuple[str, str] | None
    used_bytes: int = 0
    guaranteed: int = 0  # percent of its time
    compute: int = 0
    num_swappable: int = 0
    by_rank: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    residents: dict[str, Resident] = field(default_factory=dict)

    @property
    def figures(self) -> Figures:
        shared = self.num_swappable
        return (self.free_bytes, self.guaranteed, self.compute, shared, *self.by_rank)  # type: ignore

    def take(self, resident: Resident, num_bytes: int, sign: int) -> None:
        """Put the replica with ``num_bytes`` on the device (1) or take it off (-1)."""
        placed, version = resident.assignment, resident.version
        num_bytes *= sign
        self.used_bytes += num_bytes
        self.free_bytes -= num_bytes
        self.guaranteed += sign * version.spec.guaranteed_percent
        self.compute += sign * version.spec.needs.compute_percent
        self.by_rank[version.rank] += num_bytes
        if sign > 0:
            self.residents[placed.replica_id] = resident
        else:
            del self.residents[placed.replica_id]
        if version.is_swappable:
            self.num_swappable += sign


def _slot(node: NodeView, device: DeviceView, cell: int) -> Slot:
    closed = None
    if node.status != "ready":
        closed = (f"node_{node.status}", f"node {node.node_id} is {node.status}")
    elif node.draining:
        closed = ("node_draining", f"node {node.node_id} is draining")
    room = device.capacity_bytes - device.foreign_bytes
    return Slot(node, device, cell, room, room, closed)


class Fleet:
    """All devices, in the order of their cells, and who must be told from whom: the cells that
    hold a version or a label, or shun a label, with how often."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self.now, self.retiers = snapshot.now, snapshot.retiers
        self.says_whose = snapshot.says_whose
        self._board, self._stale = Board(snapshot), set[int]()  # cells
        self.slots: dict[int, Slot] = {}
        for row, (node, devices) in enumerate(self._board.rows):
            for column, device in enumerate(devices):
                cell = row * self._board.width + column
                self.slots[cell] = _slot(node, device, cell)
        self.holding: dict[str, dict[int, int]] = {}
        self.labelled: dict[str, dict[int, int]] = {}
        self.shunning: dict[str, dict[int, int]] = {}
        self.num_on_node: dict[str, dict[str, int]] = {}
        self.num_in_zone: dict[str, dict[str, int]] = {}
        self.rows_of_zone: dict[str, list[int]] = {}
        self.rows_of_node: dict[str, list[int]] = {}
        for row, (node, _) in enumerate(self._board.rows):
            self.rows_of_zone.setdefault(node.zone, []).append(row)
            self.rows_of_node.setdefault(node.node_id, []).append(row)
        self.failures: dict[str, list[FailureView]] = {}
        self.history: dict[str, list[FailureView]] = {}  # those over, too
        for one in snapshot.failures:
            self.history.setdefault(one.version_id, []).append(one)
            if one.retry_at > self.now:
                self.failures.setdefault(one.version_id, []).append(one)

    @property
    def board(self) -> Board:
        """All devices as arrays, brought up to date with what was added and removed."""
        if self._stale:
            self._board.set_devices((cell, self.slots[cell].figures) for cell in self._stale)
            self._stale.clear()
        return self._board

    def span(self, placed: Assignment, version: VersionView) -> list[Slot]:
        """The devices that a replica holds, of those that there are."""
        cells = self._board.cells
        if version.spec.tensor_parallel == 1:
            found = [cells.get((placed.node_id, placed.device_index))]
        else:
            shards = shards_of(placed, version.spec.tensor_parallel)
            found = [cells.get((one.node_id, one.device_index)) for one in shards]
        return [self.slots[cell] for cell in found if cell is not None]

    def add(self, resident: Resident) -> None:
        self._move(resident, 1)

    def remove(self, resident: Resident) -> None:
        self._move(resident, -1)

    def _move(self, resident: Resident, sign: int) -> None:
        placed, version = resident.assignment, resident.version
        span = self.span(placed, version)
        cells = [slot.cell for slot in span]
        num_bytes = resident.num_bytes
        for slot in span:
            slot.take(resident, num_bytes, sign)
            self._stale.add(slot.cell)
            self._board.ranking.changed.append(slot.cell // self._board.width)
        if version.shape.cpu_milli or version.shape.host_memory:
            self._take_host(span, version, sign)
        if version.shape.compute:
            self._board.any_compute = True
        name, beside = version.version_id, version.spec.colocation
        _count(self.holding, (name,), cells, sign)
        if beside.labels or beside.anti_affinity:
            _count(self.labelled, beside.labels, cells, sign)
            _count(self.shunning, beside.anti_affinity, cells, sign)
        for node in {slot.node.node_id: slot.node for slot in span}.values():
            _count(self.num_on_node, (name,), (node.node_id,), sign)
            _count(self.num_in_zone, (name,), (node.zone,), sign)

    def _take_host(self, span: Sequence[Slot], version: VersionView, sign: int) -> None:
        """Each device's share of what the replica needs of its node."""
        shape, board = version.shape, self._board
        for slot in span:
            node = board.node[slot.cell // board.width]
            board.cpu[node] -= sign * -(-shape.cpu_milli // shape.num_devices)
            board.memory[node] -= sign * -(-shape.host_memory // shape.num_devices)
            board.ranking.changed += self.rows_of_node[slot.node.node_id]

    def slots_of_node(self, node_id: str) -> Iterator[Slot]:
        """The node's devices."""
        width = self._board.width
        for row in self.rows_of_node.get(node_id, ()):  # none without devices
            for column in range(len(self._board.rows[row][1])):
                yield self.slots[row * width + column]

    def failure(self, node_id: str, version_id: str) -> FailureView | None:
        """The failure that keeps the version off the node now, if any."""
        found = self.failures.get(version_id, ())
        return next((one for one in found if one.node_id == node_id), None)

    def unwanted_beside(self, version: VersionView) -> list[int]:
        """The cells with a resident that the version must not share a device with, but for its
        own replicas; ascending."""
        beside = version.spec.colocation
        if not beside.anti_affinity and not beside.labels:
            return []
        found: set[int] = set()
        for names, table in (
            (beside.anti_affinity, self.labelled),
            (beside.labels, self.shunning),
        ):
            for name in names:
                found.update(cell for cell, number in table.get(name, {}).items() if number)
        return sorted(found)


def _count(
    table: dict[str, dict[_Key, int]], names: Iterable[str], keys: Sequence[_Key], sign: int
) -> None:
    for name in names:
        counted = table.setdefault(name, {})
        for key in keys:
            counted[key] = counted.get(key, 0) + sign


def shard_bytes(placed: Assignment, version: VersionView) -> int:
    return -(-placed.memory_bytes // version.spec.tensor_parallel)


def rejection(
    fleet: Fleet, slot: Slot, version: VersionView, without: Iterable[str] = ()
) -> Rejection | None:
    """Why a share of ``version`` cannot go to ``slot``; None if it can.

    ``without``: replica ids to think away, to ask whether evicting them would help.
    """
    found = _unusable(fleet, slot, version) or full(fleet, slot, version, frozenset(without))
    if found is None:
        return None
    return Rejection(slot.node.node_id, slot.device.index, *found)


def barrier(
    fleet: Fleet, slot: Slot, version: VersionView, without: Iterable[str] = ()
) -> tuple[str, str] | None:
    """What but the device's memory keeps ``version`` off ``slot``; None if nothing does."""
    return _unusable(fleet, slot, version) or crowded(fleet, slot, version, frozenset(without))


def crowded(
    fleet: Fleet, slot: Slot, version: VersionView, without: frozenset[str] = frozenset()
) -> tuple[str, str] | None:
    """Reasons but the device's memory that lie in who is on it and its node now."""
    gone = [slot.residents[one] for one in without if one in slot.residents]
    return (
        _company(slot, version, without)
        or _promised(slot, version, without)
        or _host(fleet, slot, version, gone)
    )


def _unusable(fleet: Fleet, slot: Slot, version: VersionView) -> tuple[str, str] | None:
    """Reasons that no eviction changes."""
    if slot.closed:
        return slot.closed
    failure = fleet.failure(slot.node.node_id, version.version_id)
    if failure:
        return "backoff", _kept_off(failure, fleet.now)
    shape = version.shape
    if not is_of_class(slot.device, shape.gpu_classes):
        name = slot.device.name or slot.device.kind
        return "wrong_class", f"needs {' or '.join(shape.gpu_classes)}, the device is {name!r}"
    if shape.engine not in slot.node.engines:
        return "no_engine", f"needs {shape.engine}, the node has {', '.join(slot.node.engines)}"
    if len(fleet.board.rows[slot.cell // fleet.board.width][1]) < shape.num_devices:
        return "too_few_devices", f"needs {shape.num_devices} devices on one link"
    if shape.shard_bytes > slot.room_bytes:
        return "too_small", (
            f"needs {bytes_text(shape.shard_bytes)}, "
            f"the device offers {bytes_text(slot.room_bytes)} when empty"
        )
    return None


def _kept_off(failure: FailureView, now: float) -> str:
    said = f"failed {failure.count} times there, last with {failure.code}"
    left = failure.retry_at - now
    return f"{said}; next try in {left:.0f} s" if left > 0 else said


def full(
    fleet: Fleet, slot: Slot, version: VersionView, without: frozenset[str] = frozenset()
) -> tuple[str, str] | None:
    """Reasons that lie in who is on the device and its node now."""
    found = _company(slot, version, without) or _promised(slot, version, without)
    if found:
        return found
    gone = [slot.residents[one] for one in without if one in slot.residents]
    free = slot.free_bytes + sum(one.num_bytes for one in gone)
    if version.shard_bytes > free:
        return "insufficient_memory", too_full(version, free)
    return _host(fleet, slot, version, gone)


def too_full(version: VersionView, free_bytes: int) -> str:
    return f"needs {bytes_text(version.shard_bytes)}, {bytes_text(max(0, free_bytes))} is free"


def _host(
    fleet: Fleet, slot: Slot, version: VersionView, gone: Sequence[Resident]
) -> tuple[str, str] | None:
    """Too little of the node's processors or memory left; what leaves ``slot`` gives its share."""
    shape, board = version.shape, fleet.board
    if not shape.cpu_milli and not shape.host_memory:
        return None
    node = board.node[slot.cell // board.width]
    shapes = [one.version.shape for one in gone]
    cpu = int(board.cpu[node]) + sum(-(-one.cpu_milli // one.num_devices) for one in shapes)
    memory = int(board.memory[node]) + sum(-(-one.host_memory // one.num_devices) for one in shapes)
    if shape.cpu_milli > cpu:
        return (
            "insufficient_host",
            f"needs {shape.cpu_milli / 1000:g} cores, {cpu / 1000:g} are free",
        )
    if shape.host_memory > memory:
        return "insufficient_host", (
            f"needs {bytes_text(shape.host_memory)} of the node's memory, "
            f"{bytes_text(max(0, memory))} is free"
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
    """A resident that the version must not share the device with, its own replicas first."""
    stays = [(name, one) for name, one in slot.residents.items() if name not in without]
    for replica_id, resident in stays:
        if resident.version.version_id == version.version_id:
            return "already_here", f"{replica_id} runs there"
    for replica_id, resident in stays:
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
