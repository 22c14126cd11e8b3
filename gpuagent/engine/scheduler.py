"""Continuous batching: who computes which tokens in the next step.

There is one loop and no prefill or decode phase. A request has tokens whose keys and values
are missing; each step computes some of them, and when none is missing a new token is chosen,
which is then missing in turn. Example with a budget of 6 tokens a step, "a" decoding and "b"
arriving with a prompt of 9 tokens:

    step 1   a: 1 token    b: 5 of its prompt        a gets a token
    step 2   a: 1 token    b: 4 of its prompt        both get a token
    step 3   a: 1 token    b: 1 token                both get a token, and so on

Decoding requests go first, so a long prompt never stalls them (chunked prefill); the rest of
the budget goes by rank: class weight 10 / 1 / 0.1, times one plus the steps a request has been
passed over. The second factor bounds every wait, so no class starves.

Memory: a request is admitted only with blocks for all tokens it has, so it needs more only
when a new token starts a new block. If there is none, the lowest-ranked running request is
preempted: it gives its blocks back and later computes its prompt and delivered tokens anew,
mostly from its own blocks in the prefix cache, so its output is unchanged. A realtime request
that finds no slot or no blocks preempts batch requests of lower rank.

Why this ends: a preemption needs a new token that starts a block, and a request is
re-admitted with the block of that token, so each token causes one preemption at most; and
whatever is running and not preempted computes at least one token a step.

The `static` policy is the papers' baseline: nobody joins until all of a batch have finished.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuagent.engine.batch import SchedulerOutput, Sequence, Work
from gpuagent.engine.kv_cache import Admission, Copy, KVCache, extend_keys
from gpuagent.engine.request import GenerationRequest, LatencyClass, RequestRejected


class Policy(StrEnum):
    """When waiting requests may join."""

    CONTINUOUS = "continuous"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The budgets. `max_batch_tokens` is at least `max_num_seqs`, so that all can decode."""

    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 512
    max_num_seqs: int = 16
    max_model_len: int = 1 << 20
    policy: Policy = Policy.CONTINUOUS
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError("there must be at least one KV block")
        if not 1 <= self.max_num_seqs <= self.max_batch_tokens:
            raise ValueError("max_batch_tokens must be at least max_num_seqs, and that at least 1")


@dataclass(slots=True)
class _Step:
    """The step being planned."""

    budget: int
    work: dict[str, Work] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


class Scheduler:
    """Plans steps. Call `schedule`, run the output, then `complete`; one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCache(config.num_blocks, config.block_size, config.prefix_caching)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._num_arrivals = 0
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._running or self._waiting)

    def sequence(self, request_id: str) -> Sequence | None:
        """The unfinished request of that id."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected if it can never run here."""
        self._check(request)
        sequence = Sequence(request, self._num_arrivals, list(request.prompt_token_ids))
        self._num_arrivals += 1
        self._waiting[request.request_id] = sequence

    def finish(self, request_id: str) -> None:
        """Forget a request, for whatever reason it ends; its blocks are free at once."""
        self.kv.free(request_id)
        self._running.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step within all budgets."""
        step = _Step(self.config.max_batch_tokens)
        is_open = self.config.policy is Policy.CONTINUOUS or not self._running
        self._schedule_running(step)
        if is_open and not step.preempted:  # memory is short: nobody new
            self._admit_waiting(step)
        for sequence in self._unfinished():
            sequence.num_idle_steps += sequence.request_id not in step.work
        self.num_steps += 1
        return SchedulerOutput(self.num_steps, tuple(step.work.values()), tuple(step.preempted))

    def complete(self, output: SchedulerOutput, tokens: Mapping[str, int]) -> None:
        """Record that `output` was computed and which tokens were chosen and delivered.

        Call `finish` before for requests whose results must not be kept (numerical errors),
        and after for those that have ended.
        """
        for work in output.work:
            if sequence := self._running.get(work.request_id):
                self._record(sequence, work)
                if work.request_id in tokens:
                    sequence.token_ids.append(tokens[work.request_id])

    def _record(self, sequence: Sequence, work: Work) -> None:
        salt, size = sequence.request.cache_salt, self.config.block_size
        extend_keys(sequence.block_keys, salt, sequence.token_ids, size)
        self.kv.register(work.request_id, sequence.block_keys, work.start, work.end)
        sequence.num_computed = work.end

    def _check(self, request: GenerationRequest) -> None:
        limit = self.config.max_model_len
        num_prompt = len(request.prompt_token_ids)
        num_blocks = self.kv.num_blocks_for(min(num_prompt + request.sampling.max_tokens, limit))
        if self.sequence(request.request_id):
            raise RequestRejected("duplicate_request_id", f"{request.request_id} is in progress")
        if num_prompt == 0:
            raise RequestRejected("empty_prompt", "the prompt holds no token")
        if num_prompt >= limit:
            message = f"the prompt has {num_prompt} tokens, the model's context {limit}"
            raise RequestRejected("context_length_exceeded", message)
        if num_blocks > self.config.num_blocks:
            message = f"{num_blocks} KV blocks needed, {self.config.num_blocks} exist"
            raise RequestRejected("kv_capacity", message)

    def _unfinished(self) -> Iterator[Sequence]:
        yield from self._running.values()
        yield from self._waiting.values()

    def _schedule_running(self, step: _Step) -> None:
        by_need = sorted(self._running.values(), key=lambda s: (s.num_to_compute > 1, s.rank))
        for sequence in by_need:
            if sequence.request_id not in self._running or step.budget == 0:
                continue  # preempted a moment ago, or its turn is the next step
            num_tokens = min(sequence.num_to_compute, step.budget)
            copies = self._grow(sequence, num_tokens, step)
            if copies is not None:
                self._take(sequence, num_tokens, tuple(copies), step)

    def _grow(self, sequence: Sequence, num_tokens: int, step: _Step) -> list[Copy] | None:
        """Blocks for the next tokens, preempting until there are; None if it went itself."""
        start = sequence.num_computed
        while True:
            copies = self.kv.grow(sequence.request_id, start, start + num_tokens)
            if copies is not None:
                return copies
            victim = max(self._running.values(), key=lambda s: s.rank)
            self._preempt(victim, step)
            if victim is sequence:
                return None

    def _admit_waiting(self, step: _Step) -> None:
        if not self._may_admit():
            return
        for sequence in sorted(self._waiting.values(), key=lambda s: s.rank):
            if step.budget == 0 or not self._start(sequence, step):
                return  # nobody overtakes: a large request would never find room

    def _may_admit(self) -> bool:
        """False where sorting the queue would be in vain."""
        return len(self._running) < self.config.max_num_seqs or any(
            s.request.latency_class is LatencyClass.REALTIME for s in self._waiting.values()
        )

    def _start(self, sequence: Sequence, step: _Step) -> bool:
        admitted = self._admit(sequence)
        while not admitted:
            victim = self._batch_victim(sequence)
            if victim is None:
                return False
            self._preempt(victim, step)
            admitted = self._admit(sequence)
        copies = admitted.copies
        self._running[sequence.request_id] = self._waiting.pop(sequence.request_id)
        sequence.num_computed = admitted.num_cached
        if not sequence.has_started:
            sequence.has_started, sequence.num_cached = True, admitted.num_cached
            self.num_cached_tokens += admitted.num_cached
        self._take(sequence, min(sequence.num_to_compute, step.budget), copies, step)
        return True

    def _admit(self, sequence: Sequence) -> Admission | None:
        if len(self._running) >= self.config.max_num_seqs:
            return None
        salt, size = sequence.request.cache_salt, self.config.block_size
        extend_keys(sequence.block_keys, salt, sequence.token_ids, size)
        # Room for the running to grow, or the newcomer would be preempted in the next steps.
        num_spare = max(1, self.config.num_blocks // 100) if self._running else 0
        return self.kv.admit(
            sequence.request_id, sequence.block_keys, len(sequence.token_ids), num_spare
        )

    def _batch_victim(self, sequence: Sequence) -> Sequence | None:
        """The batch request that a realtime request may push out: the lowest, if lower."""
        if sequence.request.latency_class is not LatencyClass.REALTIME:
            return None
        victims = (
            s
            for s in self._running.values()
            if s.request.latency_class is LatencyClass.BATCH and s.score < sequence.score
        )
        return max(victims, key=lambda s: s.rank, default=None)

    def _take(
        self, sequence: Sequence, num_tokens: int, copies: tuple[Copy, ...], step: _Step
    ) -> None:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        step.budget -= num_tokens
        step.work[sequence.request_id] = Work(
            request_id=sequence.request_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            block_ids=self.kv.table(sequence.request_id),
            samples=end == len(sequence.token_ids),
            copies=copies,
        )

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        """Put a running request back into the queue, before those of its class behind it."""
        work = step.work.pop(victim.request_id, None)
        step.budget += len(work.token_ids) if work else 0
        step.preempted.append(victim.request_id)
        self.num_preemptions += 1
        self.kv.free(victim.request_id)
        del self._running[victim.request_id]
        victim.num_computed = 0
        victim.num_idle_steps = max(victim.num_idle_steps, self._longest_wait_behind(victim))
        self._waiting[victim.request_id] = victim

    def _longest_wait_behind(self, victim: Sequence) -> int:
        latency_class = victim.request.latency_class
        behind = (
            s.num_idle_steps
            for s in self._waiting.values()
            if s.request.latency_class is latency_class and s.arrival > victim.arrival
        )
        return max(behind, default=0)
