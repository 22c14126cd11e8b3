"""Which choices of a request are put on record with it, and when they are written down.

A placer shows every choice that it makes, also the one that finds no replica (``Seen``); that costs
a few references. What is kept of them is written out once the request has ended, beside its
record, so that nothing of it stands between a request and its first token::

    choose -> r1          saw   not sampled: forgotten as soon as it is sent
    r1 is lost
    choose -> r2          saw   attempt 2: kept, "followed"
    ok                    one record, of attempt 2

    choose -> nobody      saw   held; asked again every 50 ms, each time replacing the last
    its hold expires      one record, "refused": what the last one saw

Sampled ones are always kept. Of the others (``followed``, ``refused``) a gateway keeps ``BURST`` at
once and ``PER_S`` in the long run: a fleet that is down refuses everything and moves everything,
and must not be made to write tens of kilobytes for each.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from controlplane.application.inference import Seen
from controlplane.dispatch.record import (
    FOLLOWED,
    REFUSED,
    SAMPLED,
    Dispatch,
    dispatch_of,
    is_sampled,
)

if TYPE_CHECKING:
    from controlplane.application.call import Part

PER_S, BURST = 10.0, 100.0
DEFAULT_SHARE = 0.01


class Kept(NamedTuple):
    """A choice that will be put on record, of which attempt, and why."""

    seen: Seen
    attempt: int
    why: str


class Explaining:
    """Of one gateway; in its event loop. ``share`` (0 to 1) of all requests are sampled."""

    def __init__(self, share: float, monotonic: Callable[[], float]) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"the share of explained requests is from 0 to 1, not {share}")
        self.share, self._monotonic = share, monotonic
        self._left, self._at = BURST, monotonic()

    def sent(self, part: "Part", request_id: str) -> None:
        """What ``part`` saw last was followed by the attempt that has begun."""
        seen, part.seen = part.seen, None
        if seen is None:
            return
        if is_sampled(request_id, self.share):
            part.kept.append(Kept(seen, part.attempt, SAMPLED))
        elif part.attempt > 1 and self._may():
            part.kept.append(Kept(seen, part.attempt, FOLLOWED))

    def dispatches_of(self, parts: Sequence["Part"], request_id: str) -> tuple[Dispatch, ...]:
        """Of all ``parts``, which have ended; one that nobody took at last is among them."""
        for part in parts:
            if part.seen is not None and (is_sampled(request_id, self.share) or self._may()):
                part.kept.append(Kept(part.seen, part.attempt + 1, REFUSED))
        return tuple(
            dispatch_of(seen.choice, part.index, attempt, seen.at, why, seen.position)
            for part in parts
            for seen, attempt, why in part.kept
        )

    def _may(self) -> bool:
        """Take one from the bucket of those that are kept though they are not sampled."""
        now = self._monotonic()
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
