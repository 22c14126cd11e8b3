"""The blocks of one KV pool: who holds them, which are free, which can be found again.

A block is a row of the pool that stores keys and values of `block_size` tokens. It has a
reference count (several requests may read one block) and, once full, perhaps a key: the hash
of all tokens up to its end. A block whose count falls to zero becomes free but keeps its
contents and its key until it is handed out again, oldest first, so a freed prefix can still
be found. Example with 3 blocks:

    pool.allocate(2)       -> [0, 1]     free: 2
    pool.register(0, b"A")               block 0 can be found as "A"
    pool.release([1, 0])                 free: 2, 1, 0     (0 last: reused last)
    pool.acquire(b"A")     -> 0          free: 2, 1        (a hit; the count is 1 again)
    pool.allocate(2)       -> [2, 1]     free: -
    pool.allocate(1)       -> None       short of memory: an ordinary answer

A doubly linked list was rejected: an ordered dict gives the same constant-time removal from
the middle.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference counts, free list and key index of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the findable ones included."""
        return len(self._free)

    def num_refs(self, block: int) -> int:
        """How many holders a block has."""
        return self._num_refs[block]

    def key(self, block: int) -> bytes | None:
        """The key a block can be found by."""
        return self._keys[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, the longest free first; None if there are not so many."""
        if count > len(self._free):
            return None
        return [self._take_oldest() for _ in range(count)]

    def acquire(self, key: bytes) -> int | None:
        """Take a share in the block registered as `key`; None if there is none."""
        block = self._by_key.get(key)
        if block is not None:
            self._free.pop(block, None)
            self._num_refs[block] += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more share in each of these held blocks."""
        for block in blocks:
            assert self._num_refs[block] > 0, f"block {block} is shared but not held"
            self._num_refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one share in each block; of those now free the first is reused first."""
        for block in blocks:
            assert self._num_refs[block] > 0, f"block {block} is released but not held"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Make a full block findable; the first block with a key keeps it."""
        assert self._num_refs[block] > 0, f"block {block} is registered but not held"
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
        self._num_refs[block] = 1
        return block
