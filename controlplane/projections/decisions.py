"""Placement decisions as they were made, with the candidates and why each was refused."""

from typing import ClassVar

from controlplane.domain.placement import (
    PlacementDecided,
    Retiered,
    Started,
    Stopped,
    Unplaced,
)
from controlplane.projections.base import Projection, Recorded, Row, Rows


class Decision(Row, frozen=True):
    """``planned_from`` is the log position that the planner saw."""

    history: ClassVar = True

    decision_id: str
    generation: int
    position: int
    planned_from: int
    at: float
    actor: str
    started: tuple[Started, ...]
    stopped: tuple[Stopped, ...]
    unplaced: tuple[Unplaced, ...]
    retiered: tuple[Retiered, ...] = ()


class DecisionAbout(Row, frozen=True):
    """A version that a decision starts, stops, misses or keeps in another tier. Key: "version
    id/position"."""

    history: ClassVar = True

    key: str
    version_id: str
    position: int


def _decided(rows: Rows, event: PlacementDecided, recorded: Recorded) -> None:
    rows.put(
        Decision(
            event.decision_id,
            recorded.version,
            recorded.position,
            event.planned_from,
            event.at,
            recorded.meta.actor,
            event.started,
            event.stopped,
            event.unplaced,
            event.retiered,
        )
    )
    touched = {start.assignment.version_id for start in event.started}
    touched |= {stop.assignment.version_id for stop in event.stopped}
    touched |= {one.assignment.version_id for one in event.retiered}
    for name in touched | {gap.version_id for gap in event.unplaced}:
        rows.put(DecisionAbout(f"{name}/{recorded.position}", name, recorded.position))


PROJECTION = Projection("decisions", 4, (Decision, DecisionAbout), {PlacementDecided: _decided})
