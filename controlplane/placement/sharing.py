"""Devices that hold more models than fit at once: swappable ones take turns in what is left.

What must stay resident (versions that are not swappable, and replicas with steady traffic) has its
memory to itself. The rest of a device is shared by its swappable replicas, so it must hold the
largest of them; all of them must fit in the memory that the node keeps for what is swapped out::

    stay + max(swappable) <= room                of each device
    sum of swappable of crowded devices <= host  of each node; crowded: not all fit at once

A replica is placed so only where no device has its memory free, on the device with the least
swappable memory for its shared part, and before anybody is evicted. If that is no help either, a
swappable one may still be kept in storage, which takes nothing of the host and a load each time it
is asked for. Worked example, one device of 10 GB whose node keeps 16 GB::

    a (6), swappable        4 free afterwards: resident
    b (6), swappable        0 + max(6, 6) <= 10, 12 of the host's 16: warm
    c (4), not swappable    4 + max(6, 6) <= 10: resident, a and b share the other 6
    d (4), swappable        4 + 6 <= 10, 16 of 16: warm
    e (1), swappable        17 of 16: storage
    f (7), swappable        4 + 7 > 10: unplaced

Bytes are those that nodes have measured, where they have, and no more than the version's own.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from controlplane.domain.placement import Candidate, ScoreTerm
from controlplane.placement.feasible import Fleet, Resident, Slot, barrier
from controlplane.placement.snapshot import VersionView


@dataclass(frozen=True, slots=True)
class Shared:
    """A place beside others. ``left_bytes``: of the device, for those that share it."""

    cell: int
    left_bytes: int
    num_sharing: int
    host_used_bytes: int
    host_bytes: int
    candidate: Candidate
    tier: str = "warm"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a device holds without some of its residents. ``parked_bytes``: of those swappable ones
    that go to the host when they leave, and not to storage."""

    room_bytes: int
    stay_bytes: int
    largest_bytes: int
    swappable_bytes: int
    all_bytes: int
    parked_bytes: int

    def left_bytes(self, version: VersionView) -> int:
        """For the swappable ones, once ``version`` is there too."""
        return (
            self.room_bytes - self.stay_bytes - (0 if version.is_swappable else version.shard_bytes)
        )

    def has_room(self, version: VersionView) -> bool:
        largest = max(self.largest_bytes, version.shard_bytes if version.is_swappable else 0)
        return self.left_bytes(version) >= largest

    def host_bytes(self, version: VersionView | None = None, tier: str = "warm") -> int:
        """What may have to wait in the node's memory, with ``version`` there too in ``tier``."""
        size = version.shard_bytes if version else 0
        if self.all_bytes + size <= self.room_bytes:
            return 0
        is_parked = version is not None and version.is_swappable and tier != "storage"
        return self.parked_bytes + (size if is_parked else 0)


def standing(slot: Slot, without: Container[str] = ()) -> Standing:
    there = [one for name, one in slot.residents.items() if name not in without]
    turns = [one.num_bytes for one in there if one.may_leave]
    swappable = sum(one.num_bytes for one in there if one.version.is_swappable)
    total = sum(one.num_bytes for one in there)
    stored = sum(one.num_bytes for one in there if one.is_stored)
    largest = max(turns, default=0)
    stay = total - sum(turns)
    return Standing(slot.room_bytes, stay, largest, swappable, total, swappable - stored)


def fits(
    fleet: Fleet,
    slot: Slot,
    version: VersionView,
    without: Container[str] = (),
    tier: str = "warm",
) -> bool:
    """Whether the device has room for ``version`` beside those who take turns, and its node."""
    if version.shape.num_devices > 1:
        return False
    found = standing(slot, without)
    if not version.is_swappable and not found.swappable_bytes:
        return False
    return found.has_room(version) and _host_used(fleet, slot, version, without, tier) <= (
        slot.node.host_bytes
    )


def _host_used(
    fleet: Fleet, slot: Slot, version: VersionView, without: Container[str] = (), tier: str = "warm"
) -> int:
    """Bytes of the node's memory that may be needed with ``version`` on ``slot``."""
    others = (one for one in fleet.slots_of_node(slot.node.node_id) if one.cell != slot.cell)
    beside = sum(standing(one).host_bytes() for one in others if one.num_swappable)
    return beside + standing(slot, without).host_bytes(version, tier)


def place(fleet: Fleet, version: VersionView, tier: str = "warm") -> Shared | None:
    """The best device that ``version`` can share, in ``tier`` if it is swappable; None if there is
    none."""
    usable = _usable(fleet, version, tier)
    best = min(usable, key=lambda slot: (-_score(fleet, slot, version), slot.cell), default=None)
    if best is None:
        return None
    found, used = standing(best), _host_used(fleet, best, version, (), tier)
    terms = (
        ScoreTerm("swappable_bytes", float(found.swappable_bytes)),
        ScoreTerm("host_free_after_bytes", float(best.node.host_bytes - used)),
        ScoreTerm("replicas_on_node", float(_on_node(fleet, best, version))),
    )
    value = _score(fleet, best, version)
    return Shared(
        best.cell,
        found.left_bytes(version),
        best.num_swappable + version.is_swappable,
        used,
        best.node.host_bytes,
        Candidate(best.node.node_id, best.device.index, value, terms),
        tier if version.is_swappable else "resident",
    )


def _usable(fleet: Fleet, version: VersionView, tier: str) -> list[Slot]:
    """Devices where nothing but the memory is short; cheap questions first."""
    return [
        slot
        for slot in fleet.slots.values()
        if (version.is_swappable or slot.num_swappable)
        and slot.node.host_bytes
        and fits(fleet, slot, version, (), tier)
        and barrier(fleet, slot, version) is None
    ]


def _score(fleet: Fleet, slot: Slot, version: VersionView) -> float:
    """Spread over nodes first, then where the fewest bytes ask for the shared part."""
    found = standing(slot)
    asking = found.swappable_bytes + (version.shard_bytes if version.is_swappable else 0)
    return -100.0 * _on_node(fleet, slot, version) - asking / max(1, found.left_bytes(version))


def _on_node(fleet: Fleet, slot: Slot, version: VersionView) -> int:
    return fleet.num_on_node.get(version.version_id, {}).get(slot.node.node_id, 0)


def over_bytes(slot: Slot) -> int:
    """By how much the device lacks memory for what it holds, by turns where that is allowed."""
    return needed_bytes(slot.residents.values()) - slot.device.capacity_bytes


def needed_bytes(residents: Iterable[Resident]) -> int:
    """Bytes of a device without which somebody could never be resident there."""
    there = list(residents)
    turns = [one.num_bytes for one in there if one.version.is_swappable]
    return sum(one.num_bytes for one in there) - sum(turns) + max(turns, default=0)


def helpful(slot: Slot) -> list[Resident]:
    """Those of a device that lacks memory whose end gives it some."""
    there = list(slot.residents.values())
    largest = max((one.num_bytes for one in there if one.version.is_swappable), default=0)
    return [one for one in there if not one.version.is_swappable or one.num_bytes == largest]
