"""The block pool against a plain model of what it should hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.engine.block_pool import BlockPool


def test_a_freed_block_is_found_until_it_is_handed_out():
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.register(block, b"A")
    pool.release([block])
    assert pool.acquire(b"A") == block
    pool.release([block])
    assert pool.allocate(2) is not None
    assert pool.acquire(b"A") is None


def test_the_block_free_longest_is_reused_first():
    pool = BlockPool(3)
    pool.allocate(3)
    pool.release([2])
    pool.release([0, 1])
    assert pool.allocate(3) == [2, 0, 1]


def test_short_of_blocks_the_answer_is_none_and_nothing_changes():
    pool = BlockPool(2)
    pool.allocate(1)
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_the_first_block_with_a_key_keeps_it():
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register(first, b"A")
    pool.register(second, b"A")
    assert pool.acquire(b"A") == first
    assert pool.key(second) is None


def test_releasing_what_nobody_holds_is_our_own_mistake():
    with pytest.raises(AssertionError):
        BlockPool(1).release([0])


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "find", "share"]), st.integers(0, 9))))
def test_counts_and_free_list_agree_with_a_model(actions):
    """Whatever the order of calls, each block is free or held as often as it was taken."""
    pool, held = BlockPool(6), []
    for action, n in actions:
        if action == "alloc" and (blocks := pool.allocate(n)):
            held += blocks
            pool.register(blocks[0], bytes([blocks[0]]))
        elif action == "free" and held:
            pool.release([held.pop(n % len(held))])
        elif action == "share" and held:
            pool.share([held[n % len(held)]])
            held.append(held[n % len(held)])
        elif action == "find" and (block := pool.acquire(bytes([n]))) is not None:
            assert block == n
            held.append(block)
        assert [pool.num_refs(b) for b in range(6)] == [held.count(b) for b in range(6)]
        assert pool.num_free == 6 - len(set(held))
