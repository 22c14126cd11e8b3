"""Tensor-parallel groups over several nodes, for when no node has the devices on one link.

All shards must be joined alike, or the slowest link sets the pace: the nodes share a fabric
(InfiniBand), give equally many devices each, all of one kind and those of a node on one link. As
few nodes as possible; among these the ones that have the fewest devices left to give. It is tried
before anybody is evicted. Only nodes whose agents say where others of the fabric meet them count as
on it (``application.reconcile``): an agent that does not could not run its part. Worked example,
four devices wanted, n1 … n4 on fabric ib have 3, 2, 1 and 2 devices free::

    4 nodes' worth of 1, 2 of 2      two nodes that give two each: n2 and n4 (n1 would break its 3)
"""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from controlplane.domain.placement import Candidate, ScoreTerm
from controlplane.placement.feasible import Fleet, rejection
from controlplane.placement.snapshot import VersionView


@dataclass(frozen=True, slots=True)
class Across:
    cells: list[int]
    fabric: str
    candidate: Candidate


def across(fleet: Fleet, version: VersionView) -> Across | None:
    """The devices of the best group over nodes; None if there is none."""
    shape = version.shape
    if shape.num_devices < 2:
        return None
    offers = _offers(fleet, version)
    for num_each in range(shape.num_devices // 2, 0, -1):
        if shape.num_devices % num_each:
            continue
        for fabric, kind in sorted(offers):
            rows = _one_of_each_node(fleet, offers[fabric, kind], num_each)
            wanted = shape.num_devices // num_each
            if len(rows) >= wanted:
                cells = [cell for row in rows[:wanted] for cell in row[:num_each]]
                return Across(cells, fabric, _candidate(fleet, version, cells, wanted))
    return None


def _offers(fleet: Fleet, version: VersionView) -> dict[tuple[str, int], list[list[int]]]:
    """By fabric and kind of device: of each row the devices that could hold a shard, the fullest
    first."""
    offers: dict[tuple[str, int], list[list[int]]] = {}
    alone = _for_one_device(version)
    board = fleet.board
    for row, (node, _) in enumerate(board.rows):
        if not node.fabric or not np.any(board.free[row] >= version.shard_bytes):
            continue
        by_kind: dict[int, list[int]] = {}
        for column in range(board.width):
            cell = row * board.width + column
            slot = fleet.slots.get(cell)
            if slot and rejection(fleet, slot, alone) is None:
                by_kind.setdefault(int(board.kind[row, column]), []).append(cell)
        for kind, cells in by_kind.items():
            cells.sort(key=lambda cell: (fleet.slots[cell].free_bytes, cell))
            offers.setdefault((node.fabric, kind), []).append(cells)
    return offers


def _for_one_device(version: VersionView) -> VersionView:
    """One share of the version as a version of its own, the same to its neighbours."""
    num, spec = version.shape.num_devices, version.spec
    needs = replace(
        spec.needs,
        cpu_milli=-(-spec.needs.cpu_milli // num),
        host_memory=-(-spec.needs.host_memory // num),
    )
    share = replace(spec, tensor_parallel=1, gpu_memory=version.shard_bytes, needs=needs)
    return VersionView(version.version_id, share, version.num_replicas)


def _one_of_each_node(fleet: Fleet, rows: list[list[int]], num_each: int) -> list[list[int]]:
    """The rows with enough devices, the one with the fewest first, one of each node."""
    enough = [cells for cells in rows if len(cells) >= num_each]
    best: dict[str, list[int]] = {}
    for cells in sorted(enough, key=lambda cells: (len(cells), cells)):
        best.setdefault(fleet.slots[cells[0]].node.node_id, cells)
    return list(best.values())


def _candidate(fleet: Fleet, version: VersionView, cells: list[int], num_nodes: int) -> Candidate:
    first = fleet.slots[cells[0]]
    on_node = fleet.num_on_node.get(version.version_id, {})
    terms = (
        ScoreTerm("nodes", float(num_nodes)),
        ScoreTerm("free_after_bytes", float(first.free_bytes - version.shard_bytes)),
        ScoreTerm("replicas_on_node", float(on_node.get(first.node.node_id, 0))),
    )
    return Candidate(first.node.node_id, first.device.index, -float(num_nodes), terms)
