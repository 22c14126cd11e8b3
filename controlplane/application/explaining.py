"""Which choices of a request are put on record with it, and when they are written down.

A placer shows every choice that it makes, also the one that finds no replica (``Seen``); that costs
a few references. What is kept of them is written out once the request has ended, beside its
record, so that nothing of it stands between a request and its first token::

    choose -> r1          saw   not sampled, nor "spare": forgotten as soon as it is sent
    r1 is lost
    choose -> r2          saw   attempt 2: kept, "followed"
    ok                    one record, of attempt 2

    choose -> nobody      saw   held; asked again every 50 ms, each time replacing the last
    its hold expires      one record, "refused": what the last one saw

Sampled ones are always kept. Of the others (``followed``, ``refused``) a gateway keeps a hundred at
once and ten a second in the long run: a fleet that is down refuses everything and moves everything,
and must not be made to write tens of kilobytes for each. And of those with nothing remarkable about
them it keeps twenty at once and one a second (``spare``): who tries one request finds it explained,
and a gateway with thousands a second writes no more for it. A share of 0 keeps neither sampled nor
spare ones.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from controlplane.application.inference import Seen
from controlplane.dispatch.record import (
    FOLLOWED,
    REFUSED,
    SAMPLED,
    SPARE,
    Dispatch,
    dispatch_of,
    is_sampled,
)

if TYPE_CHECKING:
    from controlplane.application.call import Part

MOVED, ORDINARY = (10.0, 100.0), (1.0, 20.0)  # a second, and at once
DEFAULT_SHARE = 0.01


class Kept(NamedTuple):
    """A choice that will be put on record, of which attempt, and why."""

    seen: Seen
    attempt: int
    why: str


class _Bucket:
    """Lets ``per_s`` a second pass in the long run, ``burst`` at once."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Explaining:
    """Of one gateway; in its event loop. ``share`` (0 to 1) of all requests are sampled."""

    def __init__(self, share: float, monotonic: Callable[[], float]) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"the share of explained requests is from 0 to 1, not {share}")
        self.share, self._monotonic = share, monotonic
        self._moved = _Bucket(*MOVED, monotonic())
        self._ordinary = _Bucket(*ORDINARY, monotonic())

    def sent(self, part: "Part", request_id: str) -> None:
        """What ``part`` saw last was followed by the attempt that has begun."""
        seen, part.seen = part.seen, None
        if seen is None:
            return
        if is_sampled(request_id, self.share):
            part.kept.append(Kept(seen, part.attempt, SAMPLED))
        elif part.attempt > 1:
            if self._moved.take(self._monotonic()):
                part.kept.append(Kept(seen, part.attempt, FOLLOWED))
        elif self.share and self._ordinary.take(self._monotonic()):
            part.kept.append(Kept(seen, part.attempt, SPARE))

    def dispatches_of(self, parts: Sequence["Part"], request_id: str) -> tuple[Dispatch, ...]:
        """Of all ``parts``, which have ended; one that nobody took at last is among them."""
        for part in parts:
            if part.seen is not None and self._keeps_refused(request_id):
                part.kept.append(Kept(part.seen, part.attempt + 1, REFUSED))
        return tuple(
            dispatch_of(seen.choice, part.index, attempt, seen.at, why, seen.position)
            for part in parts
            for seen, attempt, why in part.kept
        )

    def _keeps_refused(self, request_id: str) -> bool:
        return is_sampled(request_id, self.share) or self._moved.take(self._monotonic())
