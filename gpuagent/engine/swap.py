"""Where preempted requests' keys and values wait: host memory beside the device's blocks.

    step 40   swap_outs (device 7 -> host 0), (device 2 -> host 1)     "mail" gives way
    step 41   other requests use blocks 7 and 2
    step 58   swap_ins  (host 0 -> device 5), (host 1 -> device 9)     "mail" goes on

A block is copied with all its layers, bit by bit, so what is computed afterwards is what would
have been computed without the pause. Where the device has its own memory the host's is pinned,
so that the copies run at the speed of the bus; on a CPU it is a second buffer. It is made at
the first swap: a process that never preempts does not pay for it.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gpuagent.engine.preemption import Swap


class BlockStore(Protocol):
    """The device's blocks, all layers of a block together."""

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), ...) of blocks."""

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks."""


class HostBuffer:
    """`num_blocks` blocks in host memory. `num_moved` and `seconds` are totals."""

    def __init__(self, store: BlockStore, num_blocks: int) -> None:
        self._store = store
        self._num_blocks = num_blocks
        self._buffer: Tensor | None = None
        self.num_moved = 0
        self.seconds = 0.0

    def swap_out(self, swaps: Sequence[Swap]) -> None:
        """Copy device blocks to the host."""
        start = time.perf_counter()
        contents = self._store.read_blocks([swap.device for swap in swaps])
        self._allocated(contents)[[swap.host for swap in swaps]] = contents.cpu()
        self._count(len(swaps), start)

    def fill(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set host blocks to what another engine's `read_blocks` gave."""
        self._allocated(contents)[list(blocks)] = contents

    def swap_in(self, swaps: Sequence[Swap]) -> None:
        """Copy host blocks to the device."""
        assert self._buffer is not None, "nothing was swapped out"
        start = time.perf_counter()
        contents = self._buffer[[swap.host for swap in swaps]]
        self._store.write_blocks([swap.device for swap in swaps], contents)
        self._count(len(swaps), start)

    def _allocated(self, contents: Tensor) -> Tensor:
        if self._buffer is None:
            shape = self._num_blocks, *contents.shape[1:]
            is_pinned = contents.is_cuda
            self._buffer = torch.empty(shape, dtype=contents.dtype, pin_memory=is_pinned)
        return self._buffer

    def _count(self, num_blocks: int, start: float) -> None:
        self.num_moved += num_blocks
        self.seconds += time.perf_counter() - start
