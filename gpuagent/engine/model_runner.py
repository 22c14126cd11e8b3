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
from gpuagent.engine.swap import HostBuffer
from gpuagent.models.layers import Attention


class Model(Protocol):
    """A decoder; see `gpuagent.models.llama.LlamaModel`."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (T, hidden) of tokens (T,) at positions (T,)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits (rows, vocab) in float32, the requests of the rows, and those gone wrong.

    A request with proposals has `Work.num_logits` rows, one after the other.
    """

    request_ids: tuple[str, ...]
    logits: Tensor
    unsound: tuple[str, ...] = ()


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


class TorchExecutor:
    """A model in torch over `KVTensors`: runs everywhere."""

    name = "torch"

    def __init__(self, model: Model, kv: KVTensors, weights_bytes: int = 0) -> None:
        self.model = model
        self.weights_bytes = weights_bytes
        self._kv = kv
        self._workspace = Workspace(kv.dtype, str(kv.device))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self._kv.num_bytes

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
        hidden = self.executor.forward(works)
        unsound = self._unsound(works, hidden)
        rows = [row for row in _logit_rows(works) if row[0] not in unsound]
        if not rows:
            return StepResult((), hidden.new_empty((0, 0)), unsound)
        names, indices = zip(*rows, strict=True)
        picked = hidden[torch.tensor(indices, device=hidden.device)]
        return StepResult(names, self.executor.logits(picked), unsound)

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

    def _unsound(self, works: list[Work], hidden: Tensor) -> tuple[str, ...]:
        if torch.isfinite(hidden.sum(dtype=torch.float32)):
            return ()
        is_finite = torch.isfinite(hidden).all(-1).split([len(w.token_ids) for w in works])
        unsound = [w for w, rows in zip(works, is_finite, strict=True) if not rows.all()]
        for work in unsound:
            self.executor.erase(work)
        return tuple(work.request_id for work in unsound)


def _logit_rows(works: list[Work]) -> list[tuple[str, int]]:
    """The request and the row of each wanted score, in the order of the rows."""
    ends = accumulate(len(work.token_ids) for work in works)
    return [
        (work.request_id, row)
        for work, end in zip(works, ends, strict=True)
        for row in range(end - work.num_logits, end)
    ]
