"""Leaving the device with unfinished requests, and coming back to where they were.

A model whose weights are swapped out keeps its queue, its requests' tokens and seeds, and the keys
and values of those that run. On a GPU the blocks in use are copied to pinned host memory and back
into the same places; where device memory is the host's they stay, and only what nobody holds is
given back. Either way the scheduler finds its block tables as it left them, and what is computed
afterwards is, bit by bit, what would have been computed without the pause. Example, a shared pool
with 100 MB guaranteed, of which two requests hold 30 and a third 90 (20 of it borrowed):

    park      what is borrowed must not be missing later: the latest request is preempted
              30 MB are held now; the rest is given back, its prefixes are forgotten
              the lease leaves the pool with its guarantee: the neighbours' part is what is left
    unpark    the lease joins again, with 30 MB taken; the third request is resumed from its host
              copy, or computed anew

Preempting everybody was rejected: what the swap space does not hold would be computed anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuagent.engine.model_runner import Executor
from gpuagent.engine.scheduler import Scheduler
from gpuagent.engine.shared_pool import Lease, SharedPool


@dataclass
class Parked:
    """What is needed to come back; `num_bytes` have been moved to the host."""

    executors: Sequence[Executor]
    num_bytes: int
    contents: list[tuple[list[int], Tensor]]
    lease: Lease | None
    pool: SharedPool | None

    def bring_back(self) -> int:
        """Weights and blocks where they were; the bytes moved."""
        num_bytes = sum(executor.restore() for executor in self.executors)
        for executor, (blocks, contents) in zip(self.executors, self.contents, strict=False):
            with torch.inference_mode():
                executor.write_blocks(blocks, contents)
            num_bytes += contents.nbytes
        if self.lease and self.pool:
            self.pool.join(self.lease)
        return num_bytes


def park(
    scheduler: Scheduler,
    executors: Sequence[Executor],
    lease: Lease | None,
    shed: Callable[[int], int],
) -> Parked:
    """Give up the device's memory; `shed` preempts until that many chunks are given back."""
    pool = lease.share if lease else None
    if lease and pool:
        shed(lease.num_borrowed)
        scheduler.kv.pool.trim(scheduler.kv.pool.num_chunks_taken)
        pool.leave(lease)
    contents: list[tuple[list[int], Tensor]] = []
    num_bytes = 0
    if executors[0].is_apart:
        scheduler.kv.pool.forget_free()
        contents = _saved(scheduler, executors[0])
        num_bytes = sum(executor.offload() for executor in executors)
    return Parked(executors, num_bytes, contents, lease, pool)


def _saved(scheduler: Scheduler, executor: Executor) -> list[tuple[list[int], Tensor]]:
    """The blocks in use and what is in them, in host memory; empty if none are."""
    blocks = scheduler.kv.pool.held()
    if not blocks:
        return []
    with torch.inference_mode():
        contents = executor.read_blocks(blocks).cpu()
    return [(blocks, contents.pin_memory() if torch.cuda.is_available() else contents)]
