"""The sampler against plain definitions, and that no request feels its neighbours."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.engine.request import RequestRejected, SamplingParams
from gpuagent.engine.sampler import SamplingRow, sample
from gpuagent.engine.sampling_checks import check_sampling

VOCAB = 50


def row(seed=0, index=0, token_ids=(), num_prompt=0, **params):
    sampling = SamplingParams(max_tokens=9, **params)
    return SamplingRow(sampling, seed, index, token_ids, num_prompt)


def draw_many(logits, num=4000, **params):
    """Frequencies (vocab,) of tokens drawn with different seeds from one row of logits."""
    rows = [row(seed=i, **params) for i in range(num)]
    chosen = sample(logits.expand(num, -1).contiguous(), rows)
    counts = torch.bincount(torch.tensor([c.token_id for c in chosen]), minlength=len(logits))
    return counts / num


def allowed(logits, **params):
    return set(draw_many(logits, num=600, **params).nonzero().flatten().tolist())


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def test_temperature_zero_takes_the_best(logits):
    assert allowed(logits, temperature=0.0) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(logits, temperature):
    expected = torch.softmax(logits / temperature, -1)
    seen = draw_many(logits, temperature=temperature)
    assert (seen - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


def test_top_k_leaves_the_k_best(logits):
    assert allowed(logits, top_k=3, temperature=5.0) == set(logits.topk(3).indices.tolist())


def test_top_p_leaves_the_smallest_set_that_reaches_p(logits):
    probabilities, tokens = torch.softmax(logits, -1).sort(descending=True)
    size = int((probabilities.cumsum(0) < 0.7).sum()) + 1
    assert allowed(logits, top_p=0.7) == set(tokens[:size].tolist())


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-30])
def test_however_small_top_p_is_the_best_is_left(logits, top_p):
    assert allowed(logits, top_p=top_p) == {int(logits.argmax())}


def test_a_nucleus_larger_than_the_first_look_is_found():
    flat = torch.zeros(5000)
    flat[7] = 1e-3
    seen = draw_many(flat, num=600, top_p=0.999).nonzero().flatten()
    assert len(seen) > 500


def test_min_p_leaves_what_is_likely_enough_beside_the_best(logits):
    probabilities = torch.softmax(logits, -1)
    expected = (probabilities >= 0.2 * probabilities.max()).nonzero().flatten().tolist()
    assert allowed(logits, min_p=0.2) == set(expected)


def test_presence_and_frequency_penalties_count_output_tokens_only():
    logits = torch.zeros(1, 6)
    tokens = (0, 0, 1, 1, 1, 2)  # 0 twice in the prompt; output: 1 three times, 2 once
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logprobs": 0}
    kept = row(token_ids=tokens, num_prompt=2, temperature=0.0, **params)
    bias = tuple((t, -9.0) for t in (0, 3, 4, 5))  # leaves 1 at -1.25 and 2 at -0.75
    only = row(token_ids=tokens, num_prompt=2, temperature=0.0, logit_bias=bias, **params)
    assert sample(logits, [kept])[0].token_id == 0
    assert sample(logits, [only])[0].token_id == 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores():
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    assert sample(logits, [row(token_ids=(0,), temperature=0.0)])[0].token_id == 0
    punished = row(token_ids=(0,), temperature=0.0, repetition_penalty=1.5)
    assert sample(logits, [punished])[0].token_id == 1
    negative = torch.tensor([[-1.0, -1.2]])
    assert sample(negative, [punished])[0].token_id == 1


def test_bias_forces_and_bans(logits):
    worst = int(logits.argmin())
    assert allowed(logits, logit_bias=((worst, 100.0),)) == {worst}
    best = int(logits.argmax())
    assert best not in allowed(logits, logit_bias=((best, -100.0),))


def test_logprobs_are_the_models_own_whatever_the_sampling(logits):
    chosen = sample(logits[None], [row(temperature=0.3, top_k=2, logprobs=3)])[0]
    expected = torch.log_softmax(logits, -1)
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id]))
    assert [t for t, _ in chosen.top] == logits.topk(3).indices.tolist()
    assert chosen.top[0][1] == pytest.approx(float(expected.max()))


def test_the_callers_logits_are_left_as_they_were(logits):
    before = logits.clone()
    sample(logits[None], [row(top_k=2, logit_bias=((1, 5.0),), temperature=0.5)])
    assert torch.equal(logits, before)


def test_nan_or_infinity_spoils_its_own_row_only(logits):
    batch = torch.stack([logits, logits, logits])
    batch[1, 3] = math.nan
    batch[2, 4] = math.inf
    chosen = sample(batch, [row(), row(), row()])
    assert chosen[0] == sample(logits[None], [row()])[0]
    assert chosen[1] is None
    assert chosen[2] is None


any_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.4]),
        "logprobs": st.sampled_from([None, 2]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_params, min_size=1, max_size=6), st.integers(0, 99))
def test_a_seeded_row_samples_alike_alone_and_in_any_batch(all_params, seed):
    batch = torch.randn(len(all_params), VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = [row(i, i, (1, 2, 3), 1, **p) for i, p in enumerate(all_params)]
    together = sample(batch, rows)
    assert together == [sample(batch[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert together == sample(batch.flip(0), rows[::-1])[::-1]


def test_tokens_of_one_seed_are_drawn_independently():
    """Two draws of one request agree as often as two independent ones would."""
    flat = torch.zeros(1, 8)
    drawn = [sample(flat, [row(seed=3, index=i)])[0].token_id for i in range(800)]
    same = sum(a == b for a, b in pairwise(drawn)) / 800
    assert abs(same - 1 / 8) < 0.05


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"stop": ("",)},
        {"logprobs": 21},
        {"logit_bias": ((VOCAB, 1.0),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_meaningless_values_are_refused(params):
    with pytest.raises(RequestRejected) as refusal:
        check_sampling(SamplingParams(max_tokens=1, **params), VOCAB)
    assert refusal.value.code == "invalid_sampling"
