"""Runs a scheduler against a pretended paged memory that checks every read.

The memory stores the token itself where a model would store its key and value, so a request
reads back its own tokens exactly if block tables, sharing, copies and preemption are right.
"""

from collections.abc import Callable, Sequence

from gpuagent.engine.batch import SchedulerOutput, Work
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.scheduler import Scheduler


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    latency_class: LatencyClass = LatencyClass.STANDARD,
    salt: bytes = b"",
    weight: float = 1.0,
) -> GenerationRequest:
    """A request with default sampling."""
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id, tuple(prompt), sampling, latency_class, salt, weight)


def next_token(tokens: Sequence[int]) -> int:
    """What the pretended model says after `tokens`: depends on all of them."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value % 7


Proposer = Callable[[list[int]], tuple[int, ...]]


def nothing(tokens: list[int]) -> tuple[int, ...]:
    """No proposals."""
    return ()


class Driver:
    """Steps a scheduler, keeps outputs, asserts the invariants after each step."""

    def __init__(self, scheduler: Scheduler, propose: Proposer = nothing) -> None:
        self.scheduler = scheduler
        self.propose = propose
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.cached: dict[str, int] = {}
        size = scheduler.config.block_size
        self.memory = [[-1] * size for _ in range(scheduler.config.num_blocks)]
        self.host = [[-1] * size for _ in range(scheduler.config.num_host_blocks)]

    def add(self, new: GenerationRequest) -> None:
        """Queue a request."""
        self.scheduler.add(new)
        self.requests[new.request_id] = new
        self.outputs[new.request_id] = []

    def cancel(self, request_id: str) -> None:
        """End a request from outside."""
        self.scheduler.finish(request_id)
        self.requests.pop(request_id, None)

    def step(self) -> SchedulerOutput:
        """One step: plan, check, compute, record."""
        drafts = {s.request_id: self.propose(s.token_ids) for s in self.scheduler.decoding()}
        output = self.scheduler.schedule(drafts)
        self._check_budgets(output)
        self._move(output)
        self._compute(output)
        tokens = {w.request_id: self._sample(w) for w in output.work if w.samples}
        self.scheduler.complete(output, tokens)
        for request_id, chosen in tokens.items():
            self._deliver(request_id, chosen)
        self.check_blocks()
        return output

    def run(self, max_steps: int = 3000) -> None:
        """Step until all is done; too many steps are a failure (someone starves)."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {sorted(self.requests)}")

    def expected(self, new: GenerationRequest) -> list[int]:
        """What the request generates when it runs alone."""
        tokens = list(new.prompt_token_ids)
        for _ in range(new.sampling.max_tokens):
            tokens.append(next_token(tokens))
        return tokens[len(new.prompt_token_ids) :]

    def check_blocks(self) -> None:
        """Every block is free or held by exactly as many tables as it counts."""
        pool = self.scheduler.kv.pool
        held = [0] * pool.num_blocks
        for request_id in self.requests:
            for block in self.scheduler.kv.table(request_id):
                held[block] += 1
        assert held == [pool.num_refs(b) for b in range(pool.num_blocks)]
        assert pool.num_free == held.count(0)
        assert pool.num_held == pool.num_blocks - held.count(0)
        copies = [s.host_copy for s in self.scheduler.waiting if s.host_copy]
        blocks = [block for copy in copies for block in copy.blocks]
        assert len(blocks) == len(set(blocks)), "a host block is used twice"
        num_host = self.scheduler.config.num_host_blocks
        assert self.scheduler.host.num_free == num_host - len(blocks)

    def _tokens(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].prompt_token_ids) + self.outputs[request_id]

    def _check_budgets(self, output: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert output.num_tokens <= config.max_batch_tokens
        assert len(output.work) <= self.scheduler.num_running <= config.max_num_seqs
        assert all(work.token_ids for work in output.work)
        written = [
            (work.block_ids[p // config.block_size], p % config.block_size)
            for work in output.work
            for p in range(work.start, work.end)
        ]
        assert len(written) == len(set(written)), "two tokens are written to one place"

    def _move(self, output: SchedulerOutput) -> None:
        for swap in output.swap_outs:
            self.host[swap.host] = list(self.memory[swap.device])
        sources = [list(self.memory[copy.source]) for copy in output.copies]
        for copy, contents in zip(output.copies, sources, strict=True):
            self.memory[copy.target] = contents
        for swap in output.swap_ins:
            self.memory[swap.device] = list(self.host[swap.host])

    def _compute(self, output: SchedulerOutput) -> None:
        size = self.scheduler.config.block_size
        for work in output.work:
            for position, token in enumerate(work.token_ids, work.start):
                self.memory[work.block_ids[position // size]][position % size] = token
        for work in output.work:
            read = [self.memory[work.block_ids[p // size]][p % size] for p in range(work.end)]
            assert read == [*self._tokens(work.request_id), *work.drafts][: work.end]

    def _sample(self, work: Work) -> list[int]:
        """The proposals that are right, and the token after them."""
        tokens = self._tokens(work.request_id)[: work.end - work.num_drafts]
        chosen = [next_token(tokens)]
        for draft in work.drafts:
            if draft != chosen[-1]:
                break
            chosen.append(next_token(tokens + chosen))
        return chosen

    def _deliver(self, request_id: str, chosen: list[int]) -> None:
        self.outputs[request_id] += chosen
        sequence = self.scheduler.sequence(request_id)
        assert sequence is not None
        self.cached[request_id] = sequence.num_cached
        if len(self.outputs[request_id]) == self.requests[request_id].sampling.max_tokens:
            self.scheduler.finish(request_id)
            del self.requests[request_id]
            self.finished.append(request_id)
