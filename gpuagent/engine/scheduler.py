"""Continuous batching: who computes which tokens in the next step.

There is one loop and no prefill or decode phase. A request has tokens whose keys and values
are missing; each step computes some of them, and when none is missing a new token is chosen,
which is then missing in turn. Example with a budget of 6 tokens a step, "a" decoding and "b"
arriving with a prompt of 9 tokens:

    step 1   a: 1 token    b: 5 of its prompt        a gets a token
    step 2   a: 1 token    b: 4 of its prompt        both get a token
    step 3   a: 1 token    b: 1 token                both get a token, and so on

Decoding requests go first, so a long prompt never stalls them (chunked prefill), and prompts
get what `pacing` leaves them, so that it does not slow them either. The rest goes by rank:
class weight 10 / 1 / 0.1 times one plus the steps passed over (`waiting` for the queue), which
bounds every wait; tenants of one class share its slots by tokens (`fairness`). `policies` puts the
three moves decode, prefill and admit in another order.

Memory: a request is admitted only with blocks for all tokens it has, and if it will still fit
when everybody has grown (`admission`), so it needs more only when a new token starts a new
block. If there is none, the lowest-ranked running request is preempted: it gives its blocks
back and resumes later, from host memory or by computing its tokens anew (`preemption`), so its
output is unchanged. A realtime request that finds no slot or no blocks preempts batch requests,
but none that had itself waited until its class came before realtime: that one keeps its place
until its next token.

Why this ends: a preemption for growth needs a new token that starts a block, and a request is
re-admitted with the block of that token, so each token causes one preemption at most; whatever
is running and not preempted computes at least one token a step; and a class that gets nothing
is let in after a bounded wait and then yields a token.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter

from gpuagent.engine.admission import LengthDistribution, peak_tokens
from gpuagent.engine.batch import WEIGHTS, SchedulerOutput, Sequence, Work
from gpuagent.engine.kv_cache import Admission, Copy, KVCache, extend_keys
from gpuagent.engine.pacing import Pace
from gpuagent.engine.policies import PLANS, Policy
from gpuagent.engine.preemption import HostCopy, Swap, SwapSpace
from gpuagent.engine.request import GenerationRequest, LatencyClass, RequestRejected
from gpuagent.engine.shared_pool import Lease
from gpuagent.engine.waiting import WaitingQueue

__all__ = ["Policy", "Scheduler", "SchedulerConfig"]

_rank = attrgetter("rank")
_max_total = attrgetter("max_total")
_latency_class = attrgetter("request.latency_class")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The budgets. `max_batch_tokens` is at least `max_num_seqs`, so that all can decode.

    `target_itl_seconds` bounds what prompts add to a step in which others decode; None gives
    them the whole budget. `num_host_blocks` is the room for swapped requests, 0 for none. A leased
    pool (`shared_pool`) takes and gives memory in chunks of `blocks_per_chunk`.
    """

    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 512
    max_num_seqs: int = 16
    max_model_len: int = 1 << 20
    policy: Policy = Policy.CONTINUOUS
    prefix_caching: bool = True
    num_host_blocks: int = 0
    target_itl_seconds: float | None = None
    blocks_per_chunk: int = 1

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError("there must be at least one KV block")
        if not 1 <= self.max_num_seqs <= self.max_batch_tokens:
            raise ValueError("max_batch_tokens must be at least max_num_seqs, and that at least 1")


class Scheduler:
    """Plans steps. Call `schedule`, run the output, then `complete`; one thread."""

    def __init__(self, config: SchedulerConfig, lease: Lease | None = None) -> None:
        self.config = config
        sizes = config.num_blocks, config.block_size, config.prefix_caching
        self.kv = KVCache(*sizes, lease, config.blocks_per_chunk)
        self.host = SwapSpace(config.num_host_blocks)
        self.pace = Pace(config.max_batch_tokens, config.target_itl_seconds)
        self.lengths = LengthDistribution()
        self.num_steps = 0
        self.num_swapped_out = 0
        self.num_recomputed = 0
        self.num_cached_tokens = 0
        self.running: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.num_joined = 0  # since nobody was running
        self._num_arrivals = 0
        self._returning: list[HostCopy] = []

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times a request had to give its blocks back."""
        return self.num_swapped_out + self.num_recomputed

    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.running or self.waiting)

    def urgency(self) -> float:
        """Weight of the most urgent class with an unfinished request; 0 without any."""
        running = {s.request.latency_class for s in self.running.values()}
        waiting = {each for each in LatencyClass if self.waiting.count(each)}
        return max((WEIGHTS[each] for each in running | waiting), default=0.0)

    def sequence(self, request_id: str) -> Sequence | None:
        """The unfinished request of that id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def decoding(self) -> Iterator[Sequence]:
        """The running requests that miss one token, to which proposals can be added."""
        return (s for s in self.running.values() if s.num_to_compute == 1 and s.num_output)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestRejected if it can never run here."""
        self._check(request)
        sequence = Sequence(request, self._num_arrivals, list(request.prompt_token_ids))
        self._num_arrivals += 1
        self.waiting.add(sequence)

    def adopt(
        self, request: GenerationRequest, tokens: Seq[int], copy: HostCopy | None, num_cached: int
    ) -> None:
        """Queue a request that another engine began and gave `tokens`, as if it had been preempted
        here with `copy`; raises RequestRejected."""
        self._check(request)
        sequence = Sequence(request, self._num_arrivals, [*request.prompt_token_ids, *tokens])
        sequence.has_started, sequence.num_cached, sequence.host_copy = True, num_cached, copy
        self._num_arrivals += 1
        self.waiting.add(sequence)

    def finish(self, request_id: str) -> None:
        """Forget a request, for whatever reason it ends; its blocks are free at once."""
        sequence = self.sequence(request_id)
        if sequence is None:
            return
        if sequence.host_copy:
            self.host.release(sequence.host_copy)
        if sequence.num_output:
            self.lengths.record(sequence.num_output)
        self.kv.free(request_id)
        self.running.pop(request_id, None)
        self.waiting.remove(request_id)

    def schedule(self, drafts: Mapping[str, tuple[int, ...]] | None = None) -> SchedulerOutput:
        """Plan the next step within all budgets, with proposals for decoding requests."""
        step = _Step(self, drafts or {})
        PLANS[self.config.policy](step)
        for name, sequence in self.running.items():
            if name not in step.work:
                sequence.pass_over(sequence.num_idle_steps + 1)
            elif sequence.num_idle_steps:
                sequence.pass_over(0)
        self.waiting.age({self.running[name].request.latency_class for name in step.work})
        self.num_steps += 1
        return step.output(self.num_steps)

    def complete(self, output: SchedulerOutput, tokens: Mapping[str, Seq[int]]) -> None:
        """Record that `output` was computed and which tokens were chosen and delivered.

        For work with proposals these are the accepted ones and the one chosen after them.
        Call `finish` before for requests whose results must not be kept (numerical errors),
        and after for those that have ended.
        """
        for copy in self._returning:
            self.host.release(copy)
        self._returning = []
        for work in output.work:
            if sequence := self.running.get(work.request_id):
                self._record(sequence, work, tokens.get(work.request_id, ()))

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn what the step cost."""
        if output.work:
            self.pace.cost.observe(output.num_extra, seconds)

    def preempt_last(self) -> tuple[Swap, ...] | None:
        """Between two steps, put the lowest-ranked running request back into the queue; the swaps
        to be done before anything else, or None if nothing runs."""
        if not self.running:
            return None
        step = _Step(self, {})
        step.preempt(max(self.running.values(), key=lambda s: s.rank))
        return tuple(step.swap_outs)

    def observe_swaps(self, num_blocks: int, seconds: float) -> None:
        """Learn what moving that many blocks, one way, has cost."""
        self.host.cost.observe(num_blocks, seconds)

    def bring_home(self, copies: Iterable[HostCopy]) -> None:
        """These host copies are read by the planned step and free when it is complete."""
        self._returning += copies

    def _record(self, sequence: Sequence, work: Work, tokens: Seq[int]) -> None:
        """Tokens up to the last accepted one are computed; what was rejected is forgotten."""
        sequence.token_ids += tokens
        if tokens:
            sequence.is_protected = False
            sequence.account.charge_output(len(tokens), sequence.request.weight)
        num_rejected = max(work.num_drafts + 1 - len(tokens), 0) if work.num_drafts else 0
        start, size = work.start, self.config.block_size
        end = sequence.num_computed = start + len(work.token_ids) - num_rejected
        if len(sequence.token_ids) // size > len(sequence.block_keys):
            salt = sequence.request.cache_salt
            extend_keys(sequence.block_keys, salt, sequence.token_ids, size)
        if end // size > start // size:
            self.kv.register(work.request_id, sequence.block_keys, start, end)
        if num_rejected:
            self.kv.shrink(work.request_id, end)

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


@dataclass(slots=True)
class _Return:
    """A request coming back from host memory in the step being planned."""

    copy: HostCopy
    swaps: tuple[Swap, ...]


@dataclass(slots=True)
class _Step:
    """The step being planned; see `gpuagent.engine.policies.Planner`.

    `budget` is what is left of the tokens. Prompts may take as much of it as the pace allows
    beside those whose tokens somebody waits for: not batch requests, and none of a lower class
    than the prompt's.
    """

    scheduler: Scheduler
    drafts: Mapping[str, tuple[int, ...]]
    budget: int = field(init=False)
    num_prompt_tokens: int = 0
    is_forming: bool = field(init=False)
    num_decoding: Counter[LatencyClass] = field(init=False)
    num_waiting: float = field(init=False)
    work: dict[str, Work] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    swap_outs: list[Swap] = field(default_factory=list)
    returns: dict[str, _Return] = field(default_factory=dict)
    _decoding: list[Sequence] = field(default_factory=list)  # as the step begins
    _others: list[Sequence] = field(default_factory=list)  # that run and do not decode
    _holdings: dict[str, tuple[int, int]] = field(default_factory=dict)  # see `_holding`

    def __post_init__(self) -> None:
        scheduler = self.scheduler
        running = scheduler.running.values()
        for sequence in running:
            is_decoding = len(sequence.token_ids) - sequence.num_computed == 1
            (self._decoding if is_decoding else self._others).append(sequence)
        if not running:
            scheduler.num_joined = 0
        has_room = scheduler.num_joined < scheduler.config.max_num_seqs
        self.is_forming = has_room and all(s.num_output <= 1 for s in running)
        self.budget = scheduler.config.max_batch_tokens
        self.num_decoding = Counter(map(_latency_class, self._decoding))
        self.num_waiting = self._weigh_waiting()

    @property
    def is_empty(self) -> bool:
        """True if nothing is planned yet."""
        return not self.work

    def prompt_room(self, sequence: Sequence) -> int:
        """Tokens that this prompt may take; 0 or less if none."""
        is_realtime = sequence.request.latency_class is LatencyClass.REALTIME
        watched = [LatencyClass.REALTIME, *(() if is_realtime else (LatencyClass.STANDARD,))]
        num_watched = sum(WEIGHTS[each] * self.num_decoding[each] for each in watched)
        limit = self.scheduler.pace.prompt_budget(num_watched, self.num_waiting)
        return min(self.budget, limit - self.num_prompt_tokens)

    def _weigh_waiting(self) -> float:
        """The weights of those whose first token is still to come and who have or find a slot."""
        scheduler = self.scheduler
        num_prompts = Counter(map(_latency_class, self._others))
        num_free = scheduler.config.max_num_seqs - len(scheduler.running)
        total = 0.0
        for each in LatencyClass:
            num_starting = min(scheduler.waiting.count(each), num_free)
            num_free -= num_starting
            total += WEIGHTS[each] * (num_prompts[each] + num_starting)
        return total

    def output(self, number: int) -> SchedulerOutput:
        """The finished plan."""
        self.scheduler.bring_home(each.copy for each in self.returns.values())
        return SchedulerOutput(
            step=number,
            work=tuple(self.work.values()),
            preempted=tuple(self.preempted),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(swap for each in self.returns.values() for swap in each.swaps),
        )

    def decode(self) -> None:
        """One token each, and proposals from what the others' tokens leave."""
        decoding = sorted(self._decoding, key=_rank)
        if self.preempted:  # for the sake of prompts, by another policy than `continuous`
            decoding = [each for each in decoding if self._is_still_running(each)]
        room = self.budget - len(decoding)
        for sequence in decoding:
            if self._is_still_running(sequence):
                work = self._decode_one(sequence, room)
                room -= work.num_drafts if work else 0

    def prefill(self) -> None:
        """More of the prompts, the most urgent first."""
        for sequence in sorted(self._others, key=_rank):
            num_tokens = min(sequence.num_to_compute, self.prompt_room(sequence))
            if self._is_still_running(sequence) and num_tokens > 0:
                copies = self._grow(sequence, num_tokens)
                if copies is not None:
                    self._take_prompt(sequence, num_tokens, copies)

    def admit(self) -> None:
        """Let waiting requests start; nobody overtakes, or a large one would never find room.

        Except realtime requests, if a batch request can make room for them.
        """
        waiting = self.scheduler.waiting
        if self.preempted:
            return  # memory is short: nobody new
        while self._has_slot and (head := waiting.first()):
            if head.request_id in self.preempted or not self._start(head):
                break
        while head := waiting.head(LatencyClass.REALTIME):
            if not self._start(head, must_preempt=True):
                break

    @property
    def _has_slot(self) -> bool:
        return len(self.scheduler.running) < self.scheduler.config.max_num_seqs

    def _is_still_running(self, sequence: Sequence) -> bool:
        """False if it was preempted a moment ago."""
        return self.budget > 0 and sequence.request_id in self.scheduler.running

    def _decode_one(self, sequence: Sequence, room: int) -> Work | None:
        drafts = self.drafts.get(sequence.request_id, ())
        drafts = self._clip(sequence, drafts, room) if drafts else ()
        copies = self._grow_for_drafts(sequence, len(drafts)) if drafts else None
        if copies is None:
            drafts, copies = (), self._grow(sequence, 1)
        return None if copies is None else self._take(sequence, 1, copies, drafts)

    def _clip(self, sequence: Sequence, drafts: tuple[int, ...], room: int) -> tuple[int, ...]:
        """No proposals past the budget, the context or the request's end."""
        sampling, config = sequence.request.sampling, self.scheduler.config
        num_left = sampling.max_tokens - sequence.num_output - 1
        num_context = config.max_model_len - len(sequence.token_ids) - 1
        return drafts[: max(min(num_left, num_context, room), 0)]

    def _grow_for_drafts(self, sequence: Sequence, num_drafts: int) -> list[Copy] | None:
        """Blocks for proposals too; None if memory is short: nobody is preempted for them."""
        start = sequence.num_computed
        return self.scheduler.kv.grow(sequence.request_id, start, start + 1 + num_drafts)

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[Copy] | None:
        """Blocks for the next tokens, preempting until there are; None if it went itself."""
        start = sequence.num_computed
        while True:
            copies = self.scheduler.kv.grow(sequence.request_id, start, start + num_tokens)
            if copies is not None:
                return copies
            victim = max(self.scheduler.running.values(), key=lambda s: s.rank)
            self.preempt(victim)
            if victim is sequence:
                return None

    def _start(self, sequence: Sequence, must_preempt: bool = False) -> bool:
        if self.prompt_room(sequence) <= 0:
            return False
        admitted = None if must_preempt else self._admit(sequence)
        while not admitted:
            victim = self._batch_victim(sequence)
            if victim is None:
                return False
            self.preempt(victim)
            admitted = self._admit(sequence)
        self._resume(sequence, admitted)
        num_tokens = min(sequence.num_to_compute, self.prompt_room(sequence))
        self._take_prompt(sequence, num_tokens, admitted.copies)
        return True

    def _resume(self, sequence: Sequence, admitted: Admission) -> None:
        """Move a request from the queue to the running ones."""
        scheduler, name = self.scheduler, sequence.request_id
        sequence.is_protected = scheduler.waiting.is_starving(sequence.request.latency_class)
        scheduler.waiting.remove(name)
        scheduler.running[name] = sequence
        scheduler.num_joined += 1
        sequence.num_computed = admitted.num_cached
        if sequence.host_copy:
            self._bring_back(sequence, sequence.host_copy)
        if not sequence.has_started:
            sequence.has_started, sequence.num_cached = True, admitted.num_cached
            scheduler.num_cached_tokens += admitted.num_cached
            num_tokens = sequence.num_prompt - admitted.num_cached
            sequence.account.charge_prompt(num_tokens, sequence.request.weight)

    def _bring_back(self, sequence: Sequence, copy: HostCopy) -> None:
        """Swap in what the prefix cache no longer holds."""
        table = self.scheduler.kv.table(sequence.request_id)
        first = sequence.num_computed // self.scheduler.config.block_size
        is_needed = copy.num_tokens > sequence.num_computed
        pairs = zip(table[first:], copy.blocks[first:], strict=False) if is_needed else ()
        self.returns[sequence.request_id] = _Return(copy, tuple(Swap(d, h) for d, h in pairs))
        sequence.num_computed = max(sequence.num_computed, copy.num_tokens)
        sequence.host_copy = None

    def _admit(self, sequence: Sequence) -> Admission | None:
        scheduler, config = self.scheduler, self.scheduler.config
        if not self._has_slot or not self._will_fit(sequence):
            return None
        salt, size = sequence.request.cache_salt, config.block_size
        extend_keys(sequence.block_keys, salt, sequence.token_ids, size)
        # Room for the running to grow, or the newcomer would be preempted in the next steps.
        num_spare = max(1, config.num_blocks // 100) if scheduler.running else 0
        return scheduler.kv.admit(
            sequence.request_id, sequence.block_keys, len(sequence.token_ids), num_spare
        )

    def _will_fit(self, sequence: Sequence) -> bool:
        """Whether all will have room at their expected lengths; realtime need not ask."""
        scheduler = self.scheduler
        is_urgent = sequence.request.latency_class is LatencyClass.REALTIME
        if is_urgent or not scheduler.running or not scheduler.lengths.is_known:
            return True
        if self._most_blocks(sequence) <= scheduler.config.num_blocks:
            return True  # whatever is expected
        return self._expected_peak(sequence) <= scheduler.config.num_blocks

    def _most_blocks(self, newcomer: Sequence) -> int:
        """No less than the peak: as if all got all tokens that they may get, at the same time."""
        kv, running = self.scheduler.kv, self.scheduler.running.values()
        num_tokens = sum(map(_max_total, running)) + newcomer.max_total
        num_ends = 2 * (len(running) + 1)  # blocks begun, by what each has and by what it adds
        num_used = kv.pool.num_blocks - kv.pool.num_free
        return num_used + kv.num_blocks_for(num_tokens) + num_ends

    def _expected_peak(self, newcomer: Sequence) -> int:
        """Blocks, from each request's own ones and the blocks it is expected to add."""
        running, pool = self.scheduler.running, self.scheduler.kv.pool
        for name in running.keys() - self._holdings.keys():  # a step changes nobody's
            self._holdings[name] = self._holding(running[name])
        holdings = [self._holdings[name] for name in running]
        num_shared = pool.num_blocks - pool.num_free - sum(own for own, _ in holdings)
        return max(num_shared, 0) + peak_tokens([*holdings, self._holding(newcomer)])

    def _holding(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks of its own, and those that it is expected to add."""
        num_blocks_for, lengths = self.scheduler.kv.num_blocks_for, self.scheduler.lengths
        max_tokens = sequence.request.sampling.max_tokens
        remaining = lengths.expected_remaining(sequence.num_output, max_tokens)
        num_own = len(sequence.token_ids) - sequence.num_cached
        return num_blocks_for(num_own), num_blocks_for(remaining)

    def _batch_victim(self, sequence: Sequence) -> Sequence | None:
        """The batch request that a realtime request may push out: the latest."""
        if sequence.request.latency_class is not LatencyClass.REALTIME:
            return None
        victims = (
            s
            for s in self.scheduler.running.values()
            if s.request.latency_class is LatencyClass.BATCH and not s.is_protected
        )
        return max(victims, key=lambda s: s.arrival, default=None)

    def _take_prompt(self, sequence: Sequence, num_tokens: int, copies: Iterable[Copy]) -> None:
        self.num_prompt_tokens += num_tokens
        self._take(sequence, num_tokens, copies)

    def _take(
        self,
        sequence: Sequence,
        num_tokens: int,
        copies: Iterable[Copy],
        drafts: tuple[int, ...] = (),
    ) -> Work:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        token_ids = tuple(sequence.token_ids[start:end])
        self.budget -= num_tokens + len(drafts)
        work = self.work[sequence.request_id] = Work(
            request_id=sequence.request_id,
            start=start,
            token_ids=token_ids + drafts if drafts else token_ids,
            block_ids=self.scheduler.kv.table(sequence.request_id),
            samples=end == len(sequence.token_ids),
            copies=tuple(copies),
            num_drafts=len(drafts),
        )
        return work

    def preempt(self, victim: Sequence) -> None:
        """Put a running request back into the queue, at the place of its arrival."""
        name, scheduler = victim.request_id, self.scheduler
        work = self.work.pop(name, None)
        self.budget += len(work.token_ids) if work else 0
        self.preempted.append(name)
        self._keep(victim, is_whole=not (work and work.copies))
        scheduler.kv.free(name)
        del scheduler.running[name]
        victim.num_computed = 0
        victim.pass_over(0)
        scheduler.waiting.add(victim)

    def _keep(self, victim: Sequence, is_whole: bool) -> None:
        """Keep what it has computed on the host, unless that costs more than computing it.

        A request that was to come back in this very step never left its host copy. One whose
        blocks are not whole before the step's copies are done is computed anew.
        """
        scheduler = self.scheduler
        if coming := self.returns.pop(victim.request_id, None):
            victim.host_copy = coming.copy
        elif is_whole:
            self._swap_out(victim)
        scheduler.num_swapped_out += victim.host_copy is not None
        scheduler.num_recomputed += victim.host_copy is None

    def _swap_out(self, victim: Sequence) -> None:
        kv, host, cost = self.scheduler.kv, self.scheduler.host, self.scheduler.pace.cost
        num_tokens = victim.num_computed
        copy = host.keep(kv.num_blocks_for(num_tokens), num_tokens, cost.per_extra)
        if copy:
            victim.host_copy = copy
            pairs = zip(kv.table(victim.request_id), copy.blocks, strict=False)
            self.swap_outs += [Swap(device, host_block) for device, host_block in pairs]
