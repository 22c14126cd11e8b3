"""Shared memory through which a prefill worker gives keys and values to a decode worker.

The agent makes it, an anonymous file in memory, and both workers inherit it: it has no name that
could be left behind, and the kernel frees it when the last of the three has ended, however that
happens. The prefill worker alone says which bytes are in use; the decode worker copies them out and
says so, by way of the agent:

    prefill   take(400) -> Region(0, 400)      writes, HandOver(..., 0, 400)
    prefill   take(700) -> Region(448, 700)    starts are rounded to whole cache lines
    prefill   take(900) -> None                full: the request goes on decoding where it is
    decode    reads 0..400, Taken(0)
    prefill   give_back(0); take(300) -> Region(0, 300)
"""

import mmap
import os
from typing import NamedTuple

ALIGNMENT = 64
SHARE = 10  # of the replica's memory


class Region(NamedTuple):
    """Bytes [start, start + size)."""

    start: int
    size: int


def create(num_bytes: int) -> int:
    """A descriptor of that much shared memory; its pages come when they are written."""
    descriptor = os.memfd_create("engine-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class Arena:
    """One worker's view of the memory behind an inherited descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self._size)
        os.close(descriptor)
        self._taken: dict[int, Region] = {}  # by start, in order

    @property
    def num_taken(self) -> int:
        """Regions in use."""
        return len(self._taken)

    def take(self, size: int) -> Region | None:
        """The first gap of that size; None if there is none."""
        start = 0
        for region in self._taken.values():
            if region.start - start >= size:
                break
            start = -(-(region.start + region.size) // ALIGNMENT) * ALIGNMENT
        if start + size > self._size:
            return None
        region = Region(start, size)
        self._taken = dict(sorted({**self._taken, start: region}.items()))
        return region

    def give_back(self, start: int) -> None:
        """The region at `start` is free."""
        del self._taken[start]

    def view(self, region: Region) -> memoryview:
        """Its bytes, to be read or written."""
        return memoryview(self._memory)[region.start : region.start + region.size]
