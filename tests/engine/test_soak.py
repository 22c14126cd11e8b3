"""A long random life leaves nothing behind; `tests.benchmarks.engine_soak` has the long one."""

from tests.benchmarks.engine_soak import measure


def test_thousands_of_requests_leak_no_block_and_no_memory():
    answer = measure(num_requests=2500, seed=1)
    figures = answer["figures"]
    assert figures["leaked_blocks"] == figures["leaked_host_blocks"] == 0
    assert answer["ratios"]["heap_at_the_last_over_a_fifth"] < 1.2
    assert figures["num_swapped_out"] > 0, "the load must preempt, or it shows nothing"
    assert figures["num_accepted_tokens"] > 0
    assert figures["num_cancelled"] > 0
