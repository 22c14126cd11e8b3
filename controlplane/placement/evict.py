"""Who leaves so that a more important replica fits: the cheapest residents of one place.

Cheapest: the least important class hurt, then the fewest bytes, then the fewest replicas, then the
first device. Only *strictly lower* priority is evicted, so equals never displace each other.

Places are looked at in the order of what they must cost at least (the class that suffices, the
bytes that are short), and no further than until none can be cheaper than the best found.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from controlplane.placement import sharing
from controlplane.placement.feasible import (
    Fleet,
    Resident,
    Slot,
    barrier,
    must_not_meet,
    rejection,
)
from controlplane.placement.fragmentation import Array
from controlplane.placement.snapshot import RANK, VersionView


class Cost(NamedTuple):
    """The lower, the sooner it is paid; ``rank`` is negative: hurting rank 2 costs -2."""

    rank: int
    num_bytes: int
    num_replicas: int
    place: int


def victims(fleet: Fleet, version: VersionView) -> list[Resident] | None:
    """The cheapest residents of one device, or group, whose eviction lets ``version`` in."""
    best: tuple[Cost, list[Resident]] | None = None
    for least, place in _places(fleet, version):
        if best and least >= best[0]:
            break
        chosen = _victims_at(fleet, place, version)
        if chosen:
            cost = _cost(chosen, least.place)
            if best is None or cost < best[0]:
                best = cost, chosen
    return best[1] if best else None


def _cost(chosen: list[Resident], place: int) -> Cost:
    return Cost(
        -min(one.version.rank for one in chosen),
        sum(one.assignment.memory_bytes for one in chosen),
        len(chosen),
        place,
    )


def _places(fleet: Fleet, version: VersionView) -> Iterator[tuple[Cost, list[Slot]]]:
    """Where evicting could help, with a lower bound of the cost, the lowest first."""
    board, size = fleet.board, version.shard_bytes
    lower = board.by_rank[version.rank + 1 :].sum(0) if version.rank < max(RANK.values()) else None
    if lower is None:
        return
    short = np.maximum(0, size - board.free)
    short[board.num_swappable > 0] = 0  # who leaves may be less than what is short there
    could = board.is_open & (board.room >= size) & (short <= lower)
    if version.shape.num_devices > 1:
        yield from _links(fleet, could & (lower >= 0), lower)
        return
    least = -np.where(short <= board.by_rank[2], 2, 1)
    cells = np.flatnonzero(could & (lower > 0))
    bounds = zip(least.reshape(-1)[cells].tolist(), short.reshape(-1)[cells].tolist(),
                 cells.tolist(), strict=True)  # fmt: skip
    for rank, num_bytes, cell in sorted(bounds):
        yield Cost(rank, num_bytes, 1, cell), [fleet.slots[cell]]


def _links(fleet: Fleet, could: Array, lower: Array) -> Iterator[tuple[Cost, list[Slot]]]:
    width = fleet.board.width
    for row in np.flatnonzero((could & (lower > 0)).any(1)).tolist():
        cells = row * width + np.flatnonzero(could[row])
        yield Cost(-2, 0, 1, row), [fleet.slots[cell] for cell in cells.tolist()]


def _victims_at(fleet: Fleet, place: list[Slot], version: VersionView) -> list[Resident]:
    """A small set of lower-priority residents to evict there; empty if that cannot help."""
    lower = _lower(place, version)
    usable = [slot for slot in place if _fits(fleet, slot, version, lower)]
    usable.sort(key=lambda slot: (-slot.free_bytes, slot.cell))
    group = usable[: version.shape.num_devices]
    if len(group) < version.shape.num_devices:
        return []
    # From all of them, spare one after the other, the most important and busiest first.
    chosen = _lower(group, version)
    for resident in sorted(chosen.values(), key=_spare_first):
        if must_not_meet(version, resident.version):
            continue
        rest = {name: one for name, one in chosen.items() if one is not resident}
        if all(_fits(fleet, slot, version, rest) for slot in group):
            chosen = rest
    return [chosen[replica_id] for replica_id in sorted(chosen)]


def _fits(fleet: Fleet, slot: Slot, version: VersionView, without: Mapping[str, Resident]) -> bool:
    """Whether it fits once those have left, with the memory to itself or shared."""
    if rejection(fleet, slot, version, without) is None:
        return True
    return sharing.fits(fleet, slot, version, without) and (
        barrier(fleet, slot, version, without) is None
    )


def _lower(place: Iterable[Slot], version: VersionView) -> dict[str, Resident]:
    return {
        replica_id: resident
        for slot in place
        for replica_id, resident in slot.residents.items()
        if resident.version.rank > version.rank
    }


def _spare_first(resident: Resident) -> tuple[int, float, int, str]:
    version = resident.version
    return version.rank, resident.idle_s, -resident.num_bytes, resident.assignment.replica_id
