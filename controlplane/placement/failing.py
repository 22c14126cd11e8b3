"""Where a replica goes that does not start where it is: its load failed, or it waits for room.

Its node tries again by itself, after 10 s, 20 s, … 5 min, and starts it when there is room; that
takes no decision. So it stays, unless another node is better: one where the version has failed at
most a quarter as often. A source that nobody can fetch is thus tried on a few nodes, and then on
one of them for long, with a decision for four times as many failures::

    fails on n1                   n1 1              n2 never tried: it moves there
    fails on n2                   n1 1, n2 1        it stays on n2, and n2 tries again
    fails on n2 three times more  n1 1, n2 4        it moves to n1
    fails on n1 fifteen times     n1 16, n2 4       it moves to n2

After ``WIDELY`` nodes the fault is likely the version's own: a node that never tried it is no
better than one where it failed once. Rejected: to stop it, and start another one when a backoff is
over. That was a decision, and a new generation, for each try.
"""

from controlplane.domain.placement import Stopped
from controlplane.placement import sharing
from controlplane.placement.feasible import Fleet, Resident, Slot, crowded, full
from controlplane.placement.snapshot import AssignedView, FailureView

WIDELY = 3  # nodes
FACTOR = 4
SPREAD_AFTER_S = 3600.0  # since the last failure there


def no_better(fleet: Fleet, view: AssignedView) -> list[FailureView] | None:
    """What keeps the replica off other nodes, its own included; None if it is to stay."""
    placed = view.assignment
    known = {one.node_id: one for one in fleet.history.get(placed.version_id, ())}
    unknown = FailureView(placed.version_id, placed.node_id, view.state, 1, fleet.now)
    own = known.pop(placed.node_id, unknown)
    if len(known) + 1 >= WIDELY and own.count < FACTOR:
        return None
    others = known.values()
    return [
        own,
        *(one for one in others if one.retry_at > fleet.now or FACTOR * one.count > own.count),
    ]


def has_place(fleet: Fleet, resident: Resident) -> bool:
    """Whether its devices still have room for it, whatever its node says."""
    span = fleet.span(resident.assignment, resident.version)
    return len(span) == resident.version.spec.tensor_parallel and all(
        _fits(fleet, slot, resident) for slot in span
    )


def _fits(fleet: Fleet, slot: Slot, resident: Resident) -> bool:
    version = resident.version
    if full(fleet, slot, version) is None:
        return True
    return sharing.fits(fleet, slot, version) and crowded(fleet, slot, version) is None


def failed_lately(fleet: Fleet, version_id: str, node_id: str) -> bool:
    """Too lately to start one there for the sake of spreading alone."""
    return any(
        one.node_id == node_id and one.at + SPREAD_AFTER_S > fleet.now
        for one in fleet.history.get(version_id, ())
    )


def stop(view: AssignedView, why: str = "") -> Stopped:
    """The end of one that goes elsewhere, or has lost its place."""
    node_id = view.assignment.node_id
    if view.state == "stuck":
        return Stopped(view.assignment, "no_room", f"{node_id} has found no room for it.{why}")
    return Stopped(view.assignment, "failed", f"The replica failed on {node_id}.{why}")
