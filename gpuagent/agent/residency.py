"""Which replicas are on the device now, when more are desired than fit: three tiers.

    resident   on the device, steps
    host       ready in the node's memory: weights as the device wants them, unfinished requests
               with their keys and values. Becoming resident moves bytes; nothing is read or packed
    storage    files, or not even those

Pure: what the agent has and who asks in, moves out; the caller carries them out and asks again
whenever something has changed. Who has requests comes in, by priority and then by who has waited
longest; for that others go out to the host, and from there to storage if the host is full too:

    idle ones first, best-effort before normal before high, then those meant for storage before
    those meant for the host before the others, the least recently used first;
    a busy one only for a higher priority, or once it has had its turn of ``turn_s`` while an equal
    one has waited as long. It is not ended: its requests keep their state and go on when it is
    back, which they ask for like any others.

Example, a device of 10 GB and three models of 6, turn 10 s. ``a`` is resident and generating:

    t=0    a request for b     a is busy; b waits
    t=4    a is done           a out, b in, as soon as a's memory is free
    t=5    requests for a, c   both wait while b works;  t=14  b has had its turn: b out, a in
    t=15   a is done           a out, c in (b asks too, but c has waited longer);  then b again

What is desired and nobody asks for comes in only where memory is free, the ``warm`` ones first:
nobody is put out for a guess. With one exception: what is placed to take turns and was never loaded
is loaded once, in the place of idle ones, so that it is ready in the host when it is asked for.
What ``stays`` is put out for nobody, unless the device has less memory than before. A group over
several devices comes in when there is room on all of them: what is in its way on any goes out, or
nothing does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuagent.agent.reconcile import PRIORITY

RESIDENT, HOST, STORAGE = "resident", "host", "storage"


@dataclass(frozen=True)
class Candidate:
    """A replica as the agent has it.

    ``num_bytes`` of the device while resident (of a group: of each, ``also_on`` are the others),
    ``host_bytes`` of the host otherwise. ``moving``: a load, a swap or an end is on its way; it
    counts as on the device until that is over. ``is_busy``: it has unfinished requests.
    ``waits_since``: when somebody began to wait for it to be resident, or None. ``can_park``: it
    has the host tier (a replica on several workers has not). ``prepares``: it is to be loaded
    once, though nobody asks yet. ``intended``: 0 resident, 1 host, 2 storage, as it is placed.
    """

    replica_id: str
    device_index: int
    num_bytes: int
    tier: str
    priority: str = "normal"
    host_bytes: int = 0
    moving: str = ""  # "in" | "out" | ""
    is_busy: bool = False
    waits_since: float | None = None
    used_at: float = 0.0
    resident_since: float = 0.0
    warm_rank: int | None = None
    can_park: bool = True
    stays: bool = False
    prepares: bool = False
    also_on: tuple[int, ...] = ()
    intended: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """All that it takes memory of."""
        return (self.device_index, *self.also_on)

    @property
    def rank(self) -> int:
        """Lower is more important."""
        return PRIORITY.get(self.priority, 1)

    @property
    def is_on_device(self) -> bool:
        """Whether it takes device memory, now or until it has gone."""
        return self.tier == RESIDENT or self.moving == "in"


@dataclass(frozen=True)
class Moves:
    """What to do now. ``blocked``: who waits for others to finish. ``reserved``: bytes of each
    device that are kept for those who wait."""

    bring_in: tuple[str, ...] = ()
    swap_out: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    reserved: Mapping[int, int] = field(default_factory=dict)


@dataclass
class _Plan:
    """The moves so far, and what is left of each memory after them."""

    free: dict[int, int]
    coming: dict[int, int]
    host_free: int
    turn_s: float
    now: float
    gone: set[str] = field(default_factory=set)
    bring_in: list[str] = field(default_factory=list)
    swap_out: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    reserved: dict[int, int] = field(default_factory=dict)


def decide(
    candidates: Iterable[Candidate],
    rooms: Mapping[int, int],
    host_room: int,
    turn_s: float,
    now: float,
) -> Moves:
    """The moves for this moment. ``rooms``: bytes that each device offers its replicas, foreign
    memory and reserve taken off; ``host_room`` the same of the host tier."""
    known = sorted(candidates, key=lambda each: each.replica_id)
    plan = _Plan(dict(rooms), dict.fromkeys(rooms, 0), host_room, turn_s, now)
    for each in known:
        _count(plan, each)
    for index in plan.free:
        _shrink(plan, known, index)
    asking = [each for each in known if each.waits_since is not None and _is_off(each)]
    for each in sorted(asking, key=lambda one: (one.rank, one.waits_since, one.replica_id)):
        _admit(plan, known, each)
    preparing = [each for each in known if each.prepares and each not in asking and _is_off(each)]
    for each in sorted(preparing, key=lambda one: (one.rank, one.replica_id)):
        _prepare(plan, known, each)
    _fill(plan, known)
    _relieve_host(plan, known)
    return Moves(
        tuple(plan.bring_in),
        tuple(plan.swap_out),
        tuple(plan.drop),
        tuple(plan.blocked),
        plan.reserved,
    )


def _is_off(each: Candidate) -> bool:
    return each.tier != RESIDENT and not each.moving


def _count(plan: _Plan, each: Candidate) -> None:
    for index in each.devices if each.is_on_device else ():
        if index in plan.free:
            plan.free[index] -= each.num_bytes
            plan.coming[index] += each.num_bytes if each.moving == "out" else 0
    if each.tier == HOST or each.moving == "out":
        plan.host_free -= each.host_bytes


def _shrink(plan: _Plan, known: list[Candidate], index: int) -> None:
    """Put idle ones out while the device is over its room: foreign memory has grown."""
    missing = -(plan.free[index] + plan.coming[index])
    idle = [each for each in _victims(plan, known, index) if not each.is_busy]
    while missing > 0 and idle:
        victim = idle.pop(0)
        _put_out(plan, known, victim)
        missing -= victim.num_bytes


def _brought_in(plan: _Plan, each: Candidate) -> bool:
    """Bring it in if there is room for it on all of its devices."""
    if any(each.num_bytes > plan.free[index] for index in each.devices):
        return False
    plan.bring_in.append(each.replica_id)
    for index in each.devices:
        plan.free[index] -= each.num_bytes
    return True


def _admit(plan: _Plan, known: list[Candidate], asker: Candidate) -> None:
    """Bring it in, or make room for it, or let it wait."""
    if not _are_known(plan, asker) or _brought_in(plan, asker):
        return
    chosen: dict[str, Candidate] = {}
    for index in asker.devices:
        busy = sum(victim.host_bytes for victim in chosen.values() if victim.is_busy)
        found = _in_the_way(plan, known, asker, index, plan.host_free - busy)
        if found is None:
            plan.blocked.append(asker.replica_id)
            return
        chosen |= {victim.replica_id: victim for victim in found}
    for victim in sorted(chosen.values(), key=lambda each: not each.is_busy):
        _put_out(plan, known, victim)
    _reserve(plan, asker)


def _are_known(plan: _Plan, each: Candidate) -> bool:
    return all(index in plan.free for index in each.devices)


def _in_the_way(
    plan: _Plan, known: list[Candidate], asker: Candidate, index: int, host_left: int
) -> list[Candidate] | None:
    """Who must go from one device for the asker; None if not enough of them can. ``host_left`` is
    for the busy ones; idle ones may go to storage."""
    missing = asker.num_bytes - max(plan.free[index], 0) - plan.coming[index]
    chosen: list[Candidate] = []
    for victim in _victims(plan, known, index):
        if missing <= 0:
            break
        if victim.stays or (victim.is_busy and not _must_yield(plan, victim, asker, host_left)):
            continue
        chosen.append(victim)
        missing -= victim.num_bytes
        host_left -= victim.host_bytes if victim.is_busy else 0
    return chosen if missing <= 0 else None


def _prepare(plan: _Plan, known: list[Candidate], each: Candidate) -> None:
    """Bring it in where idle ones can go to the host for it, else leave all as it is."""
    index = each.device_index  # a group is never prepared: it is placed to stay
    if not _are_known(plan, each) or each.also_on:
        return
    if _brought_in(plan, each):  # before whoever left for it is filled in again
        return
    missing = each.num_bytes - max(plan.free[index], 0) - plan.coming[index]
    idle = [
        victim
        for victim in _victims(plan, known, index)
        if victim.can_park and not victim.is_busy and not victim.stays
    ]
    host_bytes = 0
    chosen: list[Candidate] = []
    while missing > 0 and idle:
        chosen.append(idle.pop(0))
        missing -= chosen[-1].num_bytes
        host_bytes += chosen[-1].host_bytes
    if missing > 0 or host_bytes > plan.host_free:
        return
    for victim in chosen:
        _put_out(plan, known, victim)
    _reserve(plan, each)


def _reserve(plan: _Plan, asker: Candidate) -> None:
    """What is free goes to the first that waits, the rest comes from those on their way out."""
    for index in asker.devices:
        now = min(asker.num_bytes, max(plan.free[index], 0))
        plan.free[index] -= now
        plan.coming[index] -= asker.num_bytes - now
        plan.reserved[index] = plan.reserved.get(index, 0) + now


def _victims(plan: _Plan, known: list[Candidate], index: int) -> list[Candidate]:
    """Residents that could go, the first to go first."""
    found = [
        each
        for each in known
        if index in each.devices
        and each.tier == RESIDENT
        and not each.moving
        and each.replica_id not in plan.gone
        and (each.can_park or not each.is_busy)
        and each.waits_since is None
    ]
    return sorted(
        found,
        key=lambda each: (
            each.is_busy, -each.rank, -each.intended, each.used_at, each.replica_id
        ),
    )  # fmt: skip


def _must_yield(plan: _Plan, victim: Candidate, asker: Candidate, host_left: int) -> bool:
    """Whether a busy one is put out, to go on later."""
    if host_left < victim.host_bytes or victim.rank < asker.rank:
        return False
    waited = plan.now - (asker.waits_since or plan.now)
    had_turn = min(waited, plan.now - victim.resident_since) >= plan.turn_s
    return victim.rank > asker.rank or had_turn


def _put_out(plan: _Plan, known: list[Candidate], victim: Candidate) -> None:
    """To the host if there is room, or room can be made by dropping the idle; else to storage."""
    plan.gone.add(victim.replica_id)
    for index in victim.devices:
        plan.coming[index] = plan.coming.get(index, 0) + victim.num_bytes
    if victim.can_park and _make_host_room(plan, known, victim):
        plan.swap_out.append(victim.replica_id)
        plan.host_free -= victim.host_bytes
    else:
        plan.drop.append(victim.replica_id)


def _make_host_room(plan: _Plan, known: list[Candidate], victim: Candidate) -> bool:
    if victim.intended == 2 and not victim.is_busy:  # nobody is dropped for it
        return plan.host_free >= victim.host_bytes
    droppable = _droppable(plan, known)
    room = plan.host_free + sum(each.host_bytes for each in droppable)
    if room < victim.host_bytes:
        return False
    while plan.host_free < victim.host_bytes:
        _drop(plan, droppable.pop(0))
    return True


def _relieve_host(plan: _Plan, known: list[Candidate]) -> None:
    """Drop idle ones from the host while it holds more than it may."""
    droppable = _droppable(plan, known)
    while plan.host_free < 0 and droppable:
        _drop(plan, droppable.pop(0))


def _droppable(plan: _Plan, known: list[Candidate]) -> list[Candidate]:
    found = [
        each
        for each in known
        if each.tier == HOST
        and not (each.moving or each.is_busy or each.waits_since is not None)
        and each.replica_id not in (*plan.drop, *plan.bring_in)
    ]
    return sorted(
        found, key=lambda each: (-each.rank, -each.intended, each.used_at, each.replica_id)
    )


def _drop(plan: _Plan, each: Candidate) -> None:
    plan.drop.append(each.replica_id)
    plan.host_free += each.host_bytes


def _fill(plan: _Plan, known: list[Candidate]) -> None:
    """Bring in what nobody asks for yet, where memory is free."""
    away = [each for each in known if _is_off(each) and each.waits_since is None]
    last = len(known)
    for each in sorted(
        away,
        key=lambda one: (
            last if one.warm_rank is None else one.warm_rank,
            one.rank,
            one.intended,
            -one.used_at,
            one.replica_id,
        ),
    ):
        if each.replica_id in (*plan.drop, *plan.bring_in):
            continue
        if _are_known(plan, each):
            _brought_in(plan, each)
