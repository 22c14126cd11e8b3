"""Requests for a model that is not there: held in the gateway while it loads, or refused at once.

A version is cold while none of its replicas is ready, be it that it is scaled to zero, still loads,
or lies in host memory or on disk. Its request is on record by then, and that is what wakes the
version: the controller reads in the ledger what is open (``application.demand``). So any number of
requests, in any number of gateways, load it once::

    t = 0.0    a, standard class: 12 s to load by its last time, 60 s allowed: held, first
    t = 0.5    b, realtime class: 11.5 s to load, 10 s allowed: refused, Retry-After 12
    t = 1.0    c, standard: held, second
    t = 11.8   a replica is ready: a is sent, then c

Held requests of a version are sent in the order in which they came. Each ends at its class's
deadline at the latest; one whose client leaves ends at once, with no token, and so does one whose
version is retired. A version that fits nowhere for ``UNPLACED_S`` is given up with the planner's
reason: for so long an idle model may still make room for it. One that failed is waited for while
its next try and the load after it end in time; one that no try can mend, or that has failed twice
in a row wherever it is (``gaps``), is not: whoever waits for its third try mostly waits for a third
failure, and could have been told so a minute ago::

    t = 20.0   the load of a fails, tried again in 10 s, 12 s to load: 23 s of 40 left: held
    t = 31.0   it fails again, tried again in 20 s
    t = 32.0   d comes: 32 s of 60 allowed, and refused, Retry-After 32
    t = 34.0   no other node has taken it: a is refused, Retry-After 30
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from controlplane.application.inference import Gap, Placer
from controlplane.application.refused import Refused

if TYPE_CHECKING:
    from controlplane.application.call import Call

HOLD_S: Mapping[str, float] = {"realtime": 10.0, "standard": 60.0, "batch": 300.0}
MAX_HELD = 256  # of one version in one gateway
UNPLACED_S = 3.0
POLL_S = 0.05

_log = logging.getLogger(__name__)


def parse_deadlines(text: str) -> Mapping[str, float]:
    """The defaults, with the classes that ``text`` (JSON) names replaced; raises ValueError."""
    given = msgspec.json.decode(text, type=dict[str, float]) if text else {}
    for name, seconds in given.items():
        if name not in HOLD_S or not 0 <= seconds <= 3600:
            raise ValueError(f"hold deadlines: {name!r} is a class, with seconds up to 3600")
    return {**HOLD_S, **given}


class NotLoadedYet(Refused):
    """The version's tokenizer is unknown: no node has ever loaded it."""

    def __init__(self, version_id: str) -> None:
        text = f"No node has loaded '{version_id}' yet."
        super().__init__("model_not_ready", text, "model", retry_after=2)


@dataclass(slots=True)
class Unplaced:
    """Since when somebody who waits has seen that there is a gap; monotonic seconds."""

    since: float | None = None

    def seconds(self, gap: Gap | None, now: float) -> float:
        """For how long there has been a gap; 0 without one."""
        if gap is None:
            self.since = None
            return 0.0
        if self.since is None:
            self.since = now
        return now - self.since


@dataclass
class Queue:
    """The held calls of one version, the first the next."""

    calls: "deque[Call]" = field(default_factory=deque)
    unplaced: Unplaced = field(default_factory=Unplaced)


@dataclass(frozen=True)
class Held:
    """What a held call tells its client. ``until``: monotonic, its class's deadline."""

    until: float
    queue: Queue
    expected: Callable[[], float]

    def position(self, call: "Call") -> int:
        """1 is the next."""
        return self.queue.calls.index(call) + 1 if call in self.queue.calls else 1


class Holds:
    """The held calls of one gateway, by version; in its event loop.

    ``send`` encodes what is not encoded yet and sends all parts; it raises Refused.
    """

    def __init__(
        self,
        placer: Placer,
        monotonic: Callable[[], float],
        send: "Callable[[Call], Awaitable[None]]",
        deadlines: Mapping[str, float] = HOLD_S,
    ) -> None:
        self._placer, self._monotonic, self._send = placer, monotonic, send
        self._deadlines = deadlines
        self._queues: dict[str, Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        return sum(len(queue.calls) for queue in self._queues.values())

    def take(self, call: "Call", refusal: Refused) -> None:
        """Hold ``call``, which was refused so, or raise Refused: what is not cold for the same
        reason, what fits nowhere with the planner's, what would take too long with the estimate."""
        job, version_id = call.job, call.job.version_id
        expected = self._placer.wait_s(version_id)
        if expected is None:
            raise refusal
        allowed = self._deadlines.get(job.latency_class, HOLD_S["standard"])
        self._check(call, expected, allowed)
        queue = self._queues.get(version_id)
        if queue is None:
            queue = self._queues[version_id] = Queue()
            task = asyncio.create_task(self._drain(version_id, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(queue.calls) >= MAX_HELD:
            text = f"{MAX_HELD} requests wait for this model to load already."
            raise Refused("overloaded", text, "model", retry_after=expected)
        queue.calls.append(call)
        until = job.began + allowed
        call.hold(Held(until, queue, lambda: self._placer.wait_s(version_id) or 0.0))

    def _check(self, call: "Call", expected: float, allowed: float) -> None:
        """Raise Refused where it is no use to wait."""
        job, version_id = call.job, call.job.version_id
        gone = self._placer.gone(version_id)
        if gone is not None:
            raise gone
        gap = self._placer.gap(version_id)
        if gap is None and version_id not in self._queues:
            gap = self._placer.tried(version_id)
        if gap is not None and (gap.lasts or gap.keeps_failing or expected > allowed):
            raise unplaced(gap, expected)
        if expected > allowed:
            raise _too_long(job.requested_model, expected, job.latency_class, allowed)

    async def _drain(self, version_id: str, queue: Queue) -> None:
        """Send them in order as soon as a replica is ready; let go of those that have ended."""
        try:
            while queue.calls:
                self._let_go(version_id, queue)
                while queue.calls and await self._sent(queue.calls[0]):
                    queue.calls.popleft()
                if queue.calls:
                    await asyncio.sleep(POLL_S)
        finally:
            if self._queues.get(version_id) is queue:
                del self._queues[version_id]

    def _let_go(self, version_id: str, queue: Queue) -> None:
        now, gone = self._monotonic(), self._placer.gone(version_id)
        gap, expected = self._placer.gap(version_id), self._placer.wait_s(version_id) or 0.0
        unplaced_s = queue.unplaced.seconds(gap, now)
        for call in queue.calls:
            left = call.held.until - now if call.held else 0.0
            if gone is not None:
                call.fail(gone)
            elif gap is not None and is_hopeless(gap, unplaced_s, left, expected):
                call.fail(unplaced(gap, expected))
            elif call.held is not None and left <= 0:
                call.fail(_expired(call, expected))
        queue.calls = deque(call for call in queue.calls if call.error is None)

    async def _sent(self, call: "Call") -> bool:
        """Whether ``call`` needs no further holding: it was sent, or has failed."""
        try:
            await self._send(call)
        except Refused as refusal:
            if refusal.code == "model_not_ready":
                return False
            call.fail(refusal)
        except Exception:
            _log.exception("request %s could not be sent", call.job.request_id)
            call.fail(Refused("internal_error", "The request could not be sent."))
        return True


def _too_long(model: str, expected: float, latency_class: str, allowed: float) -> Refused:
    text = (
        f"'{model}' is not loaded; that takes about {expected:.0f} s, and a request of class "
        f"{latency_class} waits {allowed:g} s at most. It is being loaded."
    )
    return Refused("model_cold", text, "model", retry_after=expected)


def is_hopeless(gap: Gap, unplaced_s: float, left: float, expected: float) -> bool:
    """Seconds: since when it fits nowhere, until the call's deadline, until it can be loaded."""
    if gap.lasts or unplaced_s < UNPLACED_S:
        return gap.lasts
    return gap.retry_s is None or gap.keeps_failing or expected > left


def unplaced(gap: Gap, expected: float) -> Refused:
    """Without a time to come back where none would help; else, of what failed, that of its next
    try and the load."""
    again = 10.0 if gap.retry_s is None else expected
    if gap.lasts:
        return Refused("model_not_ready", gap.reason, "model")
    return Refused("model_not_ready", gap.reason, "model", retry_after=again)


def _expired(call: "Call", expected: float) -> Refused:
    text = (
        f"'{call.job.requested_model}' was not loaded within the time that a request of class "
        f"{call.job.latency_class} waits; about {expected:.0f} s more are expected."
    )
    return Refused("hold_expired", text, "model", retry_after=max(1.0, expected))
