"""One inference request in the application's own words, free of HTTP and of the bus's format.

A ``Job`` is a checked request. It becomes one ``Order`` per choice, each a generation of its own,
which a ``Placer`` gives a ``Target`` and a ``Generator`` sends there; what comes back is a
``Delta`` per step. A job of two prompts with two choices each is four orders::

    Job(req-7, prompts=(a, b), num_choices=2)
      -> Order(req-7-0, a)  Order(req-7-1, a)  Order(req-7-2, b)  Order(req-7-3, b)

A job that embeds has a prompt, and so an order, for every few dozen inputs: they lie in it side by
side, and nothing is generated, so ``max_tokens`` is 0. 70 inputs are three orders of 24, 23 and 23.

How a job is served is ``serve``; the ledger's part of it stands in ``ports``.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from controlplane.application.capture import Capture
from controlplane.application.refused import Refused
from controlplane.dispatch.choose import Choice
from controlplane.domain.money import Price


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
    weight: float = 1.0
    record_id: str = ""  # the request that this is one of several choices, or tries, of
    sent_token_ids: tuple[int, ...] = ()  # from which on it is to be continued
    num_cached_tokens: int = 0
    input_lengths: tuple[int, ...] = ()  # of inputs to embed, side by side in the prompt


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
    embeddings: tuple[bytes, ...]
    num_computed_tokens: int


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
    """Where a generation goes; ``num_uncached_tokens`` of its prompt are to be computed there."""

    node_id: str
    replica_id: str
    num_uncached_tokens: int = 0


class InFlight(NamedTuple):
    """What this gateway has on each replica: requests, and tokens of prompts that none has
    answered yet."""

    num: Mapping[str, int]
    num_tokens: Mapping[str, int]


class Seen(NamedTuple):
    """A choice as it was made: also one that found nobody. ``position`` is the log's, ``at`` in
    Unix seconds."""

    choice: Choice
    position: int
    at: float


class Gap(NamedTuple):
    """Why a version runs nowhere. ``reason``: the planner's sentence. ``lasts``: neither waiting
    nor another model that leaves changes it. ``retry_s``: seconds until it is tried again after
    failures; None where it did not fail. ``num_failures``: in a row, where it failed least."""

    reason: str
    lasts: bool = False
    retry_s: float | None = None
    num_failures: int = 0

    @property
    def keeps_failing(self) -> bool:
        """The next try is no more likely to succeed than the last ones; a first failure may be that
        of a worker that was killed."""
        return self.num_failures > 1


class Placer(Protocol):
    """Chooses among the replicas that are ready now; ``local`` is what we have there."""

    def choose(
        self,
        job: "Job",
        excluded: frozenset[str],
        local: InFlight,
        saw: Callable[[Seen], None],
    ) -> Target:
        """``saw`` is shown the choice, whatever comes of it. Raises Refused ``model_not_ready``
        with the reasons."""

    def is_heard(self, node_id: str) -> bool:
        """False once the node has been silent for too long."""

    def is_suspect(self, node_id: str) -> bool:
        """The log says that the node is silent, and it is not heard here either."""

    def has_other(self, job: "Job", excluded: frozenset[str]) -> bool:
        """Whether a replica that is ready now could take the job."""

    def wait_s(self, version_id: str) -> float | None:
        """Seconds until a replica is expected to be ready; None if one is, or was till now."""

    def gone(self, version_id: str) -> Refused | None:
        """What a new request for the version is told if nobody can ask for it any more."""

    def gap(self, version_id: str) -> Gap | None:
        """Why it fits nowhere, as the planner says; None if it is placed, or not planned yet."""

    def tried(self, version_id: str) -> Gap | None:
        """Of a version not planned yet: why no device could hold it; None if one could."""


class Limits(Protocol):
    """The tenant's rate, and how many requests it has open."""

    async def take(self, job: "Job") -> Any:
        """Its limits after this request; raises Refused, and then nothing was taken."""

    def give_back(self, job: "Job", num_tokens: int, was_refused: bool = False) -> None:
        """The request is over and used ``num_tokens`` of what it asked for; nothing at all, its
        place among the requests included, if it was refused after all."""


@dataclass(slots=True)
class Job:
    """A checked request: who asks, what was resolved, and the encoded prompts (one per part).

    ``weight`` is the tenant's among those of its latency class, ``priority`` the version's.

    A job whose model's tokenizer is not known yet has empty prompts and the most that they may
    become as ``max_prompt_tokens`` (all together); ``encode`` fills in prompts, ``max_tokens`` and
    ``input_lengths`` once the tokenizer is there, and raises Refused until then. Nothing is ever
    more than was reserved.
    """

    request_id: str
    tenant_id: str
    subject: str
    end_user: str
    tier: str
    endpoint: str
    requested_model: str
    route: str
    arm: str
    version_id: str
    latency_class: str
    price: Price
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    max_tokens: tuple[int, ...]
    sampling: SamplingOptions
    cache_salt: bytes
    began: float  # monotonic seconds
    weight: float = 1.0
    priority: str = "normal"
    capture: Capture | None = None  # of a tenant that opted in
    limits: Any = None
    max_prompt_tokens: int = 0  # if they are not encoded yet
    encode: Callable[["Job"], Awaitable[None]] | None = None
    input_lengths: tuple[tuple[int, ...], ...] = ()  # of each prompt's inputs, if it embeds
    reserved_prompt_tokens: int = field(init=False)
    max_output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.reserved_prompt_tokens = max(self.num_prompt_tokens, self.max_prompt_tokens)
        self.max_output_tokens = sum(self.max_tokens) * self.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def lengths_of(self, prompt: int) -> tuple[int, ...]:
        """Of the inputs in that prompt; empty if it is to be continued."""
        return self.input_lengths[prompt] if self.input_lengths else ()
