"""How many replicas of a version the load asks for: up quickly, down slowly, never to and fro.

Three figures press for one more, once they have done so for ``up_after_s`` and all replicas that
were asked for are ready: the share of slots that requests take or wait for, the share of KV blocks
in use, and the time to the first token against its latency class's target. One less is right once
the rest would for ``down_after_s`` have had so much to spare that they would not press at once
(``slots_down``, ``kv_down``): that gap is the hysteresis.

The time to the first token does not fall in proportion to the replicas, so a gap of shares alone
does not keep a fleet from growing for its sake, shrinking for its idle slots and growing again.
Therefore what was too few is remembered with the demand (requests a minute) it was too few for,
and the fleet shrinks to that number again only once demand is below ``tolerance`` of it. Worked
example, 8 slots a replica, between 1 and 4::

    demand 60, open 8 of 8 slots for 15 s    queue: 1 -> 2, and 1 was too few for 60 a minute
    demand 60, open 6 of 16                  2 stay: one would have 6 of 8, above slots_down
    demand 60, open 3 of 16                  2 stay all the same: 60 > 0.8 x 60
    demand 40, open 3 of 16 for 120 s        slack: 2 -> 1

Under a demand that holds, each number can be found too few only once, so the number goes up at most
as often as there are replicas to add, and down at most as often as it had overshot.

What had piled up before a number of replicas was ready says little about that number. While it
drains nothing is added, and if it drains too slowly and one is added for that, the number that was
draining it is not remembered as too few: without the pile it may do::

    40 were held while 1 loaded, 36 open after 15 s     they drain, nothing is added
    36 open still after 15 s more                       queue: 1 -> 2, though less than at first
    the pile is gone, 3 open for 120 s                  slack: 2 -> 1, of which nothing bad is known

So what was added for a pile goes again, as far as the rest would not press: the gap between
``slots_down`` and ``slots_up`` would keep it for good, though the load never asked for it. If the
rest presses after all, that is known of it from then on, and it is not tried again::

    20 open for 2 loaded replicas, 60 piled up          queue: 2 -> 4
    the pile is gone, 20 open of 32 for 120 s           slack: 4 -> 3, which have 20 of 24
    20 open of 24                                       3 stay: 2 would have 20 of 16

Nor do first tokens count that waited behind a pile (``settling``).

With a minimum of 0 the last replica goes when nothing was asked for ``idle_s`` and nothing is
expected; a request that finds no replica wakes the version at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TARGET_TTFT_S = {"realtime": 0.5, "standard": 2.0, "batch": 30.0}


@dataclass(frozen=True, slots=True)
class Policy:
    """Shares are of all slots or KV blocks; ``fill`` is what an increase for the queue aims at."""

    slots_up: float = 0.9
    slots_down: float = 0.5
    fill: float = 0.7
    kv_up: float = 0.9
    kv_down: float = 0.6
    tolerance: float = 0.8
    up_after_s: float = 15.0
    down_after_s: float = 120.0
    idle_s: float = 300.0
    keep_expected: float = 0.35


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Load:
    """One version now. ``num_open``: requests admitted and not ended, waiting ones included.

    ``num_asked``: requests that came within the last half minute and since the number last
    changed, those that were not let wait included. ``num_slots``: of one replica. ``kv_used``:
    share over all replicas. ``ttft``: the worst class's time to the first token over its target, 0
    if none is known since the number last changed. ``demand``: requests a minute. ``expected``:
    requests in the next five minutes. ``idle_s``: since something was last open.
    """

    num: int
    low: int
    high: int
    num_ready: int = 0
    num_open: int = 0
    num_asked: int = 0
    num_slots: int = 1
    kv_used: float = 0.0
    ttft: float = 0.0
    demand: float = 0.0
    expected: float = 0.0
    idle_s: float = 0.0

    @property
    def slots_used(self) -> float:
        return self.num_open / max(1, self.num_slots * self.num)

    def readings(self) -> tuple[tuple[str, float], ...]:
        """What a decision was made from, by name."""
        names = ("num_ready", "num_open", "num_asked", "num_slots", "slots_used", "kv_used", "ttft")
        rest = ("demand", "expected", "idle_s")
        return tuple((name, float(getattr(self, name))) for name in (*names, *rest))


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of a version from round to round. ``since``: of its last change.

    ``pressed_since`` and ``slack_since``: from when on the load asked for more or less without a
    pause, None if it does not. ``open_then``: what was open when it began to press, or when
    it was last looked whether that drains. ``has_pile``: it has pressed ever since as many as
    wanted were ready. ``for_pile``: it was for
    a pile that the number was raised last. ``too_few``: demand by number of replicas that it was
    too much for.
    """

    since: float = 0.0
    pressed_since: float | None = None
    slack_since: float | None = None
    open_then: int = 0
    has_pile: bool = True
    for_pile: bool = False
    too_few: Mapping[int, float] = field(default_factory=dict)


MORE = ("queue", "kv_pressure", "ttft")  # codes of an increase that a load has forced


@dataclass(frozen=True, slots=True)
class Verdict:
    """``is_for_pile``: else an increase says that the number before is too few for the demand."""

    after: int
    code: str  # woken | queue | kv_pressure | ttft | slack | idle
    reason: str
    is_for_pile: bool = False


def changed(memory: Memory, load: Load, verdict: Verdict, now: float) -> Memory:
    """What is remembered once ``verdict`` is carried out; as ``domain.scaling`` folds it."""
    too_few, for_pile = dict(memory.too_few), verdict.is_for_pile
    if verdict.code in MORE and not for_pile:
        too_few[load.num] = load.demand
    is_less = verdict.code == "slack"
    if is_less:  # nothing has piled up before it: what presses now is the load itself
        for_pile = memory.for_pile
    return Memory(since=now, has_pile=not is_less, for_pile=for_pile, too_few=too_few)


def decide(
    load: Load, memory: Memory, now: float, policy: Policy = DEFAULT_POLICY
) -> tuple[Verdict | None, Memory]:
    """The change that is due, if one is, and what to remember until the next round."""
    if load.num == 0:
        return _wake(load), replace(memory, pressed_since=None, slack_since=None)
    pressure = _pressure(load, policy) if load.num_ready >= load.num else ""
    has_slack = not pressure and _has_slack(load, memory, policy)
    memory = _noted(memory, load, bool(pressure), has_slack, now)
    if _has_lasted(memory.pressed_since, policy.up_after_s, now) and load.num < load.high:
        if pressure == "queue" and load.num_open < memory.open_then:  # what had piled up drains
            return None, replace(memory, pressed_since=now, open_then=load.num_open)
        return _more(load, pressure, memory.has_pile, policy), memory
    if _has_lasted(memory.slack_since, policy.down_after_s, now):
        return _less(load), memory
    return _sleep(load, memory, now, policy), memory


def _noted(memory: Memory, load: Load, presses: bool, has_slack: bool, now: float) -> Memory:
    begins = presses and memory.pressed_since is None
    return replace(
        memory,
        pressed_since=_since(presses, memory.pressed_since, now),
        slack_since=_since(has_slack, memory.slack_since, now),
        open_then=load.num_open if begins else memory.open_then,
        has_pile=memory.has_pile and (presses or load.num_ready < load.num),
    )


def _has_lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


def _since(holds: bool, since: float | None, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def _wake(load: Load) -> Verdict | None:
    num = max(load.num_open, load.num_asked)
    if not num or not load.high:
        return None
    requests = "1 request" if num == 1 else f"{num} requests"
    return Verdict(1, "woken", f"{requests} came for it, and it is scaled to zero.")


def _pressure(load: Load, policy: Policy) -> str:
    if load.slots_used > policy.slots_up:
        return "queue"
    if load.kv_used > policy.kv_up:
        return "kv_pressure"
    return "ttft" if load.ttft > 1 else ""


def _has_slack(load: Load, memory: Memory, policy: Policy) -> bool:
    rest = load.num - 1
    if rest < max(1, load.low):
        return False
    grown = load.num / rest
    was_too_much = [demand for num, demand in memory.too_few.items() if num >= rest]
    return (
        load.slots_used * grown < (policy.slots_up if memory.for_pile else policy.slots_down)
        and load.kv_used * grown < policy.kv_down
        and load.ttft <= 1
        and all(load.demand <= policy.tolerance * demand for demand in was_too_much)
    )


def _more(load: Load, code: str, has_pile: bool, policy: Policy) -> Verdict:
    """One more; for a queue as many as it fills, at most twice what there is."""
    after = load.num + 1
    if code == "queue":
        filled = math.ceil(load.num_open / (load.num_slots * policy.fill))
        after = max(after, min(filled, 2 * load.num))
    says = {
        "queue": f"{load.num_open} requests for {load.num_slots * load.num} slots",
        "kv_pressure": f"{load.kv_used:.0%} of the KV blocks are in use",
        "ttft": f"the first token takes {load.ttft:.1f} times its target",
    }
    text = f"More is asked of it than it can do: {says[code]}."
    if has_pile:
        text += " It may be for what had piled up before."
    return Verdict(min(after, load.high), code, text, has_pile)


def _less(load: Load) -> Verdict:
    rest = load.num - 1
    text = (
        f"{rest} can do what is asked of it: {load.num_open} open for {load.num_slots} slots each"
    )
    return Verdict(rest, "slack", f"{text}, {load.demand:.1f} requests a minute.")


def _sleep(load: Load, memory: Memory, now: float, policy: Policy) -> Verdict | None:
    """The last replica's end, where none need stay."""
    if load.num != 1 or load.low or load.num_open or load.expected >= policy.keep_expected:
        return None
    if min(load.idle_s, now - memory.since) < policy.idle_s:
        return None
    return Verdict(
        0, "idle", f"Nobody has asked for it for {load.idle_s:.0f} s, nor is expected to."
    )
