"""Which stretches of the time are simulated, and how much each counts.

Failures are rare and decide about availability, so the time around each loss and return of a node
is simulated in full and counts once. The rest is cut into cells of five minutes; of each group of
``sample`` neighbouring cells one, drawn, is simulated, and counts for the group's seconds over its
own: a stratified sample, whose weighted sums expect what the whole would give. Simulated stretches
follow each other without a gap in the simulation's time, so queues and loaded models go over from
one to the next; what fades with time (idle models, averages of demand) sees a day that is
``sample`` times as short. Worked example, 1 of 2, one loss at 700 s, back at 2,000 s, of 3,600 s::

    640–1,060      in full, weight 1 (from a minute before the loss to six after)
    1,940–2,360    in full, weight 1
    0–640, 1,060–1,940, 2,360–3,600: cells of 300 s and rests; of each two one, weight 2 or so

With ``sample`` 1 there is one stretch: everything.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.simulation.scenario import Failures, Outage, Scenario

CELL_S = 300.0
BEFORE_S, AFTER_S = 60.0, 360.0


@dataclass(frozen=True, slots=True)
class Window:
    """``at`` in the simulation's time, ``wall`` in seconds from the scenario's beginning."""

    at: float
    wall: float
    seconds: float
    weight: float = 1.0

    def wall_at(self, at: float) -> float:
        return self.wall + at - self.at


def outages(scenario: Scenario, chance: np.random.Generator) -> list[Outage]:
    """Scheduled and random ones by time; a node that is away does not fail again."""
    drawn = [*scenario.failures.schedule]
    if scenario.failures.mtbf_hours:
        for node in scenario.node_ids():
            drawn += _random(node, scenario.failures, scenario.seconds, chance)
    found: list[Outage] = []
    until: dict[str, float] = {}
    for one in sorted(drawn, key=lambda one: (one.at, one.node)):
        if one.at >= until.get(one.node, 0.0):
            found.append(one)
            until[one.node] = one.at + one.seconds
    return found


def _random(
    node: str, how: Failures, seconds: float, chance: np.random.Generator
) -> Iterator[Outage]:
    at = chance.exponential(how.mtbf_hours * 3600.0)
    while at < seconds:
        away = max(60.0, chance.exponential(how.mttr_hours * 3600.0))
        yield Outage(node, at, away)
        at += away + chance.exponential(how.mtbf_hours * 3600.0)


def windows(
    scenario: Scenario, losses: Sequence[Outage], chance: np.random.Generator
) -> list[Window]:
    """In order; their weighted seconds add up to the scenario's."""
    if scenario.sample == 1:
        return [Window(0.0, 0.0, scenario.seconds)]
    full = _full(losses, scenario.seconds)
    cells = list(_cells(full, scenario.seconds))
    chosen = [(begin, end, 1.0) for begin, end in full]
    for first in range(0, len(cells), scenario.sample):
        group = cells[first : first + scenario.sample]
        begin, end = group[int(chance.integers(len(group)))]
        total = sum(last - start for start, last in group)
        chosen.append((begin, end, total / (end - begin)))
    found, at = [], 0.0
    for begin, end, weight in sorted(chosen):
        found.append(Window(at, begin, end - begin, weight))
        at += end - begin
    return found


def _full(losses: Iterable[Outage], seconds: float) -> list[tuple[float, float]]:
    """Around each loss and return, overlapping ones joined."""
    moments = sorted(at for one in losses for at in (one.at, one.at + one.seconds) if at < seconds)
    found: list[tuple[float, float]] = []
    for moment in moments:
        begin, end = max(0.0, moment - BEFORE_S), min(seconds, moment + AFTER_S)
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def _cells(full: Sequence[tuple[float, float]], seconds: float) -> Iterator[tuple[float, float]]:
    """What is left, in pieces of at most ``CELL_S``."""
    at = 0.0
    for begin, end in (*full, (seconds, seconds)):
        while begin - at > 0:
            upto = min(begin, at + CELL_S)
            yield at, upto
            at = upto
        at = end
