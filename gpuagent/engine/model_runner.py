"""Turns one SchedulerOutput into one forward pass and the logits it asks for."""

from typing import Protocol

import torch
from torch import Tensor

from gpuagent.engine.attention import PagedAttention, Workspace, order_work
from gpuagent.engine.batch import SchedulerOutput, Work
from gpuagent.engine.kv_tensors import KVTensors
from gpuagent.models.layers import Attention


class Model(Protocol):
    """A decoder; see `gpuagent.models.llama.LlamaModel`."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (T, hidden) of tokens (T,) at positions (T,)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32."""


class ModelRunner:
    """Runs a model over paged keys and values."""

    def __init__(self, model: Model, kv: KVTensors) -> None:
        self._model = model
        self._kv = kv
        self._workspace = Workspace(kv.keys.dtype, str(kv.keys.device))

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> tuple[list[str], Tensor]:
        """Compute a step: the ids of the requests that sample, and their logits (rows, vocab).

        Running the same work again writes the same keys and values, so a caller may repeat
        part of a step. The block copies must not be repeated: see `copy_blocks`.
        """
        works = order_work(output.work)
        hidden = self._forward(works)
        rows, ids, end = [], [], 0
        for work in works:
            end += len(work.token_ids)
            if work.samples:
                rows.append(end - 1)
                ids.append(work.request_id)
        if not rows:
            return [], hidden.new_empty((0, 0))
        return ids, self._model.logits(hidden[self._tensor(rows)])

    @torch.inference_mode()
    def copy_blocks(self, output: SchedulerOutput) -> None:
        """Do the step's block copies; once, before `run`."""
        self._kv.copy_blocks(output.copies)

    def _forward(self, works: list[Work]) -> Tensor:
        tokens = [token for work in works for token in work.token_ids]
        positions = [p for work in works for p in range(work.start, work.end)]
        attention = PagedAttention(self._kv, works, self._workspace)
        return self._model.forward(self._tensor(tokens), self._tensor(positions), attention)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._kv.keys.device)
