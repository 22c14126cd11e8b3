"""The queue: one line per latency class, and whose head is next.

Inside a class tenants share by what they have been served (`gpuagent.engine.fairness`); inside a
tenant the order is that of arrival, and a preempted request returns to its old place. Between
classes the score decides: the weight, 10 / 1 / 0.1, times one plus the steps in which the class
had somebody waiting and nobody computing. Example, all slots go to realtime requests while "b" of
class batch waits:

    step    1     2    ...   99    100   101
    b      0.1   0.2         9.9  10.0  10.1   > 10: the next free slot is b's

The age belongs to the class and not to the request. Ages of single requests were rejected: in
a long line of batch work everybody is old, and a realtime request would wait behind them all.
This way a class that gets anything computed does not age, so realtime always comes first into
a load of batch work; a class that gets nothing at all has its turn after at most 100 steps,
and since a tenant whose turn does not come is not charged while others are, so has everybody in it.
"""

from collections.abc import Collection, Iterator

from gpuagent.engine.batch import WEIGHTS, Sequence
from gpuagent.engine.fairness import FairLine
from gpuagent.engine.request import LatencyClass


class WaitingQueue:
    """The unfinished requests that hold no blocks."""

    def __init__(self) -> None:
        self._lines = {each: FairLine() for each in LatencyClass}
        self._num_idle = dict.fromkeys(LatencyClass, 0)
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Sequence | None:
        """The waiting request of that id."""
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a request at its tenant's place of its arrival."""
        self._lines[sequence.request.latency_class].add(sequence)
        self._by_id[sequence.request_id] = sequence

    def remove(self, request_id: str) -> None:
        """Take a request out, wherever it stands; unknown ids are ignored."""
        sequence = self._by_id.pop(request_id, None)
        if sequence:
            self._lines[sequence.request.latency_class].remove(sequence)

    def head(self, latency_class: LatencyClass) -> Sequence | None:
        """The first of a class."""
        return self._lines[latency_class].head()

    def count(self, latency_class: LatencyClass) -> int:
        """How many of a class wait."""
        return len(self._lines[latency_class])

    def counts(self) -> dict[str, int]:
        """How many wait, by class; without those of which nobody does."""
        return {each.value: len(line) for each, line in self._lines.items() if line}

    def first(self) -> Sequence | None:
        """The most urgent class's head; the higher class among equals."""
        present = [each for each in LatencyClass if self._lines[each]]
        return self.head(max(present, key=self.score)) if present else None

    def score(self, latency_class: LatencyClass) -> float:
        """Weight times one plus the steps the class has got nothing."""
        return WEIGHTS[latency_class] * (1 + self._num_idle[latency_class])

    def is_starving(self, latency_class: LatencyClass) -> bool:
        """True if the class has waited so long that it comes before realtime."""
        return self.score(latency_class) > WEIGHTS[LatencyClass.REALTIME]

    def age(self, served: Collection[LatencyClass]) -> None:
        """A step is planned in which these classes compute something."""
        for each in LatencyClass:
            is_idle = self._lines[each] and each not in served
            self._num_idle[each] = self._num_idle[each] + 1 if is_idle else 0
