"""Replicas by load, what was expected, and what became of it: for people to read.

A load ahead is a **hit** if somebody asked for the model within its time, **wasted** if nobody did;
a model that had to be woken by a request, because it was not loaded ahead, is **missed**::

    ReplicasScaled (preload) at 0     nothing yet
    PreloadJudged 2 requests          hit, 41 s ahead of the first
    ReplicasScaled (woken)            missed
"""

from typing import ClassVar

from controlplane.domain.scaling import (
    WOKEN,
    Came,
    DemandForecast,
    Expected,
    PreloadJudged,
    Reading,
    ReplicasScaled,
)
from controlplane.projections.base import Projection, Recorded, Row, Rows


class Scaling(Row, frozen=True):
    """One change of a version's number of replicas, and the figures it was made from."""

    history: ClassVar = True

    position: int
    version_id: str
    at: float
    before: int
    after: int
    code: str
    reason: str
    readings: tuple[Reading, ...]
    until: float


class Forecast(Row, frozen=True):
    """What was expected from ``at`` to ``until``; ``came``: of the forecast before this one."""

    history: ClassVar = True

    position: int
    at: float
    until: float
    expected: tuple[Expected, ...]
    came: tuple[Came, ...]


class Preload(Row, frozen=True):
    """``outcome``: hit | wasted | missed. Seconds; ``ahead_s`` None where nobody came."""

    history: ClassVar = True

    position: int
    version_id: str
    at: float
    outcome: str
    loaded_at: float | None
    num_requests: int
    ahead_s: float | None
    wasted_s: float


def _scaled(rows: Rows, event: ReplicasScaled, recorded: Recorded) -> None:
    rows.put(
        Scaling(
            recorded.position,
            event.version_id,
            event.at,
            event.before,
            event.after,
            event.code,
            event.reason,
            event.readings,
            event.until,
        )
    )
    if event.code == WOKEN:
        missed = Preload(recorded.position, event.version_id, event.at, "missed", None, 0, None, 0)
        rows.put(missed)


def _forecast(rows: Rows, event: DemandForecast, recorded: Recorded) -> None:
    rows.put(Forecast(recorded.position, event.at, event.until, event.expected, event.came))


def _judged(rows: Rows, event: PreloadJudged, recorded: Recorded) -> None:
    rows.put(
        Preload(
            recorded.position,
            event.version_id,
            event.at,
            "hit" if event.num_requests else "wasted",
            event.loaded_at,
            event.num_requests,
            event.ahead_s,
            event.wasted_s,
        )
    )


PROJECTION = Projection(
    "demand",
    1,
    (Scaling, Forecast, Preload),
    {ReplicasScaled: _scaled, DemandForecast: _forecast, PreloadJudged: _judged},
)
