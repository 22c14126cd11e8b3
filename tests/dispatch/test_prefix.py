"""What a prompt's keys find in the filters of nodes, and in what was just sent."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch.prefix import (
    MAX_ALIKE,
    MAX_SENT,
    SENT_S,
    Cache,
    Sent,
    cache_of,
    cached_tokens,
    keys_of,
    prompt_of,
)
from gpuagent.engine.kv_cache import KVCache, extend_keys
from gpuagent.engine.prefix_filter import BITS_PER_KEY, MAX_KEYS, filter_of

SIZE = 16


def engine_keys(salt: bytes, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, salt, tokens, SIZE)
    return keys


def cache(replica_id: str, keys: list[bytes]) -> Cache:
    found = cache_of(replica_id, filter_of(keys), SIZE)
    assert found is not None
    return found


def test_the_keys_of_a_prompt_are_those_of_the_engine() -> None:
    """The router would else find nothing, and nobody would be told."""
    tokens = [7, 0, 2**31, *range(200)]
    assert list(keys_of(prompt_of(b"salt", tokens), SIZE)) == engine_keys(b"salt", tokens)
    assert engine_keys(b"salt", tokens) != engine_keys(b"other", tokens)


@given(st.integers(0, 12), st.integers(1, 200), st.integers(0, 400))
def test_what_is_cached_is_always_found(num_blocks: int, more: int, num_others: int) -> None:
    """Of a filter: too much sometimes, too little never; one token is left to compute."""
    tokens = list(range(SIZE * num_blocks + more))
    others = [key for n in range(num_others) for key in engine_keys(b"x%d" % n, [n] * SIZE)]
    keys = engine_keys(b"s", tokens)[:num_blocks]
    prompt, caches = prompt_of(b"s", tokens), []
    if keys + others:
        caches.append(cache("r", keys + others))
    found = cached_tokens(prompt, caches).get("r", 0)
    assert min(SIZE * num_blocks, len(tokens) - 1) <= found <= len(tokens) - 1


def test_a_filter_says_a_tenth_of_a_block_too_much() -> None:
    """On average, of prompts of which nothing is cached, as another tenant's are."""
    full = [key for n in range(64) for key in engine_keys(b"a", list(range(n, n + SIZE * 64)))]
    one = cache("r", full)
    assert 8 * len(one.bits) == BITS_PER_KEY * len(full)
    found = [
        cached_tokens(prompt_of(b"b", range(n, n + 640)), [one]).get("r", 0) for n in range(900)
    ]
    assert 0.05 < sum(found) / len(found) / SIZE < 0.25


def test_a_cache_of_any_size_fits_into_telemetry() -> None:
    keys = [n.to_bytes(32, "little") for n in range(3 * MAX_KEYS)]
    kv = KVCache(len(keys), SIZE)
    for number, key in enumerate(keys):
        (block,) = kv.pool.allocate(1) or ()
        kv.pool.register(block, key)
        assert number == block
    told = kv.prefix_filter()
    assert len(told) == MAX_KEYS * BITS_PER_KEY // 8
    assert told == filter_of(keys[-MAX_KEYS:])  # the last used


def test_what_was_evicted_is_told_no_more_and_what_is_used_stays() -> None:
    kv = KVCache(2, SIZE)
    first, second, third = ([n.to_bytes(32, "little")] for n in (1, 2, 3))
    for name, keys in (("a", first), ("b", second)):
        assert kv.admit(name, keys, SIZE)
        kv.register(name, keys, 0, SIZE)
        kv.free(name)
    assert kv.prefix_filter() == filter_of(second + first)
    assert kv.admit("a2", [*first, *third], SIZE + 1)  # hits the first, evicts the second
    assert kv.prefix_filter() == filter_of(first)


def test_replicas_with_other_block_sizes_are_compared_too() -> None:
    tokens = list(range(100))
    small: list[bytes] = []
    extend_keys(small, b"s", tokens, 4)
    wide = cache_of("wide", filter_of(engine_keys(b"s", tokens)), SIZE)
    thin = cache_of("thin", filter_of(small), 4)
    assert wide and thin
    found = cached_tokens(prompt_of(b"s", tokens), [wide, thin])
    assert found["wide"] >= 96 and found["thin"] == 99


def test_what_is_no_filter_is_as_nothing_cached() -> None:
    """A node of an older release says nothing; one that says nonsense is not believed."""
    assert cache_of("r", b"", SIZE) is None
    assert cache_of("r", bytes(7), SIZE) is None


# --- what was just sent -----------------------------------------------------------------------
def test_the_next_turn_finds_the_last_one_until_reports_know_of_it() -> None:
    sent, turn = Sent(), prompt_of(b"s", range(100))
    sent.note("m@v1", turn, "r1", 0.0)
    longer = prompt_of(b"s", range(140))
    assert sent.cached_tokens("m@v1", longer, 1.0) == {"r1": 100}
    assert sent.cached_tokens("m@v1", turn, 1.0) == {"r1": 99}
    other = prompt_of(b"s", [*range(99), 7, 8])
    for version, prompt in (
        ("m@v1", other), ("m@v2", longer), ("m@v1", prompt_of(b"t", range(140))),
    ):  # fmt: skip
        assert sent.cached_tokens(version, prompt, 1.0) == {}
    assert sent.cached_tokens("m@v1", longer, SENT_S) == {}


def test_what_was_sent_is_bounded_and_forgotten() -> None:
    sent = Sent()
    for number in range(3 * MAX_SENT):
        sent.note("m@v1", prompt_of(b"s", range(number, number + 50)), "r1", 0.0)
    assert sent._num == sum(map(len, sent._alike.values())) == MAX_SENT
    for _ in range(3 * MAX_ALIKE):
        sent.note("m@v1", prompt_of(b"s", range(50)), "r2", 1.0)
    assert sent._num == sum(map(len, sent._alike.values())) <= MAX_SENT
    sent.note("m@v1", prompt_of(b"s", range(9, 50)), "r2", 20.0)
    assert sent._num == 1
