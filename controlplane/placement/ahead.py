"""Which models to load before they are asked for, and who leaves for a model that is wanted now.

Each wish is tried on the planner itself: the fleet with one replica of the model wanted, and, if it
fits nowhere so, without the idle models that are least expected, one after the other. So nothing is
loaded ahead that would evict a replica in use or leave another without its place. Worked example,
one device of 10 GB, a (6) and b (4) resident and idle, c (4) absent, rates as ``demand`` has them::

    c 2.0, a 1.0, b 0.1      c fits once b has left: load c, b is displaced
    c 2.0, a 1.0, b 1.95     2.0 < 1.05 x 1.95: nothing moves
    c 2.0, 0.5 expected      unlikely within five minutes: nothing moves, even if there is room

A load costs its device's bandwidth and whoever leaves a load of its own later, so it must pay by
the very rule that a trace is replayed with (``preload.pays``): by a margin over all that leave, and
by a price that is a share of all that is asked for, the higher the fewer places there are. What
ranks a version is its rate or, if that is more, what is expected of it a minute: one that is asked
for at this hour every day has no rate yet. Nobody leaves of whom more is expected, whatever the
rates say. And a request must be likelier than not: 0.7 expected requests mean one at least with
1 - e^-0.7 = 50 %.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.placement.plan import plan
from controlplane.placement.preload import MARGIN, pays, terms_of
from controlplane.placement.snapshot import FleetSnapshot

HORIZON_MINUTES = 5.0
LOAD_EXPECTED = 0.7  # requests within the horizon
MAX_LOADS, MAX_TRIES = 4, 8  # in one round
MAX_LEAVING = 8  # for one model


@dataclass(frozen=True, slots=True)
class Load:
    """Load ``version_id``; ``leaving`` go for it, the least expected first."""

    version_id: str
    leaving: tuple[str, ...]


def loads_ahead(
    snapshot: FleetSnapshot,
    expected: Mapping[str, float],
    rates: Mapping[str, float],
    idle: Sequence[str],
) -> list[Load]:
    """``expected``: requests within the horizon, by version, of all that come and go; ``rates``
    of the same rank them (``demand``); ``idle``: versions that may leave, with all their replicas.
    What has one wanted already is passed over."""
    found: list[Load] = []
    wanted = {one.version_id for one in snapshot.versions if one.num_replicas}
    known = {str(one.version_id) for one in snapshot.versions}
    hopes = [name for name, num in expected.items() if num >= LOAD_EXPECTED and name in known]
    worth = worths(expected, rates)
    price = terms_of(num_places(snapshot, {*expected, *idle})).price
    staying = list(idle)
    asleep = [name for name in hopes if name not in wanted]
    for name in sorted(asleep, key=lambda one: (-worth[one], one))[:MAX_TRIES]:
        if len(found) == MAX_LOADS:
            break
        lesser = [one for one in staying if expected.get(one, 0.0) <= expected[name]]
        leaving = room_for(snapshot, name, _lesser(lesser, worth, worth[name]))
        if leaving is None or not pays(worth[name], leaving, worth, price):
            continue
        snapshot = _changed(snapshot, {name: 1, **dict.fromkeys(leaving, 0)})
        staying = [one for one in staying if one not in leaving]
        found.append(Load(name, leaving))
    return found


def worths(expected: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """What ranks each version: its rate, or what is expected of it a minute if that is more."""
    return {
        name: max(rates.get(name, 0.0), expected.get(name, 0.0) / HORIZON_MINUTES)
        for name in {*expected, *rates}
    }


def num_places(snapshot: FleetSnapshot, coming_and_going: Collection[str]) -> float:
    """For how many versions of their mean size the devices have room that take replicas now."""
    sizes = [
        one.shard_bytes for one in snapshot.versions if str(one.version_id) in coming_and_going
    ]
    room = sum(
        device.capacity_bytes
        for node in snapshot.nodes
        if node.status == "ready" and not node.draining
        for device in node.devices
    )
    return room * len(sizes) / sum(sizes) if sizes else 0.0


def _lesser(idle: Sequence[str], rates: Mapping[str, float], than: float) -> list[str]:
    lesser = [one for one in idle if MARGIN * rates.get(one, 0.0) < than]
    return sorted(lesser, key=lambda one: (rates.get(one, 0.0), one))


def room_for(
    snapshot: FleetSnapshot, version_id: str, idle: Sequence[str]
) -> tuple[str, ...] | None:
    """Who of ``idle`` (the first first) leaves so that one replica of ``version_id`` is placed and
    nothing else is lost by it; () if nobody need, None if that is not enough."""
    gaps = sum(gap.num_missing for gap in plan(snapshot, 0).unplaced)
    order = [one for one in idle if one != version_id][:MAX_LEAVING]
    for num in range(len(order) + 1):
        if _is_placed(snapshot, version_id, order[:num], gaps):
            return _spared(snapshot, version_id, order[:num], gaps)
    return None


def _spared(
    snapshot: FleetSnapshot, version_id: str, leaving: Sequence[str], gaps: int
) -> tuple[str, ...]:
    """Without those that need not leave after all: the first ones may stand on other devices."""
    chosen = list(leaving)
    for one in leaving[:-1]:
        rest = [other for other in chosen if other != one]
        if _is_placed(snapshot, version_id, rest, gaps):
            chosen = rest
    return tuple(chosen)


def _is_placed(snapshot: FleetSnapshot, version_id: str, leaving: Sequence[str], gaps: int) -> bool:
    made = plan(_changed(snapshot, {version_id: 1, **dict.fromkeys(leaving, 0)}), 0)
    return (
        any(
            start.assignment.version_id == version_id and start.assignment.tier != "storage"
            for start in made.started
        )
        and not any(stop.code == "evicted" for stop in made.stopped)
        and sum(gap.num_missing for gap in made.unplaced) <= gaps
    )


def _changed(snapshot: FleetSnapshot, numbers: Mapping[str, int]) -> FleetSnapshot:
    versions = tuple(
        replace(one, num_replicas=numbers[one.version_id]) if one.version_id in numbers else one
        for one in snapshot.versions
    )
    return replace(snapshot, versions=versions)
