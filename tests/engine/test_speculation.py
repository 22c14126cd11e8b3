"""Guessing ahead changes neither the distribution nor, for seeds and greedy, the tokens."""

from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from gpuagent.engine import verification
from gpuagent.engine.request import SamplingParams
from gpuagent.engine.sampler import SamplingRow, sample
from gpuagent.engine.speculation import (
    MAX_DRAFTS,
    PROBE_DRAFTS,
    NgramIndex,
    Speculation,
    expected_tokens,
)
from gpuagent.engine.verification import Drafts, accept, draw_drafts, is_certain

VOCAB = 4
TARGET = torch.tensor(  # scores of the next token by the last one
    [[1.0, 0.2, -0.5, 0.0], [0.0, 1.5, 0.3, -1.0], [-0.2, 0.1, 0.9, 0.4], [0.5, 0.5, 0.5, -2.0]]
)
DRAFT = TARGET.flip(0) * 1.3  # another opinion
PARAMS = SamplingParams(max_tokens=9)
NUM_SEEDS = 4000


def row(seed, tokens, params=PARAMS):
    return SamplingRow(params, seed, len(tokens), tokens, num_prompt=0)


def generate(seed, num_drafts, num_tokens=3):
    """Tokens after token 0 of the toy model, guessed by the other one."""
    tokens = [0]
    while len(tokens) <= num_tokens:
        drafts = guess(seed, tokens, num_drafts)
        ahead = [[*tokens, *drafts.token_ids[:i]] for i in range(num_drafts + 1)]
        rows = [row(seed, each) for each in ahead]
        logits = torch.stack([TARGET[each[-1]] for each in ahead])
        tokens += [s.token_id for s in accept(drafts, sample(logits, rows), logits, rows)]
    return tuple(tokens[1 : num_tokens + 1])


def guess(seed, tokens, num_drafts):
    found, distributions = [], []
    for _ in range(num_drafts):
        ahead = [*tokens, *found]
        drawn, distribution = draw_drafts(DRAFT[ahead[-1]].unsqueeze(0), [row(seed, ahead)])
        found += drawn
        distributions.append(distribution[0])
    return Drafts(tuple(found), torch.stack(distributions) if distributions else None)


def p_value(num_drafts, num_seeds=NUM_SEEDS):
    """How well the three-token outcomes fit what the target alone says."""
    outcomes = list(product(range(VOCAB), repeat=3))
    p = TARGET.double().softmax(-1)
    expected = [float(p[0, a] * p[a, b] * p[b, c]) * num_seeds for a, b, c in outcomes]
    counts = Counter(generate(seed, num_drafts) for seed in range(num_seeds))
    return chisquare([counts[each] for each in outcomes], expected).pvalue


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_outcomes_are_distributed_as_the_target_says(num_drafts):
    assert p_value(num_drafts) > 0.001


def always(token, target, proposal, seed, index):
    return token


def from_the_target(token, target, proposal, seed, index):
    """Right acceptance, but a rejected guess is replaced by a draw from p."""
    if JUDGE(token, target, proposal, seed, index) == token:
        return token
    return int(torch.multinomial(target, 1, generator=torch.Generator().manual_seed(seed)))


def by_the_target_alone(token, target, proposal, seed, index):
    """Accepts with p(x), however likely the guess was, and then takes the residual."""
    return JUDGE(token, target * proposal[token], proposal, seed, index)


JUDGE = verification.judge


@pytest.mark.parametrize("broken", [always, by_the_target_alone, from_the_target])
def test_the_statistics_would_show_a_broken_rule(broken, monkeypatch):
    """Keeping every guess, forgetting q, or replacing it from p: all show."""
    monkeypatch.setattr(verification, "judge", broken)
    assert p_value(2, num_seeds=2000) < 1e-6


def test_a_certain_guess_leaves_the_tokens_as_they_are():
    """Greedy or seeded, with any guess, right or wrong: the tokens without guesses."""
    for seed, temperature in product(range(40), (0.0, 1.0)):
        params = SamplingParams(max_tokens=9, temperature=temperature, seed=seed)
        plain = [0]
        for _ in range(3):
            (chosen,) = sample(TARGET[plain[-1]].unsqueeze(0), [row(seed, plain, params)])
            plain.append(chosen.token_id)
        for guesses in product(range(VOCAB), repeat=2):
            ahead = [[0, *guesses[:i]] for i in range(3)]
            rows = [row(seed, each, params) for each in ahead]
            logits = torch.stack([TARGET[each[-1]] for each in ahead])
            kept = accept(Drafts(guesses), sample(logits, rows), logits, rows)
            tokens = [s.token_id for s in kept]
            assert tokens == plain[1 : len(tokens) + 1]


def test_only_requests_without_a_seed_get_drawn_guesses():
    assert is_certain(row(1, [0], SamplingParams(max_tokens=1, temperature=0.0)))
    assert is_certain(row(1, [0], SamplingParams(max_tokens=1, seed=5)))
    assert not is_certain(row(1, [0]))


def test_numbers_that_are_not_finite_end_the_acceptance():
    logits = torch.full((3, VOCAB), float("nan"))
    rows = [row(0, [0]), row(0, [0, 1]), row(0, [0, 1, 1])]
    assert accept(Drafts((1, 1)), sample(logits, rows), logits, rows) == [None]


def test_expected_tokens_are_those_of_the_paper():
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(1.0, 4) == 5


def speculation(batch, base, per_draft, acceptance):
    found = Speculation()
    for i in range(40):
        found.observe_step(batch, i % 3, base + per_draft * (i % 3))
    for i in range(400):
        found.observe_guess("r", (1,), (1,) if i % 10 < 10 * acceptance else (2,))
    return found


def test_alone_it_pays_and_in_a_batch_it_switches_itself_off():
    """10 ms a step and 2 ms a guess, as in the module's example."""
    assert 3 <= speculation(1, 0.010, 0.002, 0.8).num_drafts("r", 1) <= 5
    assert speculation(16, 0.010, 0.002, 0.8).num_drafts("r", 16) == 0


def test_the_number_of_guesses_follows_the_acceptance():
    numbers = [speculation(1, 0.010, 0.001, a).num_drafts("r", 1) for a in (0.0, 0.5, 1.0)]
    assert numbers[0] == 0
    assert 0 < numbers[1] < numbers[2] == MAX_DRAFTS


def test_an_unknown_cost_is_tried_out():
    assert Speculation().num_drafts("r", 4) == PROBE_DRAFTS


def test_an_unknown_cost_is_tried_out_on_two_requests_of_a_step():
    """All of 16 would make the step twice as long."""
    speculation = Speculation()
    for _ in range(2):
        assert [speculation.num_drafts(f"r{i}", 16) for i in range(4)] == [2, 2, 0, 0]
        speculation.observe_step(16, 0, 0.02)


def test_lookup_continues_what_followed_before_and_prefers_the_longest_match():
    assert NgramIndex().propose([1, 2, 3, 9, 7, 2, 3], 3) == (9, 7, 2)
    assert NgramIndex().propose([1, 2, 3, 8, 5, 2, 3, 6, 1, 2, 3], 1) == (8,)
    assert NgramIndex().propose([5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)
    assert NgramIndex().propose([1, 2, 3], 4) == ()


def test_the_index_grows_with_the_request():
    index, tokens = NgramIndex(), [4, 5, 6]
    assert index.propose(tokens, 2) == ()
    tokens += [9, 4, 5]
    assert index.propose(tokens, 2) == (6, 9)
