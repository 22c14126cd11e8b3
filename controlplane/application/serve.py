"""One inference request from its order to its record, free of HTTP and of the bus's format.

::

    call = await serving.start(job)      limits -> intent and reservation durable -> node -> sent
    while (deltas := await call.next()): tokens of all its choices, as the frames bring them
        ...                              (while the model still loads: ``call.held``, see ``hold``)
    await call.finish()                  terminal record durable; only now may a client hear "done"

A call has one part per choice, each a generation of its own on the nodes; the ledger knows only
the call. A part whose replica is lost, or whose node is suspect while another replica is ready, is
sent to another one, which goes on from the tokens that were sent (``continuation``); where that
cannot be, it fails with a typed error.

Whatever happens, ``finish`` runs: a client that left, a reader too slow, a node lost, an exception
in the caller. It cancels what still runs, waits at most two seconds for the nodes' own counts (not
without the bus), and bills exactly the tokens that were produced.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from controlplane.application.attempts import attempts_of
from controlplane.application.call import Call, Part
from controlplane.application.capture import keep
from controlplane.application.continuation import Continuations
from controlplane.application.explaining import DEFAULT_SHARE, Explaining
from controlplane.application.hold import HOLD_S, Holds, NotLoadedYet
from controlplane.application.inference import (
    Generator,
    InFlight,
    Job,
    Limits,
    Order,
    Placer,
    SamplingOptions,
)
from controlplane.application.ports import (
    AuditUnavailable,
    BudgetExceeded,
    Clock,
    Intent,
    Ledger,
    Terminal,
)
from controlplane.application.refused import Refused
from controlplane.application.settle import Settler

CANCEL_WAIT_S = 2.0
CUT_S = 1.8  # a bus that is restarted is back by then

_STOPPED = Refused("internal_error", "The request was given up.")
_CUT = Refused("bus_unavailable", "The gateway cannot reach the nodes.", retry_after=1)
_LEFT = frozenset({"client_closed", "slow_reader"})


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
    hold_s: Mapping[str, float] = field(default_factory=lambda: HOLD_S)
    explained_share: float = DEFAULT_SHARE
    currency: str = "USD"
    calls: dict[str, Call] = field(default_factory=dict)
    draining: bool = False
    num_local: Counter[str] = field(default_factory=Counter)
    num_local_tokens: Counter[str] = field(default_factory=Counter)
    num_of_tenant: Counter[str] = field(default_factory=Counter)
    continued: Counter[str] = field(default_factory=Counter)  # choices, by why they had to be
    is_cut: bool = False  # without the bus for too long

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.monotonic = self.clock.monotonic
        self.in_flight = InFlight(self.num_local, self.num_local_tokens)
        self.explaining = Explaining(self.explained_share, self.monotonic)
        self.holds = Holds(self.placer, self.monotonic, self._send_held, self.hold_s)
        self.continuations = Continuations(
            self.placer, self.monotonic, self._send_lost, Call.give_up, self.hold_s
        )

    def live(self) -> set[str]:
        """Request ids that must not be reaped: in flight here, or waiting to be recorded."""
        return {*self.calls, *self.settler.unsettled}

    async def start(self, job: Job) -> Call:
        """Admit and send; raises Refused. After it returns the caller must ``finish`` the call."""
        if self.draining:
            raise Refused("shutting_down", "This gateway is shutting down.", retry_after=1)
        if self.is_cut:
            raise _CUT
        job.limits = await self.limits.take(job)
        call = Call(self, job, _parts_of(job))
        self._enter(call)
        try:
            await self._admit(job)
        except BaseException:
            self._leave(job)
            self.limits.give_back(job, 0, was_refused=True)
            raise
        try:
            await self._send_or_hold(call)
        except BaseException as error:
            call.error = error if isinstance(error, Refused) else _STOPPED
            await call.finish()
            raise
        return call

    def _enter(self, call: Call) -> None:
        self.calls[call.job.request_id] = call
        self.num_of_tenant[call.job.tenant_id] += 1

    def _leave(self, job: Job) -> None:
        if self.calls.pop(job.request_id, None) is None:
            return
        self.num_of_tenant[job.tenant_id] -= 1
        if not self.num_of_tenant[job.tenant_id]:
            del self.num_of_tenant[job.tenant_id]

    async def _admit(self, job: Job) -> None:
        try:
            await self.ledger.admit(_intent_of(job, self.gateway, self.clock.now()))
        except BudgetExceeded as error:
            raise Refused(
                "insufficient_quota", _beyond(error, self.currency), limits=job.limits
            ) from error
        except AuditUnavailable as error:
            raise Refused(
                "audit_unavailable", "The request could not be recorded.", retry_after=1
            ) from error

    async def _send_or_hold(self, call: Call) -> None:
        if call.job.encode is not None:
            self.holds.take(call, NotLoadedYet(call.job.version_id))
            return
        try:
            await self._send_all(call)
        except Refused as refusal:
            if refusal.code != "model_not_ready" or any(part.target for part in call.parts):
                raise
            self.holds.take(call, refusal)

    async def _send_held(self, call: Call) -> None:
        """Send a held call, unless it has ended; raises Refused ``model_not_ready`` to be tried
        again. An end that comes meanwhile waits, so that it cancels what was sent."""
        async with call.sending:
            if call.error is not None or call.is_finished:
                return
            job = call.job
            if job.encode is not None:
                await job.encode(job)
                job.encode = None
                for part in call.parts:
                    prompt = part.index // job.num_choices
                    part.prompt, part.max_tokens = job.prompts[prompt], job.max_tokens[prompt]
                    part.input_lengths = job.lengths_of(prompt)
            try:
                await self._send_all(call)
            except Refused as refusal:
                if not any(part.target for part in call.parts):
                    raise
                call.fail(refusal)  # half of it runs: not to be sent again
            call.release()

    async def _send_all(self, call: Call) -> None:
        for part in call.parts:
            await self._send(call, part)

    async def _send(self, call: Call, part: Part) -> None:
        """Choose a replica and send; raises Refused when there is none to be had."""
        job, before = call.job, part.target
        excluded = part.course.excluded(self.monotonic())
        target = self.placer.choose(job, excluded, self.in_flight, part.saw)
        part.begin(target, self.monotonic())
        self.explaining.sent(part, job.request_id)
        order = Order(
            part.order_id,
            target.replica_id,
            part.prompt,
            part.max_tokens,
            _seeded(job.sampling, part.index),
            job.latency_class,
            job.cache_salt,
            part.attempt,
            job.weight,
            "" if part.order_id == job.request_id else job.request_id,
            tuple(part.token_ids),
            part.num_cached_tokens,
            part.input_lengths,
        )
        self.num_local[target.replica_id] += 1
        part.num_pending_tokens = target.num_uncached_tokens
        self.num_local_tokens[target.replica_id] += target.num_uncached_tokens
        part.is_running = True
        try:
            receive = keep(job.capture, call.receive) if job.capture else call.receive
            await self.generator.generate(target.node_id, order, partial(receive, part))
        except BaseException:
            self.left(part)
            part.note("error", "not_sent", self.monotonic())
            part.target = before
            raise

    async def send_again(self, call: Call, part: Part) -> None:
        """To another replica; without one it waits if it may, else the call ends."""
        try:
            await self._send_on(call, part)
        except Refused as refusal:
            self.continuations.take(call, part, refusal)

    async def _send_lost(self, call: Call, part: Part) -> None:
        """Like ``_send_held``, a part that waited."""
        async with call.sending:
            if call.error is None and not call.is_finished:
                await self._send_on(call, part)

    async def _send_on(self, call: Call, part: Part) -> None:
        await self._send(call, part)
        call.sent(part)
        if part.num_output_tokens and part.course.cause:
            self.continued[part.course.cause] += 1
        part.course.cause = ""

    # --- a node that is silent ------------------------------------------------------------------
    async def leave_suspects(self) -> None:
        """What suspect nodes are silent about goes elsewhere, where a replica is ready. To be
        called as a node becomes suspect, and now and then: a replica may become ready later.
        Without the bus it is not the nodes that are silent."""
        if self.is_cut:
            return
        for call in list(self.calls.values()):
            for part in call.parts:
                if self._may_leave(call, part):
                    await self._move(call, part)

    def _may_leave(self, call: Call, part: Part) -> bool:
        now = self.monotonic()
        return (
            part.target is not None
            and self.placer.is_suspect(part.target.node_id)
            and call.may_leave(part, now)
            and self.placer.has_other(call.job, part.course.excluded(now))
        )

    async def _move(self, call: Call, part: Part) -> None:
        """Its node is told to stop first: once it is left, nobody knows where it ran."""
        order_id = part.order_id
        await self.generator.cancel(order_id)
        if part.order_id == order_id and call.may_leave(part, self.monotonic()):
            call.leave(part)

    # --- the end --------------------------------------------------------------------------------
    async def end(self, call: Call) -> Terminal:
        """Stop what still runs, and record; ``Call.finish`` sees to it that this happens once."""
        async with call.sending:
            await self._stop(call)
        terminal = _terminal_of(call, self.clock.now(), self.monotonic(), self.explaining)
        try:
            await self.settler.settle(terminal)
        finally:
            self._leave(call.job)
            self.limits.give_back(call.job, terminal.num_prompt_tokens + terminal.num_output_tokens)
        return terminal

    async def _stop(self, call: Call) -> None:
        """Cancel what still runs and wait, briefly, for how much it produced."""
        running = [part for part in call.parts if part.is_running]
        if not running:
            return
        call.stopping = True
        call.error = call.error or _STOPPED
        for part in running:
            await self.generator.cancel(part.order_id)
        until = self.monotonic() + (0.0 if self.is_cut else CANCEL_WAIT_S)
        while call.num_open and self.monotonic() < until:
            waiter = call.next_wake()
            self.loop.call_later(max(0.0, until - self.monotonic()), _wake_if_waiting, waiter)
            await waiter
        for part in running:
            self.generator.release(part.order_id)
            self.left(part)

    def computed(self, part: Part) -> None:
        """Nothing of the part's prompt is to be computed any more."""
        if part.target is not None:
            self.num_local_tokens[part.target.replica_id] -= part.num_pending_tokens
        part.num_pending_tokens = 0

    def left(self, part: Part) -> None:
        """The part runs on its replica no more."""
        self.computed(part)
        if part.is_running and part.target is not None:
            self.num_local[part.target.replica_id] -= 1
        part.is_running = False

    # --- once a second --------------------------------------------------------------------------
    def watch_bus(self, away_s: float) -> None:
        """Without the bus for ``CUT_S``, what has no token yet ends and nothing new is taken.
        To be called several times a second."""
        self.is_cut = away_s > CUT_S
        for call in list(self.calls.values()) if self.is_cut else ():
            if call.first_at is None and call.held is None:
                call.fail(_CUT)

    def sweep(self, refusal_of: Callable[[Job], Refused | None]) -> None:
        """Find what is stuck, and end the calls that may not be served any more: ``refusal_of``
        says why, if so."""
        now = self.monotonic()
        for call in list(self.calls.values()):
            refusal = refusal_of(call.job)
            if refusal is not None:
                call.fail(refusal)
            call.check(now)

    def waiting(self) -> dict[str, int]:
        """Calls without a token yet, by latency class."""
        return Counter(
            call.job.latency_class for call in self.calls.values() if call.first_at is None
        )

    def progress(self) -> dict[str, int]:
        """Tokens produced so far by each call that has any."""
        counts = {key: _num_output_tokens(call.parts) for key, call in self.calls.items()}
        return {key: count for key, count in counts.items() if count}


def _beyond(error: BudgetExceeded, currency: str) -> str:
    """In the numbers that the refusal was based on; those of money are in ``currency``."""
    rule = error.budget
    unit = currency if rule.unit == "money" else rule.unit
    of = f"{rule.scope} {rule.target}".strip()
    per = "in total" if rule.period == "total" else f"a {rule.period}"
    return f"The budget '{rule.budget_id}' ({unit} {per}, {of}) does not cover this: {error}."


def _wake_if_waiting(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _parts_of(job: Job) -> list[Part]:
    """Choices of the first prompt, then of the second, ...; one part keeps the call's own id."""
    count = len(job.prompts) * job.num_choices
    names = [job.request_id] if count == 1 else [f"{job.request_id}-{i}" for i in range(count)]
    return [_part_of(job, i, name) for i, name in enumerate(names)]


def _part_of(job: Job, index: int, name: str) -> Part:
    prompt = index // job.num_choices
    part = Part(index, job.prompts[prompt], job.max_tokens[prompt], name)
    part.input_lengths = job.lengths_of(prompt)
    return part


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
        end_user=job.end_user,
        endpoint=job.endpoint,
        requested_model=job.requested_model,
        route=job.route,
        arm=job.arm,
        version_id=job.version_id,
        latency_class=job.latency_class,
        num_prompt_tokens=job.reserved_prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        price=job.price,
        at=at,
        gateway=gateway,
    )


def _terminal_of(call: Call, at: float, now: float, explaining: Explaining) -> Terminal:
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
        num_prompt_tokens=_num_prompt_tokens(call, outcome, produced),
        num_cached_tokens=_num_cached_tokens(call),
        num_output_tokens=produced,
        ttft_ms=(call.first_at - job.began) * 1000 if call.first_at is not None else None,
        queue_ms=min(queue) if queue else None,
        duration_ms=(now - job.began) * 1000,
        at=at,
        attempts=max(part.attempt for part in parts),
        tries=attempts_of(parts, at, now),
        dispatches=explaining.dispatches_of(parts, job.request_id),
        text=job.capture.encrypted(job.tenant_id, job.request_id) if job.capture else None,
    )


def _outcome(call: Call) -> str:
    if call.error is not None and call.error.code not in _LEFT:
        return "error"
    return "cancelled" if call.client_gone or call.error is not None else "ok"


def _num_prompt_tokens(call: Call, outcome: str, produced: int) -> int:
    """All of them once anything came of them. Of inputs whose client has left, those that were
    computed; of inputs that could not be embedded none, since nobody gets a part of the vectors."""
    if produced or outcome == "ok":
        return call.job.num_prompt_tokens
    if outcome == "cancelled":
        return sum(part.num_computed_tokens for part in call.parts)
    return 0


def _num_cached_tokens(call: Call) -> int:
    """Of each prompt once, as prompts are counted: other choices find all of it cached."""
    return sum(part.num_cached_tokens for part in call.parts[:: call.job.num_choices])


def _num_output_tokens(parts: Iterable[Part]) -> int:
    return sum(part.num_output_tokens for part in parts)
