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

With a lease (`shared_pool`) blocks have memory only in chunks that have been taken, the first
first, and `num_blocks` is what the pool could have if it were alone. With 8 blocks in chunks of 4:

    pool.allocate(2)       -> [0, 1]     takes chunk 0; free: 2, 3 and whatever can be taken
    pool.trim(1)           -> 0          block 0 is held, so is its chunk
    pool.release([1, 0])
    pool.trim(1)           -> 1          chunk 0 is given back, and what was found in it lost
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from gpuagent.engine.shared_pool import Lease


class BlockPool:
    """Reference counts, free list and key index of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, lease: Lease | None = None, per_chunk: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._lease = lease
        self._per_chunk = per_chunk
        self._has_memory = [lease is None] * -(-num_blocks // per_chunk)
        self.num_held = 0  # blocks with a holder
        self._num_held_in = [0] * len(self._has_memory)  # the same, by chunk
        self.on_trim: Callable[[Sequence[int]], None] = lambda blocks: None
        if lease:
            lease.num_idle, lease.trim = self._count_idle, self.trim
        self._num_refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}  # the last used last
        self.num_key_changes = 0  # a change is a key that can be found now, or no more
        owned = range(0 if lease else num_blocks)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(owned)

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: nobody holds them, the findable ones included."""
        if self._lease is None:
            return len(self._free)
        num_missing = self._has_memory.count(False)
        if not num_missing:
            return len(self._free)
        num_more = min(num_missing, self._lease.num_obtainable()) * self._per_chunk
        return min(len(self._free) + num_more, self.num_blocks - self.num_held)

    def num_refs(self, block: int) -> int:
        """How many holders a block has."""
        return self._num_refs[block]

    def key(self, block: int) -> bytes | None:
        """The key a block can be found by."""
        return self._keys[block]

    def is_writable(self, block: int) -> bool:
        """True if nobody but its one holder reads a held block, now or by a later hit."""
        return self._num_refs[block] == 1 and self._keys[block] is None

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, the longest free first; None if there are not so many."""
        while count > len(self._free):
            if not self._grow():
                return None
        return [self._take_oldest() for _ in range(count)]

    def acquire(self, key: bytes) -> int | None:
        """Take a share in the block registered as `key`; None if there is none."""
        block = self._by_key.pop(key, None)
        if block is not None:
            self._by_key[key] = block
            self._free.pop(block, None)
            self._hold(block)
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
                self.num_held -= 1
                self._num_held_in[block // self._per_chunk] -= 1

    def register(self, block: int, key: bytes) -> None:
        """Make a full block findable; the first block with a key keeps it."""
        assert self._num_refs[block] > 0, f"block {block} is registered but not held"
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block
            self.num_key_changes += 1

    def last_keys(self, num_keys: int) -> list[bytes]:
        """Keys that can be found, at most so many, the last used first."""
        return list(islice(reversed(self._by_key), num_keys))

    def trim(self, num_chunks: int) -> int:
        """Give back up to that many chunks in which nothing is held; how many it were."""
        assert self._lease is not None, "only a leased pool gives back"
        chunks = self._idle_chunks()[::-1][:num_chunks]
        for chunk in chunks:
            self._has_memory[chunk] = False
            for block in self._blocks_of(chunk):
                del self._free[block]
                self._forget_key(block)
            self.on_trim(self._blocks_of(chunk))
        self._lease.give(len(chunks))
        return len(chunks)

    def held(self) -> list[int]:
        """The blocks that somebody holds."""
        return [block for block, num in enumerate(self._num_refs) if num]

    def forget_free(self) -> None:
        """Let nothing be found in free blocks: their contents are lost."""
        for block in self._free:
            self._forget_key(block)

    @property
    def num_chunks_taken(self) -> int:
        """Chunks that have memory."""
        return self._has_memory.count(True)

    def _take_oldest(self) -> int:
        if self._lease and self._keys[next(iter(self._free))] is not None and self._lease.is_free():
            self._grow()  # before something that could still be found is lost
        block, _ = self._free.popitem(last=False)
        self._forget_key(block)
        self._hold(block)
        return block

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
            self.num_key_changes += 1

    def _hold(self, block: int) -> None:
        self._num_refs[block] += 1
        if self._num_refs[block] == 1:
            self.num_held += 1
            self._num_held_in[block // self._per_chunk] += 1

    def _grow(self) -> bool:
        """Memory for the first chunk that has none; False if there is none to be had."""
        if self._lease is None or False not in self._has_memory or not self._lease.take():
            return False
        chunk = self._has_memory.index(False)
        self._has_memory[chunk] = True
        for block in reversed(self._blocks_of(chunk)):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        return True

    def _count_idle(self) -> int:
        return len(self._idle_chunks())

    def _idle_chunks(self) -> list[int]:
        pairs = enumerate(zip(self._has_memory, self._num_held_in, strict=True))
        return [chunk for chunk, (has_memory, num_held) in pairs if has_memory and not num_held]

    def _blocks_of(self, chunk: int) -> range:
        start = chunk * self._per_chunk
        return range(start, min(start + self._per_chunk, self.num_blocks))
