"""The fleet as a matrix, so that rules and score are computed for all devices at once.

One row for each link of each node (devices that may form a group), one column for each of its
devices, in the order of ids; what is absent has no free memory and is closed. A *cell* is
``row · width + column``. Worked example, n1 with two devices on one link and two on another, n2
with one::

    row 0   n1 link a    n1/0  n1/1
    row 1   n1 link b    n1/2  n1/3
    row 2   n2           n2/0   -        width 2, cells 0 … 5, cell 5 is closed

``Ranking`` keeps, for each shape asked for, every cell's first broken rule and its standing, and
computes again only the rows that changed since: placing the thousandth model of a common shape
looks at one row, not at the fleet.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controlplane.placement.fragmentation import Array, Host, Typical
from controlplane.placement.snapshot import (
    DeviceView,
    FleetSnapshot,
    NodeView,
    Shape,
    is_of_class,
)

UNBOUNDED = 2**62
NUM_RANKS = 3
Figures = tuple[int, int, int, int, int, int, int]
"""Of one device: free bytes, percent promised, percent busy, swappable replicas, bytes held by rank
0, 1 and 2."""


class Board:
    """Free memory and promises of every device, in bytes and percent, ``[rows, width]`` each."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        nodes = sorted(snapshot.nodes, key=lambda one: one.node_id)
        self.rows: list[tuple[NodeView, tuple[DeviceView, ...]]] = [
            (node, devices) for node in nodes for devices in _links(node)
        ]
        self.width = max((len(devices) for _, devices in self.rows), default=1)
        kinds: dict[tuple[str, str], int] = {}
        shape = (len(self.rows), self.width)
        self.capacity, self.room = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.kind, self.is_open = np.zeros(shape, np.int64), np.zeros(shape, bool)
        self.cells: dict[tuple[str, int], int] = {}
        self.kinds: list[DeviceView] = []
        for row, (node, devices) in enumerate(self.rows):
            for column, device in enumerate(devices):
                kind = kinds.setdefault((device.kind, device.name), len(kinds))
                if kind == len(self.kinds):
                    self.kinds.append(device)
                self.capacity[row, column] = device.capacity_bytes
                self.room[row, column] = max(0, device.capacity_bytes - device.foreign_bytes)
                self.kind[row, column] = kind
                self.is_open[row, column] = node.status == "ready" and not node.draining
                self.cells[node.node_id, device.index] = row * self.width + column
        self.kinds = self.kinds or [DeviceView(0, 0)]
        self.row_sizes = self._row_sizes()
        self._held = np.zeros((4 + NUM_RANKS, *shape), np.int64)  # in the order of ``Figures``
        self.free, self.guaranteed, self.compute, self.num_swappable = self._held[:4]
        self.by_rank = self._held[4:]
        self.free[:] = self.room
        self._set_hosts(nodes)
        shared = set[str].intersection(*(set(one.engines) for one in nodes)) if nodes else set()
        self.common_engines = frozenset(shared)
        wholes = Counter(map(_whole, self.rows)) if snapshot.keeps_wholes else None
        self.typical = Typical(snapshot.versions, self.kinds, wholes)
        self.any_compute = False
        self.least_room = int(self.room.min(initial=0))
        self.is_closed = ~self.is_open
        self.any_closed = bool(self.is_closed.any())
        self.row_free = self.free.sum(1)
        self.devices = np.maximum(self.capacity, 1).astype(float)
        self.alone = self.typical.alone(self.free, self.kind)
        self.ranking = Ranking(self)

    def _set_hosts(self, nodes: Sequence[NodeView]) -> None:
        number = {node.node_id: index for index, node in enumerate(nodes)}
        self.node = np.array([number[node.node_id] for node, _ in self.rows], np.int64)
        self.cpu = np.array([one.cpu_milli or UNBOUNDED for one in nodes], np.int64)
        self.memory = np.array([one.host_memory or UNBOUNDED for one in nodes], np.int64)
        self.cpu_total, self.any_host = self.cpu.copy(), any(one.cpu_milli for one in nodes)

    def _row_sizes(self) -> Array:
        """How many devices each row has, ``[rows]``."""
        return np.array([len(devices) for _, devices in self.rows], np.int64)

    def hosts(self, rows: Any, shape: Shape) -> tuple[Host, Host]:
        """What the rows' nodes have free, and what would be left beside a replica of ``shape``."""
        node = self.node[rows]
        cpu, memory = self.cpu[node], self.memory[node]
        return Host(cpu, memory), Host(cpu - shape.cpu_milli, memory - shape.host_memory)

    def set_devices(self, devices: Iterable[tuple[int, Figures]]) -> None:
        """What the devices of some cells hold now."""
        rows = set()
        for cell, figures in devices:
            row, column = divmod(cell, self.width)
            self.row_free[row] += figures[0] - self.free.item(cell)
            self._held[:, row, column] = figures
            rows.add(row)
        for row in rows:
            self.alone[row] = self.typical.alone(self.free[row], self.kind[row])

    def has_engine(self, engine: str) -> Array:
        """``[rows]``."""
        return np.array([engine in node.engines for node, _ in self.rows], bool)

    def is_of_class(self, shape: Shape) -> Array:
        """``[rows, width]``."""
        return np.array([is_of_class(kind, shape.gpu_classes) for kind in self.kinds])[self.kind]


def _links(node: NodeView) -> list[tuple[DeviceView, ...]]:
    """The node's devices by link, each by index, the link of the first device first."""
    found: dict[str, list[DeviceView]] = {}
    for device in sorted(node.devices, key=lambda one: one.index):
        found.setdefault(device.link, []).append(device)
    return [tuple(devices) for devices in found.values()]


def _whole(row: tuple[NodeView, tuple[DeviceView, ...]]) -> Shape:
    """What takes all devices of the row and all of its node's host."""
    node, devices = row
    size = min(device.capacity_bytes for device in devices)
    return Shape(len(devices), size, 0, 0, node.cpu_milli, node.host_memory, ())


# --- rules and standing of every cell ---------------------------------------------------------
CODES = (
    "",  # none: a candidate
    "closed",  # the node's own reason, see ``feasible``
    "wrong_class",
    "too_few_devices",
    "too_small",
    "insufficient_time",
    "insufficient_memory",
    "insufficient_host",
    "too_few_free",
    "in_group",
    "no_engine",
)
(
    _FREE,
    _CLOSED,
    _CLASS,
    _FEW,
    _SMALL,
    _TIME,
    _MEMORY,
    _HOST,
    _FEW_FREE,
    _IN_GROUP,
    _ENGINE,
) = range(len(CODES))
_FITS = np.array([_FREE, _MEMORY])  # by whether the memory is too little


@dataclass(slots=True)
class Standing:
    """Of every cell, for one shape: ``code`` indexes ``CODES``; ``stranded`` bytes, see
    ``fragmentation``; ``group`` are the columns that a group led by the row's candidate takes."""

    code: Array
    stranded: Array
    group: Array | None
    seen: int = 0  # changes of the board that it knows of


class Ranking:
    """Standings by shape, brought up to date when asked for."""

    MAX_KEPT = 512

    def __init__(self, board: Board) -> None:
        self._board = board
        self._kept: dict[Shape, Standing] = {}
        self.changed: list[int] = []

    def of(self, shape: Shape) -> Standing:
        found = self._kept.get(shape)
        if found is None:
            found = evaluate(self._board, shape, slice(None))
            if len(self._kept) >= self.MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[shape] = found
        elif found.seen < len(self.changed):
            self._refresh(found, shape)  # in place: a survey lasts until the board changes
        found.seen = len(self.changed)
        return found

    def _refresh(self, found: Standing, shape: Shape) -> None:
        rows = np.unique(np.array(self.changed[found.seen :], np.int64))
        new = evaluate(self._board, shape, rows)
        found.code[rows], found.stranded[rows] = new.code, new.stranded
        if found.group is not None:
            found.group[rows] = new.group


def evaluate(board: Board, shape: Shape, rows: Any, barred: Array | None = None) -> Standing:
    """The standing of ``rows`` (an index of rows, or a slice); ``barred`` cells ``[rows, width]``
    may not be in a group."""
    code = _codes(board, shape, rows)
    free, kind, alone = board.free[rows], board.kind[rows], board.alone[rows]
    if shape.num_devices == 1:
        hosts = board.hosts(rows, shape) if board.typical.num_others else ()
        lost = board.typical.lost_by_one(free, kind, hosts, shape.shard_bytes, alone)
        return Standing(code, _stranded(board, lost, shape), None)
    usable = (code == _FREE) if barred is None else (code == _FREE) & ~barred
    group = _groups(board, shape, rows, usable, code)
    taken = np.zeros(free.shape, np.int64)
    np.put_along_axis(taken, group, shape.shard_bytes, axis=1)
    lost = board.typical.lost_by_group(free, kind, board.hosts(rows, shape), taken)[:, None]
    return Standing(code, np.repeat(_stranded(board, lost, shape), board.width, axis=1), group)


def _stranded(board: Board, lost: Array, shape: Shape) -> Array:
    stranded = np.divide(lost, board.typical.total)
    stranded -= shape.num_devices * shape.shard_bytes
    return stranded


def _codes(board: Board, shape: Shape, rows: Any) -> Array:
    """The first rule that each cell breaks; the later ones are written first, and those that hold
    for every device are not looked at."""
    free = board.free[rows]
    code = _FITS.take(free < shape.shard_bytes)
    if shape.cpu_milli or shape.host_memory:
        host = board.hosts(rows, shape)[1]
        lacks = (np.minimum(host.cpu_milli, host.memory) < 0)[:, None]
        code[lacks & (code == _FREE)] = _HOST
    if shape.guaranteed:
        code[board.guaranteed[rows] + shape.guaranteed > 100] = _TIME
    if shape.shard_bytes > board.least_room:
        code[board.room[rows] < shape.shard_bytes] = _SMALL
    if shape.num_devices > 1:
        code[board.row_sizes[rows] < shape.num_devices] = _FEW
    if shape.engine not in board.common_engines:
        code[~board.has_engine(shape.engine)[rows]] = _ENGINE
    if shape.gpu_classes:
        code[~board.is_of_class(shape)[rows]] = _CLASS
    if board.any_closed:
        code[board.is_closed[rows]] = _CLOSED
    return code


def _groups(board: Board, shape: Shape, rows: Array, usable: Array, code: Array) -> Array:
    """The tightest group of each row, ``[R, num_devices]`` columns; the first leads it, and the
    row's other usable cells are marked as its company. Rows without one have no candidate."""
    num = min(shape.num_devices, board.width)
    order = np.argsort(np.where(usable, board.free[rows], UNBOUNDED), axis=1, kind="stable")
    group = np.sort(order[:, :num], axis=1)
    has = (usable.sum(1) >= shape.num_devices)[:, None]
    leads = np.arange(board.width)[None, :] == group[:, :1]
    code[usable & has & ~leads] = _IN_GROUP
    code[usable & ~has] = _FEW_FREE
    return group
