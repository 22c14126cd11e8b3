"""A request in flight: what its nodes bring, what its consumer takes, and when it is stuck.

One consumer reads a ``Call``; the bus's side feeds it through ``receive``, in the same event loop::

    receive(part, "The")      nothing is queued: the consumer's on_delta may take it at once
    receive(part, " end")     queued; wakes the consumer that waits in next()
    receive(part, finish)     the choice has ended, or goes on elsewhere: see ``continuation``

Once a second ``check`` gives up what an engine or a node has left silent, and cuts a reader that
leaves too much unread.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from controlplane.application.continuation import (
    ENGINE_LOST,
    MOVABLE,
    QUEUE_FULL,
    QUIET_S,
    RETIRED,
    SILENT,
    SUSPECT,
    Course,
    cause_of,
)
from controlplane.application.inference import Job, Seen, Target
from controlplane.application.ports import Terminal
from controlplane.application.refused import Refused

if TYPE_CHECKING:
    from controlplane.application.explaining import Kept
    from controlplane.application.hold import Held
    from controlplane.application.serve import Serving

IDLE_S = 60.0  # without a token after the first one
QUEUE_S = 300.0  # without the first token
SLOW_READER_S = 30.0
SLOW_READER_DELTAS = 512
SLOW_READER_BYTES = 256 * 1024
HEARTBEAT_S = 10.0
HELD_HEARTBEAT_S = 2.0
QUEUE_RETRY_S = 2.0

_OUTCOMES = {"error": "error", "cancelled": "cancelled"}  # of an attempt; all else is ok
_SAID_AS_THEY_ARE = QUEUE_FULL | {RETIRED, "stream_corrupt"}


class Try(NamedTuple):
    """How one attempt ended and what it brought; ``began`` and ``ended`` are monotonic. See
    ``attempts``."""

    target: Target
    attempt: int
    outcome: str
    error_code: str
    num_cached_tokens: int
    num_output_tokens: int
    queue_ms: float | None
    began: float
    ended: float


@dataclass(slots=True)
class Part:
    """One choice: the attempts that produce it, one after the other, and what they have produced.

    ``num_before`` of its tokens were there when the present attempt began, which ``is_running``
    until it has ended or is given up.
    """

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    request_id: str
    input_lengths: tuple[int, ...] = ()  # of the inputs that it embeds; empty: it generates
    target: Target | None = None
    attempt: int = 0
    num_output_tokens: int = 0
    num_before: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # of the inputs that it embeds, by the attempt that ended it
    num_pending_tokens: int = 0  # of the prompt, until the attempt brings a token
    queue_ms: float | None = None  # of the first attempt that brought a token
    attempt_queue_ms: float | None = None
    heard_at: float = 0.0
    is_running: bool = False
    finish_reason: str = ""
    error: Refused | None = None
    set_back: Refused | None = None  # why the last attempt that was given up failed
    sent_at: float = 0.0
    tries: list[Try] = field(default_factory=list)
    seen: Seen | None = None  # the last choice, until it is sent
    kept: "list[Kept]" = field(default_factory=list)  # choices that go on record
    course: Course = field(default_factory=Course)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def order_id(self) -> str:
        """The present attempt's request id on the bus; an earlier one's words are not its."""
        return self.request_id if self.attempt <= 1 else f"{self.request_id}_{self.attempt}"

    @property
    def num_new(self) -> int:
        """Tokens of the present attempt."""
        return self.num_output_tokens - self.num_before

    @property
    def has_all_tokens(self) -> bool:
        """Only the word that they were the last may be missing; vectors come with that word."""
        return not self.input_lengths and self.num_output_tokens >= self.max_tokens

    def saw(self, seen: Seen) -> None:
        """A replica is being chosen; see ``explaining``."""
        self.seen = seen

    def begin(self, target: Target, now: float) -> None:
        """Another attempt."""
        self.target, self.attempt = target, self.attempt + 1
        self.heard_at = self.sent_at = now
        self.num_before, self.attempt_queue_ms = self.num_output_tokens, None
        self.course.failed[target.replica_id] = now

    def add(self, delta: Any) -> None:
        """Tokens have come."""
        if self.attempt_queue_ms is None:
            self.note_queue(delta.queue_ms)
            self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_output_tokens = delta.index + len(delta.token_ids)
        self.token_ids.extend(delta.token_ids)

    def note_queue(self, queue_ms: float) -> None:
        """The present attempt has begun to compute, after so long in the engine's queue."""
        self.attempt_queue_ms = queue_ms
        self.queue_ms = queue_ms if self.queue_ms is None else self.queue_ms

    def note(self, outcome: str, error_code: str, now: float) -> None:
        """The present attempt is over."""
        if self.target is not None:
            num_cached = 0 if self.num_before else self.num_cached_tokens
            counts = (num_cached, self.num_new, self.attempt_queue_ms)
            how = (outcome, error_code, *counts, self.sent_at, now)
            self.tries.append(Try(self.target, self.attempt, *how))


@dataclass(frozen=True, slots=True)
class Rest:
    """What the last delta of a lost attempt brought."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Any, ...]
    finish_reason: str = ""


class Call:
    """A request in flight. ``next`` and ``finish`` are for one consumer; the rest is internal.

    While the consumer waits in ``next``, it may take deltas that nothing is queued before from
    ``on_delta`` instead: called as they come, it says whether it took one.
    """

    def __init__(self, serving: "Serving", job: Job, parts: list[Part]) -> None:
        self._serving, self.job, self.parts = serving, job, parts
        self._pending: list[tuple[Part, Any]] = []
        self._pending_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lost: list[Part] = []  # to be continued, and not tried yet
        self.num_open = len(parts)
        self.first_at: float | None = None
        self.error: Refused | None = None
        self.client_gone = False
        self.was_cut = False
        self.stopping = False
        self.written_at = job.began
        self.writing_since: float | None = None
        self.slow_since: float | None = None
        self.heartbeat = False
        self.on_cut: Callable[[], object] | None = None
        self.on_delta: Callable[[Part, Any], bool] | None = None
        self.held: Held | None = None
        self.waiting: list[Part] = []  # for a replica that continues them
        self.sending = asyncio.Lock()  # held while a held call is sent, and while it is ended
        self._finished = False

    # --- the consumer's side --------------------------------------------------------------------
    async def next(self) -> list[tuple[Part, Any]]:
        """New deltas; empty after the last one, and also for a heartbeat (then ``num_open``)."""
        while not self._pending:
            if self._lost and self.error is None:
                await self._serving.send_again(self, self._lost.pop())
                continue
            if self.num_open == 0 or self.error is not None or self.heartbeat:
                self.heartbeat = False
                return []
            self._waiter = self._serving.loop.create_future()
            await self._waiter
        batch, self._pending = self._pending, []
        self._pending_bytes = 0
        return batch

    def next_wake(self) -> "asyncio.Future[None]":
        """Drop what is queued; done once the call has something new to say."""
        self._pending.clear()
        self._pending_bytes = 0
        self._waiter = waiter = self._serving.loop.create_future()
        return waiter

    @property
    def is_over(self) -> bool:
        """Nothing more will come: all choices have ended, or the call has failed."""
        return not self._pending and (self.num_open == 0 or self.error is not None)

    @property
    def is_finished(self) -> bool:
        return self._finished

    @property
    def num_of_tenant(self) -> int:
        """Requests that this call's tenant has open in this gateway, this one included."""
        return self._serving.num_of_tenant[self.job.tenant_id]

    def client_left(self) -> None:
        """Nobody reads any more: the consumer is woken and sees ``is_over``."""
        self.client_gone = True
        self.fail(Refused("client_closed", "The client closed the connection."))

    def fail(self, error: Refused) -> None:
        """End the call with ``error`` unless it has ended."""
        if self.error is None and self.num_open:
            self.error = error
            self._wake()

    async def finish(self) -> Terminal | None:
        """Record the end, once: None if that was done before. Raises AuditUnavailable."""
        if self._finished:
            return None
        self._finished = True
        return await self._serving.end(self)

    # --- while its model loads ------------------------------------------------------------------
    def hold(self, held: "Held") -> None:
        """Not sent yet; the consumer is told so at once."""
        self.held, self.heartbeat = held, True

    def release(self) -> None:
        self.held = None

    # --- while no replica continues it ----------------------------------------------------------
    def wait_for(self, part: Part) -> None:
        """``part`` waits for a replica; the consumer is told so at once."""
        self.waiting.append(part)
        self.heartbeat = True
        self._wake()

    def sent(self, part: Part) -> None:
        """``part`` waits no more."""
        if part in self.waiting:
            self.waiting.remove(part)

    def give_up(self, part: Part, reason: Refused | None = None) -> None:
        """No other replica takes ``part``: the call ends, with ``reason`` if there is one."""
        self.sent(part)
        part.finish_reason = "error"
        self.num_open -= 1
        self.error = self.error or reason or nowhere_else(part)
        self._wake()

    # --- the bus's side -------------------------------------------------------------------------
    def receive(self, part: Part, delta: Any) -> None:
        """Take one delta; called in the event loop, for every token of every stream."""
        now = self._serving.monotonic()
        part.heard_at = now
        if delta.token_ids:
            if self.first_at is None:
                self.first_at = now
            if part.num_pending_tokens:
                self._serving.computed(part)
            part.add(delta)
        if delta.finish_reason:
            self._end_attempt(part, delta)
            if not part.finish_reason or part.error is not None:
                if not delta.token_ids and not delta.text:
                    self._wake()
                    return
                delta = Rest(delta.index, delta.token_ids, delta.text, delta.logprobs)
        elif self._takes_now(part, delta):
            return
        self._pending.append((part, delta))
        self._pending_bytes += len(delta.text)
        self._wake()

    def _takes_now(self, part: Part, delta: Any) -> bool:
        """Not when more is to come at once: then the consumer gets it together, in one write."""
        return (
            self.on_delta is not None
            and not self._pending
            and not self._serving.generator.is_behind
            and self.on_delta(part, delta)
        )

    def _end_attempt(self, part: Part, delta: Any) -> None:
        part.num_cached_tokens = max(part.num_cached_tokens, delta.num_cached_tokens)
        reason, error = delta.finish_reason, _error_of(delta)
        if part.input_lengths:
            self._note_embedded(part, delta, error is None)
        self._serving.left(part)
        part.note(_OUTCOMES.get(reason, "ok"), delta.error_code, part.heard_at)
        if error is not None and self._moves(part, cause_of(reason, delta.error_code)):
            part.set_back = error
            self._lost.append(part)
            return
        if error is not None and not self.stopping and part.has_all_tokens:
            reason, error = "length", None  # only its end was lost
        part.finish_reason = reason
        self.num_open -= 1
        if error is not None:
            part.error = error
            self.error = self.error or error

    def _note_embedded(self, part: Part, delta: Any, is_whole: bool) -> None:
        """How much was computed: of one that was stopped, what its node says."""
        num_told = min(delta.num_computed_tokens, len(part.prompt))
        part.num_computed_tokens = len(part.prompt) if is_whole else num_told
        if part.num_computed_tokens:
            part.note_queue(delta.queue_ms)

    def _moves(self, part: Part, cause: str) -> bool:
        """Whether another replica is to go on with ``part``, whose attempt is over."""
        has_tokens = part.num_output_tokens > 0
        if not cause or self.stopping or self.error is not None:
            return False
        if part.has_all_tokens:
            return False
        if part.target is not None:
            part.course.failed[part.target.replica_id] = part.heard_at
        return part.course.lose(cause, part.num_new, part.attempt, has_tokens, part.heard_at)

    def may_leave(self, part: Part, now: float) -> bool:
        """Whether another replica may go on with ``part``, if its node is suspect; see
        ``continuation``."""
        if not part.is_running or part.has_all_tokens or self.stopping or self.error is not None:
            return False
        if part.num_new and now - part.heard_at <= QUIET_S:
            return False
        has_tokens, sampling = part.num_output_tokens > 0, self.job.sampling
        if has_tokens and (sampling.presence_penalty or sampling.frequency_penalty):
            return False
        return part.course.may_leave(part.attempt, has_tokens)

    def leave(self, part: Part) -> None:
        """Its node is suspect: another replica goes on with ``part``."""
        self._abandon(part, SUSPECT, "The node is not heard.")

    def _abandon(self, part: Part, code: str, message: str) -> None:
        """The present attempt is over, whatever its node may still bring of it."""
        self._serving.generator.release(part.order_id)
        self.receive(part, _Ended(part.num_output_tokens, "error", code, message))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- once a second --------------------------------------------------------------------------
    def check(self, now: float) -> None:
        """Fail what is stuck, wake for a heartbeat what has long been silent."""
        self._check_reader(now)
        for part in self.parts:
            if not part.is_running or part.target is None or self.error:
                continue
            if now - part.heard_at > (IDLE_S if part.num_new else QUEUE_S):
                self._abandon(part, SILENT, "The engine stopped answering.")
            elif not self._serving.placer.is_heard(part.target.node_id):
                self._serving.lose_node(part.target.node_id)
        pause = HELD_HEARTBEAT_S if self.held is not None or self.waiting else HEARTBEAT_S
        if now - self.written_at > pause and self._waiter is not None:
            self.heartbeat = True
            self.written_at = now
            self._wake()

    def _check_reader(self, now: float) -> None:
        """A reader that leaves more than the mark unread, or one write waiting, for 30 s is cut."""
        over = len(self._pending) > SLOW_READER_DELTAS or self._pending_bytes > SLOW_READER_BYTES
        if self.writing_since is not None:
            self.slow_since = self.slow_since or self.writing_since
        elif not over:
            self.slow_since = None
        elif self.slow_since is None:
            self.slow_since = now
        if self.slow_since is not None and now - self.slow_since > SLOW_READER_S and self.on_cut:
            self.error = self.error or Refused("slow_reader", "The client does not read.")
            self.was_cut = True
            self.on_cut()


def nowhere_else(part: Part) -> Refused:
    """The end of a part that was given back, or whose replica is gone, and that no other takes."""
    if part.set_back is not None and part.set_back.code in QUEUE_FULL:
        return part.set_back
    if part.tries and part.tries[-1].error_code == RETIRED:
        return Refused(RETIRED, "The replica was retired and no other is ready.", retry_after=2)
    return Refused("engine_lost", "The engine was lost and no other is ready.", retry_after=2)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of an attempt that was given up here, as a delta."""

    index: int
    finish_reason: str
    error_code: str
    error_message: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Any, ...] = ()
    num_cached_tokens: int = 0
    queue_ms: float = 0.0
    num_computed_tokens: int = 0


def _error_of(delta: Any) -> Refused | None:
    """The error a terminal delta stands for; a cancellation nobody asked for is one too."""
    if delta.finish_reason == "error":
        code = delta.error_code or "engine_lost"
        if code in QUEUE_FULL:
            return Refused(code, delta.error_message, retry_after=QUEUE_RETRY_S)
        if code == SILENT:
            return Refused("engine_lost", delta.error_message, retry_after=1)
        if code in ENGINE_LOST or code in MOVABLE - _SAID_AS_THEY_ARE:
            return Refused("engine_lost", "The engine was lost.", retry_after=1)
        if code == RETIRED:
            message = "The replica was retired or moved, and its time to finish was over."
            return Refused(code, message, retry_after=1)
        return Refused(code, delta.error_message or "The engine failed.")
    if delta.finish_reason == "cancelled":
        return Refused("engine_lost", "The generation was cancelled.", retry_after=1)
    return None
