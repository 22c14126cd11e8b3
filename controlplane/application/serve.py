"""One inference request from its order to its record, free of HTTP and of the bus's format.

::

    call = await serving.start(job)      limits -> intent and reservation durable -> node -> sent
    while (deltas := await call.next()): tokens of all its choices, as the frames bring them
        ...
    await call.finish()                  terminal record durable; only now may a client hear "done"

A call has one part per choice, each a generation of its own on the nodes; the ledger knows only
the call. A part that fails before its first token is sent once more, to another replica: nothing
was shown, so nothing can be repeated. After its first token it fails for good, with a typed error.

Whatever happens, ``finish`` runs: a client that left, a reader too slow, a node lost, an exception
in the caller. It cancels what still runs, waits at most two seconds for the nodes' own counts, and
bills exactly the tokens that were produced.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from controlplane.application.ports import (
    AuditUnavailable,
    BudgetExceeded,
    Clock,
    Intent,
    Ledger,
    Terminal,
)
from controlplane.application.settle import Settler
from controlplane.domain.money import Price

MAX_ATTEMPTS = 3
CANCEL_WAIT_S = 2.0
IDLE_S = 60.0  # without a token after the first one
QUEUE_S = 300.0  # without the first token
LOST_S = 15.0  # node not heard
SLOW_READER_S = 30.0
SLOW_READER_DELTAS = 512
SLOW_READER_BYTES = 256 * 1024
HEARTBEAT_S = 10.0

_TRY_ELSEWHERE = frozenset(
    {"node_unreachable", "node_restarted", "node_lost", "replica_not_ready", "overloaded"}
)
_ENGINE_LOST = _TRY_ELSEWHERE | {"worker_lost", "replica_lost", "engine_lost", "worker_died"}


class Refused(Exception):
    """The caller gets no answer: ``code`` is stable, ``param`` names the field at fault.

    ``retry_after`` is in seconds. ``limits`` are the caller's rate limits at that moment.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        limits: Any = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.retry_after, self.limits = retry_after, limits


_STOPPED = Refused("internal_error", "The request was given up.")
_LEFT = frozenset({"client_closed", "slow_reader"})


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens; the defaults switch a feature off. ``logprobs`` None: not wanted."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class Order(msgspec.Struct, frozen=True):
    """One generation for one node."""

    request_id: str
    replica_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingOptions
    latency_class: str
    cache_salt: bytes
    attempt: int


class Delta(Protocol):
    """What one step added to one generation; the wire's struct of that name, see there."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error_code: str
    error_message: str
    num_cached_tokens: int
    queue_ms: float
    logprobs: tuple[Any, ...]


class Generator(Protocol):
    """The nodes, reached over the bus."""

    @property
    def is_behind(self) -> bool:
        """More deltas have come than the one that a sink is being called with."""

    async def generate(self, node_id: str, order: Order, sink: Callable[[Any], None]) -> None:
        """Start; ``sink`` gets every delta once and in order. Raises BusUnavailable."""

    async def cancel(self, request_id: str) -> None: ...

    def release(self, request_id: str) -> None: ...


class Target(msgspec.Struct, frozen=True):
    """Where a generation goes."""

    node_id: str
    replica_id: str


class Placer(Protocol):
    """Chooses among the replicas that are ready now; ``num_local`` counts ours by replica id."""

    def choose(self, job: "Job", excluded: frozenset[str], num_local: Mapping[str, int]) -> Target:
        """Raises Refused ``model_not_ready`` with the reasons."""

    def is_heard(self, node_id: str) -> bool:
        """False once the node has been silent for too long."""


class Limits(Protocol):
    """The tenant's rate, and how many requests it has open."""

    async def take(self, job: "Job") -> Any:
        """Its limits after this request; raises Refused, and then nothing was taken."""

    def give_back(self, job: "Job", num_tokens: int, was_refused: bool = False) -> None:
        """The request is over and used ``num_tokens`` of what it asked for; nothing at all, its
        place among the requests included, if it was refused after all."""


@dataclass(slots=True)
class Job:
    """A checked request: who asks, what was resolved, and the encoded prompts (one per part)."""

    request_id: str
    tenant_id: str
    subject: str
    tier: str
    endpoint: str
    requested_model: str
    route: str
    arm: str
    version_id: str
    latency_class: str
    budget_tokens: int | None
    budget_period: str
    price: Price
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    max_tokens: tuple[int, ...]
    sampling: SamplingOptions
    cache_salt: bytes
    began: float  # monotonic seconds
    limits: Any = None
    num_prompt_tokens: int = field(init=False)
    max_output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = sum(map(len, self.prompts))
        self.max_output_tokens = sum(self.max_tokens) * self.num_choices


@dataclass(slots=True)
class Part:
    """One choice: the generation that produces it, and what it has produced."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    request_id: str
    target: Target | None = None
    attempt: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    queue_ms: float | None = None
    heard_at: float = 0.0
    finish_reason: str = ""
    error: Refused | None = None
    failed: frozenset[str] = frozenset()


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
        self._retries: list[Part] = []
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
        self._finished = False

    # --- the consumer's side --------------------------------------------------------------------
    async def next(self) -> list[tuple[Part, Any]]:
        """New deltas; empty after the last one, and also for a heartbeat (then ``num_open``)."""
        while not self._pending:
            if self._retries:
                await self._serving._send_again(self, self._retries.pop())
                continue
            if self.num_open == 0 or self.error is not None or self.heartbeat:
                self.heartbeat = False
                return []
            self._waiter = self._serving.loop.create_future()
            await self._waiter
        batch, self._pending = self._pending, []
        self._pending_bytes = 0
        return batch

    @property
    def is_over(self) -> bool:
        """Nothing more will come: all choices have ended, or the call has failed."""
        return not self._pending and (self.num_open == 0 or self.error is not None)

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
        return await self._serving._finish(self)

    # --- the bus's side -------------------------------------------------------------------------
    def receive(self, part: Part, delta: Any) -> None:
        """Take one delta; called in the event loop, for every token of every stream."""
        now = self._serving.monotonic()
        part.heard_at = now
        if delta.token_ids:
            if self.first_at is None:
                self.first_at = now
            part.num_output_tokens = delta.index + len(delta.token_ids)
            if part.queue_ms is None:
                part.queue_ms = delta.queue_ms
        if delta.finish_reason:
            self._end_part(part, delta)
            if part.error is not None or self._retries:
                self._wake()
                return
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

    def _end_part(self, part: Part, delta: Any) -> None:
        part.num_cached_tokens = delta.num_cached_tokens
        self._serving.left(part)
        error = _error_of(delta)
        if error is not None and self._may_retry(part, delta.error_code):
            self._retries.append(part)
            return
        part.finish_reason = delta.finish_reason
        self.num_open -= 1
        if error is not None:
            part.error = error
            self.error = self.error or error

    def _may_retry(self, part: Part, code: str) -> bool:
        return (
            code in _TRY_ELSEWHERE
            and not self.stopping
            and not self.client_gone
            and part.num_output_tokens == 0
            and part.attempt < MAX_ATTEMPTS
        )

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- once a second --------------------------------------------------------------------------
    def check(self, now: float) -> None:
        """Fail what is stuck, wake for a heartbeat what has long been silent."""
        self._check_reader(now)
        for part in self.parts:
            if part.finish_reason or part.target is None or self.error:
                continue
            patience = IDLE_S if part.num_output_tokens else QUEUE_S
            if now - part.heard_at > patience:
                self.fail(Refused("engine_lost", "The engine stopped answering.", retry_after=1))
            elif not self._serving.placer.is_heard(part.target.node_id):
                self._serving.lose_node(part.target.node_id)
        if now - self.written_at > HEARTBEAT_S and self._waiter is not None:
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


def _error_of(delta: Any) -> Refused | None:
    """The error a terminal delta stands for; a cancellation nobody asked for is one too."""
    if delta.finish_reason == "error":
        code = delta.error_code or "engine_lost"
        if code in _ENGINE_LOST:
            return Refused("engine_lost", "The engine was lost.", retry_after=1)
        return Refused(code, delta.error_message or "The engine failed.")
    if delta.finish_reason == "cancelled":
        return Refused("engine_lost", "The generation was cancelled.", retry_after=1)
    return None


@dataclass
class Serving:
    """The request path of one gateway process; single-threaded, in one event loop."""

    ledger: Ledger
    settler: Settler
    generator: Generator
    placer: Placer
    limits: Limits
    clock: Clock
    gateway: str
    lose_node: Callable[[str], None]
    calls: dict[str, Call] = field(default_factory=dict)
    draining: bool = False
    num_local: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.monotonic = self.clock.monotonic

    def live(self) -> set[str]:
        """Request ids that must not be reaped: in flight here, or waiting to be recorded."""
        return {*self.calls, *self.settler.unsettled}

    async def start(self, job: Job) -> Call:
        """Admit and send; raises Refused. After it returns the caller must ``finish`` the call."""
        if self.draining:
            raise Refused("shutting_down", "This gateway is shutting down.", retry_after=1)
        job.limits = await self.limits.take(job)
        call = Call(self, job, _parts_of(job))
        self.calls[job.request_id] = call
        try:
            await self._admit(job)
        except BaseException:
            del self.calls[job.request_id]
            self.limits.give_back(job, 0, was_refused=True)
            raise
        try:
            await self._send_all(call)
        except BaseException as error:
            call.error = error if isinstance(error, Refused) else _STOPPED
            await call.finish()
            raise
        return call

    async def _admit(self, job: Job) -> None:
        try:
            await self.ledger.admit(_intent_of(job, self.gateway, self.clock.now()))
        except BudgetExceeded as error:
            raise Refused(
                "insufficient_quota",
                f"The tenant's token budget ({job.budget_period}) does not cover this: {error}.",
                limits=job.limits,
            ) from error
        except AuditUnavailable as error:
            raise Refused(
                "audit_unavailable", "The request could not be recorded.", retry_after=1
            ) from error

    async def _send_all(self, call: Call) -> None:
        for part in call.parts:
            await self._send(call, part)

    async def _send(self, call: Call, part: Part) -> None:
        """Choose a replica and send; raises Refused when there is none to be had."""
        job = call.job
        target = self.placer.choose(job, part.failed, self.num_local)
        part.target, part.attempt, part.heard_at = target, part.attempt + 1, self.monotonic()
        part.failed |= {target.replica_id}
        order = Order(
            part.request_id,
            target.replica_id,
            part.prompt,
            part.max_tokens,
            _seeded(job.sampling, part.index),
            job.latency_class,
            job.cache_salt,
            part.attempt,
        )
        self.num_local[target.replica_id] += 1
        try:
            await self.generator.generate(target.node_id, order, partial(call.receive, part))
        except BaseException:
            self.left(part)
            part.target = None
            raise

    async def _send_again(self, call: Call, part: Part) -> None:
        """Another replica, if there is one; else the call ends."""
        try:
            await self._send(call, part)
        except Refused:
            part.finish_reason = "error"
            call.num_open -= 1
            call.error = call.error or Refused(
                "engine_lost", "The engine was lost and no other is ready.", retry_after=2
            )

    # --- the end --------------------------------------------------------------------------------
    async def _finish(self, call: Call) -> Terminal:
        await self._stop(call)
        terminal = _terminal_of(call, self.clock.now(), self.monotonic())
        try:
            await self.settler.settle(terminal)
        finally:
            self.calls.pop(call.job.request_id, None)
            self.limits.give_back(call.job, terminal.num_prompt_tokens + terminal.num_output_tokens)
        return terminal

    async def _stop(self, call: Call) -> None:
        """Cancel what still runs and wait, briefly, for how much it produced."""
        running = [part for part in call.parts if not part.finish_reason and part.target]
        if not running:
            return
        call.stopping = True
        call.error = call.error or _STOPPED
        for part in running:
            await self.generator.cancel(part.request_id)
        until = self.monotonic() + CANCEL_WAIT_S
        while call.num_open and self.monotonic() < until:
            call._pending.clear()
            call._waiter = waiter = self.loop.create_future()
            self.loop.call_later(max(0.0, until - self.monotonic()), _wake_if_waiting, waiter)
            await waiter
        for part in running:
            self.generator.release(part.request_id)
            if not part.finish_reason:
                self.left(part)

    def left(self, part: Part) -> None:
        """The part runs on its replica no more."""
        if part.target is not None:
            self.num_local[part.target.replica_id] -= 1

    # --- once a second --------------------------------------------------------------------------
    def sweep(self, refusal_of: Callable[[Job], Refused | None]) -> None:
        """Find what is stuck, and end the calls that may not be served any more: ``refusal_of``
        says why, if so."""
        now = self.monotonic()
        for call in list(self.calls.values()):
            refusal = refusal_of(call.job)
            if refusal is not None:
                call.fail(refusal)
            call.check(now)

    def progress(self) -> dict[str, int]:
        """Tokens produced so far by each call that has any."""
        counts = {key: _num_output_tokens(call.parts) for key, call in self.calls.items()}
        return {key: count for key, count in counts.items() if count}


def _wake_if_waiting(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _parts_of(job: Job) -> list[Part]:
    """Choices of the first prompt, then of the second, ...; one part keeps the call's own id."""
    count = len(job.prompts) * job.num_choices
    names = [job.request_id] if count == 1 else [f"{job.request_id}-{i}" for i in range(count)]
    return [
        Part(i, job.prompts[i // job.num_choices], job.max_tokens[i // job.num_choices], name)
        for i, name in enumerate(names)
    ]


def _seeded(sampling: SamplingOptions, index: int) -> SamplingOptions:
    """Choices of one seeded request differ, repeatably."""
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)


def _intent_of(job: Job, gateway: str, at: float) -> Intent:
    return Intent(
        request_id=job.request_id,
        tenant_id=job.tenant_id,
        subject=job.subject,
        endpoint=job.endpoint,
        requested_model=job.requested_model,
        route=job.route,
        arm=job.arm,
        version_id=job.version_id,
        latency_class=job.latency_class,
        num_prompt_tokens=job.num_prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        budget_tokens=job.budget_tokens,
        budget_period=job.budget_period,
        price=job.price,
        at=at,
        gateway=gateway,
    )


def _terminal_of(call: Call, at: float, now: float) -> Terminal:
    job, parts = call.job, call.parts
    produced = _num_output_tokens(parts)
    outcome = _outcome(call)
    first = parts[0]
    queue = [part.queue_ms for part in parts if part.queue_ms is not None]
    return Terminal(
        request_id=job.request_id,
        outcome=outcome,
        finish_reason=",".join(sorted({p.finish_reason for p in parts if p.finish_reason})),
        error_code=call.error.code if call.error else "",
        node_id=first.target.node_id if first.target else "",
        replica_id=first.target.replica_id if first.target else "",
        num_prompt_tokens=job.num_prompt_tokens if produced or outcome == "ok" else 0,
        num_cached_tokens=_num_cached_tokens(call),
        num_output_tokens=produced,
        ttft_ms=(call.first_at - job.began) * 1000 if call.first_at is not None else None,
        queue_ms=min(queue) if queue else None,
        duration_ms=(now - job.began) * 1000,
        at=at,
        attempts=max(part.attempt for part in parts),
    )


def _outcome(call: Call) -> str:
    if call.error is not None and call.error.code not in _LEFT:
        return "error"
    return "cancelled" if call.client_gone or call.error is not None else "ok"


def _num_cached_tokens(call: Call) -> int:
    """Of each prompt once, as prompts are counted: other choices find all of it cached."""
    return sum(part.num_cached_tokens for part in call.parts[:: call.job.num_choices])


def _num_output_tokens(parts: Iterable[Part]) -> int:
    return sum(part.num_output_tokens for part in parts)
