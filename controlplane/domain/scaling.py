"""How many replicas of a version there should be just now, within the bounds of its specification,
and what was expected of each. One stream, ``scaling``; only the controller writes it.

Between ``min_replicas`` and ``max_replicas`` the number follows the load (``placement.autoscale``)
and what is expected (``placement.ahead``). A version that was never scaled has its minimum::

    min 0, max 2    nothing in the log                           0
                    ReplicasScaled 0 -> 1 (woken)                1
                    ModelVersionScaled min 2                     2   the bounds hold at once
                    ReplicasScaled 1 -> 0 (idle), min 0 again    0

A forecast says what came of the one before, and a load ahead is judged once: both by events, since
requests are in the ledger and not in the log.
"""

import msgspec
from msgspec import field
from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.ids import VersionId

STREAM = "scaling"
PRELOAD = "preload"
WOKEN = "woken"
FOR_PILE = "for_pile"  # reading of an increase that says nothing about the number before
MORE = ("queue", "kv_pressure", "ttft")  # codes of an increase that a load has forced


class Reading(msgspec.Struct, frozen=True):
    """One figure that a decision was made from."""

    name: str
    value: float


class Expected(msgspec.Struct, frozen=True):
    """``method``: arima | averages | daytime. ``num_requests``: until the forecast's end."""

    version_id: VersionId
    num_requests: float
    method: str


class Came(msgspec.Struct, frozen=True):
    """What the forecast before this one had expected, and what came."""

    version_id: VersionId
    expected: float
    num_requests: int


# --- events -----------------------------------------------------------------------------------
class ReplicasScaled(Event, frozen=True, tag_field="type", tag="ReplicasScaled"):
    """``code``: woken | queue | kv_pressure | ttft | slack | idle | preload | preload_over |
    displaced. ``until``: of a preload, when it is judged; else 0."""

    version_id: VersionId
    before: int
    after: int
    code: str
    reason: str
    readings: tuple[Reading, ...]
    at: float
    until: float = 0.0


class DemandForecast(Event, frozen=True, tag_field="type", tag="DemandForecast"):
    """For the time from ``at`` to ``until``; versions of which nothing is expected are left out."""

    at: float
    until: float
    expected: tuple[Expected, ...]
    came: tuple[Came, ...] = ()


class PreloadJudged(Event, frozen=True, tag_field="type", tag="PreloadJudged"):
    """``loaded_at``: of the ReplicasScaled that is judged. ``ahead_s``: from then to the first
    request, None if none came. ``wasted_s``: how long it was resident for nothing."""

    version_id: VersionId
    loaded_at: float
    num_requests: int
    ahead_s: float | None
    wasted_s: float
    at: float


ScalingEvent = ReplicasScaled | DemandForecast | PreloadJudged


# --- state ------------------------------------------------------------------------------------
class Scale(State, frozen=True):
    """``too_few``: at what demand (requests a minute) that many replicas were not enough.
    ``for_pile``: it was for what had piled up that the number was raised last."""

    num: int
    since: float
    code: str = ""
    too_few: dict[int, float] = field(default_factory=dict)
    for_pile: bool = False


class Preload(State, frozen=True):
    """A load ahead that is not judged yet."""

    at: float
    until: float


class Scaling(State, frozen=True):
    scales: dict[str, Scale] = field(default_factory=dict)
    preloads: dict[str, Preload] = field(default_factory=dict)
    forecast: DemandForecast | None = None

    def num_wanted(self, version_id: str, low: int, high: int) -> int:
        """Replicas of the version, within its bounds."""
        scale = self.scales.get(version_id)
        return min(max(scale.num if scale else low, low), high)


def evolve(scaling: Scaling, event: ScalingEvent) -> Scaling:
    match event:
        case ReplicasScaled():
            return _scaled(scaling, event)
        case DemandForecast():
            return replace(scaling, forecast=event)
        case PreloadJudged(version_id=version_id):
            kept = {name: one for name, one in scaling.preloads.items() if name != version_id}
            return replace(scaling, preloads=kept)
    return scaling


def _scaled(scaling: Scaling, event: ReplicasScaled) -> Scaling:
    old = scaling.scales.get(event.version_id)
    too_few = dict(old.too_few) if old else {}
    for_pile = bool(_reading(event, FOR_PILE))
    if event.code in MORE and not for_pile:
        too_few[event.before] = _reading(event, "demand")
    if event.code == "slack":
        for_pile = old is not None and old.for_pile
    scale = Scale(event.after, event.at, event.code, too_few, for_pile)
    preloads = scaling.preloads
    if event.code == PRELOAD:
        preloads = {**preloads, event.version_id: Preload(event.at, event.until)}
    return replace(scaling, scales={**scaling.scales, event.version_id: scale}, preloads=preloads)


def _reading(event: ReplicasScaled, name: str) -> float:
    return next((one.value for one in event.readings if one.name == name), 0.0)


# --- commands ---------------------------------------------------------------------------------
class ScaleReplicas(Command, frozen=True):
    """``before`` is what the decision was made from: its bounds are not this stream's to know."""

    version_id: VersionId
    before: int
    after: int
    code: str
    reason: str
    readings: tuple[Reading, ...]
    now: float
    until: float = 0.0


class RecordForecast(Command, frozen=True):
    until: float
    expected: tuple[Expected, ...]
    came: tuple[Came, ...]
    now: float


class JudgePreload(Command, frozen=True):
    version_id: VersionId
    num_requests: int
    ahead_s: float | None
    now: float


ScalingCommand = ScaleReplicas | RecordForecast | JudgePreload


def decide(scaling: Scaling, command: ScalingCommand) -> list[Event]:
    match command:
        case ScaleReplicas():
            return _scale(scaling, command)
        case RecordForecast(until=until, expected=expected, came=came, now=now):
            last = scaling.forecast
            said_nothing = not expected and (last is None or not last.expected)
            if said_nothing or (last is not None and last.until > now):
                return []
            return [DemandForecast(now, until, expected, came)]
        case JudgePreload(version_id=version_id, now=now):
            known = scaling.preloads.get(version_id)
            if known is None:
                return []
            wasted = 0.0 if command.num_requests else max(0.0, now - known.at)
            return [
                PreloadJudged(
                    version_id, known.at, command.num_requests, command.ahead_s, wasted, now
                )
            ]


def _scale(scaling: Scaling, order: ScaleReplicas) -> list[Event]:
    known = scaling.scales.get(order.version_id)
    if order.before == order.after or (known is not None and known.num == order.after):
        return []
    return [
        ReplicasScaled(
            order.version_id,
            order.before,
            order.after,
            order.code,
            order.reason,
            order.readings,
            order.now,
            order.until,
        )
    ]


DECIDER = Decider("scaling", Scaling(), decide, evolve)
