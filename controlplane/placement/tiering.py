"""In which tier each replica is kept that shares a device: it follows what is asked for.

Where replicas are placed to take turns (``sharing``), some are resident, some wait in the node's
memory (warm) and some in storage. Those that were placed first are not those that are asked for
most later, so once nothing is to start or stop, they change places, by the rule that loads ahead
are weighed with (``preload.pays``): a model goes up in the place of others if it is asked for by
half as much again as all of those together. Worked example, a device of 10 GB, host of 16 GB, a (6)
and d (4) resident, b (6) warm, e (4) in storage; requests a minute::

    a 8, b 2, d 1, e 0      nothing moves
    a 2, b 8, d 1, e 0      8 > 1.5 x 2: b resident, a warm
    a 2, b 8, d 1, e 1.2    1.2 < 1.5 x 1: nothing moves
    a 2, b 8, d 1, e 6      6 > 1.5 x 1: e warm, d in storage
    the next plan           6 + 4 fit on the device: e resident

Nothing flaps: what has changed its tier stays there for ``STAY_S``, the gain must be half the loss,
and it must be ``PRICE`` of all that is asked for on that device or node. Little moves: one exchange
for each device, or between host and storage of each node, in one plan. A class of priority counts
ten times the next. Replicas with steady traffic are never moved out. Only two things move without
regard to demand: what no longer fits (the least asked first), and everything up if a device is not
crowded any more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.domain.ids import ReplicaId
from controlplane.domain.placement import Retiered
from controlplane.placement import explain, sharing
from controlplane.placement.feasible import Fleet, Resident, Slot
from controlplane.placement.preload import Memory, Swap, swaps
from controlplane.placement.snapshot import FleetSnapshot

STAY_S = 120.0
MARGIN = 1.5
PRICE = 0.02
CLASS_WEIGHT = (10.0, 1.0, 0.1)  # by rank: high, normal, best-effort


@dataclass(frozen=True, slots=True)
class _Demand:
    """Requests a minute for a replica, and who has changed its tier lately."""

    fleet: Fleet
    snapshot: FleetSnapshot

    def rate(self, one: Resident) -> float:
        """Its share of what is asked of its version."""
        name = one.version.version_id
        num = sum(self.fleet.holding.get(name, {}).values())
        return self.snapshot.rates.get(name, 0.0) / max(1, num)

    def worth(self, one: Resident) -> float:
        return self.rate(one) * CLASS_WEIGHT[one.version.rank]

    def is_settled(self, one: Resident) -> bool:
        """Whether it may change its tier for another's sake."""
        lately = one.retiered_at and self.snapshot.now - one.retiered_at < STAY_S
        return not one.is_steady and not lately

    def least_first(self, residents: Iterable[Resident]) -> list[Resident]:
        return sorted(residents, key=lambda one: (self.worth(one), one.assignment.replica_id))


def retiered(fleet: Fleet, snapshot: FleetSnapshot) -> tuple[Retiered, ...]:
    """The changes that are due; each replica at most once."""
    demand = _Demand(fleet, snapshot)
    found: list[Retiered] = []
    for node in sorted(snapshot.nodes, key=lambda one: one.node_id):
        if not node.host_bytes or node.status != "ready" or node.draining:
            continue
        slots = [one for one in fleet.slots_of_node(node.node_id) if one.num_swappable]
        crowded = [one for one in slots if _is_crowded(one)]
        found += _uncrowded(slots, demand)
        of_host = _of_host(crowded, node.host_bytes, demand)
        found += of_host or [one for slot in crowded for one in _of_device(slot, demand)]
    return tuple(found)


def _is_crowded(slot: Slot) -> bool:
    found = sharing.standing(slot)
    return found.all_bytes > found.room_bytes


def _swappable(slot: Slot) -> list[Resident]:
    return [one for one in slot.residents.values() if one.version.is_swappable]


def _uncrowded(slots: Sequence[Slot], demand: _Demand) -> Iterator[Retiered]:
    """Where all fit at once, all are resident."""
    for slot in slots:
        for one in _swappable(slot) if not _is_crowded(slot) else ():
            if one.assignment.tier != "resident":
                yield _changed(one, "resident", "room", demand)


def _of_host(crowded: Sequence[Slot], room: int, demand: _Demand) -> list[Retiered]:
    """Between the node's memory and storage."""
    there = [one for slot in crowded for one in _swappable(slot)]
    parked = [one for one in there if not one.is_stored]
    over = sum(one.num_bytes for one in parked) - room
    if over > 0:
        idle = [one for one in parked if not one.is_steady]
        leaving = _until(over, demand.least_first(idle))
        return [_changed(one, "storage", "host_full", demand) for one in leaving]
    stored = [one for one in there if one.is_stored]
    return _exchanged(room, parked, stored, ("warm", "storage"), demand)


def _of_device(slot: Slot, demand: _Demand) -> list[Retiered]:
    """Between a device and its node's memory."""
    there = _swappable(slot)
    staying = sum(one.num_bytes for one in slot.residents.values()) - sum(
        one.num_bytes for one in there
    )
    room = slot.room_bytes - staying
    on = [one for one in there if one.assignment.tier == "resident"]
    over = sum(one.num_bytes for one in on) - room
    if over > 0:
        idle = [one for one in on if not one.is_steady]
        leaving = _until(over, demand.least_first(idle))
        return [_changed(one, "warm", "crowded", demand) for one in leaving]
    waiting = [one for one in there if one.assignment.tier == "warm"]
    return _exchanged(room, on, waiting, ("resident", "warm"), demand)


def _until(missing: int, leaving: Sequence[Resident]) -> Iterator[Resident]:
    """As many of the first as give back what is missing."""
    for one in leaving:
        if missing <= 0:
            return
        yield one
        missing -= one.num_bytes


def _exchanged(
    room: int,
    upper: Sequence[Resident],
    lower: Sequence[Resident],
    tiers: tuple[str, str],
    demand: _Demand,
) -> list[Retiered]:
    """The best exchange that pays, if one does: one goes up, and others down for it."""
    by_id = {one.assignment.replica_id: one for one in (*upper, *lower)}
    may_go_up = [one for one in lower if demand.is_settled(one)]
    memory = Memory(
        room,
        {name: one.num_bytes for name, one in by_id.items()},
        [one.assignment.replica_id for one in upper],
        [one.assignment.replica_id for one in upper if not demand.is_settled(one)],
    )
    worth: dict[str, float] = {
        one.assignment.replica_id: demand.worth(one) for one in (*upper, *may_go_up)
    }
    best = next(swaps(memory, worth, MARGIN, PRICE), None)
    return _carried_out(best, by_id, tiers, demand) if best else []


def _carried_out(
    swap: Swap, by_id: dict[ReplicaId, Resident], tiers: tuple[str, str], demand: _Demand
) -> list[Retiered]:
    up = by_id[ReplicaId(swap.model)]
    down = [by_id[ReplicaId(name)] for name in swap.evicted]
    return [
        _changed(up, tiers[0], "more_asked", demand, down),
        *(_changed(one, tiers[1], "less_asked", demand, [up]) for one in down),
    ]


def _changed(
    one: Resident, tier: str, code: str, demand: _Demand, others: Sequence[Resident] = ()
) -> Retiered:
    before, rate = one.assignment.tier, round(demand.rate(one), 3)
    assignment = replace(one.assignment, tier=tier)
    beside = [(other.version.version_id, demand.rate(other)) for other in others]
    names = tuple(other.assignment.replica_id for other in others)
    reason = explain.retiered(assignment, before, rate, beside, code)
    return Retiered(assignment, before, code, reason, rate, names)
