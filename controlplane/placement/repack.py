"""What moving replicas would gain, as an integer program; solving it is an adapter's business.

The planner places one replica after the other and moves nothing, so holes come to be that no model
fits in. This states which replicas to move, and where, such that more of what is missing fits and
more devices fall empty, at little movement. Every move starts its copy before the old one stops
(``Assignment.replaces``), so all copies must fit into what is free *now*; chains of moves take
several rounds.

Binary variables: x[r,d] replica r moves to device d; u[v,d] a missing replica of v goes to d after
the moves; e[d] device d falls empty. With f_d bytes free on d now, s the sizes, c_d the capacity::

    maximise  Σ u[v,d] · 10 s_v / c_d  +  Σ e[d]  -  Σ x[r,d] · (1/50 + s_r / (5 c_d))
    Σ_d x[r,d] <= 1                       each moves once        Σ x <= max_moves
    Σ_r s_r x[r,d] <= f_d                 copies fit beside what is there
    Σ_r s_r x[r,d] - Σ_{r on d} s_r Σ_d' x[r,d'] + Σ_v s_v u[v,d] <= f_d     and so does the rest
    Σ_d u[v,d] <= missing_v
    x[r,d] + u[v,d] <= 1                  of one version, or of two that must not meet
    e[d] <= Σ_d' x[r,d'] for each r on d, and e[d] + x[r,d] <= 1, e[d] + u[v,d] <= 1

Worked example, devices of 10 GB: a (4) on n1, b (4) on n2, and c (8) is missing::

    x[a,n2] = 1, u[c,n1] = 1      moves 4 GB and places 8:  10 · .8 - .02 - .08 = 7.9

Moved are ready replicas of one device without promises or host needs, to devices in use, never to a
node that holds another replica of the version; the rules of ``feasible`` hold for every target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from controlplane.domain.ids import ReplicaId
from controlplane.domain.placement import Assignment, Candidate, ScoreTerm, Started
from controlplane.placement.explain import bytes_text
from controlplane.placement.feasible import Fleet, Resident, Slot, must_not_meet, rejection
from controlplane.placement.snapshot import FleetSnapshot, VersionView

MISSING_WORTH = 10.0
MOVE_COST = 0.02
BYTES_COST = 0.2


@dataclass(frozen=True, slots=True)
class Variable:
    """``kind``: move (of ``replica_id``) | place (a missing one) | empty; ``cell``: the device."""

    kind: str
    cell: int
    worth: float
    version: VersionView | None = None
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """Σ factor · variable <= limit; the keys are indexes of variables."""

    factors: dict[int, float]
    limit: float


@dataclass(slots=True)
class Problem:
    fleet: Fleet
    variables: list[Variable] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Move:
    assignment: Assignment
    node_id: str
    device_index: int


@dataclass(frozen=True, slots=True)
class Repack:
    """``placed``: missing replicas that fit then, by version; ``emptied``: devices that fall
    empty, as (node, index)."""

    moves: tuple[Move, ...] = ()
    placed: tuple[tuple[str, int], ...] = ()
    emptied: tuple[tuple[str, int], ...] = ()

    @property
    def moved_bytes(self) -> int:
        return sum(one.assignment.memory_bytes for one in self.moves)


# --- the problem ------------------------------------------------------------------------------
def problem(snapshot: FleetSnapshot, missing: Sequence[tuple[str, int]], max_moves: int) -> Problem:
    """``missing``: how many replicas of which version fit nowhere now."""
    versions = snapshot.versions_by_id()
    stated = Problem(Fleet(snapshot))
    for view in snapshot.assigned:
        version = versions.get(view.assignment.version_id)
        if version:
            stated.fleet.add(Resident(view.assignment, version, view.idle_s))
    replaced = {view.assignment.replaces for view in snapshot.assigned}
    states = {view.assignment.replica_id: view.state for view in snapshot.assigned}
    for cell, slot in stated.fleet.slots.items():
        for resident in slot.residents.values():
            name = resident.assignment.replica_id
            if states[name] == "ready" and name not in replaced and _is_movable(resident.version):
                _add_moves(stated, resident, cell)
    for version_id, number in missing:
        if version_id in versions and _is_movable(versions[version_id]):
            _add_places(stated, versions[version_id], number)
    _add_empties(stated)
    stated.bounds += [*_capacities(stated), *_meetings(stated)]
    moves = [i for i, one in enumerate(stated.variables) if one.kind == "move"]
    stated.bounds.append(Bound(dict.fromkeys(moves, 1.0), max_moves))
    return stated


def _is_movable(version: VersionView) -> bool:
    shape = version.shape
    asks = shape.guaranteed or shape.cpu_milli or shape.host_memory
    return shape.num_devices == 1 and not asks and not version.is_swappable


def _add_moves(stated: Problem, resident: Resident, at: int) -> None:
    """A variable for every device in use that could take a copy now."""
    fleet, version = stated.fleet, resident.version
    on_node = fleet.num_on_node[version.version_id]
    own = fleet.slots[at].node.node_id
    first = len(stated.variables)
    for cell, slot in fleet.slots.items():
        others = on_node.get(slot.node.node_id, 0) - (slot.node.node_id == own)
        if (
            cell == at
            or others
            or not slot.residents
            or rejection(fleet, slot, version) is not None
        ):
            continue
        cost = MOVE_COST + BYTES_COST * version.shard_bytes / slot.device.capacity_bytes
        stated.variables.append(
            Variable("move", cell, -cost, version, resident.assignment.replica_id)
        )
    _at_most(stated, first, 1)


def _add_places(stated: Problem, version: VersionView, number: int) -> None:
    """A variable for every device where nothing but the room may be missing."""
    first = len(stated.variables)
    for cell, slot in stated.fleet.slots.items():
        refused = rejection(stated.fleet, slot, version)
        if refused is None or refused.code == "insufficient_memory":
            worth = MISSING_WORTH * version.shard_bytes / slot.device.capacity_bytes
            stated.variables.append(Variable("place", cell, worth, version))
    _at_most(stated, first, number)


def _at_most(stated: Problem, first: int, limit: int) -> None:
    """Of the variables from ``first`` on."""
    chosen = range(first, len(stated.variables))
    if chosen:
        stated.bounds.append(Bound(dict.fromkeys(chosen, 1.0), limit))


def _add_empties(stated: Problem) -> None:
    """A variable for each device that all its residents could leave."""
    leaving: dict[str, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for index, one in enumerate(stated.variables):
        arriving.setdefault(one.cell, []).append(index)
        if one.kind == "move":
            leaving.setdefault(one.replica_id, []).append(index)
    for cell, slot in stated.fleet.slots.items():
        if not slot.residents or not all(name in leaving for name in slot.residents):
            continue
        empty = len(stated.variables)
        stated.variables.append(Variable("empty", cell, 1.0))
        for name in slot.residents:
            stated.bounds.append(Bound({empty: 1.0, **dict.fromkeys(leaving[name], -1.0)}, 0))
        stated.bounds += [Bound({empty: 1.0, one: 1.0}, 1) for one in arriving.get(cell, ())]


def _capacities(stated: Problem) -> Iterator[Bound]:
    """In parts of each device's capacity, so that a solver's tolerance is of no account."""
    at = {name: cell for cell, slot in stated.fleet.slots.items() for name in slot.residents}
    now: dict[int, dict[int, float]] = {}
    then: dict[int, dict[int, float]] = {}
    for index, one in enumerate(stated.variables):
        if one.version is None:
            continue
        size = one.version.shard_bytes
        then.setdefault(one.cell, {})[index] = size
        if one.kind == "move":
            now.setdefault(one.cell, {})[index] = size
            then.setdefault(at[one.replica_id], {})[index] = -size
    for table in (now, then):
        for cell, sizes in table.items():
            slot = stated.fleet.slots[cell]
            unit = max(1, slot.device.capacity_bytes)
            factors = {index: size / unit for index, size in sizes.items()}
            yield Bound(factors, max(0, slot.free_bytes) / unit)


def _meetings(stated: Problem) -> Iterator[Bound]:
    """No two arrivals of one version, or of two that must not meet, on one device."""
    by_cell: dict[int, list[tuple[int, VersionView]]] = {}
    for index, one in enumerate(stated.variables):
        if one.version is not None:
            by_cell.setdefault(one.cell, []).append((index, one.version))
    for arrivals in by_cell.values():
        for number, (index, version) in enumerate(arrivals):
            for other, beside in arrivals[number + 1 :]:
                same = version.version_id == beside.version_id
                if same or must_not_meet(version, beside):
                    yield Bound({index: 1.0, other: 1.0}, 1)


# --- the answer -------------------------------------------------------------------------------
def outcome(stated: Problem, chosen: Sequence[int]) -> Repack:
    """What the chosen variables mean. Raises ValueError if they break a bound by more than a
    solver's tolerance."""
    for bound in stated.bounds:
        total = sum(bound.factors.get(index, 0.0) for index in chosen)
        if total > bound.limit + 1e-6:
            raise ValueError(f"the answer breaks a bound: {total} > {bound.limit}")
    residents = {
        name: one.assignment
        for slot in stated.fleet.slots.values()
        for name, one in slot.residents.items()
    }
    moves, emptied = [], []
    placed: dict[str, int] = {}
    for index in sorted(chosen):
        one = stated.variables[index]
        slot = stated.fleet.slots[one.cell]
        if one.kind == "move":
            moves.append(Move(residents[one.replica_id], slot.node.node_id, slot.device.index))
        elif one.kind == "empty":
            emptied.append((slot.node.node_id, slot.device.index))
        elif one.version is not None:
            placed[one.version.version_id] = placed.get(one.version.version_id, 0) + 1
    return Repack(tuple(moves), tuple(sorted(placed.items())), tuple(emptied))


def starts(stated: Problem, repack: Repack, generation: int) -> tuple[Started, ...]:
    """The moves as starts of an ordinary decision, which the reconciler carries on."""
    numbers: dict[str, int] = {}
    return tuple(_start(stated, move, generation, numbers) for move in repack.moves)


def _start(stated: Problem, move: Move, generation: int, numbers: dict[str, int]) -> Started:
    old = move.assignment
    number = numbers[old.version_id] = numbers.get(old.version_id, -1) + 1
    cell = stated.fleet.board.cells[move.node_id, move.device_index]
    slot: Slot = stated.fleet.slots[cell]
    left = slot.free_bytes - old.memory_bytes
    name = ReplicaId(f"{old.version_id.replace('@', '.', 1)}.g{generation}.{number}")
    new = Assignment(
        name, old.version_id, slot.node.node_id, slot.device.index, old.memory_bytes,
        replaces=old.replica_id,
    )  # fmt: skip
    reason = (
        f"{old.version_id} moves from {old.node_id}/{old.device_index} to {new.node_id}/"
        f"{new.device_index}, which leaves {bytes_text(left)} free there, to make room elsewhere."
    )
    term = ScoreTerm("free_after_bytes", float(left))
    return Started(new, reason, (Candidate(new.node_id, new.device_index, 0.0, (term,)),), (), 1)
