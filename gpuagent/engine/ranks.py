"""One engine on several devices: rank 0 schedules and samples, the others compute along.

Rank 0 has the queue, the block tables, the sampler and an executor like any engine's; what it asks
of its own part of the model it first tells the others, each over a line of its own (`lines`).
A rank has its slices of the weights (`models.sharding`) and, for its KV heads, the keys and values
of the same blocks in the same places, so one block table is right on all. A step with two ranks:

    rank 0   schedule  Step(works) ->   layer 0 part  sum  layer 1 part  sum ...  head, sample
    rank 1             poll ........    layer 0 part  sum  layer 1 part  sum ...  poll

The line is all that connects their fates: rank 0's end closes it, and the others end; if another
one ends, the next sum fails and rank 0 raises `ExecutorLost`. Nobody repeats part of a step, as an
engine with one device does to find a request that raises: the ranks would no longer be at the same
sum. The line is a socket and not a tensor of fixed size that is broadcast, because a rank that
waits must also hear its agent, and because a broadcast has a deadline and an idle group has none.

What follows from a request alone stays on rank 0, so prefixes, chunks, guesses by lookup and
cancellations need nothing here. What moves keys and values out of the device (swap space,
hand-over, parking) is not done by a group.
"""

import threading
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gpuagent.engine.batch import Work
from gpuagent.engine.collective import LOOPBACK, Collective
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.lines import CopyBlocks, Erase, Line, Order, Step, framed
from gpuagent.engine.meeting import Board, BoardElsewhere
from gpuagent.engine.model_runner import Executor, ExecutorLost, Scores
from gpuagent.engine.scheduler import SchedulerConfig
from gpuagent.models.errors import LoadError
from gpuagent.models.sharding import Shard


def check_supported(quantization: str, speculation: str, swap_bytes: int | None) -> None:
    """Raise LoadError tensor_parallel_unsupported for what a group does not do.

    Rounding a slice by itself would round otherwise than the whole; a draft model and swap space
    would need a part on each rank.
    """
    problems = {
        f"quantization {quantization:.40}": quantization not in ("none", "bf16"),
        "a draft model": speculation == "draft",
        "swap space": bool(swap_bytes),
    }
    for what, is_asked in problems.items():
        if is_asked:
            raise LoadError("tensor_parallel_unsupported", f"{what} is for one device")


class Rank:
    """This process's place in a group, with its lines: one to each other rank, or one to rank 0."""

    def __init__(
        self,
        rank: int,
        size: int,
        lines: Sequence[Line],
        device: str = "cpu",
        interface: str = LOOPBACK,
    ) -> None:
        assert len(lines) == (size - 1 if rank == 0 else 1), "a line to each other rank"
        self.collective = Collective(rank, size, device, interface)
        self.shard = Shard(rank, size, self.collective.total)
        self.lines = lines
        self._device = device
        self._made = ""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.shard.rank == 0

    def connect(self, timeout_s: float) -> None:
        """Meet the others, with the weights loaded; raises LoadError group_incomplete, or
        group_mismatch if they have not made the same engine as this one."""
        if self.leads:
            self._receive_all(Board(timeout_s), timeout_s)
        else:
            board = BoardElsewhere(self.lines[0], timeout_s)
            self.collective.connect(board, timeout_s)
            board.over()
        mark = zlib.crc32(self._made.encode()) >> 12  # 20 bits: sums are exact in float32
        total = int(self.collective.total(torch.tensor([mark]).to(self._device)))
        if total != mark * self.shard.size:
            raise LoadError("group_mismatch", f"another rank has not made {self._made}"[:400])

    def executor(self, local: Executor, scheduling: SchedulerConfig) -> Executor:
        """What the engine of this rank runs on."""
        self._made = f"{local.name} {scheduling}"
        return GroupExecutor(local, self.lines) if self.leads else local

    def follower(self, local: Executor) -> "Follower | None":
        """What this rank does when it has loaded, if another one leads."""
        return None if self.leads else Follower(local, self.lines[0])

    def _receive_all(self, board: Board, timeout_s: float) -> None:
        """Meet the other ranks, with a thread for the line of each."""
        threads = [
            threading.Thread(target=board.serve, args=(line,), daemon=True) for line in self.lines
        ]
        for thread in threads:
            thread.start()
        self.collective.connect(board, timeout_s)
        for thread in threads:
            thread.join(timeout_s)


class GroupExecutor:
    """Rank 0's executor: tells the other ranks, then does its own part."""

    is_apart = False  # its weights and keys cannot leave by themselves

    def __init__(self, local: Executor, lines: Sequence[Line]) -> None:
        self._local = local
        self._lines = lines

    @property
    def name(self) -> str:
        """What computes, for statistics."""
        return f"{self._local.name}-tp{len(self._lines) + 1}"

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._local.weights_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of this rank's KV pool."""
        return self._local.kv_bytes

    def step(self, works: Sequence[Work]) -> Scores:
        """See `Executor`; raises ExecutorLost, after which nothing more can be computed."""
        self._tell(Step(list(works)))
        try:
            return self._local.step(works)
        except Exception as error:
            raise ExecutorLost(f"a step of the group failed: {error}") from error

    def follow(self, works: Sequence[Work]) -> None:
        """Rank 0 follows nobody."""
        raise ExecutorLost("rank 0 leads")

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Hidden states alone are a draft model's, and no group has one."""
        raise ExecutorLost("a group computes whole steps")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Executor`: the head is whole on this rank."""
        return self._local.logits(hidden)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """See `Executor`."""
        if copies:
            self._tell(CopyBlocks(list(copies)))
            self._local.copy_blocks(copies)

    def erase(self, work: Work) -> None:
        """See `Executor`."""
        self._tell(Erase(work))
        self._local.erase(work)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Each rank has a part of a block; nothing takes it elsewhere."""
        raise ExecutorLost("a group's blocks stay where they are")

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """See `read_blocks`."""
        raise ExecutorLost("a group's blocks stay where they are")

    def discard(self, blocks: Sequence[int]) -> None:
        """A group's pool is leased from nobody, so nothing is given back."""

    def offload(self) -> int:
        """Nothing moves: a group stays on its devices until it is unloaded."""
        return 0

    def restore(self) -> int:
        """See `offload`."""
        return 0

    def _tell(self, order: Order) -> None:
        frame = framed(order)
        try:
            for line in self._lines:
                line.send(frame)
        except OSError as error:
            raise ExecutorLost(f"another rank is gone: {error}") from error


class Follower:
    """What a rank other than 0 does: whatever rank 0 says."""

    def __init__(self, executor: Executor, line: Line) -> None:
        self._executor = executor
        self.line = line

    @torch.inference_mode()
    def obey(self, timeout_s: float | None = 0.0) -> bool:
        """Carry out the orders that have arrived, or the next one where there is no timeout; False
        if there was none. Raises EOFError when rank 0 is gone."""
        order = self.line.next(timeout_s)
        while order is not None:
            self._carry_out(order)
            if timeout_s is None:
                return True
            order = self.line.next(0.0)
        return False

    def _carry_out(self, order: Order) -> None:
        match order:
            case Step(works=works):
                self._executor.follow(works)
            case CopyBlocks(copies=copies):
                self._executor.copy_blocks(copies)
            case Erase(work=work):
                self._executor.erase(work)
            case _:
                raise AssertionError(f"not an order for a rank that works: {order}")
