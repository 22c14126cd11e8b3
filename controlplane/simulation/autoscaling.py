"""A version's replicas under a load, scaled by the product's own rule: one second a step.

A replica serves ``num_slots`` requests at a time, ``service_s`` seconds each, and takes ``load_s``
to become ready; what finds no slot waits, first come first served. Arrivals are evenly spaced by
the rate of the moment, each moved by up to half a gap by a hash of its number, so that the same
input gives the same run. Demand is the fitted averages' own measure (``placement.demand``), and
the time to the first token the median of who came in the last minute, as the product has it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from controlplane.placement.autoscale import (
    DEFAULT_POLICY,
    TARGET_TTFT_S,
    Load,
    Memory,
    Policy,
    changed,
    decide,
)
from controlplane.placement.demand import Recent
from controlplane.placement.settling import Settling

DEMAND_S = (80.0, 320.0)  # averages, of which the higher counts
TTFT_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """What one replica does. ``seed`` moves the arrivals."""

    num_slots: int
    service_s: float
    load_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The state after one second, ``at`` seconds from the beginning."""

    at: float
    rate: float
    num: int
    num_ready: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class _Fleet:
    node: Node
    running: list[float] = field(default_factory=list)  # when each will be done
    waiting: deque[float] = field(default_factory=deque)  # when each came
    ready_at: list[float] = field(default_factory=list)
    told: deque[tuple[float, float]] = field(default_factory=deque)  # when it came, how it waited

    def step(self, now: float) -> None:
        self.running = [until for until in self.running if until > now]
        free = self.num_ready(now) * self.node.num_slots - len(self.running)
        came = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running += [now + self.node.service_s] * len(came)
        self.told.extend((at, now - at) for at in came)
        while self.told and self.told[0][0] <= now - TTFT_S:
            self.told.popleft()

    def ttft_s(self, since: float | None) -> float:
        waits = sorted(wait for at, wait in self.told if since is not None and at >= since)
        return waits[len(waits) // 2] if waits else 0.0

    def num_ready(self, now: float) -> int:
        return sum(at <= now for at in self.ready_at)

    def become(self, num: int, now: float) -> None:
        while len(self.ready_at) < num:
            self.ready_at.append(now + self.node.load_s)
        del self.ready_at[num:]


def scale(
    rate: Callable[[float], float],
    seconds: int,
    node: Node,
    low: int,
    high: int,
    policy: Policy = DEFAULT_POLICY,
    num_piled: int = 0,
) -> Iterator[Step]:
    """``rate`` is in requests a minute at a second; one step for each second. ``num_piled``:
    requests that wait when it begins."""
    fleet, memory, recent = _Fleet(node), Memory(), Recent(len(DEMAND_S))
    settling = Settling(policy)
    fleet.waiting.extend([0.0] * num_piled)
    arrivals, asked_at, num = _Arrivals(rate, node.seed), -policy.idle_s, low
    fleet.become(low, -node.load_s)
    for second in range(seconds):
        now = float(second)
        for at in arrivals.until(now):
            fleet.waiting.append(at)
            recent.note(at, DEMAND_S)
        fleet.step(now)
        num_open = len(fleet.running) + len(fleet.waiting)
        asked_at = now if num_open else asked_at
        demand = max(recent.rates(now, DEMAND_S))
        num_ready = fleet.num_ready(now)
        settled = settling.since("", num, num_ready, num_open, node.num_slots, now)
        load = Load(
            num, low, high, num_ready, num_open, num_slots=node.num_slots,
            ttft=fleet.ttft_s(settled) / TARGET_TTFT_S["standard"],
            demand=demand, idle_s=now - asked_at,
        )  # fmt: skip
        verdict, memory = decide(load, memory, now, policy)
        if verdict is not None:
            num, memory = verdict.after, changed(memory, load, verdict, now)
            fleet.become(num, now)
        yield Step(
            now, rate(now), num, fleet.num_ready(now), len(fleet.running), len(fleet.waiting)
        )


class _Arrivals:
    """The n-th request comes when the integral of the rate has reached n, give or take half."""

    def __init__(self, rate: Callable[[float], float], seed: int) -> None:
        self._rate, self._seed, self._sum, self._next, self._num = rate, seed, 0.0, 0.5, 0

    def until(self, now: float) -> Iterator[float]:
        self._sum += self._rate(now) / 60
        while self._sum >= self._next:
            yield now
            self._num += 1
            digest = blake2b(b"%d %d" % (self._seed, self._num), digest_size=2).digest()
            moved = int.from_bytes(digest, "big") / 65536 - 0.5
            self._next = self._num + 0.5 + (moved if self._seed else 0.0)
