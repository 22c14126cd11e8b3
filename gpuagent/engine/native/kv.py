"""Keys and values in the layout of the kernels; see attention.h.

Block b of layer l is `keys[l, b]`, (K, D, 16): the tokens are innermost, so that the scores of 16
tokens are one vector. `values[l, b]` is (K, 16, D). In int8 each token has a scale per KV head,
`key_scales[l, b]` and `value_scales[l, b]`, (K, 16) in float32. The last block stays zero.

Bytes per token and layer with 3 KV heads of 64: 1,536 in float32, 408 in int8.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.native.build import kernels
from gpuagent.models.config import ModelConfig
from gpuagent.models.mapping import drop_pages, untouched_zeros

BLOCK_SIZE = 16


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class BlockedKV:
    """Keys and values of `num_blocks` blocks of 16 tokens for all layers.

    A leased pool has small pages, so that what `discard` gives back is free for others.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        is_int8: bool = False,
        is_leased: bool = False,
    ) -> None:
        shape = config.num_layers, num_blocks + 1, config.num_kv_heads
        dtype = torch.int8 if is_int8 else torch.float32
        self.null_block = num_blocks
        zeros = untouched_zeros if is_leased else _zeros
        self.keys = zeros((*shape, config.head_dim, BLOCK_SIZE), dtype)
        self.values = zeros((*shape, BLOCK_SIZE, config.head_dim), dtype)
        scales = (*shape, BLOCK_SIZE) if is_int8 else (0,)
        self.key_scales, self.value_scales = (zeros(scales, torch.float32) for _ in "kv")
        if not is_leased:
            for pool in (self.keys, self.values):
                kernels().advise_huge(pool.data_ptr(), pool.nbytes)

    @property
    def is_int8(self) -> bool:
        """Whether keys and values are stored as int8 with scales."""
        return self.keys.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, the null block included."""
        return sum(pool.nbytes for pool in self._scales()) + self.keys.nbytes + self.values.nbytes

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks in all layers; all sources are read before any target is written."""
        if copies:
            sources, targets = map(list, zip(*copies, strict=True))
            for pool in self._pools():
                pool[:, targets] = pool[:, sources]

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), bytes) of blocks, scales included, in memory of its own."""
        parts = [pool[:, list(blocks)].transpose(0, 1) for pool in self._pools()]
        return torch.cat([p.reshape(len(blocks), -1).view(torch.uint8) for p in parts], 1)

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks, in the shape of `read_blocks`."""
        pools = self._pools()
        widths = [pool[:, 0].nbytes for pool in pools]
        for pool, part in zip(pools, contents.split(widths, 1), strict=True):
            rows = part.contiguous().view(pool.dtype)
            shaped = rows.view(len(blocks), len(pool), *pool.shape[2:])
            pool[:, list(blocks)] = shaped.transpose(0, 1)

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the memory of neighbouring blocks back to the kernel."""
        for pool in self._pools():
            for layer in pool:
                drop_pages(layer[blocks[0] : blocks[-1] + 1])

    def erase(self, work: Work) -> None:
        """Zero what the work's tokens have written."""
        positions = torch.arange(work.start, work.end)
        blocks = torch.tensor(work.block_ids)[positions // BLOCK_SIZE]
        offsets = positions % BLOCK_SIZE
        self.keys[:, blocks, :, :, offsets] = 0
        self.values[:, blocks, :, offsets] = 0
        for scales in self._scales():
            scales[:, blocks, :, offsets] = 0

    def _pools(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values, *self._scales())

    def _scales(self) -> tuple[torch.Tensor, ...]:
        return (self.key_scales, self.value_scales) if self.is_int8 else ()
