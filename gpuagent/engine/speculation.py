"""Guessing tokens ahead: whether, how many, and what came of it.

A decode step reads all weights to give one token. If somebody guesses the next k tokens, one
step computes them all side by side, and the longest right beginning is kept, with the token
after it. With an acceptance of a per token a step then gives, on average,

    E(k) = (1 - a^(k+1)) / (1 - a)      (Leviathan et al., "Fast Inference from Transformers
                                         via Speculative Decoding", ICML 2023, equation 1)

tokens for the time of k more tokens. Whether that pays depends on the batch: alone, a request
bears the whole step; among 16 it bears a sixteenth, and its guesses cost as much as others'
tokens. So k is chosen, per request and step, to have the most tokens for the time:

    E(k) / (base / batch + k * per_draft)

with base and per_draft read from measured steps of that batch size (`pacing.LinearCost`).
Example, base 10 ms and 2 ms a guess, acceptance 0.8:

    alone       k = 0: 1 / 10 = 0.100    k = 4: 3.36 / 18 = 0.187    k = 8: 4.33 / 26 = 0.167
    among 16    k = 0: 1 / 0.6 = 1.6     k = 1: 1.80 / 2.6 = 0.69    off: k = 0 is the best

k = 0 is taken unless another is `MARGIN` better. While it is off, guesses that cost nothing
(n-gram lookup) are still compared with the tokens that come, so acceptance stays known; one
step in `PROBE_EVERY` guesses anyway, because the cost of a guess can only be seen in a step, but
for `MAX_PROBED` requests alone: guesses for all of 16 make that step twice as long.

`NgramProposer` looks the last tokens up in what the request has already: prompt and output.
Example, with (7, 8) seen before in ... 7 8 9 4 ... and the request now ending in 7 8, it
proposes 9 4 and so on. That is right for extraction, editing and code, and seldom elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuagent.engine.pacing import LinearCost

MAX_DRAFTS = 15  # 16 rows of one request cost about what one row does
MARGIN = 1.1
PROBE_EVERY = 256
PROBE_DRAFTS = 2
MAX_PROBED = 2  # requests of a step
ACCEPTANCE_STEPS = 64  # k is chosen once per step for all with about the same acceptance
PRIOR = 0.5
MEMORY = 0.9  # weight of the past for each compared token
NGRAMS = (4, 3, 2)


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """E(k): tokens that a step gives for a request with that many guesses."""
    if acceptance >= 1.0:
        return num_drafts + 1.0
    return (1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance)


@dataclass(slots=True)
class SpeculationCounters:
    """Totals, named as vLLM's spec_decode metrics."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class Speculation:
    """Chooses k and remembers acceptance and costs. `draft_seconds` is what a guess costs."""

    max_drafts: int = MAX_DRAFTS
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
    _acceptance: dict[str, float] = field(default_factory=dict)
    _overall: float = PRIOR
    _costs: dict[int, LinearCost] = field(default_factory=dict)
    _num_steps: int = 0
    _num_probed: int = 0  # in this step
    _chosen: dict[tuple[int, int], int] = field(default_factory=dict)  # for this step

    def num_drafts(self, request_id: str, batch: int) -> int:
        """How many tokens to guess for a request among `batch` decoding ones."""
        cost = self._costs.get(_bucket(batch))
        if cost is None or cost.per_extra == 0.0 or self._num_steps % PROBE_EVERY == 0:
            self._num_probed += 1
            return PROBE_DRAFTS if self._num_probed <= MAX_PROBED else 0
        step = round(self._acceptance.get(request_id, self._overall) * ACCEPTANCE_STEPS)
        if (batch, step) not in self._chosen:
            self._chosen[batch, step] = self._best(step / ACCEPTANCE_STEPS, cost, batch)
        return self._chosen[batch, step]

    def acceptance(self, request_id: str) -> float:
        """The estimated chance that a guess for this request is right."""
        return self._acceptance.get(request_id, self._overall)

    def observe_step(self, batch: int, num_drafts: int, seconds: float) -> None:
        """Learn what a step in which all decode has cost, the making of guesses included."""
        self._num_steps += 1
        self._num_probed = 0
        self._chosen.clear()
        self._costs.setdefault(_bucket(batch), LinearCost()).observe(num_drafts, seconds)

    def observe_guess(self, request_id: str, drafts: Sequence[int], came: Sequence[int]) -> None:
        """Compare guesses with the tokens that came, whether or not they were computed."""
        for draft, token in zip(drafts, came, strict=False):
            old = self._acceptance.get(request_id, self._overall)
            self._acceptance[request_id] = MEMORY * old + (1 - MEMORY) * (draft == token)
            self._overall += (1 - MEMORY) / 10 * ((draft == token) - self._overall)
            if draft != token:
                return

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A request's guesses were computed and so many accepted."""
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += num_drafts
        self.counters.num_accepted_tokens += num_accepted

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._acceptance.pop(request_id, None)

    def _best(self, acceptance: float, cost: LinearCost, batch: int) -> int:
        share = cost.base / batch

        def rate(num_drafts: int) -> float:
            seconds = share + num_drafts * cost.per_extra
            return expected_tokens(acceptance, num_drafts) / max(seconds, 1e-9)

        best = max(range(self.max_drafts + 1), key=rate)
        return best if rate(best) > MARGIN * rate(0) else 0


def _bucket(batch: int) -> int:
    """Batch sizes that share a cost line: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (batch - 1).bit_length()


class NgramIndex:
    """Where each n-gram of one request's tokens last occurred; grows with them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after it
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
        """What followed the last tokens when they last occurred; the longest match counts."""
        self._extend(tokens)
        for size in NGRAMS:
            end = self._ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if end is not None:
                return self._continue(tokens, end, num_drafts)
        return ()

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index n-grams that end before the last token, so that none finds itself."""
        for end in range(self._num_indexed, len(tokens)):
            for size in NGRAMS:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))

    @staticmethod
    def _continue(tokens: Sequence[int], end: int, num_drafts: int) -> tuple[int, ...]:
        """Read on from `end`; past the last token, from the guesses themselves."""
        distance = len(tokens) - end
        found = list(tokens[end : end + num_drafts])
        while len(found) < num_drafts:
            found.append(found[len(found) - distance])
        return tuple(found)
