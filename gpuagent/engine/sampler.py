"""Choose the next token of each row of logits.

Order of operations, as the OpenAI API and its usual servers have it: penalties and bias,
then temperature, then top-k, top-p and min-p, then one draw. Log probabilities are reported
of the model's own distribution, before any of that.

A draw is the inverse of the cumulated probabilities at one number u in [0, 1), and u is a
hash of the request's seed and the token's index, not the next number of a stream:

    probabilities 0.5 0.3 0.2, u = 0.6  ->  cumulated 0.5 0.8 1.0  ->  token 1

So a seeded request gives the same tokens alone, in any batch, and after a preemption, with no
generator to save. Gumbel noise was rejected: it needs one random number per vocabulary entry.

The vocabulary is sorted for nobody: top-k takes a partial selection; top-p looks at the
`NUCLEUS` best first, and only rows whose nucleus is larger are selected in full.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuagent.engine.request import SamplingParams

GREEDY_BELOW = 1e-5
NUCLEUS = 1024
U_BITS = 32  # few enough that u * total never rounds up to the total in float64


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What choosing one token needs to know of its request.

    `token_ids` is prompt and output so far; `seed` is always set, `index` counts the
    request's output tokens.
    """

    params: SamplingParams
    seed: int
    index: int
    token_ids: Sequence[int]
    num_prompt: int

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, not a draw."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """True if the most likely token is all that is asked for."""
        params = self.params
        return self.is_greedy and params.logprobs is None and not _is_adjusted(params)


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token; `logprobs` is its own (natural log) and the best alternatives."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(
    logits: Tensor, rows: Sequence[SamplingRow], best: Sequence[int] | None = None
) -> list[Sample | None]:
    """One sample per row of logits (rows, vocab) in float32; None for a row with NaN or inf.

    `best` is `most_likely(logits)` where that is known already.
    """
    best = most_likely(logits) if best is None else best
    samples = [Sample(token) if token >= 0 else None for token in best]
    special = [i for i, row in enumerate(rows) if not row.is_plain and best[i] >= 0]
    if special:
        picked = logits if len(special) == len(rows) else logits[special]
        found = _sample_special(picked, [rows[i] for i in special])
        for i, each in zip(special, found, strict=True):
            samples[i] = each
    return samples


def most_likely(logits: Tensor) -> tuple[int, ...]:
    """Index of each row's maximum, the first among equals; -1 for a row with NaN or inf."""
    is_sound = torch.isfinite(logits.sum(-1)).tolist()
    return tuple(t if s else -1 for t, s in zip(_argmax(logits), is_sound, strict=True))


def _argmax(logits: Tensor) -> list[int]:
    """On the CPU by numpy: torch's takes 12 times as long."""
    found = logits.numpy().argmax(-1) if logits.is_cpu else logits.argmax(-1)
    indices: list[int] = found.tolist()
    return indices


def _sample_special(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sample]:
    """Rows of finite logits that want more than the most likely token."""
    tokens = _choose(_adjusted(logits, rows), rows)
    return [report(token, logits[i], rows[i].params) for i, token in enumerate(tokens)]


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    tokens = _argmax(logits)
    random = [i for i, row in enumerate(rows) if not row.is_greedy]
    if random:
        chosen = [rows[i] for i in random]
        picked = logits if len(random) == len(rows) else logits[random]
        for i, token in zip(random, _draw(picked, chosen).tolist(), strict=True):
            tokens[i] = token
    return tokens


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits with penalties and bias; the same tensor if no row asks for any."""
    asking = [i for i, row in enumerate(rows) if _is_adjusted(row.params)]
    if asking:
        logits = logits.clone()
    for i in asking:
        _adjust(logits[i], rows[i])
    return logits


def _is_adjusted(params: SamplingParams) -> bool:
    has_penalty = params.presence_penalty or params.frequency_penalty
    return bool(has_penalty or params.logit_bias or params.repetition_penalty != 1.0)


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Penalties and bias on one row (vocab), in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.token_ids)), device=logits.device)
        scores, factor = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(row.token_ids[row.num_prompt :], dtype=torch.int64)
        tokens, counts = output.to(logits.device).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        indices = torch.tensor(tokens, device=logits.device)
        logits.index_add_(0, indices, torch.tensor(biases, device=logits.device))


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens (rows,) drawn at each row's temperature from what its filters leave."""
    return draw_at(_filtered(logits, rows), [uniform(row.seed, row.index) for row in rows])


def probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What tokens of non-greedy rows are drawn from: (rows, vocab) in float64, each sums to 1."""
    return _filtered(_adjusted(logits, rows), rows)


def _filtered(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    temperatures = [row.params.temperature for row in rows]
    logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    for i, row in enumerate(rows):
        _filter(logits[i], row.params)
    return torch.softmax(logits, -1, dtype=torch.float64)


def draw_at(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """The token (rows,) at each number in [0, 1) of the row's cumulated weights (rows, vocab)."""
    cumulated = weights.cumsum(-1)
    targets = torch.tensor(numbers, dtype=cumulated.dtype, device=cumulated.device)
    targets = targets.unsqueeze(1) * cumulated[:, -1:]
    # right=True finds the first sum above the target, which a probability of 0 never is.
    found = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _filter(scores: Tensor, params: SamplingParams) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p exclude from one row (vocab)."""
    if params.top_k and params.top_k < len(scores):
        scores[scores < scores.topk(params.top_k).values[-1]] = -math.inf
    if params.top_p < 1.0:
        scores[scores < _nucleus_bound(scores, params.top_p)] = -math.inf
    if params.min_p > 0.0:
        scores[scores < scores.max() + math.log(params.min_p)] = -math.inf


def _nucleus_bound(scores: Tensor, top_p: float) -> Tensor:
    """The score of the last token of the smallest set with probability >= top_p."""
    total = scores.logsumexp(-1)
    for size in (min(NUCLEUS, len(scores)), len(scores)):
        best = scores.topk(size).values
        before = (best - total).exp().cumsum(-1).roll(1)
        before[0] = 0.0
        is_inside = before < top_p
        is_inside[0] = True  # also for a top_p that is 0 in float32
        if not is_inside[-1] or size == len(scores):
            break
    return best[is_inside][-1]


def uniform(seed: int, index: int, purpose: str = "") -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    text = f"{seed}:{index}{purpose}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=U_BITS // 8).digest(), "big")
    return float(bits) / float(1 << U_BITS)


def report(token: int, logits: Tensor, params: SamplingParams) -> Sample:
    """A token chosen elsewhere as a sample of one row's logits (vocab)."""
    is_asked = params.logprobs is not None
    logprobs = torch.log_softmax(logits, -1) if is_asked else None
    return _report(token, logprobs, params.logprobs)


def _report(token: int, logprobs: Tensor | None, num_top: int | None) -> Sample:
    if logprobs is None:
        return Sample(token)
    values, ids = logprobs.topk(num_top or 0)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sample(token, float(logprobs[token]), top)
