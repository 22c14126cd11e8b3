"""Where guesses come from: the request's own text, or a smaller model of the same vocabulary.

Before a step, `propose` gives guesses for the decoding requests; after it, `observe` compares
them with what came. How many, and whether at all, is decided by `speculation`; which are kept
by `verification`. A step with n-gram guesses, for a request that ends in "the bank of":

    propose    {"chat": Drafts((England, shall, be))}        found 40 tokens ago
    step       computes of, England, shall, be: four rows of scores
    accept     England, shall, then "may" instead of "be"   3 tokens from one step
    observe    2 of 3 were right

A draft model keeps keys and values of its own, over blocks of its own. It is behind by the
tokens that came since its last guess; they are computed first, all requests' in one pass, and
then one token each for every further guess. A request for which its pool has no room is not
guessed for. A prompt it has not seen is computed over several steps, `MAX_CATCH_UP` tokens in
each, so that it delays nobody for long.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Protocol

import torch

from gpuagent.engine.batch import SchedulerOutput, Sequence, Work
from gpuagent.engine.kv_cache import KVCache
from gpuagent.engine.model_runner import Executor, ModelRunner, StepResult
from gpuagent.engine.sampler import SamplingRow
from gpuagent.engine.scheduler import SchedulerConfig
from gpuagent.engine.speculation import NgramIndex, Speculation
from gpuagent.engine.verification import Drafts, draw_drafts, is_certain

MAX_CATCH_UP = 256
NUM_SHADOW = 1  # guesses made, for comparison only, while speculation is off
SHADOW_BATCH = 4  # larger batches compare in every second step, third step, ...: it seldom pays

RowOf = Callable[[Sequence, Seq[int]], SamplingRow]


class SpeculationKind(StrEnum):
    """Who guesses."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request and how many tokens to guess for it; 0 only for comparison."""

    sequence: Sequence
    num_drafts: int


class Proposer(Protocol):
    """Makes guesses."""

    def propose(self, wishes: list[Wish]) -> dict[str, Drafts]:
        """Guesses for some of the requests."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


class NgramProposer:
    """Prompt lookup; see `gpuagent.engine.speculation`."""

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, wishes: list[Wish]) -> dict[str, Drafts]:
        """Guesses for the requests whose last tokens occurred before."""
        found = {wish.sequence.request_id: self._look_up(wish) for wish in wishes}
        return {name: Drafts(tokens) for name, tokens in found.items() if tokens}

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._indices.pop(request_id, None)

    def _look_up(self, wish: Wish) -> tuple[int, ...]:
        index = self._indices.setdefault(wish.sequence.request_id, NgramIndex())
        return index.propose(wish.sequence.token_ids, max(wish.num_drafts, NUM_SHADOW))


@dataclass(slots=True)
class _Draft:
    """One request's guesses being made."""

    sequence: Sequence
    num_wanted: int
    guesses: list[int] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens up to the next guess."""
        return [*self.sequence.token_ids, *self.guesses]

    def finished(self) -> Drafts:
        """The guesses made."""
        drawn = torch.stack(self.distributions) if self.distributions else None
        return Drafts(tuple(self.guesses), drawn)


class DraftModelProposer:
    """A small model guesses. `num_blocks` blocks of `block_size` belong to it alone."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, block_size: int, row_of: RowOf
    ) -> None:
        self._runner = runner
        self._kv = KVCache(num_blocks, block_size, prefix_caching=False)
        self._row_of = row_of
        self._computed: dict[str, list[int]] = {}  # the tokens whose keys and values it has

    def propose(self, wishes: list[Wish]) -> dict[str, Drafts]:
        """Guesses for the requests that it has caught up with."""
        drafts = [self._begin(wish) for wish in wishes if wish.num_drafts]
        active, budget = [draft for draft in drafts if draft], MAX_CATCH_UP
        while active:
            active = self._advance(active, budget)
        return {d.sequence.request_id: d.finished() for d in drafts if d and d.guesses}

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._computed.pop(request_id, None) is not None:
            self._kv.free(request_id)

    def _begin(self, wish: Wish) -> _Draft | None:
        """Forget what was rejected and make room; None if there is none."""
        name, tokens = wish.sequence.request_id, wish.sequence.token_ids
        if not self._kv.table(name) and self._kv.admit(name, (), 1) is None:
            return None
        computed = self._computed.setdefault(name, [])
        pairs = zip(computed, tokens[:-1], strict=False)
        del computed[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
        has_room = self._kv.grow(name, len(computed), len(tokens) + wish.num_drafts) is not None
        return _Draft(wish.sequence, wish.num_drafts) if has_room else None

    def _advance(self, active: list[_Draft], budget: int) -> list[_Draft]:
        """One pass; the drafts that go on."""
        works = []
        for draft in active:
            work = self._work(draft, budget)
            budget -= len(work.token_ids) if work else 0
            works += [work] if work else []
        result = self._runner.run(SchedulerOutput(0, tuple(works)))
        for work in works:
            self._computed[work.request_id] += work.token_ids
        by_name = {draft.sequence.request_id: draft for draft in active}
        guessed = [by_name[name] for name in result.request_ids]
        self._guess(guessed, result)
        return [draft for draft in guessed if len(draft.guesses) < draft.num_wanted]

    def _work(self, draft: _Draft, budget: int) -> Work | None:
        name, tokens = draft.sequence.request_id, draft.tokens
        start = len(self._computed[name])
        end = min(len(tokens), start + budget)
        if start == end:
            return None
        blocks = self._kv.table(name)
        return Work(name, start, tuple(tokens[start:end]), blocks, samples=end == len(tokens))

    def _guess(self, drafts: list[_Draft], result: StepResult) -> None:
        if not drafts:
            return
        for i, draft in enumerate(drafts):
            row = self._row_of(draft.sequence, draft.guesses)
            if is_certain(row):
                draft.guesses.append(max(result.best[i], 0))
            else:
                tokens, drawn_from = draw_drafts(result.logits[i : i + 1], [row])
                draft.guesses += tokens
                draft.distributions.append(drawn_from[0])


class Speculator:
    """Guesses before each step and learns after it.

    `is_free` says that guesses cost next to nothing, so they may be made for comparison only.
    """

    def __init__(self, proposer: Proposer, is_free: bool) -> None:
        self._proposer = proposer
        self._is_free = is_free
        self._guesses: dict[str, Drafts] = {}
        self._num_proposals = 0
        self.speculation = Speculation()

    def propose(self, decoding: Seq[Sequence]) -> dict[str, Drafts]:
        """The guesses to compute in the next step."""
        wishes = [
            Wish(sequence, self._num_drafts(sequence, len(decoding))) for sequence in decoding
        ]
        wanted = {wish.sequence.request_id: wish.num_drafts for wish in wishes}
        self._num_proposals += 1
        every = 1 + len(decoding) // SHADOW_BATCH
        compares = self._is_free and self._num_proposals % every == 0
        self._guesses = self._proposer.propose(
            [wish for wish in wishes if wish.num_drafts or compares]
        )
        return {name: drafts for name, drafts in self._guesses.items() if wanted[name]}

    def _num_drafts(self, sequence: Sequence, batch: int) -> int:
        """None past the request's end: the step gives one token more than was guessed."""
        num_left = sequence.request.sampling.max_tokens - sequence.num_output - 1
        return min(self.speculation.num_drafts(sequence.request_id, batch), num_left)

    def observe(
        self, output: SchedulerOutput, tokens: Mapping[str, Seq[int]], seconds: float
    ) -> None:
        """Compare with the tokens that came, and learn what the step cost."""
        for work in output.work:
            came = tokens.get(work.request_id, ())
            if work.request_id in self._guesses and came:
                drafts = self._guesses[work.request_id].token_ids
                self.speculation.observe_guess(work.request_id, drafts, came)
            if work.num_drafts:
                self.speculation.count(work.num_drafts, max(len(came) - 1, 0))
        num_drafts = sum(work.num_drafts for work in output.work)
        if output.work and output.num_extra == num_drafts:
            self.speculation.observe_step(len(output.work), num_drafts, seconds)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.speculation.forget(request_id)
        self._proposer.forget(request_id)
        self._guesses.pop(request_id, None)


def make_speculator(
    kind: SpeculationKind, row_of: RowOf, draft: Executor | None, sizes: SchedulerConfig
) -> Speculator | None:
    """None for "none". `draft` computes the draft model, with as many blocks as its target."""
    if kind is SpeculationKind.NGRAM:
        return Speculator(NgramProposer(), is_free=True)
    if kind is SpeculationKind.DRAFT:
        assert draft is not None, "a draft model is loaded before"
        runner = ModelRunner(draft)
        proposer = DraftModelProposer(runner, sizes.num_blocks, sizes.block_size, row_of)
        return Speculator(proposer, is_free=False)
    return None
