"""Placement decisions as they were made, with the candidates and why each was refused."""

from typing import ClassVar

from controlplane.domain.placement import PlacementDecided, Started, Stopped, Unplaced
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
        )
    )


PROJECTION = Projection("decisions", 1, (Decision,), {PlacementDecided: _decided})
