"""What becomes of a preempted request's keys and values: kept in host memory, or computed anew.

Both give the same output, so the cheaper one is taken, by rates measured on this machine:

    swap        2 * num_blocks * seconds_per_block      out now, and in again later
    recompute   num_tokens * seconds_per_token          a prefill of what it has

Example with blocks of 16 tokens, 0.2 ms to move a block and 0.5 ms to compute a token: a
request of 100 tokens (7 blocks) costs 2.8 ms or 50 ms, so it is swapped; a model so small, or
a memory so slow, that a token costs 0.02 ms would recompute it in 2 ms. Until a rate is known
a swap is tried, which measures it. A full host pool leaves only the computing.

The host copy is given back when a step that has brought it home is complete, not when that
step is planned: another swap of the same step would overwrite it first.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from gpuagent.engine.block_pool import BlockPool
from gpuagent.engine.pacing import LinearCost


class Swap(NamedTuple):
    """Move one block between device and host memory."""

    device: int
    host: int


class HostCopy(NamedTuple):
    """The first `num_tokens` tokens of a request, in these blocks of the host pool."""

    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class SwapSpace:
    """The host pool's blocks and what moving one costs; `num_blocks` 0 means no pool."""

    num_blocks: int
    cost: LinearCost = field(default_factory=LinearCost)
    pool: BlockPool | None = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks) if self.num_blocks else None

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return self.pool.num_free if self.pool else 0

    def keep(self, num_blocks: int, num_tokens: int, seconds_per_token: float) -> HostCopy | None:
        """Room for a preempted request; None if it is to be computed anew."""
        if self.pool is None or num_tokens == 0:
            return None
        if not self._is_cheaper(num_blocks, num_tokens, seconds_per_token):
            return None
        blocks = self.pool.allocate(num_blocks)
        return None if blocks is None else HostCopy(tuple(blocks), num_tokens)

    def reserve(self, num_blocks: int, num_tokens: int) -> HostCopy | None:
        """Room for a request that comes from another engine; None if there is none now."""
        blocks = self.pool.allocate(num_blocks) if self.pool else None
        return None if blocks is None else HostCopy(tuple(blocks), num_tokens)

    def release(self, copy: HostCopy) -> None:
        """Give a copy's blocks back."""
        assert self.pool is not None
        self.pool.release(copy.blocks)

    def _is_cheaper(self, num_blocks: int, num_tokens: int, seconds_per_token: float) -> bool:
        is_known = self.cost.num_observed > 0 and seconds_per_token > 0.0
        return not is_known or 2 * self.cost.predict(num_blocks) < num_tokens * seconds_per_token
