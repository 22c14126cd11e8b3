"""Sums over the ranks of a tensor-parallel group, by torch.distributed.

How the ranks find each other: over the lines that they have to rank 0 anyway (`meeting`). So no
port is guessed, no file is left behind, and of the network only the interface is used that the
group was given: the loopback, or that of the nodes' fabric.

On GPUs the sum is NCCL's all-reduce (not measured: it has run on no machine with two GPUs). On CPUs
it is gloo's, by pairs: each rank sends its partial sum to each other one, and all add up in the
order of ranks, so that all have the same bits. Two ranks, two floats::

    rank 0 has (1, 2)   sends (1, 2), receives (3, 4)   (1, 2) + (3, 4) = (4, 6)
    rank 1 has (3, 4)   sends (3, 4), receives (1, 2)   (1, 2) + (3, 4) = (4, 6)

gloo's own all-reduce is for large parts of two ranks, as of a long prompt, where it is the faster
one: a + b are the same bits in either order, while of three ranks' parts it adds some pieces in
another order than others. For small parts it is the slower: for 1 to 16 rows of 576 floats between
two processes on two cores it took 1.4 to 2.3 times as long as an exchange (0.12 to 0.16 ms), for
256 rows 0.3 to 0.8 times (`python -m tests.benchmarks.tensor_parallel`). A step of SmolLM2 has
sixty sums.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gpuagent.models.errors import LoadError

LOOPBACK = "lo"
LARGE = 1 << 16  # numbers, from which on an all-reduce is no slower


class Collective:
    """The ranks' common sum; `connect` before the first use."""

    def __init__(self, rank: int, size: int, device: str, interface: str = LOOPBACK) -> None:
        self.rank = rank
        self.size = size
        self._interface = interface
        self._device = device
        self._backend = "nccl" if device == "cuda" else "gloo"

    def connect(self, store: dist.Store, timeout_s: float) -> None:
        """Meet the other ranks; LoadError group_incomplete if one does not come in time."""
        timeout = timedelta(seconds=timeout_s)
        self._store = store  # torch holds on to its inside only
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = self._interface
        try:
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout
            )
            self.total(torch.zeros(1, device=self._device))
        except (RuntimeError, OSError, EOFError) as error:  # torch's own are RuntimeErrors
            text = f"rank {self.rank} of {self.size} did not meet the others: {error}"
            raise LoadError("group_incomplete", text[:400]) from error

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, each of the same shape; the same bits on all. What was in
        `part` may be lost."""
        is_large = self.size == 2 and part.numel() >= LARGE and part.dtype is torch.float32
        if self._backend == "nccl" or is_large:
            part = part.contiguous()
            dist.all_reduce(part)
            return part
        parts = self._exchanged(part.contiguous())
        whole = parts[0].float()
        for each in parts[1:]:
            whole = whole + each.float()
        return whole.to(part.dtype)

    def _exchanged(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in the order of ranks."""
        parts = [part if i == self.rank else torch.empty_like(part) for i in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        pending = [dist.isend(part, rank) for rank in others]
        pending += [dist.irecv(parts[rank], rank) for rank in others]
        for each in pending:
            if each is not None:
                each.wait()
        return parts

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
