"""Moving replicas together: what it would gain, and the decision that starts it.

The fleet is the log's, the telemetry that of the newest decision. The moves are appended as one
ordinary decision with the placement's version as its parent: if the controller was faster, it is
refused and previewed again. From then on the reconciler carries it out: copies load, the old ones
stop when they are ready, what is missing is placed.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import EventMeta, EventStore
from controlplane.application.reconcile import snapshot
from controlplane.domain import placement
from controlplane.domain.placement import DecidePlacement, PlacementDecided, PlanInputs
from controlplane.placement.repack import Problem, Repack, outcome, problem, starts

BY_REPACK = 0  # as a decision's ``planner``: the moves were asked for, not planned
Solver = Callable[[Problem], list[int]]


@dataclass(frozen=True)
class Preview:
    """``num_unplaced``: replicas that fit nowhere now."""

    fleet: FleetState
    inputs: PlanInputs
    stated: Problem
    repack: Repack
    num_unplaced: int


def preview(
    fleet: FleetState, inputs: PlanInputs, solve: Solver, max_moves: int, now: float
) -> Preview:
    """The best moves that the solver finds for the fleet."""
    gaps = [(one.version_id, one.num_missing) for one in fleet.placement.unplaced]
    stated = problem(snapshot(fleet, inputs, now), gaps, max_moves)
    found = outcome(stated, solve(stated))
    return Preview(fleet, inputs, stated, found, sum(number for _, number in gaps))


def newest_inputs(store: EventStore, position: int | None) -> PlanInputs:
    """Of the decision at ``position``; nothing is known without one."""
    if position is None:
        return PlanInputs()
    event = store.read_all(position - 1, 1, position)[0].event
    assert isinstance(event, PlacementDecided)
    return event.inputs or PlanInputs()


def start(made: Preview, handler: CommandHandler, meta: EventMeta, now: float) -> str | None:
    """Append the moves as a decision; its id, or None if there is nothing to move.

    Raises VersionConflict if the placement has changed since the preview.
    """
    if not made.repack.moves:
        return None
    state = made.fleet.placement
    inputs = PlanInputs(
        made.inputs.foreign_bytes, made.inputs.idle_s, made.inputs.reserved_bytes, BY_REPACK
    )
    command = DecidePlacement(
        f"dec-{uuid.uuid4().hex}",
        made.fleet.position,
        starts(made.stated, made.repack, state.generation + 1),
        (),
        state.unplaced,
        now,
        inputs,
    )
    handler.handle(
        placement.DECIDER, placement.STREAM, command, meta, expected_version=state.generation
    )
    return command.decision_id
