"""Where keys and values live: one tensor for all layers, rows in block order.

Block b, offset o is slot b * block_size + o; slot s of layer l is `keys[l, s]`, (K, D). One
block past the pool, the null block, stays zero forever: padded reads point at it. A block of
the pool would not do, because a request whose numbers went wrong may leave NaN there, and
zero attention times NaN is NaN in a neighbour's output.

In int8 each token has a scale per KV head, max |x| / 127; reading widens again. Example: the key
(0.5, -1.27) is stored as (50, -127) with the scale 0.01. A vector with NaN has the scale NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.models.config import ModelConfig
from gpuagent.models.mapping import drop_pages, untouched_zeros


class KVTensors:
    """Keys and values of `num_blocks` blocks for all layers of one model.

    `dtype` is what is read and written; with `is_int8` the pool is an eighth to a quarter of it. A
    leased pool takes memory as it is written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
        is_int8: bool = False,
        is_leased: bool = False,
    ) -> None:
        shape = (num_blocks + 1) * block_size, config.num_kv_heads, config.head_dim
        stored = torch.int8 if is_int8 else dtype
        self.block_size = block_size
        self.null_block = num_blocks
        self.token_width = config.num_kv_heads * config.head_dim
        self.dtype = dtype
        self.is_int8 = is_int8
        pool = 2, config.num_layers, *shape
        scales = pool[:-1] if is_int8 else (0,)
        if is_leased:
            self._pool = untouched_zeros(pool, stored)
            self._scales = untouched_zeros(scales, torch.float32)
        else:
            self._pool = torch.zeros(pool, dtype=stored, device=device)
            self._scales = torch.zeros(scales, device=device)

    def free(self) -> None:
        """Give up the memory until `allocate`; what was stored is lost."""
        self._shapes = self._pool.shape, self._scales.shape
        self._pool, self._scales = self._pool.new_empty(0), self._scales.new_empty(0)

    def allocate(self) -> None:
        """Zeroed memory again after `free`."""
        pool, scales = self._shapes
        self._pool, self._scales = self._pool.new_zeros(pool), self._scales.new_zeros(scales)

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self._pool.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, the null block included."""
        return self._pool.nbytes + self._scales.nbytes

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep key and value (T, K, D) of slots (T,)."""
        for part, rows in enumerate((key, value)):
            if self.is_int8:
                scale = rows.float().abs().amax(-1) / 127
                self._scales[part, layer].index_copy_(0, slots, scale)
                # A zero vector divides by the least number instead: its quotients are zero too.
                rows = rows / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
                rows = rows.round().nan_to_num().to(torch.int8)
            self._pool[part, layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, blocks: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks, (len(blocks) * block_size, K, D) each, in `out`'s memory.

        `out` has `2 * len(blocks)` rows of a block's numbers.
        """
        shape = (len(blocks) * self.block_size, *self._pool.shape[3:])
        parts = []
        for part, target in enumerate(out.chunk(2)):
            source = self._pool[part, layer].view(-1, out.shape[1])
            if self.is_int8:
                scales = self._scales[part, layer].view(-1, self.block_size * shape[1])[blocks]
                target = target.view(shape)
                widened = source[blocks].view(shape).to(self.dtype)
                torch.mul(widened, scales.view(*shape[:2], 1).to(self.dtype), out=target)
            else:
                torch.index_select(source, 0, blocks, out=target)
            parts.append(target.view(shape))
        return parts[0], parts[1]

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks in all layers; all sources are read before any target is written."""
        if copies:
            sources, targets = zip(*copies, strict=True)
            for pool in self._pools():
                pool[:, :, self._slots(targets)] = pool[:, :, self._slots(sources)]

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), bytes) of blocks, scales included, in memory of its own."""
        parts = [self._of_blocks(pool, blocks) for pool in self._pools()]
        rows = [part.reshape(len(blocks), -1).view(torch.uint8) for part in parts]
        return torch.cat(rows, 1)

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks, in the shape of `read_blocks`."""
        pools = self._pools()
        widths = [pool[:, :, : self.block_size].nbytes for pool in pools]
        for pool, part in zip(pools, contents.to(self.device).split(widths, 1), strict=True):
            rows = part.contiguous().view(pool.dtype)
            shape = len(blocks), 2, pool.shape[1], self.block_size, *pool.shape[3:]
            pool[:, :, self._slots(blocks)] = rows.view(shape).movedim(0, 2).flatten(2, 3)

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the memory of neighbouring blocks back where it is the kernel's to give."""
        if self.device.type != "cpu":
            return
        rows = slice(blocks[0] * self.block_size, (blocks[-1] + 1) * self.block_size)
        for pool in self._pools():
            for layer in pool.flatten(0, 1):
                drop_pages(layer[rows])

    def erase(self, work: Work) -> None:
        """Zero what the work's tokens have written."""
        slots = self._slots(work.block_ids)[work.start : work.end]
        for pool in self._pools():
            pool[:, :, slots] = 0

    def _pools(self) -> tuple[Tensor, ...]:
        return (self._pool, self._scales) if self.is_int8 else (self._pool,)

    def _of_blocks(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        """(len(blocks), 2, layers, block_size, ...)."""
        contents = pool[:, :, self._slots(blocks)]
        return contents.unflatten(2, (len(blocks), self.block_size)).movedim(2, 0)

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        offsets = torch.arange(self.block_size)
        slots = torch.tensor(blocks).unsqueeze(1) * self.block_size + offsets
        return slots.flatten().to(self.device)
