"""Where keys and values live: one tensor for all layers, rows in block order.

Block b, offset o is slot b * block_size + o; slot s of layer l is `keys[l, s]`, (K, D). One
block past the pool, the null block, stays zero forever: padded reads point at it. A block of
the pool would not do, because a request whose numbers went wrong may leave NaN there, and
zero attention times NaN is NaN in a neighbour's output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.models.config import ModelConfig


class KVTensors:
    """Keys and values of `num_blocks` blocks for all layers of one model."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        shape = (num_blocks + 1) * block_size, config.num_kv_heads, config.head_dim
        self.block_size = block_size
        self.null_block = num_blocks
        self._pool = torch.zeros((2, config.num_layers, *shape), dtype=dtype, device=device)
        self.keys, self.values = self._pool

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, the null block included."""
        return self._pool.nbytes

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks in all layers; all sources are read before any target is written."""
        if copies:
            sources, targets = zip(*copies, strict=True)
            self._pool[:, :, self._slots(targets)] = self._pool[:, :, self._slots(sources)]

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), 2, layers, block_size, K, D) of blocks, in memory of its own."""
        contents = self._pool[:, :, self._slots(blocks)]
        return contents.unflatten(2, (len(blocks), self.block_size)).movedim(2, 0)

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks, in the shape of `read_blocks`."""
        rows = contents.to(self._pool.device).movedim(0, 2).flatten(2, 3)
        self._pool[:, :, self._slots(blocks)] = rows

    def erase(self, work: Work) -> None:
        """Zero what the work's tokens have written."""
        slots = self._slots(work.block_ids)[work.start : work.end]
        self._pool[:, :, slots] = 0

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        offsets = torch.arange(self.block_size)
        slots = torch.tensor(blocks).unsqueeze(1) * self.block_size + offsets
        return slots.flatten().to(self._pool.device)
