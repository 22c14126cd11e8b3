"""Generations on this node: who asked, what was produced so far, and frames to the gateways.

The deltas of one engine step are grouped by gateway and each group becomes one frame, encoded
once. With two gateways and three running requests a step gives two messages, not three::

    step -> deltas r1 r2 r3;  r1, r2 asked by gw-a, r3 by gw-b
         -> engine.frames.gw-a.n1  Frame(seq=8, [r1, r2])
            engine.frames.gw-b.n1  Frame(seq=3, [r3])

``seq`` counts per gateway without a gap, so a gateway that sees 8 after 6 asks for a resend. What
was produced is therefore kept until 60 s after the end (``generation``). A quiet gateway gets an
empty frame every two seconds, or it would never learn that the last frame of a stream was lost.

A gateway that dies says nothing, so a generation may carry a lease: once its gateway has been
silent for that long (no generate, cancel or resend, of which an empty one is the heartbeat), it is
cancelled. Time without a bus does not count::

    lease 10 s;  t=0 generate   t=2 heartbeat   gateway killed   t=12 cancelled

What it had produced is then asked for by another gateway, which closes the records (``tallies``).

A replica's queue is bounded, and no tenant can fill it alone: one may hold up to ``QUEUE_SHARE``
times the places that are left (Choudhury and Hahne's dynamic thresholds). With 1024 places::

    one tenant alone            holds 819 at most: 4 * (1024 - 819) = 820
    a second one comes          finds 205 places, and may take 164 of them before it has its share
    eight that want everything  hold 124 each, 32 are left for a ninth

Every accepted generation ends with exactly one delta that has a finish reason, also when the
replica is not there, the worker dies, or the agent ends.

One that another replica began is continued: it counts from the tokens that were sent by then, so
that indices, counts and what is billed are those of the whole. Each try of a gateway has a request
id of its own, under one record.
"""

import re
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from operator import attrgetter
from typing import Protocol, TypeVar

import msgspec

from gpuagent.agent.generation import Generation
from gpuagent.agent.kept_vectors import KeptVectors
from gpuagent.agent.metrics import Served
from gpuagent.agent.tallies import Tallies
from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import Cancel, Close, Closed, Delta, Frame, Generate, Resend

RETENTION_S = 60.0
RESEND_GRACE_S = 1.0  # a resend may overtake the generate it is about
RESEND_BYTES = 512 * 1024
COUNTS_AT_ONCE = 1000
MAX_EARLY = 10_000
MAX_INPUTS = 32  # whose vectors fit into one message; gateways ask for no more in one request
QUEUE_SHARE = 4
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
MAX_ID_CHARS = 128
SUBJECT_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
LATENCY_CLASSES = frozenset({"realtime", "standard", "batch"})

M = TypeVar("M", Generate, Cancel, Resend, Close)
Publish = Callable[[str, bytes], Awaitable[None]]
_embeddings = attrgetter("embeddings")


class Engines(Protocol):
    """What inference needs of the replicas on this node."""

    def refusal(self, replica_id: str) -> str:
        """Why the replica takes no generation now; "" if it does."""

    def add(self, request: Generate) -> None:
        """Hand a generation to the replica's worker."""

    def cancel(self, replica_id: str, request_id: str) -> None:
        """Ask the worker to end one."""


class Inference:
    """All generations of this agent; single-threaded, on the event loop."""

    def __init__(
        self,
        node_id: str,
        boot_id: str,
        engines: Engines,
        publish: Publish,
        clock: Callable[[], float],
        max_queue: int,
    ) -> None:
        self._node_id = node_id
        self._boot_id = boot_id
        self._engines = engines
        self._publish = publish
        self._clock = clock
        self._max_queue = max_queue
        self._known: dict[str, Generation] = {}
        self._tallies = Tallies(clock)
        self._active: Counter[str] = Counter()  # unfinished generations by replica
        self._held: Counter[tuple[str, bytes]] = Counter()  # the same by replica and tenant
        self._ended: deque[tuple[float, Generation]] = deque()
        self._vectors = KeptVectors()
        self._early_cancels: dict[str, float] = {}
        self._late_resends: list[tuple[float, str, str, int]] = []
        self._seq: Counter[str] = Counter()
        self._spoke: dict[str, float] = {}  # gateway -> when its last frame left
        self._heard: dict[str, float] = {}  # gateway -> when it last said anything
        self.counts: Counter[str] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()  # (replica, finish reason)
        self.served: dict[str, Served] = {}  # by replica

    @property
    def num_active(self) -> int:
        return self._active.total()

    def num_active_on(self, replica_id: str) -> int:
        """Unfinished generations of one replica."""
        return self._active[replica_id]

    # --- from gateways ----------------------------------------------------------------------
    async def generate(self, payload: bytes) -> None:
        """Start a generation; refusals are answered by a terminal delta."""
        request = self._read(payload, Generate)
        if request is None:
            return
        if not _is_addressable(request):
            self.counts["refused_names"] += 1
            return
        known = self._known.get(request.request_id)
        if known and (known.terminal is None or known.attempt >= request.attempt):
            self.counts["duplicates"] += 1
            return
        await self._start(request)

    async def _start(self, request: Generate) -> None:
        now = self._clock()
        generation = Generation(
            request_id=request.request_id,
            gateway=request.gateway,
            replica_id=request.replica_id,
            attempt=request.attempt,
            num_prompt_tokens=len(request.prompt_token_ids),
            started_at=now,
            lease_s=request.lease_s,
            tenant=request.cache_salt,
            record_id=request.record_id,
            num_cached_tokens=request.num_cached_tokens,
            token_ids=array("I", request.sent_token_ids),
            num_sent=len(request.sent_token_ids),
        )
        self._tallies.open(generation)
        self._heard[request.gateway] = now
        self._known[request.request_id] = generation
        self._active[request.replica_id] += 1
        self._held[request.replica_id, request.cache_salt] += 1
        if self._is_unwanted(request):
            await self._end([generation], "cancelled")
        elif refusal := self._refusal(request):
            await self._end([generation], "error", *refusal)
        else:
            generation.served = self.served.setdefault(request.replica_id, Served())
            self._engines.add(request)

    def _is_unwanted(self, request: Generate) -> bool:
        """Cancelled, or its record closed, before it came."""
        key = f"{request.gateway} {request.request_id}"
        is_cancelled = self._early_cancels.pop(key, None) is not None
        return is_cancelled or self._tallies.is_closed(request.record_id or request.request_id)

    def _refusal(self, request: Generate) -> tuple[str, str] | None:
        """(code, message) of why this generation cannot start."""
        if request.latency_class not in LATENCY_CLASSES:
            return "invalid_request", f"no latency class {request.latency_class!r}"
        if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:  # nor is it NaN
            return "invalid_request", f"a weight of {request.weight}"
        if len(request.input_lengths) > MAX_INPUTS:
            return "invalid_request", f"vectors of more than {MAX_INPUTS} inputs"
        if len(request.sent_token_ids) >= max(request.sampling.max_tokens, 1):
            return "invalid_request", "all tokens that were asked for are there already"
        reason = self._engines.refusal(request.replica_id)
        if reason:
            return "replica_not_ready", reason
        return self._crowded(request)

    def _crowded(self, request: Generate) -> tuple[str, str] | None:
        """Whether this generation, which is counted already, is one too many."""
        num_others = self._active[request.replica_id] - 1
        num_own = self._held[request.replica_id, request.cache_salt] - 1
        num_left = self._max_queue - num_others
        if num_left <= 0:
            return "overloaded", (
                f"The replica's queue is full: {self._max_queue} requests, {num_own} of them yours."
            )
        if num_own >= QUEUE_SHARE * num_left:
            return "tenant_queue_full", (
                f"You have {num_own} unfinished requests at this replica; of its queue of "
                f"{self._max_queue} one tenant may hold {QUEUE_SHARE * num_left} now."
            )
        return None

    def _read(self, payload: bytes, kind: type[M]) -> M | None:
        """The message; None, and counted, if it is malformed."""
        try:
            return codec.decode(payload, kind)
        except codec.WireError:
            self.counts["malformed"] += 1
            return None

    async def cancel(self, payload: bytes) -> None:
        """End generations; the worker answers with their terminal deltas."""
        message = self._read(payload, Cancel)
        if message is None:
            return
        self._hear(message.gateway)
        for request_id in message.request_ids:
            known = self._known.get(request_id)
            if known is None:
                self._cancel_early(message.gateway, request_id)
            elif known.terminal is None and known.gateway == message.gateway:
                self._engines.cancel(known.replica_id, request_id)

    def _cancel_early(self, gateway: str, request_id: str) -> None:
        """A cancel may overtake its generate: subscriptions are read side by side."""
        if len(self._early_cancels) < MAX_EARLY and len(request_id) <= MAX_ID_CHARS:
            self._early_cancels[f"{gateway} {request_id}"] = self._clock() + RETENTION_S

    async def resend(self, payload: bytes) -> None:
        """Send again what a gateway missed, each request from its own token index."""
        message = self._read(payload, Resend)
        if message is None:
            return
        if not SUBJECT_TOKEN.fullmatch(message.gateway):
            self.counts["refused_names"] += 1
            return
        self._hear(message.gateway)
        if not message.requests:
            return
        self.counts["resends"] += 1
        deltas: list[Delta] = []
        for request_id, index in message.requests.items():
            known = self._known.get(request_id)
            if known and known.gateway == message.gateway:
                deltas.extend(known.since(max(index, 0)))
            elif len(self._late_resends) < MAX_EARLY:
                due = self._clock() + RESEND_GRACE_S
                self._late_resends.append((due, message.gateway, request_id, max(index, 0)))
        await self._send_packed(message.gateway, deltas)

    async def close(self, payload: bytes) -> None:
        """End what a lost gateway asked for under some records, and answer what it produced.

        A worker ends a generation a step later, so whoever asks does so until all have ended.
        """
        message = self._read(payload, Close)
        if message is None:
            return
        if not SUBJECT_TOKEN.fullmatch(message.asker):
            self.counts["refused_names"] += 1
            return
        self.counts["closings"] += 1
        for record_id in message.record_ids:
            self._tallies.close(record_id)
            for generation in self._tallies.running(message.gateway, record_id):
                self._engines.cancel(generation.replica_id, generation.request_id)
        await self._answer_closing(message)

    async def _answer_closing(self, message: Close) -> None:
        some = [self._tallies.counts(message.gateway, one) for one in message.record_ids]
        counts = [one for counted in some for one in counted]
        for start in range(0, max(len(counts), 1), COUNTS_AT_ONCE):
            end = start + COUNTS_AT_ONCE
            part = counts[start:end]
            answer = Closed(
                node_id=self._node_id,
                number=message.number,
                generations=tuple(part),
                more=end < len(counts),
                sent=self._tallies.sent(part),
                computed=self._tallies.computed(part),
            )
            await self._publish_counted(
                subjects.closed(message.asker, self._node_id), codec.encode(answer)
            )

    async def _publish_counted(self, subject: str, payload: bytes) -> None:
        try:
            await self._publish(subject, payload)
        except OSError:
            self.counts["frames_unsent"] += 1

    # --- leases -----------------------------------------------------------------------------
    def _hear(self, gateway: str) -> None:
        if gateway in self._heard:  # others have nothing here that could expire
            self._heard[gateway] = self._clock()

    def extend_leases(self) -> None:
        """Call while the bus is away: then the silence is no gateway's fault."""
        self._heard = dict.fromkeys(self._heard, self._clock())

    def _end_expired(self, now: float) -> None:
        """Cancel what no gateway waits for any more; the worker answers with the last deltas."""
        shortest = min((g.lease_s for g in self._leased()), default=0.0)
        quiet = {gw for gw, at in self._heard.items() if shortest and now - at > shortest}
        if not quiet:
            return
        for generation in self._leased():
            if generation.gateway in quiet and now - self._heard[generation.gateway] > (
                generation.lease_s
            ):
                self.counts["leases_expired"] += 1
                generation.lease_s = 0.0  # once
                self._engines.cancel(generation.replica_id, generation.request_id)

    def _leased(self) -> Iterator[Generation]:
        return (g for g in self._known.values() if g.terminal is None and g.lease_s)

    # --- from workers -----------------------------------------------------------------------
    async def outputs(self, deltas: Iterable[Delta]) -> None:
        """Relay what one step produced: one frame per gateway."""
        now = self._clock()
        by_gateway: defaultdict[str, list[Delta]] = defaultdict(list)
        for delta in deltas:
            generation = self._known.get(delta.request_id)
            if generation is None or generation.terminal is not None:
                self.counts["stray_deltas"] += 1
                continue
            if delta.index != len(generation.token_ids):
                delta = self._corrupt(generation)
            num_cached = generation.num_cached_tokens
            generation.record(delta)
            if served := generation.served:  # some engines know only at the end
                served.cached_tokens += generation.num_cached_tokens - num_cached
                if delta.token_ids or delta.num_computed_tokens:
                    _observe(generation, served, delta, now)
            by_gateway[generation.gateway].append(delta)
            if delta.finish_reason:
                self._close(generation, now)
        for gateway, group in by_gateway.items():
            send = self._send_packed if any(map(_embeddings, group)) else self._send
            await send(gateway, group)

    def _corrupt(self, generation: Generation) -> Delta:
        """The engine skipped or repeated a token: the stream must not go on."""
        self.counts["corrupt_streams"] += 1
        self._engines.cancel(generation.replica_id, generation.request_id)
        return generation.ending("error", "stream_corrupt", "the engine broke the token order")

    async def lose_replica(self, replica_id: str, code: str, message: str) -> None:
        """End every generation of a replica that is gone."""
        if self._active[replica_id]:
            await self._end(self._unfinished_on(replica_id), "error", code, message)

    async def end_held(self, request_ids: Iterable[str]) -> None:
        """End generations that were cancelled before an engine had them."""
        known = (self._known.get(request_id) for request_id in request_ids)
        await self._end([g for g in known if g and g.terminal is None], "cancelled")

    def _unfinished_on(self, replica_id: str) -> list[Generation]:
        known = self._known.values()
        return [g for g in known if g.terminal is None and g.replica_id == replica_id]

    def forget_replica(self, replica_id: str) -> None:
        """Drop the figures of a replica that is gone for good."""
        self.served.pop(replica_id, None)
        for key in [key for key in self.finished if key[0] == replica_id]:
            del self.finished[key]

    async def _end(
        self, generations: list[Generation], reason: str, code: str = "", message: str = ""
    ) -> None:
        await self.outputs([g.ending(reason, code, message) for g in generations])

    def _close(self, generation: Generation, now: float) -> None:
        held = generation.replica_id, generation.tenant
        self._held[held] -= 1
        if self._held[held] <= 0:
            del self._held[held]
        self._active[generation.replica_id] -= 1
        if self._active[generation.replica_id] <= 0:
            del self._active[generation.replica_id]
        assert generation.terminal is not None
        generation.ended_at = now
        if generation.served:
            self.finished[generation.replica_id, generation.terminal.finish_reason] += 1
            generation.served.end_to_end.observe(now - generation.started_at)
        self._ended.append((now + RETENTION_S, generation))
        self._vectors.keep(generation)

    # --- to gateways ------------------------------------------------------------------------
    async def _send(self, gateway: str, deltas: Iterable[Delta]) -> None:
        """One frame; a frame that cannot leave leaves a gap that the gateway will see."""
        self._seq[gateway] += 1
        self._spoke[gateway] = self._clock()
        frame = Frame(self._node_id, self._boot_id, self._seq[gateway], tuple(deltas))
        self.counts["frames"] += 1
        await self._publish_counted(subjects.frames(gateway, self._node_id), codec.encode(frame))

    async def _send_packed(self, gateway: str, deltas: Iterable[Delta]) -> None:
        """As many frames as their size demands."""
        batch: list[Delta] = []
        size = 0
        for delta in deltas:
            num_bytes = len(msgspec.msgpack.encode(delta))
            if batch and size + num_bytes > RESEND_BYTES:
                await self._send(gateway, batch)
                batch, size = [], 0
            batch.append(delta)
            size += num_bytes
        if batch:
            await self._send(gateway, batch)

    # --- time -------------------------------------------------------------------------------
    async def tick(self) -> None:
        """Forget what is old, answer late resends, show quiet gateways the last number."""
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            self._forget(self._ended.popleft()[1])
        self._tallies.forget_old()
        self._early_cancels = {k: due for k, due in self._early_cancels.items() if due > now}
        await self._answer_late(now)
        self._end_expired(now)
        quiet = [gateway for gateway, at in self._spoke.items() if now - at >= 2.0]
        alive = {g.gateway for g in self._known.values()} if quiet else set()
        for gateway in quiet:
            if gateway in alive:
                await self._send(gateway, ())
            else:
                del self._spoke[gateway]
                self._heard.pop(gateway, None)

    def _forget(self, generation: Generation) -> None:
        if self._known.get(generation.request_id) is generation:
            del self._known[generation.request_id]
        self._tallies.shrink(generation)
        self._vectors.forget(generation)

    async def _answer_late(self, now: float) -> None:
        """Requests that are unknown still: their generate was lost, or another boot had them."""
        due = [late for late in self._late_resends if late[0] <= now]
        if not due:
            return
        self._late_resends = [late for late in self._late_resends if late[0] > now]
        for _, gateway, request_id, index in due:
            known = self._known.get(request_id)
            if known is None:
                await self._send(gateway, [_unknown(request_id, index)])
            elif known.gateway == gateway:
                await self._send_packed(gateway, known.since(index))


def _observe(generation: Generation, served: Served, delta: Delta, now: float) -> None:
    num_tokens = len(delta.token_ids)
    if generation.last_at:
        served.inter_token.observe(now - generation.last_at, num_tokens)
    else:
        if num_tokens:
            served.first_token.observe(now - generation.started_at)
        served.prompt_tokens += delta.num_computed_tokens or delta.num_prompt_tokens
    served.generated_tokens += num_tokens
    generation.last_at = now


def _unknown(request_id: str, index: int) -> Delta:
    message = "this node does not know the request"
    return Delta(request_id, index, (), "", "error", "engine_lost", message)


def _is_addressable(request: Generate) -> bool:
    """Whether the answer's subject would be one token and ours to publish on."""
    return (
        SUBJECT_TOKEN.fullmatch(request.gateway) is not None
        and SUBJECT_TOKEN.fullmatch(request.request_id) is not None
        and len(request.replica_id) <= MAX_ID_CHARS * 4
        and len(request.record_id) <= MAX_ID_CHARS
    )
