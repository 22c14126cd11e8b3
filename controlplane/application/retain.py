"""Retention: what is older than the policy says goes, a bounded batch at a round, and never unseen.

Records go into an archive first (``archive``), whole segments at a time, and their rows only once
the archive was read back. Each removed segment is an event, appended from the marks that the
segments bear, so one that a killed process left out is made up for in the next round::

    the last round marked 2,001-3,000 and was killed    its rows are gone, its event is not there
    this round   SegmentRemoved(2,001-3,000)             noted
                 3,001-4,000 archived, verified, removed
                 SegmentRemoved(3,001-4,000)
    next round   nothing is old enough

Captured text is removed by its age alone; only its hash is sealed, so no proof needs it. Events
and totals of usage stay, whatever their age.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controlplane.application.archive import Archived
from controlplane.application.failpoints import passing
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.domain import retention
from controlplane.domain.retention import DECIDER, REQUESTS, TEXT, NoteRemoved, days_of

DAY_S = 86_400.0
MAX_SEGMENTS = 10  # in one round: 10,000 records
MAX_NOTES = 100
MAX_TEXT_BATCHES = 20


class Marks(Protocol):
    """What was put into archives."""

    def marked(self, log: str, after: int, limit: int) -> list[tuple[int, int, str]]:
        """(first, size, mark) of archived segments with a size above ``after``, in order."""


class Texts(Protocol):
    def remove_before(self, at: float) -> int:
        """Remove a batch of what was captured before ``at`` (Unix seconds); how many."""


@dataclass(frozen=True)
class Retained:
    """What one round did."""

    archived: Archived | None
    num_noted: int
    num_texts: int


@dataclass
class Retention:
    """``archive(before)`` moves out at most ``MAX_SEGMENTS`` that were sealed before; None: there
    is no place for archives, so records stay. Blocking."""

    handler: CommandHandler
    clock: Clock
    marks: Marks
    texts: Texts
    archive: Callable[[float], Archived | None] | None

    def step(self) -> Retained:
        """One round; again, until it does nothing."""
        noted = self.note()
        before = self._before(REQUESTS)
        archived = self.archive(before) if self.archive and before is not None else None
        return Retained(archived, noted + self.note(), self._remove_texts())

    def days(self, kind: str) -> int | None:
        """How long it is kept; None: for ever."""
        return days_of(kind, self._state(kind))

    def note(self) -> int:
        """An event for each segment that was removed and has none yet; how many were made."""
        after = self._state(REQUESTS).removed_upto
        found = self.marks.marked(REQUESTS, after, MAX_NOTES)
        for first, size, name in found:
            command = NoteRemoved(REQUESTS, first, size, name, self.clock.now())
            self.handler.handle(DECIDER, DECIDER.stream(REQUESTS), command, CONTROLLER)
            passing("retain.noted")
        return len(found)

    def _remove_texts(self) -> int:
        before, count = self._before(TEXT), 0
        if before is None:
            return 0
        for _ in range(MAX_TEXT_BATCHES):
            removed = self.texts.remove_before(before)
            count += removed
            if not removed:
                break
        return count

    def _before(self, kind: str) -> float | None:
        """What is older than this goes (Unix seconds); None: nothing does."""
        days = self.days(kind)
        return None if days is None else self.clock.now() - days * DAY_S

    def _state(self, kind: str) -> retention.Retention:
        _, state = self.handler.state(DECIDER, DECIDER.stream(kind))
        found: retention.Retention = state
        return found


@dataclass
class Upkeep:
    """What the leading controller does about what is old, or erased; blocking."""

    retention: Retention
    finish_erasures: Callable[[], int]

    def step(self) -> bool:
        """One round; True if it did something, so that there may be more to do."""
        destroyed = self.finish_erasures()
        done = self.retention.step()
        return bool(destroyed or done.archived or done.num_noted or done.num_texts)
