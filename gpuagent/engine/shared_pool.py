"""One pool of bytes for keys and values on a device, shared by the models in one worker.

Each model is promised a part, its guarantee, and may use what the others leave of theirs. Memory
moves in chunks of `blocks_per_chunk` blocks of the model's own shape, so models of any shape share
one pool: bytes are counted here, and where a block lies is the model's own affair (`block_pool`).
Example, two models with 100 MB each, chunks of 10 MB ("a") and 4 MB ("b"):

    a works alone          takes 20 chunks, 200 MB: 100 of its own, 100 that b does not use
    a becomes idle         keeps them, with the prefixes that can still be found there
    b gets a request       takes back what it needs from a's chunks in which nothing is held
    both are busy          a must shed chunks until b has its 100 MB: a's latest requests give way,
                           and go on later with no token lost (`preemption`)

So a guarantee holds at once, whatever the neighbours do, and sum(taken) <= sum(guarantees) always.
Chunks that nobody holds are taken from the model that has used the pool least recently. A model
that leaves the device (`leave`) takes its guarantee with it, and who had borrowed of it sheds.

Dividing the memory for good was rejected: of three models one is usually busy. So was one tensor
with blocks of one size: a block of a large model is a hundred of a small one's.

Where device memory is the host's, chunks are what the kernel backs with pages and takes back; a
GPU's pools are allocated whole at load, so that there a model's limit is its guarantee.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Lease:
    """One model's part of the pool; sizes in bytes, `taken_bytes` a multiple of `chunk_bytes`.

    `trim(n)` gives back up to n chunks in which nothing is held, and returns how many; `shed(n)`
    preempts until n are given back or nothing runs. Both call `give`.
    """

    name: str
    guarantee_bytes: int
    chunk_bytes: int
    taken_bytes: int = 0
    used_at: int = 0
    share: "SharedPool | None" = None
    num_idle: Callable[[], int] = field(default=lambda: 0)
    trim: Callable[[int], int] = field(default=lambda num: 0)
    shed: Callable[[int], int] = field(default=lambda num: 0)

    @property
    def num_promised(self) -> int:
        """Chunks still to come that nobody can refuse."""
        return max(self.guarantee_bytes - self.taken_bytes, 0) // self.chunk_bytes

    @property
    def num_borrowed(self) -> int:
        """Chunks, the last perhaps in part, above the guarantee."""
        return -(-max(self.taken_bytes - self.guarantee_bytes, 0) // self.chunk_bytes)

    def num_obtainable(self) -> int:
        """Chunks that `take` would give now, one after the other."""
        if self.share is None:
            return 0
        return max(self.share.num_free_for(self) // self.chunk_bytes, self.num_promised)

    def is_free(self) -> bool:
        """Whether a chunk can be had that costs nobody anything."""
        return self.share is not None and self.share.free_bytes >= self.chunk_bytes

    def take(self) -> bool:
        """One more chunk; False if there is none."""
        return self.share is not None and self.share.take(self)

    def give(self, num_chunks: int) -> None:
        """Give chunks back."""
        self.taken_bytes -= num_chunks * self.chunk_bytes
        assert self.taken_bytes >= 0, f"{self.name} gives more than it has"


class SharedPool:
    """The leases of the models that are on the device."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._clock = 0

    @property
    def capacity_bytes(self) -> int:
        """All that is promised."""
        return sum(lease.guarantee_bytes for lease in self._leases)

    @property
    def taken_bytes(self) -> int:
        """All that is taken."""
        return sum(lease.taken_bytes for lease in self._leases)

    @property
    def free_bytes(self) -> int:
        """What nobody has taken."""
        return self.capacity_bytes - self.taken_bytes

    def join(self, lease: Lease) -> None:
        """A model comes onto the device, with no more taken than its guarantee."""
        assert lease.taken_bytes <= lease.guarantee_bytes, f"{lease.name} has borrowed memory"
        lease.share = self
        self._leases.append(lease)

    def leave(self, lease: Lease) -> None:
        """A model goes, with what it has taken; the others give up what they had borrowed of it."""
        if lease.share is None:
            return
        self._leases.remove(lease)
        lease.share = None
        self._reclaim(0)
        assert self.free_bytes >= 0, "a borrower has kept what it must shed"

    def num_free_for(self, lease: Lease) -> int:
        """Bytes that `lease` could take now without anybody being preempted."""
        others = (one for one in self._leases if one is not lease)
        return self.free_bytes + sum(one.num_idle() * one.chunk_bytes for one in others)

    def take(self, lease: Lease) -> bool:
        """One chunk for `lease`; within its guarantee always."""
        self._clock += 1
        lease.used_at = self._clock
        if self.free_bytes < lease.chunk_bytes:
            self._collect(lease.chunk_bytes, lease)
        if self.free_bytes < lease.chunk_bytes and lease.num_promised:
            self._reclaim(lease.chunk_bytes)
        if self.free_bytes < lease.chunk_bytes:
            return False
        lease.taken_bytes += lease.chunk_bytes
        return True

    def _collect(self, num_bytes: int, taker: Lease | None) -> None:
        """Take back chunks in which nothing is held, the least recently used model's first."""
        for one in sorted(self._leases, key=lambda each: each.used_at):
            missing = num_bytes - self.free_bytes
            if missing <= 0:
                return
            if one is not taker:
                one.trim(-(-missing // one.chunk_bytes))

    def _reclaim(self, num_bytes: int) -> None:
        """Make `num_bytes` free: from borrowers, the largest first, until they have none."""
        for one in sorted(self._leases, key=lambda each: -each.num_borrowed):
            missing = num_bytes - self.free_bytes
            if missing <= 0:
                return
            if one.num_borrowed:
                one.shed(min(-(-missing // one.chunk_bytes), one.num_borrowed))
