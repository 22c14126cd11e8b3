"""Rules and stranded memory of single devices, written plainly, to compare the fast ones with."""

from controlplane.domain.placement import Rejection
from controlplane.placement.feasible import Fleet, Slot, rejection
from controlplane.placement.snapshot import FleetSnapshot, VersionView, is_of_class


def rejections(fleet: Fleet, version: VersionView) -> list[tuple[str, int, str]]:
    """(node, device, code) of every device that cannot hold a share, one after the other."""
    found = [rejection(fleet, slot, version) for slot in fleet.slots.values()]
    return [
        (one.node_id, one.device_index, one.code) for one in found if isinstance(one, Rejection)
    ]


def usable(snapshot: FleetSnapshot, rows: list[list[Slot]], free: dict[int, int],
           hosts: dict[str, tuple[int, int]]) -> int:  # fmt: skip
    """Expected usable memory times weight, straight from the formula in ``fragmentation``."""
    total = 0
    for version in snapshot.versions:
        shape, weight = version.shape, max(1, version.num_replicas)
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
