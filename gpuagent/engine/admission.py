"""Whether a newcomer will still fit when everybody has grown.

A request holds its own tokens and grows by one a step until it ends. How long it goes on is
read from the requests that have ended: of those that were longer than it is now, the mean.
The memory needed at the end of request i, when all shorter-lived ones have gone, is (sorted
by remaining tokens, longest first)

    peak = max over i of  sum(own_1 .. own_i) + i * remaining_i

(Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025.)
Example, own tokens and expected remaining: (100, 50), (80, 20), (10, 5):

    i = 1   100 + 1 * 50  = 150
    i = 2   180 + 2 * 20  = 220      <- the peak: a pool of 240 tokens takes all three,
    i = 3   190 + 3 * 5   = 205         one of 200 leaves the third waiting

Reserving `max_tokens` for everybody was rejected: clients ask for thousands and use dozens.
Admitting whatever fits now was rejected: the pool overflows some steps later, and then work
is thrown away. Before `MIN_SAMPLES` requests have ended nothing is known and all may enter.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

MAX_SAMPLES = 256
MIN_SAMPLES = 32


class LengthDistribution:
    """Output lengths of the last `MAX_SAMPLES` requests that ended."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # sums of the k longest

    def record(self, num_output: int) -> None:
        """A request has ended after that many tokens."""
        self._lengths.append(num_output)
        self._sorted = []

    @property
    def is_known(self) -> bool:
        """True once enough requests have ended to expect anything."""
        return len(self._lengths) >= MIN_SAMPLES

    def expected_remaining(self, num_output: int, max_tokens: int) -> int:
        """Tokens still to come of a request that has `num_output`; 0 while too little is known."""
        if not self.is_known:
            return 0
        self._sort()
        num_longer = len(self._sorted) - bisect_right(self._sorted, num_output)
        # Longer than all before: as much again.
        total = self._sums[num_longer] // num_longer if num_longer else 2 * num_output
        remaining = total - num_output
        return max(0, min(remaining, max_tokens - num_output))

    def _sort(self) -> None:
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._sums = [0, *accumulate(reversed(self._sorted))]


def peak_tokens(holdings: Iterable[tuple[int, int]]) -> int:
    """The most tokens held at once, from (own, remaining) of each request."""
    peak = total = 0
    by_end = sorted(holdings, key=lambda holding: -holding[1])
    for count, (own, remaining) in enumerate(by_end, 1):
        total += own
        peak = max(peak, total + count * remaining)
    return peak
