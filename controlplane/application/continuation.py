"""A generation whose replica is gone goes on with another one, from the tokens that were sent.

What a client was sent is known here to the token, so another replica of the version gets prompt and
tokens, computes them as one prompt, and goes on as if it had been preempted there: the draw at an
index is the seed's at that index, penalties and ``max_tokens`` count what was sent, and a stop
string or a character may begin before the cut and end after it::

    attempt 1   n1   prompt of 40, max_tokens 100     tokens 0 to 29     n1 is killed
    (15 s)           nobody hears n1
    attempt 2   n2   prompt of 40, sent 30            tokens 30 to 69    its worker is killed
    (8 s)            no other replica: ": waiting reason=continuation …" until n2 has one again
    attempt 3   n2   prompt of 40, sent 70            tokens 70 to 99, length

On record that is one request with three attempts of 30, 40 and 30 tokens. Each has a request id of
its own on the bus, so nothing that an earlier one still says is taken for the present one's.

A node that is silent is suspect long before it is lost, and may yet come back. What it was silent
about goes elsewhere as soon as it is suspect, if another replica is ready then or becomes so; else
it stays, and waits for that node. The attempt that is left is cancelled and forgotten here: a node
that goes on after all stops, and is heard by nobody meanwhile::

    0.0 s    n1 falls silent; a has 30 tokens of it
    5.8 s    b is sent to n1, which looks well still
    6.1 s    NodeSuspected(n1): a goes to n2 with its 30 tokens, b from its start
    6.2 s    a's 31st token and b's first come from n2
    9.0 s    n1 goes on, and finds both cancelled; did it say a's 31st token before it does, that
             would be attempt 1's, which is nobody's
    15.0 s   (NodeLost, if n1 had stayed silent: what had no other replica moves now)

On record a has attempts of 30 and 70 tokens, b of 0 and 100. What n1 computed of either and nobody
was sent is billed to nobody. So it is with tokens and without, after a true alarm and a false one,
which costs a prompt that is computed twice. It takes more than the log's word: a node that this
gateway hears is not left, since then it is the controller that does not hear it, nor a generation
of which a token came within ``QUIET_S``. Two things stay until the node is lost: what has tokens
and a presence or frequency penalty, which not every engine can go on with
(``continuation_unsupported``), and what was moved so often that losing the next replica would end
it.

It has bounds. A choice is moved ``MAX_CONTINUATIONS`` times; attempts that were refused before they
began do not count. One that dies with its engine before its first token, and then does so again, is
not tried a third time: it may be what kills them. Without a replica it waits as long as its class
waits for a model to load, from the loss on. So does what had no token yet, unless all that it found
were full queues: its client is told so at once. What waits is refused as a new request that is held
would be (``hold``), once the planner finds no place for its version. A node that restarts keeps its
replicas' places until it is lost::

     0.0 s    n1, the only node, falls silent; a has 30 tokens of it
     6.1 s    NodeSuspected(n1): there is no other replica, a stays
    15.0 s    NodeLost(n1): a waits; there is no place for its version now
    15.5 s    b, a new request, is held
    18.0 s    a is refused with the planner's reason, 30 tokens billed; b half a second later
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.application.hold import HOLD_S, Unplaced, is_hopeless, unplaced
from controlplane.application.inference import Placer
from controlplane.application.refused import Refused

if TYPE_CHECKING:
    from controlplane.application.call import Call, Part

MAX_CONTINUATIONS = 3
MAX_ATTEMPTS = 3  # of what has no token yet
MAX_STILLBORN = 2  # attempts whose engine died before their first token
QUIET_S = 4.0  # two heartbeats: a node that was heard within it is not left
REST_S = 3.0  # a replica that failed is not asked again before its telemetry can say so
POLL_S = 0.1

# The replica's queue, or the tenant's part of it; said as it is, and another replica may have room.
QUEUE_FULL = frozenset({"overloaded", "tenant_queue_full"})
REFUSED = QUEUE_FULL | {"replica_not_ready", "node_unreachable", "not_sent"}
ENGINE_LOST = frozenset({"engine_lost", "worker_lost", "replica_lost", "worker_died"})
RETIRED = "replica_retired"  # the replica was to end, and its time to finish was over
SILENT = "engine_silent"  # no token for too long, from a node that is heard
SUSPECT = "node_suspect"  # no token, from a node that is not, and another replica is ready
MOVABLE = (
    REFUSED
    | ENGINE_LOST
    | {RETIRED, SILENT, SUSPECT, "node_lost", "node_restarted", "stream_corrupt", "cancelled"}
)
_WAITED_FOR = frozenset({"model_not_ready", "bus_unavailable"})

_log = logging.getLogger(__name__)


def cause_of(finish_reason: str, error_code: str) -> str:
    """Why an attempt that ended so is to be followed by another one; "" if it is not.

    A cancellation that nobody here asked for is a node's whose lease of this gateway ran out.
    """
    cause = "cancelled" if finish_reason == "cancelled" else error_code
    return cause if finish_reason in ("error", "cancelled") and cause in MOVABLE else ""


@dataclass(slots=True)
class Course:
    """What has become of a choice's attempts; times are monotonic seconds."""

    num_lost: int = 0
    num_stillborn: int = 0
    cause: str = ""  # of a loss that no attempt has followed yet
    lost_at: float | None = None  # since when nothing new has come
    failed: dict[str, float] = field(default_factory=dict)  # replica -> when
    unplaced: Unplaced = field(default_factory=Unplaced)

    def lose(self, cause: str, num_new: int, attempt: int, has_tokens: bool, now: float) -> bool:
        """An attempt that brought ``num_new`` tokens is over; whether another may follow."""
        if num_new or self.lost_at is None:
            self.lost_at = now
        if cause in REFUSED and not num_new:
            return has_tokens or attempt < MAX_ATTEMPTS
        self.num_lost, self.cause = self.num_lost + 1, cause
        self.num_stillborn += cause in ENGINE_LOST and not num_new
        if self.num_stillborn >= MAX_STILLBORN:
            return False
        return self.num_lost <= MAX_CONTINUATIONS if has_tokens else attempt < MAX_ATTEMPTS

    def may_leave(self, attempt: int, has_tokens: bool) -> bool:
        """Whether, after one more loss, yet another would still be followed by an attempt."""
        num_left = MAX_CONTINUATIONS - self.num_lost if has_tokens else MAX_ATTEMPTS - attempt
        return num_left > 1

    def excluded(self, now: float) -> frozenset[str]:
        """Replicas not to be asked now; what waits tries one that failed again later."""
        return frozenset(one for one, at in self.failed.items() if now - at < REST_S)


class Continuations:
    """Choices that no replica takes for the moment; of one gateway, in its event loop.

    ``send`` sends one again and raises Refused; ``give_up`` ends it, with a reason if there is one.
    """

    def __init__(
        self,
        placer: Placer,
        monotonic: Callable[[], float],
        send: "Callable[[Call, Part], Awaitable[None]]",
        give_up: "Callable[[Call, Part, Refused | None], None]",
        deadlines: Mapping[str, float] = HOLD_S,
    ) -> None:
        self._placer, self._monotonic = placer, monotonic
        self._send, self._give_up, self._deadlines = send, give_up, deadlines
        self._waiting: list[tuple[Call, Part]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, call: "Call", part: "Part", refusal: Refused) -> None:
        """``part``, which was refused so, waits for a replica, or its call ends."""
        if not self._waits(call, part, refusal):
            return
        call.wait_for(part)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())

    def _waits(self, call: "Call", part: "Part", refusal: Refused) -> bool:
        """Put ``part`` among those that wait, if it may; else end its call."""
        may_wait = self._may_wait(call, part, refusal)
        reason = self._hopeless(call, part) if may_wait else None
        if not may_wait or reason is not None:
            self._give_up(call, part, reason)
            return False
        self._waiting.append((call, part))
        return True

    def _may_wait(self, call: "Call", part: "Part", refusal: Refused) -> bool:
        job, lost_at = call.job, part.course.lost_at
        if lost_at is None or refusal.code not in _WAITED_FOR:
            return False
        if call.first_at is None and part.set_back and part.set_back.code in QUEUE_FULL:
            return False
        return self._placer.gone(job.version_id) is None and self._left_s(call, lost_at) > 0

    def _left_s(self, call: "Call", lost_at: float) -> float:
        """For how long what was lost then may wait yet."""
        allowed = self._deadlines.get(call.job.latency_class, HOLD_S["standard"])
        return lost_at + allowed - self._monotonic()

    def _hopeless(self, call: "Call", part: "Part") -> Refused | None:
        """What a new request for the version is told, where that is not waited for, either."""
        version_id, now = call.job.version_id, self._monotonic()
        gap, expected = self._placer.gap(version_id), self._placer.wait_s(version_id) or 0.0
        unplaced_s = part.course.unplaced.seconds(gap, now)
        left = self._left_s(call, now if part.course.lost_at is None else part.course.lost_at)
        if gap is None or not is_hopeless(gap, unplaced_s, left, expected):
            return None
        return unplaced(gap, expected)

    async def _drain(self) -> None:
        while self._waiting:
            await asyncio.sleep(POLL_S)
            waiting, self._waiting = self._waiting, []
            for call, part in waiting:
                await self._try(call, part)

    async def _try(self, call: "Call", part: "Part") -> None:
        """Send it, keep it waiting, or end it; nothing if its call has ended."""
        if call.error is not None or call.is_finished:
            return
        try:
            await self._send(call, part)
        except Refused as refusal:
            self._waits(call, part, refusal)
        except Exception:
            _log.exception("request %s could not be continued", call.job.request_id)
            self._give_up(call, part, None)
