"""The values that cross between scheduler and runner: what a step computes, for whom.

A `Sequence` is a request in progress and belongs to the scheduler. A `SchedulerOutput` is
frozen: whoever runs it sees no queue and no pool. With block size 4, a step that computes the
last 3 tokens of a 7-token prompt beside one decoding request is

    SchedulerOutput(step=9, work=(
        Work("chat", start=40, token_ids=(311,), block_ids=(3, 8, ...), samples=True),
        Work("mail", start=4, token_ids=(5, 6, 7), block_ids=(1, 9), samples=True)))

There is no prefill and no decode in it, only tokens whose keys and values are still missing.
Proposed tokens (`gpuagent.engine.speculation`) are computed like a prompt: "chat" with two
proposals has token_ids=(311, 8, 15), num_drafts=2, and asks for the scores after each of them.
"""

from dataclasses import dataclass, field

import msgspec

from gpuagent.engine.fairness import Account
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.preemption import HostCopy, Swap
from gpuagent.engine.request import GenerationRequest, LatencyClass

WEIGHTS = {LatencyClass.REALTIME: 10.0, LatencyClass.STANDARD: 1.0, LatencyClass.BATCH: 0.1}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress: prompt plus delivered tokens, and how many are computed.

    `token_ids[:num_computed]` have keys and values in the cache. `num_cached` of them came
    from another request's blocks when this one first started. `num_idle_steps` counts the
    steps since it last computed anything while running. `host_copy` is what a preemption has
    kept; `is_protected` holds until the next token for one that had to wait very long. `account`
    is its tenant's, charged for what it is served. `rank` sorts the most urgent first, the earlier
    one among equals.
    """

    request: GenerationRequest
    arrival: int
    token_ids: list[int]
    num_computed: int = 0
    num_cached: int = 0
    num_idle_steps: int = 0
    has_started: bool = False
    is_protected: bool = False
    host_copy: HostCopy | None = None
    block_keys: list[bytes] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    request_id: str = field(init=False)
    num_prompt: int = field(init=False)
    max_total: int = field(init=False)  # tokens, when it has all that it may get
    rank: tuple[float, int] = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.num_prompt = len(self.request.prompt_token_ids)
        self.max_total = self.num_prompt + self.request.sampling.max_tokens
        self.pass_over(0)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Tokens whose keys and values are missing; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def score(self) -> float:
        """Class weight, raised by every step in which a running request was passed over.

        So a prompt of class batch gets a step's budget after at most a hundred steps of
        others' prompts. Waiting requests age by class: `gpuagent.engine.waiting`.
        """
        return WEIGHTS[self.request.latency_class] * (1 + self.num_idle_steps)

    def pass_over(self, num_steps: int) -> None:
        """It runs and has computed nothing in the last `num_steps` steps."""
        self.num_idle_steps = num_steps
        self.rank = (-self.score, self.arrival)


class Work(msgspec.Struct, frozen=True, gc=False):
    """Compute `token_ids` at positions start, start + 1, ... of one request.

    `block_ids` are its blocks in token order, enough for all of them. `samples` says that
    the last of these tokens is the request's last, so the next one is to be chosen. The last
    `num_drafts` of them are proposals, to be accepted or not; then `samples` is set.

    One is made per request and step, and a struct costs a quarter of a frozen dataclass.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: bool
    copies: tuple[Copy, ...] = ()
    num_drafts: int = 0

    @property
    def num_logits(self) -> int:
        """Of how many of the last tokens the scores are wanted."""
        return self.num_drafts + 1 if self.samples else 0

    @property
    def drafts(self) -> tuple[int, ...]:
        """The proposed tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: `swap_outs`, then `copies`, then `swap_ins`, then `work` in one forward pass.

    A block may be the source of one copy and the target of another, so all sources are read
    before any target is written. What is swapped out may be overwritten by anything later in
    the step, and a swapped-in block may be the source of a copy, hence that order.
    """

    step: int
    work: tuple[Work, ...]
    preempted: tuple[str, ...] = ()
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The block copies of all work."""
        return tuple(copy for work in self.work for copy in work.copies)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(work.token_ids) for work in self.work)

    @property
    def num_extra(self) -> int:
        """Tokens beyond one per request: prompts and proposals."""
        return self.num_tokens - len(self.work)
