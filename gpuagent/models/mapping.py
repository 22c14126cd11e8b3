"""Give back the memory of mapped weights that have been read.

A mapped file's pages count as this process's memory from the first read on. What has been
checked or repacked need not stay: the kernel keeps it in the page cache, and reads it back from
there if somebody touches it again. For a model of 540 MB converted to 135 MB of int8:

    map, check all        540 MB resident     forget: 0
    pack layer 0           14 MB resident     forget: 0       and so on, layer by layer

Only pages of files are forgotten. The same call on memory of one's own would erase it, so what
is a file is looked up in /proc/self/maps; where there is no such thing nothing is forgotten.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

MAPS = Path("/proc/self/maps")
SUFFIX = ".safetensors"


class MappedFiles:
    """The weight files that this process has mapped at this moment."""

    def __init__(self) -> None:
        self._ranges = list(_ranges())

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Drop the whole pages of those tensors that lie in a mapped weight file."""
        for tensor in tensors:
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            if any(first <= start and end <= last for first, last in self._ranges):
                _drop(start, end)


def _ranges() -> Iterable[tuple[int, int]]:
    """Start and end of each mapping of a weight file."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.endswith(SUFFIX):
            first, _, last = line.split(maxsplit=1)[0].partition("-")
            yield int(first, 16), int(last, 16)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros that takes memory page by page as it is written: torch.zeros writes it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def drop_pages(tensor: Tensor) -> None:
    """Give back the whole pages of a contiguous tensor in memory of its own: they become zero."""
    _drop(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _drop(start: int, end: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if num_bytes > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(first, num_bytes, mmap.MADV_DONTNEED)
