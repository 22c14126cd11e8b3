"""The nodes as the gateway reaches them: which replica to ask, and the asking itself."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import astuple

from controlplane.adapters.natsbus.transport import (
    BusUnavailable,
    Generate,
    RequestTooLarge,
    Sampling,
    Transport,
)
from controlplane.application.continuation import QUIET_S
from controlplane.application.fleet import FleetLoads, NodeLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.gaps import gap_of, tried
from controlplane.application.hold import HOLD_S
from controlplane.application.inference import (
    Gap,
    InFlight,
    Job,
    Order,
    SamplingOptions,
    Seen,
    Target,
)
from controlplane.application.ports import Clock
from controlplane.application.refused import Refused
from controlplane.dispatch.choose import NeverFits, NoReplica, RequestView, choose
from controlplane.dispatch.prefix import Prompt, Sent, cached_tokens, prompt_of
from controlplane.dispatch.resolve import not_found

LOST_S = 15.0  # node not heard
LEASE_S = 10.0  # a node ends what it does for a gateway that has been silent for so long


class FleetPlacer:
    """``inference.Placer`` over the log's placement and the nodes' telemetry."""

    def __init__(
        self,
        state: FleetState,
        loads: FleetLoads,
        clock: Clock,
        deadlines: Mapping[str, float] = HOLD_S,
    ) -> None:
        self._state, self._loads, self._clock = state, loads, clock
        self._deadlines = deadlines
        self._monotonic = clock.monotonic
        self._tried: dict[str, Gap | None] = {}
        self._tried_at = -1  # log position
        self._sent = Sent()

    def choose(
        self,
        job: Job,
        excluded: frozenset[str],
        local: InFlight,
        saw: Callable[[Seen], None],
    ) -> Target:
        now = self._monotonic()
        prompt, cached = self._prompt(job, now)
        views = self._state.candidates(job.version_id, self._loads, now, *local, cached)
        position, at = self._state.position, self._clock.now()
        try:
            choice = choose(views, self._view(job), self._state.routing.weights, excluded)
        except NoReplica as error:
            saw(Seen(error.choice, position, at))
            raise self._refused(error, job) from error
        saw(Seen(choice, position, at))
        if prompt is not None:
            self._sent.note(job.version_id, prompt, choice.replica_id, now)
        left = len(job.prompts[0]) - cached.get(choice.replica_id, 0)
        return Target(choice.node_id, choice.replica_id, left)

    def _view(self, job: Job) -> RequestView:
        waits = self._deadlines.get(job.latency_class, HOLD_S["standard"])
        return RequestView(len(job.prompts[0]), job.max_tokens[0], waits)

    def _refused(self, error: NoReplica, job: Job) -> Refused:
        """With the planner's reason, where it is the fleet that has too little."""
        reason = "" if isinstance(error, NeverFits) else self._state.unplaced_reason(job.version_id)
        text = f"{error.message} {reason}".strip()
        return Refused(error.code, text, error.param, error.retry_after)

    def _prompt(self, job: Job, now: float) -> tuple[Prompt | None, Mapping[str, int]]:
        """The prompt, and how much of it each replica has cached; None where one has no choice, or
        where nothing is ever cached."""
        if job.input_lengths or len(self._state.assignments_of(job.version_id)) < 2:
            return None, {}
        prompt = prompt_of(job.cache_salt, job.prompts[0])
        caches = self._state.prefix_caches(job.version_id, self._loads, now)
        cached = cached_tokens(prompt, caches)
        for replica_id, sent in self._sent.cached_tokens(job.version_id, prompt, now).items():
            cached[replica_id] = max(sent, cached.get(replica_id, 0))
        return prompt, cached

    def is_heard(self, node_id: str) -> bool:
        return self._is_heard_within(LOST_S, node_id)

    def is_suspect(self, node_id: str) -> bool:
        node = self._state.nodes.get(node_id)
        is_silent = node is not None and node.status in ("suspect", "lost")
        return is_silent and not self._is_heard_within(QUIET_S, node_id)

    def _is_heard_within(self, seconds: float, node_id: str) -> bool:
        age = self._loads.age_s(node_id, self._monotonic())
        return age is not None and age <= seconds

    def has_other(self, job: Job, excluded: frozenset[str]) -> bool:
        views = self._state.candidates(job.version_id, self._loads, self._monotonic())
        ready = [view for view in views if view.state == "ready" and view.resident]
        try:
            choose(ready, self._view(job), self._state.routing.weights, excluded)
        except NoReplica:
            return False
        return True

    def wait_s(self, version_id: str) -> float | None:
        """With the time until the next try, where failures keep the version away."""
        expected = self._state.wait_s(version_id, self._clock.now(), self._loads)
        gap = self.gap(version_id) if expected is not None else None
        return expected + gap.retry_s if expected is not None and gap and gap.retry_s else expected

    def gone(self, version_id: str) -> Refused | None:
        if self._state.catalog.is_live(version_id):
            return None
        error = not_found(version_id)
        return Refused(error.code, error.message, "model")

    def gap(self, version_id: str) -> Gap | None:
        return gap_of(self._state, version_id, self._clock.now())

    def tried(self, version_id: str) -> Gap | None:
        """Once for each state of the fleet: 50 ms for 10,000 devices."""
        if self._tried_at != self._state.position:
            self._tried_at = self._state.position
            self._tried.clear()
        if version_id not in self._tried:
            self._tried[version_id] = tried(self._state, version_id, self._clock.now())
        return self._tried[version_id]

    def record(self, load: NodeLoad, num_local: Mapping[str, int]) -> None:
        """``num_local``: requests of this gateway by replica, now."""
        self._loads.record(load, self._monotonic(), num_local)


class NatsGenerator:
    """``inference.Generator`` over the bus."""

    def __init__(self, transport: Transport, gateway: str) -> None:
        self._transport, self._gateway = transport, gateway

    @property
    def is_behind(self) -> bool:
        return self._transport.is_behind

    async def generate(self, node_id: str, order: Order, sink: Callable[[Any], None]) -> None:
        message = Generate(
            request_id=order.request_id,
            gateway=self._gateway,
            replica_id=order.replica_id,
            prompt_token_ids=order.prompt_token_ids,
            sampling=_sampling(order.sampling, order.max_tokens),
            latency_class=order.latency_class,
            cache_salt=order.cache_salt,
            attempt=order.attempt,
            lease_s=LEASE_S,
            weight=order.weight,
            record_id=order.record_id,
            sent_token_ids=order.sent_token_ids,
            num_cached_tokens=order.num_cached_tokens,
            input_lengths=order.input_lengths,
        )
        try:
            await self._transport.generate(node_id, message, sink)
        except BusUnavailable as error:
            text = "The message bus is not reachable."
            raise Refused("bus_unavailable", text, retry_after=error.retry_after) from error
        except RequestTooLarge as error:
            text = "The prompt is too large to be sent to a node."
            raise Refused("context_length_exceeded", text, "messages") from error

    async def cancel(self, request_id: str) -> None:
        await self._transport.cancel(request_id)

    def release(self, request_id: str) -> None:
        self._transport.release(request_id)


_FIELDS = SamplingOptions.__struct_fields__
_PLAIN = SamplingOptions()


def _sampling(options: SamplingOptions, max_tokens: int) -> Sampling:
    if options == _PLAIN:  # most requests; the wire's defaults are the same
        return Sampling(max_tokens=max_tokens)
    return Sampling(max_tokens=max_tokens, **dict(zip(_FIELDS, astuple(options), strict=True)))
