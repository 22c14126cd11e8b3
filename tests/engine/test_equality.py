"""A share of `tests.benchmarks.engine_equality`: transformers' greedy tokens, one setting each."""

import pytest
import torch

from tests.benchmarks.engine_equality import SETTINGS, Reference, check, compare, make_prompts

pytestmark = pytest.mark.timeout(400)  # minutes, if the machine is shared


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_are_those_of_transformers(setting):
    """Nine prompts, the shortest and the longest among them."""
    prompts = make_prompts(9)
    assert [len(prompts[0]), len(prompts[1])] == [16, 768]
    (count,) = check(prompts, 6, [setting]).values()
    assert count.num_equal + count.num_ties == len(prompts)
    assert count.num_ties <= 1


def test_a_difference_counts_as_a_tie_only_where_the_scores_are_equal():
    scores = torch.tensor([[1.0, 1.0, 0.5], [0.0, 2.0, 0.0]])
    expected = [Reference([0, 1], scores)] * 3
    count = compare([[0, 1], [1, 2], [2, 1]], expected)
    assert (count.num_equal, count.num_ties, count.num_different) == (1, 1, 1)
