"""Keys and values in the layout of the kernels; see attention.h.

Block b of layer l is `keys[l, b]`, (K, D, 16): the tokens are innermost, so that the scores of 16
tokens are one vector. `values[l, b]` is (K, 16, D). The last block stays zero.
"""

from collections.abc import Sequence

import torch

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.models.config import ModelConfig

BLOCK_SIZE = 16


class BlockedKV:
    """Keys and values of `num_blocks` blocks of 16 tokens for all layers, in float32."""

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        shape = config.num_layers, num_blocks + 1, config.num_kv_heads
        self.null_block = num_blocks
        self.keys = torch.zeros((*shape, config.head_dim, BLOCK_SIZE))
        self.values = torch.zeros((*shape, BLOCK_SIZE, config.head_dim))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, the null block included."""
        return self.keys.nbytes + self.values.nbytes

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks in all layers; all sources are read before any target is written."""
        if copies:
            sources, targets = map(list, zip(*copies, strict=True))
            self.keys[:, targets] = self.keys[:, sources]
            self.values[:, targets] = self.values[:, sources]

    def erase(self, work: Work) -> None:
        """Zero what the work's tokens have written."""
        positions = torch.arange(work.start, work.end)
        blocks = torch.tensor(work.block_ids)[positions // BLOCK_SIZE]
        offsets = positions % BLOCK_SIZE
        self.keys[:, blocks, :, :, offsets] = 0
        self.values[:, blocks, :, offsets] = 0
