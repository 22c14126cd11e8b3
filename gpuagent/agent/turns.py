"""Which of the models on one device takes the next step: device time, shared by weight.

Each replica has a weight, and its virtual clock runs by the seconds of its steps over that weight;
whoever has work and the earliest clock is next (start-time fair queueing; Goyal et al., 1996).
The weight is what a version was promised, and a part of what nobody was, by priority::

    weight = guaranteed_percent + rest * p / sum of p      p = 10 high, 1 normal, 0.1 best effort

Example, one device, high "a" with 50 %, normal "n", best-effort "b"; the rest is 50 %, p sums to
11.1, steps of 20 ms each:

    a    50 + 50 * 10 / 11.1  = 95.0 %    all three want everything: of 200 steps, 4 s, a has
    n         50 * 1 / 11.1   =  4.5 %    190, n has 9 and b has 1
    b         50 * 0.1 / 11.1 =  0.5 %    a has no work: n 91 %, b 9 %;  b alone: everything

So a guarantee is a floor and no ceiling, it holds against other models of high priority too, idle
time goes to whoever can use it, and best effort yields but never starves. A step is not cut
short: a model that gets work waits for the end of the one that runs, no longer. A model that was
idle starts with the clock of the last that was chosen, so nobody saves up. Turns by steps were
rejected: a model with steps of 100 ms would take ten times the device of one with 10 ms.

The latency classes weigh too: what nobody was promised goes by p times 10, 1 or 0.1, the weight of
the most urgent request that a model has unfinished. Two models of normal priority, one with a
realtime request and one with batch work, share the device 100 : 1 until that request is done. A
promise stays what it is.

A ``dedicated`` replica is a process of its own, whose steps the device interleaves as it likes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PRIORITY_WEIGHTS = {"high": 10.0, "normal": 1.0, "best-effort": 0.1}
MIN_REST = 1.0  # percent: somebody promised everything, and the others still get a turn


@dataclass(slots=True)
class _Share:
    percent: int
    priority: float
    weight: float = 1.0
    clock: float = 0.0
    urgency: float = 1.0


class Turns:
    """The shares of the replicas in one worker."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._floor = 0.0
        self._last: frozenset[str] | set[str] = frozenset()  # who had work at the last choice

    def join(self, replica_id: str, percent: int, priority: str) -> None:
        """A replica is loaded."""
        weight = PRIORITY_WEIGHTS.get(priority, PRIORITY_WEIGHTS["normal"])
        self._shares[replica_id] = _Share(percent, weight)
        self._weigh()

    def leave(self, replica_id: str) -> None:
        """A replica is gone."""
        if self._shares.pop(replica_id, None) is not None:
            self._weigh()

    def weight(self, replica_id: str) -> float:
        """Percent of the device while all want it."""
        return self._shares[replica_id].weight

    def choose(self, working: Mapping[str, float]) -> str:
        """Who of those that have work, at least one, steps now; the first among equals.

        ``working`` gives each the weight of its most urgent request's class, 0 if it has none.
        """
        if len(working) == 1 and len(self._shares) == 1:
            return next(iter(working))
        shares = self._shares
        self._note_urgency(working)
        for replica_id in working:
            if replica_id not in self._last:
                share = shares[replica_id]
                share.clock = max(share.clock, self._floor)
        self._last = set(working)
        chosen = min(working, key=lambda replica_id: shares[replica_id].clock)
        self._floor = max(self._floor, shares[chosen].clock)
        return chosen

    def charge(self, replica_id: str, seconds: float) -> None:
        """The replica has held the device for that long."""
        share = self._shares[replica_id]
        share.clock += seconds / share.weight

    def _note_urgency(self, working: Mapping[str, float]) -> None:
        changed = False
        for replica_id, share in self._shares.items():
            urgency = working.get(replica_id) or 1.0
            changed |= urgency != share.urgency
            share.urgency = urgency
        if changed:
            self._weigh()

    def _weigh(self) -> None:
        shares = self._shares.values()
        rest = max(100.0 - sum(share.percent for share in shares), MIN_REST)
        total = sum(share.priority * share.urgency for share in shares)
        for share in shares:
            share.weight = share.percent + rest * share.priority * share.urgency / total
