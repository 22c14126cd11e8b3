"""Turns one SchedulerOutput into one forward pass and the logits it asks for.

A token whose hidden state is not finite has written keys and values that are not finite
either, and a block is read whole, up to slots that a later owner has not filled yet: zero
attention times NaN would be NaN in a stranger's output. So such slots are erased at once, and
their request is reported as unsound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from gpuagent.engine.attention import PagedAttention, Workspace, order_work
from gpuagent.engine.batch import SchedulerOutput, Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.kv_tensors import KVTensors
from gpuagent.engine.sampler import most_likely
from gpuagent.engine.swap import HostBuffer
from gpuagent.engine.weights_swap import offload, restore
from gpuagent.models.layers import Attention


class Model(Protocol):
    """A decoder; see `gpuagent.models.llama.LlamaModel`."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (T, hidden) of tokens (T,) at positions (T,)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What an executor gives for works: logits (rows, vocab) in float32, `Work.num_logits` rows
    of each work; the most likely token of each row, -1 where the row is not finite; and the
    works that have left something in the cache that is not finite."""

    logits: Tensor
    best: tuple[int, ...]
    unsound: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`Scores` without the rows of requests gone wrong, and the requests of the rows."""

    request_ids: tuple[str, ...]
    logits: Tensor
    unsound: tuple[str, ...] = ()
    best: tuple[int, ...] = ()


class ExecutorLost(RuntimeError):
    """The executor computes nothing more, so no part of the step is to be tried again."""


class Executor(Protocol):
    """A model with its keys and values: torch's, or the native kernels."""

    @property
    def name(self) -> str:
        """What computes, for statistics."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""

    @property
    def is_apart(self) -> bool:
        """Whether weights and cache lie in memory other than the host's, so that they can leave."""

    def step(self, works: Sequence[Work]) -> Scores:
        """Store keys and values of the works' tokens, and score what they ask for."""

    def follow(self, works: Sequence[Work]) -> None:
        """A group's later rank: its part of a step whose scores rank 0 has."""

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Store keys and values of the works' tokens; hidden states (T, hidden), side by side."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32. Both tensors are valid until the next call."""

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Do block copies in all layers."""

    def erase(self, work: Work) -> None:
        """Zero what the work's tokens have stored."""

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), ...) of blocks, in memory of its own."""

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks."""

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the memory of neighbouring blocks back, if the pool's memory can be given back."""

    def offload(self) -> int:
        """Move the weights into the host's memory and give up the pool's, if they are apart; the
        bytes moved. No step until `restore`."""

    def restore(self) -> int:
        """Move the weights back onto the device, with an empty pool; the bytes moved."""


class TorchExecutor:
    """A model in torch over `KVTensors`: runs everywhere."""

    name = "torch"

    def __init__(self, model: Model, kv: KVTensors, weights_bytes: int = 0) -> None:
        self.model = model
        self.weights_bytes = weights_bytes
        self._kv = kv
        self.is_apart = kv.device.type != "cpu"  # the device has memory of its own
        self._workspace = Workspace(kv.dtype, str(kv.device))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self._kv.num_bytes

    def step(self, works: Sequence[Work]) -> Scores:
        """See `Executor`; the works in the order of `order_work`."""
        hidden = self.forward(works)
        unsound, rows = _unsound(works, hidden), wanted_rows(works)
        if not rows:
            return Scores(hidden.new_empty((0, 0)), (), unsound)
        logits = self.logits(hidden[torch.tensor(rows, device=hidden.device)])
        return Scores(logits, most_likely(logits), unsound)

    def follow(self, works: Sequence[Work]) -> None:
        """See `Executor`."""
        self.forward(works)

    def forward(self, works: Sequence[Work]) -> Tensor:
        """See `Executor`; the works in the order of `order_work`."""
        tokens = [token for work in works for token in work.token_ids]
        positions = [p for work in works for p in range(work.start, work.end)]
        attention = PagedAttention(self._kv, list(works), self._workspace)
        return self.model.forward(self._tensor(tokens), self._tensor(positions), attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Executor`."""
        return self.model.logits(hidden)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """See `Executor`."""
        self._kv.copy_blocks(copies)

    def erase(self, work: Work) -> None:
        """See `Executor`."""
        self._kv.erase(work)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """See `Executor`."""
        return self._kv.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """See `Executor`."""
        self._kv.write_blocks(blocks, contents)

    def discard(self, blocks: Sequence[int]) -> None:
        """See `Executor`."""
        self._kv.discard(blocks)

    def offload(self) -> int:
        """See `Executor`."""
        if not self.is_apart:
            return 0
        self._kv.free()
        return offload(self.model)

    def restore(self) -> int:
        """See `Executor`."""
        if not self.is_apart:
            return 0
        self._kv.allocate()
        return restore(self.model, self._kv.device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._kv.device)


class ModelRunner:
    """Runs steps on an executor and sorts out what it returns."""

    def __init__(self, executor: Executor, num_host_blocks: int = 0) -> None:
        self.executor = executor
        self.host = HostBuffer(executor, num_host_blocks)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        """Compute a step.

        Running the same work again writes the same keys and values, so a caller may repeat
        part of a step. The block copies must not be repeated: see `copy_blocks`.
        """
        works = order_work(output.work)
        scores = self.executor.step(works)
        names = tuple(work.request_id for work in works for _ in range(work.num_logits))
        if scores.unsound:
            return self._without_unsound(scores, names)
        return StepResult(names, scores.logits, best=scores.best)

    @torch.inference_mode()
    def erase(self, work: Work) -> None:
        """Zero the keys and values of the work's tokens."""
        self.executor.erase(work)

    @torch.inference_mode()
    def copy_blocks(self, output: SchedulerOutput) -> None:
        """Do the step's swaps and block copies; once, before `run`."""
        if output.swap_outs:
            self.host.swap_out(output.swap_outs)
        self.executor.copy_blocks(output.copies)
        if output.swap_ins:
            self.host.swap_in(output.swap_ins)

    def _without_unsound(self, scores: Scores, names: Sequence[str]) -> StepResult:
        """Erase what is not finite, and leave out its rows."""
        for work in scores.unsound:
            self.executor.erase(work)
        unsound = tuple(work.request_id for work in scores.unsound)
        rows = [i for i, name in enumerate(names) if name not in unsound]
        return StepResult(
            request_ids=tuple(names[i] for i in rows),
            logits=scores.logits[rows],
            unsound=unsound,
            best=tuple(scores.best[i] for i in rows),
        )


def _unsound(works: Sequence[Work], hidden: Tensor) -> tuple[Work, ...]:
    """The works with hidden states that are not finite."""
    if torch.isfinite(hidden.sum(dtype=torch.float32)):
        return ()
    is_finite = torch.isfinite(hidden).all(-1).split([len(w.token_ids) for w in works])
    return tuple(w for w, rows in zip(works, is_finite, strict=True) if not rows.all())


def wanted_rows(works: Sequence[Work]) -> list[int]:
    """The row of each wanted score."""
    ends = accumulate(len(work.token_ids) for work in works)
    return [
        row
        for work, end in zip(works, ends, strict=True)
        for row in range(end - work.num_logits, end)
    ]
