"""Makes a stored placement decision again from its recorded inputs, and compares every bit.

The planner is pure: fleet at a log position, telemetry and time in, plan out. An event says all
three, so folding the log up to ``planned_from`` and planning again must give the very event. If it
does not, the planner of this release decides otherwise than the one that decided then (or the log
was changed, which the hash chain shows). Worked example::

    position 812   PlacementDecided(planned_from 811, inputs idle_s ((r7, 12.5),), at 100.0)
    fleet          = fold of events 1 … 811
    plan(snapshot(fleet, inputs, 100.0), generation of the stream's next version)
    differences    [] or ["started[0].candidates[1].score: 0.9375 stored, 0.875 now"]
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.application.fleet_state import FleetState
from controlplane.application.ports import READ_BATCH, EventStore, RecordedEvent
from controlplane.application.reconcile import snapshot
from controlplane.domain.event_types import encode
from controlplane.domain.placement import PlacementDecided, PlanInputs, Started
from controlplane.placement.plan import REPLAYED, plan

MAX_DIFFERENCES = 100


@dataclass(frozen=True)
class Difference:
    """``path`` as in ``started[0].reason``; None where one side has nothing."""

    path: str
    stored: Any
    replayed: Any


@dataclass(frozen=True)
class Replay:
    """``inputs_recorded`` is False for events of schema version 1: then no foreign memory and no
    idle time were assumed, and a difference proves nothing; nor does it if the ``planner`` was
    another than this release's (0: moves that were asked for)."""

    decision_id: str
    position: int
    planned_from: int
    inputs_recorded: bool
    planner: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def comparable(self) -> bool:
        """Whether a difference would prove anything."""
        return self.inputs_recorded and self.planner in REPLAYED


def replay(fleet: FleetState, recorded: RecordedEvent) -> Replay:
    """Decide again; ``fleet`` is the fold of the log up to the event's ``planned_from``."""
    stored = recorded.event
    assert isinstance(stored, PlacementDecided), recorded.type
    made = plan(
        snapshot(fleet, stored.inputs or PlanInputs(), stored.at), fleet.placement.generation + 1
    )
    again = msgspec.structs.replace(
        stored,
        started=made.started,
        stopped=made.stopped,
        unplaced=made.unplaced,
        retiered=made.retiered,
    )
    found: list[Difference] = []
    if encode(again) != encode(stored):
        found = list(_compare("", msgspec.to_builtins(stored), msgspec.to_builtins(again)))
    return Replay(
        stored.decision_id,
        recorded.position,
        stored.planned_from,
        stored.inputs is not None,
        stored.inputs.planner if stored.inputs else 1,
        tuple(found[:MAX_DIFFERENCES]),
    )


def whole(fleet: FleetState, stored: PlacementDecided, replica_id: str) -> Started | None:
    """The start of the replica with every candidate and rejection, of which an event of a large
    fleet keeps a few; None if this planner would not start it, or would elsewhere."""
    made = plan(
        snapshot(fleet, stored.inputs or PlanInputs(), stored.at),
        fleet.placement.generation + 1,
        replica_id,
    )
    then = {one.assignment for one in stored.started}
    found = (one for one in made.started if one.assignment.replica_id == replica_id)
    return next((one for one in found if one.assignment in then), None)


def replay_all(store: EventStore) -> Iterator[Replay]:
    """Every decision of the log, in one pass: each is planned from a later position than the one
    before, since it has seen that one."""
    fleet, waiting, after = FleetState(), deque[RecordedEvent](), 0
    while events := store.read_all(after, READ_BATCH):
        for recorded in events:
            waiting.append(recorded)
            if isinstance(recorded.event, PlacementDecided):
                while waiting[0].position <= recorded.event.planned_from:
                    fleet.apply(waiting.popleft())
                yield replay(fleet, recorded)
        after = events[-1].position


def _compare(path: str, stored: Any, again: Any) -> Iterator[Difference]:
    """Leaf by leaf, as deep as both have the same shape."""
    if isinstance(stored, dict) and isinstance(again, dict):
        for name in stored.keys() | again.keys():
            yield from _compare(f"{path}.{name}".lstrip("."), stored.get(name), again.get(name))
    elif isinstance(stored, (list, tuple)) and isinstance(again, (list, tuple)):
        for index in range(max(len(stored), len(again))):
            one, other = (side[index] if index < len(side) else None for side in (stored, again))
            yield from _compare(f"{path}[{index}]", one, other)
    elif stored != again:
        yield Difference(path, stored, again)
