"""Which moment ``as_of`` means, a position of the log or a time, and the rows as they were then."""

from collections.abc import Callable
from datetime import datetime

from controlplane import bootstrap
from controlplane.adapters.eventstore.models import Event
from controlplane.adapters.ledger.models import InferenceRequest
from controlplane.entrypoints.rest.problems import Problem
from controlplane.entrypoints.rest.sources import DatabaseSource, FoldedSource, Source

_DISORDER = 1_000  # rows: gateways commit what they admitted at about the same time in any order


def source_of(as_of: str | None, reached: int) -> tuple[Source, int]:
    """The rows now, which are at least at ``reached``, or as of a position or time; and where."""
    if as_of is None:
        return DatabaseSource(), reached
    upto = position_of(as_of)
    return FoldedSource(bootstrap.timeline().at(upto).rows), upto


def position_of(as_of: str) -> int:
    """A position, or the last one recorded at or before an ISO 8601 time."""
    if as_of.isascii() and as_of.isdigit() and len(as_of) < 19:
        if int(as_of) > _head():
            raise Problem(400, "invalid_as_of", "The log does not reach this position yet.")
        return int(as_of)
    try:
        at = datetime.fromisoformat(as_of)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise Problem(400, "invalid_as_of", "A log position, or like 2026-01-31T12:00:00Z.")
    return _last_until(at.timestamp())


def _last_until(moment: float) -> int:
    """By halving, since recorded times follow the log: twenty rows read of a million, where an
    index on the times would cost every append. Where a clock was set back, a position after which
    the times pass ``moment``."""
    recorded = Event.objects.values_list("recorded_at", flat=True)
    return _last(_head(), lambda position: recorded.get(position=position) <= moment)


def version_until(stream: str, position: int) -> int:
    """The stream's version at a position: how many of its events are not beyond it."""
    mine = Event.objects.filter(stream=stream)
    newest = mine.order_by("-version").values_list("version", flat=True).first() or 0
    positions = mine.values_list("position", flat=True)
    return _last(newest, lambda version: positions.get(version=version) <= position)


def moment_of(as_of: str) -> float:
    """The time (Unix seconds) that is meant: of a position, when its event was recorded."""
    position = position_of(as_of)
    if not as_of.isdigit():
        return datetime.fromisoformat(as_of).timestamp()
    found = Event.objects.filter(position=position).values_list("recorded_at", flat=True).first()
    return found or 0.0


def last_request_until(moment: float, slack: bool = True) -> int:
    """An upper bound of the ids of requests admitted at ``moment`` or before, by halving too;
    without ``slack`` a lower bound of those admitted after it."""
    every = InferenceRequest.objects.order_by("pk")

    def is_until(pk: int) -> bool:
        at = every.filter(pk__gte=pk).values_list("at", flat=True).first()
        return at is not None and at <= moment

    last = _last(every.values_list("pk", flat=True).last() or 0, is_until)
    return last + _DISORDER if slack else last - _DISORDER


def _last(newest: int, is_until: Callable[[int], bool]) -> int:
    """The last of 1 … ``newest`` that passes, by halving; 0 if none does."""
    low, high = 0, newest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_until(middle) else (low, middle)
    return low


def _head() -> int:
    return bootstrap.event_store().head().position
