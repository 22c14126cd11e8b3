"""Which guessed tokens may stay, so that the output has exactly the target's distribution.

A guess x was drawn from some distribution q; the target says p. Accept x with probability
min(1, p(x) / q(x)); at the first rejection draw instead from what q had too little of,
max(p - q, 0) scaled to 1, and drop all later guesses; if none is rejected, the target's scores
after the last guess give one token more (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", ICML 2023, algorithm 1). Example with three tokens:

    p = 0.5 0.3 0.2,  q = 0.1 0.6 0.3
    guess 0 is always kept, guess 1 with 0.3 / 0.6, guess 2 with 0.2 / 0.3
    token 0 comes out with  0.1 + (0.6 * 0.5 + 0.3 / 3) * 1 = 0.5:  the residual is token 0 only

A guess that is no draw but a certainty (n-gram lookup, or a draft model's best token) is the
case q(x) = 1: accepted with p(x), else a draw from p without x. The same comes about by drawing
from p first, as if nobody had guessed, and accepting the guess if it is what was drawn. That
way the token at an index is the same number's draw whether it was guessed or not, so a seeded
request gives the same tokens with speculation as without, whatever k was. This is why guesses
for requests with a seed, and greedy ones, are certainties. Requests without a seed get guesses
drawn from q, which are accepted more often.

Penalties and filters are part of p: each guess is judged by the distribution that would have
been sampled after the guesses before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpuagent.engine.sampler import Sample, SamplingRow, draw_at, probabilities, report, uniform


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guessed tokens, and the distributions (k, vocab) they were drawn from; None: certain."""

    token_ids: tuple[int, ...]
    probabilities: Tensor | None = None


def accept(
    drafts: Drafts, samples: Sequence[Sample | None], logits: Tensor, rows: Sequence[SamplingRow]
) -> list[Sample | None]:
    """The accepted guesses as samples and the one after them: 1 to len(rows) of them.

    `samples`, `logits` (rows, vocab) and `rows` are those of the positions after the request's
    last token and after each of the guesses that were computed.
    """
    num_drafts = len(rows) - 1
    if drafts.probabilities is None or num_drafts == 0:
        return _cut(drafts.token_ids[:num_drafts], samples)
    return _reject(drafts, samples, logits, rows)


def _cut(token_ids: Sequence[int], samples: Sequence[Sample | None]) -> list[Sample | None]:
    """The samples as far as they are what was guessed, and the one that is not."""
    for i, token in enumerate(token_ids):
        sample = samples[i]
        if sample is None or sample.token_id != token:
            return list(samples[: i + 1])
    return list(samples)


def _reject(
    drafts: Drafts, samples: Sequence[Sample | None], logits: Tensor, rows: Sequence[SamplingRow]
) -> list[Sample | None]:
    assert drafts.probabilities is not None
    accepted: list[Sample | None] = []
    for i, token in enumerate(drafts.token_ids[: len(rows) - 1]):
        if samples[i] is None:
            return [*accepted, None]
        target = probabilities(logits[i : i + 1], rows[i : i + 1])[0]
        proposal = drafts.probabilities[i].to(target.device)
        chosen = judge(token, target, proposal, rows[i].seed, rows[i].index)
        accepted.append(report(chosen, logits[i], rows[i].params))
        if chosen != token:
            return accepted
    return [*accepted, samples[-1]]


def judge(token: int, target: Tensor, proposal: Tensor, seed: int, index: int) -> int:
    """The guess, or a draw from the residual; `target` p and `proposal` q are (vocab,)."""
    if uniform(seed, index, "accept") * float(proposal[token]) < float(target[token]):
        return token
    residual = (target - proposal).clamp_(min=0.0)
    return int(draw_at(residual.unsqueeze(0), [uniform(seed, index, "residual")])[0])


def draw_drafts(scores: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], Tensor]:
    """One guess per row of a draft model's logits, drawn from the distribution returned."""
    drawn_from = probabilities(scores, rows)
    numbers = [uniform(row.seed, row.index, "draft") for row in rows]
    return draw_at(drawn_from, numbers).tolist(), drawn_from


def is_certain(row: SamplingRow) -> bool:
    """True if a guess for this request must not be a draw."""
    return row.is_greedy or row.params.seed is not None
