"""How long what is kept: the installation's policy. Stream ``retention-<kind>``.

``requests`` are the ledger's records with their attempts, which go into an archive first; ``text``
is captured text, which is only removed. Everything else is kept: events are what everything is
rebuilt from, and totals of usage are all that is left of what was archived::

    nothing said                        requests 396 days, text 30
    SetRetention(requests, 730)         RetentionSet(requests, 396 -> 730)
    SetRetention(text, None)            RetentionSet(text, 30 -> None): until it is erased
    NoteRemoved(requests, 1 to 1,000)   SegmentRemoved: once, however often it is noted
"""

from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Invalid, NotFound

REQUESTS, TEXT = "requests", "text"
DEFAULT_DAYS = {REQUESTS: 396, TEXT: 30}  # thirteen months: a year to look back, and a month more
KINDS = tuple(DEFAULT_DAYS)
MAX_DAYS = 36_500


# --- events -----------------------------------------------------------------------------------
class RetentionSet(Event, frozen=True, tag_field="type", tag="RetentionSet"):
    """``days`` None: for ever."""

    kind: str
    days_before: int | None
    days: int | None
    at: float


class SegmentRemoved(Event, frozen=True, tag_field="type", tag="SegmentRemoved"):
    """The records of a sealed segment lie in ``archive`` now, and no more in the database."""

    kind: str
    first: int
    upto: int
    archive: str
    at: float


RetentionEvent = RetentionSet | SegmentRemoved


# --- state ------------------------------------------------------------------------------------
class Retention(State, frozen=True):
    """Of one kind. ``removed_upto``: position of the last record whose removal is noted."""

    is_set: bool = False
    days: int | None = None
    removed_upto: int = 0


def evolve(retention: Retention, event: RetentionEvent) -> Retention:
    match event:
        case RetentionSet(days=days):
            return replace(retention, is_set=True, days=days)
        case SegmentRemoved(upto=upto):
            return replace(retention, removed_upto=max(upto, retention.removed_upto))


def days_of(kind: str, retention: Retention) -> int | None:
    """How long it is kept; None: for ever."""
    return retention.days if retention.is_set else DEFAULT_DAYS[kind]


# --- commands ---------------------------------------------------------------------------------
class SetRetention(Command, frozen=True):
    kind: str
    days: int | None
    now: float


class NoteRemoved(Command, frozen=True):
    kind: str
    first: int
    upto: int
    archive: str
    now: float


RetentionCommand = SetRetention | NoteRemoved


# --- decisions --------------------------------------------------------------------------------
def decide(retention: Retention, command: RetentionCommand) -> list[Event]:
    if command.kind not in KINDS:
        raise NotFound("retention", command.kind)
    match command:
        case SetRetention(kind, days, now):
            if days is not None and not 1 <= days <= MAX_DAYS:
                raise Invalid("invalid_days", f"days is 1 to {MAX_DAYS}, or null.", "days")
            before = days_of(kind, retention)
            return [] if days == before else [RetentionSet(kind, before, days, now)]
        case NoteRemoved(kind, first, upto, archive, now):
            if upto <= retention.removed_upto:
                return []
            return [SegmentRemoved(kind, first, upto, archive, now)]


DECIDER = Decider("retention", Retention(), decide, evolve)
