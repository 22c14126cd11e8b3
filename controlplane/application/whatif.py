"""What-if: the log forked at a position, the fleet changed there, planned by the product's planner.

Nothing is appended: the fork is the folded state, handed to ``simulation.whatif`` as a snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.application.fleet_state import FleetState
from controlplane.application.ports import EventStore
from controlplane.application.reconcile import snapshot
from controlplane.domain.errors import Invalid
from controlplane.domain.placement import PlanInputs
from controlplane.domain.wording import count_of
from controlplane.simulation.whatif import Change, Outcome, Place, what_if


@dataclass(frozen=True)
class Preview:
    """``position``: where the log was forked."""

    position: int
    change: Change
    outcome: Outcome


def change_of(
    lose: Sequence[str], add: Sequence[str], replicas: Sequence[str], load: float
) -> Change:
    """As people write it: ``n1``, ``n9=n1`` (like n1), ``chat@v2=4``. Raises Invalid."""
    numbers = tuple((name, _number(text)) for name, text in map(_pair, replicas))
    return Change(tuple(lose), tuple(map(_pair, add)), numbers, load)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise Invalid("invalid_change", f"'{text[:100]}' is not of the form NAME=VALUE.")
    return name, value


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Invalid("invalid_replicas", f"'{text[:100]}' is not a number of replicas.")
    return int(text)


def preview(fleet: FleetState, inputs: PlanInputs, change: Change, now: float) -> Preview:
    """``inputs``: the telemetry of the newest decision. Raises NotFound, Invalid."""
    stated = snapshot(fleet, inputs, now)
    return Preview(fleet.position, change, what_if(stated, fleet.placement.generation, change))


def recorded_at(store: EventStore, position: int) -> float:
    """When the event there was recorded, Unix seconds; 0 before the first."""
    return store.read_all(position - 1, 1, position)[0].recorded_at if position > 0 else 0.0


def sentences(made: Preview) -> list[str]:
    """The outcome for people; one that says so if nothing changes."""
    found = made.outcome
    lines = [f"{_text(one)} leaves {one.node_id}/{one.device_index}." for one in found.left]
    lines += [f"{_text(one)} starts on {one.node_id}/{one.device_index}." for one in found.joined]
    lines += [f"Evicted: {one.assignment.replica_id}. {one.reason}" for one in found.evicted]
    lines += [f"Unplaced: {one.reason}" for one in found.unplaced]
    lines += [f"{number} missing of {name} find room." for name, number in found.relieved]
    lines += [
        f"{one.version_id}: {count_of(one.before, 'replica')}, then {one.after}; each carries "
        f"{one.per_replica:.2f} times as much."
        for one in found.loads
        if one.per_replica is not None
    ]
    if not found.settled:
        lines.append("The planner had not come to rest.")
    return lines or ["Nothing would change."]


def _text(one: Place) -> str:
    return one.version_id if one.number == 1 else f"{one.number} × {one.version_id}"
