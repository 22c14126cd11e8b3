"""Which blocks hold a request's keys and values, and what can be reused of another's.

Block i of a request covers its tokens [i * block_size, (i + 1) * block_size). A full block is
registered under a key that chains over everything before it:

    key(i) = SHA-256(key(i - 1) + tokens of block i),   key(-1) = SHA-256(cache salt)

so equal keys mean equal salt, equal tokens and equal position; tenants with different salts
never meet. Example, block_size 4, request "a" with tokens 0..9 has been computed:

    blocks of "a":  [7: 0 1 2 3] [2: 4 5 6 7] [5: 8 9]      7 and 2 are registered
    admit "b" with tokens 0 1 2 3 4 5 6 7 20:  blocks [7, 2, 9], 8 tokens need no prefill
    admit "c" with tokens 0 1 2 3 4 5 6 7:     blocks [7, 4], 7 tokens need no prefill

"c" shows copy on write: all its tokens are cached, but the last one must be computed for its
logits, and that writes into block 2, which others read. It gets a copy, block 4. The same
holds for `fork` (several continuations of one prompt), where the last, partial block is
shared until one of them writes.

The index is Python's SHA-256 rather than hash(): a collision would show one tenant another's
text. Nothing here knows tensors: `Copy` says what the runner has to copy before it computes.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gpuagent.engine.block_pool import BlockPool
from gpuagent.engine.prefix_filter import MAX_KEYS, filter_of
from gpuagent.engine.shared_pool import Lease


class Copy(NamedTuple):
    """Copy the contents of block `source` to block `target` before computing."""

    source: int
    target: int


class Admission(NamedTuple):
    """A request has its blocks; its first `num_cached` tokens are already computed."""

    num_cached: int
    copies: tuple[Copy, ...]


def extend_keys(keys: list[bytes], salt: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `keys` the chained keys of the full blocks of `tokens` that it lacks."""
    parent = keys[-1] if keys else hashlib.sha256(salt).digest()
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        block = array("Q", tokens[start : start + block_size])
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        keys.append(parent)


class KVCache:
    """Block tables of the requests that hold memory, over one pool, perhaps a leased one.

    A table is a tuple: every step reads it, one in `block_size` changes it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        lease: Lease | None = None,
        per_chunk: int = 1,
    ) -> None:
        if block_size < 1:
            raise ValueError("a block holds at least one token")
        self.pool = BlockPool(num_blocks, lease, per_chunk)
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._tables: dict[str, tuple[int, ...]] = {}
        self._filter, self._filter_of = b"", 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks in token order; empty if it holds none."""
        return self._tables.get(request_id, ())

    def admit(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, num_spare: int = 0
    ) -> Admission | None:
        """Give a new request blocks for `num_tokens` tokens, reusing cached ones.

        `keys` are those of its full blocks (`extend_keys`). None, and nothing changed, if
        the pool would be left with fewer than `num_spare` free blocks. At least one token
        is left to compute.
        """
        assert request_id not in self._tables, f"{request_id} holds blocks already"
        cached = self._acquire_prefix(keys)
        num_cached = min(len(cached) * self.block_size, num_tokens - 1)
        num_shared = num_cached // self.block_size  # the rest, one block at most, is written to
        shared, rewritten = cached[:num_shared], cached[num_shared:]
        self.pool.release(rewritten)
        new = self._allocate_sparing(self.num_blocks_for(num_tokens) - num_shared, num_spare)
        if new is None:
            self.pool.release(reversed(shared))
            return None
        self._tables[request_id] = (*shared, *new)
        # In a full pool the rewritten block itself may be handed out: then there is no copy.
        pairs = zip(rewritten, new, strict=False)
        return Admission(num_cached, tuple(Copy(s, t) for s, t in pairs if s != t))

    def grow(self, request_id: str, num_computed: int, num_tokens: int) -> list[Copy] | None:
        """Make tokens [num_computed, num_tokens) writable; None if memory is short.

        Takes new blocks at the end, and a copy of the block it would write into if others
        hold that too. On None nothing has changed.
        """
        table, pool = self._tables[request_id], self.pool
        first = num_computed // self.block_size
        num_new = self.num_blocks_for(num_tokens) - len(table)
        if num_new <= 0 and first == len(table) - 1 and pool.is_writable(table[first]):
            return []  # so it is in all but one of `block_size` steps
        shared = [i for i in range(first, len(table)) if not pool.is_writable(table[i])]
        blocks = pool.allocate(len(shared) + max(num_new, 0))
        if blocks is None:
            return None
        copies = [Copy(table[i], blocks.pop()) for i in shared]
        target_of = {copy.source: copy.target for copy in copies}
        pool.release(target_of)
        self._tables[request_id] = (*(target_of.get(b, b) for b in table), *blocks)
        return copies

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks beyond those of `num_tokens` tokens (rejected proposals')."""
        table = self._tables[request_id]
        num_blocks = self.num_blocks_for(num_tokens)
        self.pool.release(reversed(table[num_blocks:]))
        self._tables[request_id] = table[:num_blocks]

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let `child_id` share all blocks of `parent_id`; whoever writes first copies."""
        assert child_id not in self._tables, f"{child_id} holds blocks already"
        table = self._tables[parent_id]
        self.pool.share(table)
        self._tables[child_id] = table

    def register(self, request_id: str, keys: Sequence[bytes], start: int, end: int) -> None:
        """Make the blocks findable that computing tokens [start, end) has filled."""
        if self._prefix_caching:
            table = self._tables[request_id]
            for i in range(start // self.block_size, end // self.block_size):
                self.pool.register(table[i], keys[i])

    def prefix_filter(self) -> bytes:
        """What can be found here, for a router; see `prefix_filter`. Made anew after a change."""
        if self._filter_of != self.pool.num_key_changes:
            self._filter_of = self.pool.num_key_changes
            self._filter = filter_of(self.pool.last_keys(MAX_KEYS))
        return self._filter

    def free(self, request_id: str) -> None:
        """Take back the request's blocks, its last block to be reused first."""
        self.pool.release(reversed(self._tables.pop(request_id, ())))

    def _allocate_sparing(self, count: int, num_spare: int) -> list[int] | None:
        if self.pool.num_free - count < num_spare:
            return None
        return self.pool.allocate(count)

    def _acquire_prefix(self, keys: Sequence[bytes]) -> list[int]:
        blocks: list[int] = []
        for key in keys if self._prefix_caching else ():
            block = self.pool.acquire(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
