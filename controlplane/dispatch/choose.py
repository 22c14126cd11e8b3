"""Which replica answers a request: the cheapest of those that can, with every term kept.

For request r and a replica on node g (Hanzo GPU Inference, section on routing)::

    cost = alpha * L(r, g) + beta * U + gamma * [weights not resident] * C_load

    L  = (queue + prefill + decode) / thermal + distance           estimated seconds
    queue    what is ahead of this request: its prefill, and a slot's turn if all are taken
    prefill  (prompt tokens - prefix * tokens in its prefix cache) / measured prefill rate
    decode   step time * output tokens
    distance hop_s for each level of their zones' paths in which node and gateway differ
    thermal  1 below 75 C, else 1 - 0.3 * (T - 75) / (T_max - 75): hot nodes are avoided early
    health   w1 (1 - U) + w2 free/total memory + w3 (1 - T/T_max) + w4 / (1 + Q)

Health breaks ties between equal costs; it is not part of the cost, which stays in seconds. The
weights are the installation's, set at run time (``domain.routing``). A replica that cannot take the
request is rejected with a code, never just expensive. One on a draining node is rejected while
there is any other; it serves alone until its replacement is ready.

Worked example, 100 prompt tokens, 10 output, rate 1000/s, step 20 ms, U = 0.5 on both::

    A idle            L = 0 + 0.1 + 0.2 = 0.30   cost 0.30 + 0.5 beta
    B three waiting   L = 0.3 + 0.1 + 0.2 = 0.60 cost 0.60 + 0.5 beta     -> A

Telemetry is up to two seconds old, in which a burst would all choose the same replica, and one
that has long done its work would be shunned. But this gateway knows its own part: what it has there
now (``num_local``, and ``num_local_tokens`` of prompts still to compute), and what it had there
when the telemetry came (``num_local_then``). So of a reported queue only the others' part is
believed, our own is what it is now, and what came or went since then changes U by a slot's part::

    reported 1.9 s ago: 1 running, 20 waiting, of which 21 ours; none of ours is there now
    others 0, queue 0 + 0, U 0.8 - 21/64                                       not 20 prefills
    reported 1.9 s ago: none; now 3 of ours are there, 900 tokens to compute
    others 0, queue 0 + 900 / rate, U 0.1 + 3/64                               not none

A ``Choice`` keeps what it was made from and nothing else: every candidate's terms and every
rejection follow from that (``Choice.explain``), so a request pays for its winner alone and only
one that is to be explained (``record``) for the rest. ``choose`` asks for one figure per replica,
the cost, and for the health of those that tie; ``explain`` for all of it::

    choose     A 0.30, B 0.60: A                   takes 0.6 of the time that explaining all took
    explain    A (queue 0.0, prefill 0.1, decode 0.2, ...), B (...): A
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from controlplane.dispatch.refusals import NotReady
from controlplane.domain.routing import DEFAULT_WEIGHTS, Weights

UNMEASURED_PREFILL_TOKENS_PER_S = 1000.0
LEAST_PREFILL_TOKENS_PER_S = 0.01  # anything below was not measured, and costs stay finite
UNMEASURED_STEP_S = 0.03
DRAINING = ("node_draining", "the node is being drained")
NO_DEADLINE_S = 1e9  # finite, since it is put on record as JSON
MAX_COUNTED_OUTPUT = 128  # most requests end long before max_tokens; more would drown the rest


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica as the gateway knows it. Memory in bytes, temperature in Celsius.

    ``node_status`` is absent | ready | suspect | lost; ``state`` the replica's; ``age_s`` how long
    ago its node was last heard, None if never. Rates of 0 mean not measured yet. One that is not
    ``resident`` comes onto its device once it is asked for, in ``load_seconds``; ``is_held``: its
    node takes requests for it though it has not been loaded yet.
    """

    replica_id: str
    node_id: str
    state: str = "ready"
    node_status: str = "ready"
    draining: bool = False
    age_s: float | None = 0.0
    utilization: float = 0.0
    temperature_c: float = 0.0
    memory_free_bytes: int = 0
    memory_total_bytes: int = 1
    num_running: int = 0
    num_waiting: int = 0
    num_local: int = 0
    num_local_then: int = 0
    num_local_tokens: int = 0
    max_batch: int = 16
    num_blocks: int = 0
    block_size: int = 16
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    num_cached_tokens: int = 0
    resident: bool = True
    load_seconds: float = 0.0
    is_held: bool = False
    zone_hops: int = 0


class RequestView(msgspec.Struct, frozen=True):
    """``max_wait_s``: the longest that it waits for a replica to be loaded."""

    num_prompt_tokens: int
    max_output_tokens: int
    max_wait_s: float = NO_DEADLINE_S


TERMS = (
    "queue_s",
    "prefill_s",
    "decode_s",
    "thermal",
    "distance_s",
    "latency",
    "utilization",
    "loading",
    "cost",
)


class Scored(msgspec.Struct, frozen=True, gc=False):
    """A replica that could take the request; ``figures`` are the values of ``TERMS``, which add up
    as the module docstring says."""

    replica_id: str
    node_id: str
    cost: float
    health: float
    figures: tuple[float, ...]

    @property
    def terms(self) -> dict[str, float]:
        return dict(zip(TERMS, self.figures, strict=True))


class RejectedReplica(msgspec.Struct, frozen=True, gc=False):
    replica_id: str
    node_id: str
    code: str
    detail: str


class Explanation(msgspec.Struct, frozen=True):
    """The winner ("" if there is none) and everything it was compared with, best first."""

    replica_id: str
    node_id: str
    candidates: tuple[Scored, ...] = ()
    rejected: tuple[RejectedReplica, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner ("" if there is none) and what it was chosen from."""

    replica_id: str
    node_id: str
    views: Sequence[ReplicaView]
    request: RequestView
    weights: Weights
    excluded: frozenset[str]

    def explain(self) -> Explanation:
        return explain(self.views, self.request, self.weights, self.excluded)

    @property
    def candidates(self) -> tuple[Scored, ...]:
        return self.explain().candidates

    @property
    def rejected(self) -> tuple[RejectedReplica, ...]:
        return self.explain().rejected

    @property
    def terms(self) -> dict[str, float]:
        """Of the winner."""
        return self.candidates[0].terms


class NoReplica(NotReady):
    """No replica can take the request; ``choice`` says why not, of each."""

    param = "model"

    def __init__(self, message: str, retry_after: float | None, choice: Choice) -> None:
        super().__init__(message, retry_after)
        self.choice = choice


class NeverFits(NoReplica):
    """Waiting does not help: the KV cache of every replica is too small for the request.
    ``param`` is the field to blame."""

    code = "context_length_exceeded"

    def __init__(self, message: str, param: str, choice: Choice) -> None:
        super().__init__(message, None, choice)
        self.param = param


def choose(
    candidates: Sequence[ReplicaView],
    request: RequestView,
    weights: Weights = DEFAULT_WEIGHTS,
    excluded: frozenset[str] = frozenset(),
) -> Choice:
    """The replica of least cost. ``excluded``: replica ids that failed this request before.

    Raises NoReplica, saying why each replica was rejected, if none is left.
    """
    best: list[ReplicaView] = []  # more than one if they cost the same
    least, draining = math.inf, []
    for view in candidates:
        if _refusal(view, request, weights, excluded) is not None:
            continue
        if view.draining:
            draining.append(view)
            continue
        cost = figures_of(view, request, weights)[-1]
        if cost < least:
            least, best = cost, [view]
        elif cost == least:
            best.append(view)
    if len(best) == 1:
        winner = best[0]
    elif best or draining:
        winner = min(best or draining, key=lambda view: _rank(score(view, request, weights)))
    else:
        raise _no_replica(Choice("", "", candidates, request, weights, excluded))
    return Choice(winner.replica_id, winner.node_id, candidates, request, weights, excluded)


def explain(
    candidates: Sequence[ReplicaView],
    request: RequestView,
    weights: Weights = DEFAULT_WEIGHTS,
    excluded: frozenset[str] = frozenset(),
) -> Explanation:
    """What ``choose`` chooses, with every term of every candidate and the rule that lost each of
    the others."""
    scored: list[Scored] = []
    draining: list[Scored] = []
    rejected: list[RejectedReplica] = []
    for view in candidates:
        refusal = _refusal(view, request, weights, excluded)
        if refusal:
            rejected.append(RejectedReplica(view.replica_id, view.node_id, *refusal))
        else:
            (draining if view.draining else scored).append(score(view, request, weights))
    if scored:
        rejected += [RejectedReplica(one.replica_id, one.node_id, *DRAINING) for one in draining]
    ordered = tuple(sorted(scored or draining, key=_rank))
    if not ordered:
        return Explanation("", "", (), tuple(rejected))
    return Explanation(ordered[0].replica_id, ordered[0].node_id, ordered, tuple(rejected))


def _rank(one: Scored) -> tuple[float, float, str]:
    return one.cost, -one.health, one.replica_id


def score(view: ReplicaView, request: RequestView, weights: Weights = DEFAULT_WEIGHTS) -> Scored:
    """Cost and health of one replica, term by term."""
    figures = figures_of(view, request, weights)
    return Scored(view.replica_id, view.node_id, figures[-1], health(view, weights), figures)


def figures_of(view: ReplicaView, request: RequestView, weights: Weights) -> tuple[float, ...]:
    """The values of ``TERMS``. It runs for every replica of every request, so what is 0 for most
    (a queue, heat, loading) is asked about before it is computed."""
    rate = view.prefill_tokens_per_s
    if rate < LEAST_PREFILL_TOKENS_PER_S:
        rate = UNMEASURED_PREFILL_TOKENS_PER_S
    prompt, output = request.num_prompt_tokens, request.max_output_tokens
    uncached = prompt - weights.prefix * view.num_cached_tokens
    prefill = uncached / rate if uncached > 0 else 0.0
    output = output if output < MAX_COUNTED_OUTPUT else MAX_COUNTED_OUTPUT
    decode = (view.decode_step_s or UNMEASURED_STEP_S) * output
    queue = 0.0
    use = view.utilization
    if view.num_waiting or view.num_local or view.num_running >= view.max_batch:
        queue = _queue_s(view, prompt, rate, decode)
    if view.num_local != view.num_local_then:
        use += (view.num_local - view.num_local_then) / (view.max_batch or 1)
        use = use if use > 0 else 0.0
    hot = view.temperature_c > weights.t_safe
    thermal = thermal_factor(view.temperature_c, weights) if hot else 1.0
    distance = weights.hop_s * view.zone_hops
    latency = weights.alpha * ((queue + prefill + decode) / thermal + distance)
    busy = weights.beta * use
    loading = 0.0 if view.resident else weights.gamma * view.load_seconds
    cost = latency + busy + loading
    return queue, prefill, decode, thermal, distance, latency, busy, loading, cost


def health(view: ReplicaView, weights: Weights = DEFAULT_WEIGHTS) -> float:
    """From 0 to 1: idle, roomy, cool and without a queue is 1 (at 0 C)."""
    idle, memory, cool, queue = weights.omega
    coolness = 1 - view.temperature_c / weights.t_max
    return (
        idle * (1 - view.utilization)
        + memory * view.memory_free_bytes / (view.memory_total_bytes or 1)
        + (cool * coolness if coolness > 0 else 0.0)
        + queue / (1 + view.num_waiting)
    )


def thermal_factor(temperature_c: float, weights: Weights = DEFAULT_WEIGHTS) -> float:
    """1 below ``t_safe``, falling to 0.7 at ``t_max``; not below 0.1 beyond it."""
    if temperature_c <= weights.t_safe:
        return 1.0
    return max(0.1, 1 - 0.3 * (temperature_c - weights.t_safe) / (weights.t_max - weights.t_safe))


def _queue_s(view: ReplicaView, num_prompt_tokens: int, rate: float, decode_s: float) -> float:
    """Seconds until this request's prefill starts.

    What is ahead prefills first: others' requests, taken to be as long as this one, and what our
    own still compute. Beyond ``max_batch`` requests at once, one also waits for slots to fall free,
    of which ``max_batch`` do so per typical generation.
    """
    slots, reported = view.max_batch or 1, view.num_running + view.num_waiting
    others = reported - view.num_local_then
    waiting = view.num_waiting * others / reported if others > 0 else 0.0
    ahead = waiting * num_prompt_tokens + view.num_local_tokens
    over = (others if others > 0 else 0) + view.num_local + 1 - slots
    return ahead / rate + (over * decode_s / slots if over > 0 else 0.0)


def zone_hops(zone: str, other: str) -> int:
    """Levels in which two zones differ: 1 of ``eu/r1`` and ``eu/r2``, 2 of ``eu/r1`` and ``us/r1``;
    0 where one is not known."""
    if not zone or not other:
        return 0
    levels, others = zone.split("/"), other.split("/")
    same = 0
    for mine, its in zip(levels, others, strict=False):
        if mine != its:
            break
        same += 1
    return max(len(levels), len(others)) - same


def _refusal(
    view: ReplicaView, request: RequestView, weights: Weights, excluded: frozenset[str]
) -> tuple[str, str] | None:
    """Why the replica cannot take the request: code and figures; None if it can."""
    if view.replica_id in excluded:
        return "failed_before", "it failed this request before"
    if view.state != "ready" and not view.is_held:
        return "not_ready", f"the replica is {view.state}"
    if view.node_status != "ready":
        return f"node_{view.node_status}", f"the node is {view.node_status}"
    if view.age_s is None or view.age_s > weights.stale_s:
        age = "never" if view.age_s is None else f"{view.age_s:.1f} s ago"
        return "stale", f"last heard {age}, allowed are {weights.stale_s:g} s"
    if view.temperature_c >= weights.t_max:
        return "too_hot", f"{view.temperature_c:g} C, the limit is {weights.t_max:g} C"
    if not view.resident and view.load_seconds > request.max_wait_s:
        return "not_resident", (
            f"resident in about {view.load_seconds:.0f} s, "
            f"the request waits {request.max_wait_s:g} s"
        )
    if view.num_blocks and (needed := _blocks(view, request)) > view.num_blocks:
        return "kv_too_small", f"needs {needed} KV blocks, the replica has {view.num_blocks}"
    return None


def _blocks(view: ReplicaView, request: RequestView) -> int:
    """KV blocks that the request may come to need there."""
    return -(-(request.num_prompt_tokens + request.max_output_tokens) // view.block_size)


def _no_replica(choice: Choice) -> NoReplica:
    rejected = choice.rejected
    if not rejected:
        return NoReplica("No replica of this model is running.", 5.0, choice)
    if _never_fits(choice):
        return _too_long(choice)
    reasons = "; ".join(sorted({f"{one.code}: {one.detail}" for one in rejected})[:4])
    return NoReplica(f"No replica can take the request now ({reasons}).", 2.0, choice)


def _never_fits(choice: Choice) -> bool:
    """Not of a request that failed somewhere: it did fit a replica, which may come back."""
    return not choice.excluded and all(
        view.num_blocks and _blocks(view, choice.request) > view.num_blocks for view in choice.views
    )


def _too_long(choice: Choice) -> NeverFits:
    prompt, output = choice.request.num_prompt_tokens, choice.request.max_output_tokens
    limit = max(view.num_blocks * view.block_size for view in choice.views)
    text = (
        f"This model's maximum context length is {limit} tokens, by the KV cache of its replicas; "
        f"the prompt has {prompt} and the answer may have {output}."
    )
    if prompt < limit:
        return NeverFits(f"{text} Ask for fewer with max_tokens.", "max_tokens", choice)
    return NeverFits(text, "messages", choice)
