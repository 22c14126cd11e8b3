"""One pool for several models: promises hold at once, idle memory is used, no token changes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.engine.block_pool import BlockPool
from gpuagent.engine.scheduler import Scheduler, SchedulerConfig
from gpuagent.engine.shared_pool import Lease, SharedPool
from tests.engine.drive import Driver, request

BLOCK = 4


def model(
    pool: SharedPool, name: str, num_blocks: int, guaranteed: int, per_chunk: int, width: int = 10
) -> Driver:
    """A scheduler with a leased pool; a block has ``width`` bytes, whatever a token is worth."""
    lease = Lease(name, guaranteed * width, per_chunk * width)
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=BLOCK, max_batch_tokens=32, max_num_seqs=8,
        num_host_blocks=6, blocks_per_chunk=per_chunk,
    )  # fmt: skip
    scheduler = Scheduler(config, lease)
    driver = SharingDriver(scheduler)
    lease.shed = driver.shed
    scheduler.kv.pool.on_trim = driver.lose
    pool.join(lease)
    return driver


class SharingDriver(Driver):
    """Blocks that are given back lose what was stored in them."""

    def shed(self, num_chunks: int) -> int:
        pool = self.scheduler.kv.pool
        given = pool.trim(num_chunks)
        while given < num_chunks and (swaps := self.scheduler.preempt_last()) is not None:
            for swap in swaps:
                self.host[swap.host] = list(self.memory[swap.device])
            given += pool.trim(num_chunks - given)
        return given

    def lose(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[block] = [-7] * BLOCK

    def check_blocks(self) -> None:
        """Unlike those of a pool of its own, free blocks may be anybody's."""

    @property
    def num_held(self) -> int:
        return len(self.scheduler.kv.pool.held())


def blocks_of(lease: Lease, num_blocks: int, per_chunk: int) -> BlockPool:
    return BlockPool(num_blocks, lease, per_chunk)


def test_the_example_of_the_modules_docstring() -> None:
    pool = SharedPool()
    a, b = Lease("a", 100, 10), Lease("b", 100, 4)
    of_a, of_b = blocks_of(a, 20, 1), blocks_of(b, 40, 1)
    for lease in (a, b):
        pool.join(lease)
    held = of_a.allocate(20)
    assert held is not None and a.taken_bytes == 200 and of_b.num_free == 25
    of_a.release(held)
    assert of_a.num_free == 20, "its own, until somebody asks"
    assert of_b.allocate(25) is not None and (a.taken_bytes, b.taken_bytes) == (100, 100)
    assert of_b.allocate(1) is not None, "nothing is held in a's chunks"
    assert of_a.num_free == 10, "a's guarantee"


def test_a_guarantee_is_had_from_a_neighbour_that_is_busy() -> None:
    """The borrower's latest requests give way at once, and everybody's tokens stay the same."""
    pool = SharedPool()
    a, b = (model(pool, name, 16, guaranteed=8, per_chunk=2) for name in "ab")
    for i in range(4):
        a.add(request(f"a{i}", [i] * 8, max_tokens=8))
    for _ in range(6):
        a.step()
    assert a.num_held > 8, "a has borrowed"
    for i in range(4):
        b.add(request(f"b{i}", [9 - i] * 8, max_tokens=8))
    b.step()
    assert b.scheduler.num_running >= 2 and a.scheduler.num_waiting >= 1
    for driver in (a, b):
        wanted = {name: driver.expected(new) for name, new in driver.requests.items()}
        driver.run()
        for name, tokens in wanted.items():
            assert driver.outputs[name] == tokens


def test_cached_prefixes_outlive_growth_but_not_a_neighbours_need() -> None:
    pool = SharedPool()
    a, b = (model(pool, name, 16, guaranteed=8, per_chunk=2) for name in "ab")
    for name in ("first", "again"):
        a.add(request(name, [3] * 16, max_tokens=2))
        a.run()
    assert a.cached["again"] == 15
    b.add(request("large", [1] * 40, max_tokens=20))  # 15 of the 16 blocks
    b.run()
    a.add(request("lost", [3] * 16, max_tokens=2))
    a.run()
    assert a.cached["lost"] == 0 and a.outputs["lost"] == a.outputs["first"]


def test_what_leaves_takes_its_guarantee_with_it() -> None:
    pool = SharedPool()
    a, b = (model(pool, name, 16, guaranteed=8, per_chunk=2) for name in "ab")
    for i in range(4):
        a.add(request(f"a{i}", [i] * 8, max_tokens=8))
    for _ in range(6):
        a.step()
    leases = list(pool._leases)
    pool.leave(leases[1])
    assert pool.taken_bytes <= pool.capacity_bytes == 80 and a.num_held <= 8
    assert leases[1].num_obtainable() == 0 and not b.scheduler.kv.pool.num_free
    a.run()
    assert sorted(a.finished) == ["a0", "a1", "a2", "a3"]


def test_joining_with_borrowed_memory_is_a_defect() -> None:
    lease = Lease("a", 10, 10, taken_bytes=20)
    with pytest.raises(AssertionError, match="borrowed"):
        SharedPool().join(lease)


loads = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)),
    max_size=24,
)


@settings(deadline=None, max_examples=60)
@given(loads, st.integers(1, 4), st.integers(1, 4))
def test_any_load_ends_with_the_tokens_of_running_alone(
    load: list[tuple[int, int, int, int]], chunk_a: int, chunk_b: int
) -> None:
    """Never more taken than there is, promises kept, everything given back in the end."""
    pool = SharedPool()
    models = [
        model(pool, "a", 30, 12, chunk_a),
        model(pool, "b", 30, 12, chunk_b, width=25),
        model(pool, "c", 24, 12, 3, width=7),
    ]
    wanted: dict[str, list[int]] = {}
    for number, (which, num_prompt, max_tokens, num_steps) in enumerate(load):
        new = request(f"r{number}", [number % 5] * num_prompt, max_tokens)
        models[which].add(new)
        wanted[new.request_id] = models[which].expected(new)
        for _ in range(num_steps):
            step_all(models, pool)
    for _ in range(600):
        if not any(driver.scheduler.has_work() for driver in models):
            break
        step_all(models, pool)
    outputs = {name: tokens for driver in models for name, tokens in driver.outputs.items()}
    assert outputs == wanted
    assert not any(driver.num_held for driver in models)
    for driver in models:
        assert driver.scheduler.host.num_free == 6
        assert driver.scheduler.kv.pool.num_free >= 12 // 4 * 3


def step_all(models: list[Driver], pool: SharedPool) -> None:
    for driver in models:
        if driver.scheduler.has_work():
            driver.step()
        assert pool.taken_bytes <= pool.capacity_bytes
        assert all(lease.taken_bytes >= 0 for lease in pool._leases)
