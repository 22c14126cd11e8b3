"""Block tables, prefix hits, salts and copy on write."""

from gpuagent.engine.kv_cache import Copy, KVCache, extend_keys


def keys_of(tokens, salt=b"", block_size=4):
    keys = []
    extend_keys(keys, salt, tokens, block_size)
    return keys


def admit(kv, request_id, tokens, salt=b""):
    return kv.admit(request_id, keys_of(tokens, salt), len(tokens))


def computed(kv, request_id, tokens, salt=b""):
    admit(kv, request_id, tokens, salt)
    kv.register(request_id, keys_of(tokens, salt), 0, len(tokens))


def test_a_common_prefix_is_shared_block_by_block():
    kv = KVCache(num_blocks=8, block_size=4)
    computed(kv, "a", range(10))
    admission = admit(kv, "b", [*range(8), 99])
    assert admission.num_cached == 8
    assert kv.table("b")[:2] == kv.table("a")[:2]
    assert kv.pool.num_refs(kv.table("a")[0]) == 2


def test_a_fully_cached_prompt_copies_its_last_block_and_computes_one_token():
    kv = KVCache(num_blocks=8, block_size=4)
    computed(kv, "a", range(8))
    admission = admit(kv, "c", range(8))
    assert admission.num_cached == 7
    assert admission.copies == (Copy(kv.table("a")[1], kv.table("c")[1]),)
    assert kv.table("a")[1] != kv.table("c")[1]


def test_a_fully_cached_prompt_fits_a_pool_with_no_room_for_the_copy():
    kv = KVCache(num_blocks=2, block_size=4)
    computed(kv, "a", range(8))
    kv.free("a")
    admission = admit(kv, "c", range(8))
    assert (admission.num_cached, admission.copies) == (7, ())


def test_salts_keep_tenants_apart():
    kv = KVCache(num_blocks=8, block_size=4)
    computed(kv, "a", range(8), salt=b"tenant-1")
    assert admit(kv, "b", [*range(8), 9], salt=b"tenant-2").num_cached == 0


def test_equal_tokens_at_another_position_or_after_another_prefix_do_not_hit():
    kv = KVCache(num_blocks=8, block_size=4)
    computed(kv, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert admit(kv, "b", [5, 6, 7, 8, 9]).num_cached == 0
    assert admit(kv, "c", [0, 0, 0, 0, 5, 6, 7, 8, 9]).num_cached == 0


def test_what_is_not_computed_is_not_found():
    kv = KVCache(num_blocks=8, block_size=4)
    admit(kv, "a", range(8))
    kv.register("a", keys_of(range(8)), 0, 5)
    assert admit(kv, "b", range(8)).num_cached == 4


def test_growth_without_memory_is_none_and_changes_nothing():
    kv = KVCache(num_blocks=2, block_size=4)
    admit(kv, "a", range(8))
    table = kv.table("a")
    assert kv.grow("a", 8, 9) is None
    assert kv.table("a") == table


def test_a_fork_shares_all_blocks_and_the_first_writer_copies():
    kv = KVCache(num_blocks=8, block_size=4)
    admit(kv, "a", range(6))
    kv.fork("a", "b")
    assert kv.grow("b", 6, 7) == [Copy(kv.table("a")[1], kv.table("b")[1])]
    assert kv.grow("a", 6, 7) == []
    kv.free("a")
    kv.free("b")
    assert kv.pool.num_free == 8


def test_admission_leaves_the_spare_blocks_alone():
    kv = KVCache(num_blocks=3, block_size=4)
    assert kv.admit("a", keys_of(range(8)), 8, num_spare=2) is None
    assert kv.pool.num_free == 3
    assert kv.admit("a", keys_of(range(8)), 8, num_spare=1) is not None


def test_prefix_caching_can_be_switched_off():
    kv = KVCache(num_blocks=8, block_size=4, prefix_caching=False)
    computed(kv, "a", range(8))
    assert admit(kv, "b", range(8)).num_cached == 0
