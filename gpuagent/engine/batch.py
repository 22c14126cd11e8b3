"""The values that cross between scheduler and runner: what a step computes, for whom.

A `Sequence` is a request in progress and belongs to the scheduler. A `SchedulerOutput` is
frozen: whoever runs it sees no queue and no pool. With block size 4, a step that computes the
last 3 tokens of a 7-token prompt beside one decoding request is

    SchedulerOutput(step=9, work=(
        Work("chat", start=40, token_ids=(311,), block_ids=(3, 8, ...), samples=True),
        Work("mail", start=4, token_ids=(5, 6, 7), block_ids=(1, 9), samples=True)))

There is no prefill and no decode in it, only tokens whose keys and values are still missing.
"""

from dataclasses import dataclass, field

from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.request import GenerationRequest, LatencyClass

WEIGHTS = {LatencyClass.REALTIME: 10.0, LatencyClass.STANDARD: 1.0, LatencyClass.BATCH: 0.1}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress: prompt plus delivered tokens, and how many are computed.

    `token_ids[:num_computed]` have keys and values in the cache. `num_cached` of them came
    from another request's blocks when this one first started.
    """

    request: GenerationRequest
    arrival: int
    token_ids: list[int]
    num_computed: int = 0
    num_cached: int = 0
    num_idle_steps: int = 0
    has_started: bool = False
    block_keys: list[bytes] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

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
        """Class weight, raised by every step in which the request was passed over.

        This is what keeps a lower class from starving: a standard request gets its turn
        after at most ten times the wait of a realtime one, a batch request after a hundred.
        """
        return WEIGHTS[self.request.latency_class] * (1 + self.num_idle_steps)

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the most urgent first, the earlier one among equals."""
        return (-self.score, self.arrival)


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `token_ids` at positions start, start + 1, ... of one request.

    `block_ids` are its blocks in token order, enough for all of them. `samples` says that
    the last of these tokens is the request's last, so the next one is to be chosen.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: bool
    copies: tuple[Copy, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: do all `copies` first, then all `work` in one forward pass.

    A block may be the source of one copy and the target of another, so all sources are read
    before any target is written.
    """

    step: int
    work: tuple[Work, ...]
    preempted: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The block copies of all work."""
        return tuple(copy for work in self.work for copy in work.copies)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(work.token_ids) for work in self.work)
