"""Rules and stranded memory of single devices, written plainly, to compare the fast ones with."""

from collections import Counter

from controlplane.domain.placement import Rejection
from controlplane.placement.feasible import Fleet, Slot, rejection
from controlplane.placement.snapshot import FleetSnapshot, Shape, VersionView, is_of_class


def rejections(fleet: Fleet, version: VersionView) -> list[tuple[str, int, str]]:
    """(node, device, code) of every device that cannot hold a share, one after the other."""
    found = [rejection(fleet, slot, version) for slot in fleet.slots.values()]
    return [
        (one.node_id, one.device_index, one.code) for one in found if isinstance(one, Rejection)
    ]


def typical(snapshot: FleetSnapshot, rows: list[list[Slot]]) -> list[tuple[Shape, int]]:
    """The catalog by replicas wanted, beside groups or host needs a twentieth for whole nodes."""
    found = [(one.shape, max(1, one.num_replicas)) for one in snapshot.versions]
    if all(
        (shape.num_devices, shape.cpu_milli, shape.host_memory) == (1, 0, 0) for shape, _ in found
    ):
        return found
    total, wholes = sum(weight for _, weight in found), Counter(map(whole, rows))
    return found + [(one, max(1, total * n // (20 * len(rows)))) for one, n in wholes.items()]


def whole(row: list[Slot]) -> Shape:
    node, size = row[0].node, min(slot.device.capacity_bytes for slot in row)
    return Shape(len(row), size, 0, 0, node.cpu_milli, node.host_memory, ())


def usable(snapshot: FleetSnapshot, rows: list[list[Slot]], free: dict[int, int],
           hosts: dict[str, tuple[int, int]]) -> int:  # fmt: skip
    """Expected usable memory times weight, straight from the formula in ``fragmentation``."""
    total = 0
    for shape, weight in typical(snapshot, rows):
        for row in rows:
            fits = [
                slot
                for slot in row
                if free[slot.cell] >= shape.shard_bytes
                and is_of_class(slot.device, shape.gpu_classes)
            ]
            cpu, memory = hosts[row[0].node.node_id]
            fed = cpu >= shape.cpu_milli and memory >= shape.host_memory
            if len(fits) >= shape.num_devices and fed:
                total += weight * sum(free[slot.cell] for slot in fits)
    return total
