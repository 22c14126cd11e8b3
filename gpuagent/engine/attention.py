"""Paged attention over a ragged batch: decoding requests in groups, each prompt chunk alone.

The tokens of a step lie side by side: first those of requests that compute one token, the
longest context first, then the chunks. Example, contexts 300, 280 and 40 decoding and a chunk
of 100 tokens after 50 computed ones:

    rows 0-1    a group of 2, padded to 304 tokens (19 blocks of 16)
    row  2      a group of 1, 48 tokens: padding it to 304 would cost more than a second call
    rows 3-102  a chunk, 150 tokens of context, causal

The blocks of a group are gathered into a workspace, (rows, blocks * block_size, K, D), and one
fused attention runs over it. Heads that share a KV head are laid out as queries of that head,
so grouped queries need no copies of keys and values. The workspace is kept between calls:
fresh memory of that size costs more in page faults than the gathering itself.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_tensors import KVTensors

MIN_FILL = 0.7  # a request joins a group if its context is at least this part of the longest


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows [start, end), one token each; blocks (rows * num_blocks,), mask (rows, 1, 1, L)."""

    start: int
    end: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows [start, end) of one request, whose blocks hold `context` tokens with these."""

    start: int
    end: int
    context: int
    blocks: Tensor
    mask: Tensor | None


def order_work(works: tuple[Work, ...]) -> list[Work]:
    """The order of a step's tokens: single ones by falling context, then chunks."""
    return sorted(works, key=lambda w: (len(w.token_ids) > 1, -w.end))


class PagedAttention:
    """Attention of one step; `works` in the order of `order_work`."""

    def __init__(self, kv: KVTensors, works: list[Work], workspace: "Workspace") -> None:
        self._kv = kv
        self._workspace = workspace
        self._slots = self._write_slots(works)
        num_single = sum(len(work.token_ids) == 1 for work in works)
        self._decodes = self._group(works[:num_single])
        self._chunks = self._lay_out(works[num_single:], num_single)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `gpuagent.models.layers.Attention`."""
        self._kv.store(layer, self._slots, key, value)
        output = torch.empty_like(query)
        for group in self._decodes:
            rows = slice(group.start, group.end)
            output[rows] = self._attend_decodes(group, query[rows], layer)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            if chunk.mask is None and not self._kv.is_int8:
                context = key[rows], value[rows]
            else:  # an int8 chunk reads what it stored, as all later tokens will
                context = self._gather(chunk.blocks, 1, layer)
                context = context[0][0, : chunk.context], context[1][0, : chunk.context]
            output[rows] = _attend_chunk(query[rows], *context, chunk.mask)
        return output

    def _attend_decodes(self, group: _Decodes, query: Tensor, layer: int) -> Tensor:
        rows, num_heads, head_dim = query.shape
        key, value = self._gather(group.blocks, rows, layer)
        shared = query.view(rows, key.shape[2], -1, head_dim)  # (rows, K, H / K, D)
        attended = scaled_dot_product_attention(
            shared, key.transpose(1, 2), value.transpose(1, 2), attn_mask=group.mask
        )
        return attended.reshape(rows, num_heads, head_dim)

    def _gather(self, blocks: Tensor, rows: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` requests with equally many blocks: (rows, L, K, D) each."""
        width = self._kv.block_size * self._kv.token_width
        key, value = self._kv.gather(layer, blocks, self._workspace.take(2 * len(blocks), width))
        return key.unflatten(0, (rows, -1)), value.unflatten(0, (rows, -1))

    def _write_slots(self, works: list[Work]) -> Tensor:
        size = self._kv.block_size
        slots = [
            work.block_ids[position // size] * size + position % size
            for work in works
            for position in range(work.start, work.end)
        ]
        return self._tensor(slots)

    def _group(self, works: list[Work]) -> list[_Decodes]:
        starts = [0] if works else []
        for i, work in enumerate(works):
            if work.end < MIN_FILL * works[starts[-1]].end:
                starts.append(i)
        return [
            self._decode_group(start, works[start:end])
            for start, end in pairwise([*starts, len(works)])
        ]

    def _decode_group(self, start: int, works: list[Work]) -> _Decodes:
        num_blocks = -(-works[0].end // self._kv.block_size)
        padding = [self._kv.null_block] * num_blocks
        blocks = [(*work.block_ids, *padding)[:num_blocks] for work in works]
        positions = torch.arange(num_blocks * self._kv.block_size)
        mask = positions < torch.tensor([work.end for work in works]).unsqueeze(1)
        return _Decodes(
            start=start,
            end=start + len(works),
            blocks=self._tensor(blocks).flatten(),
            mask=mask[:, None, None].to(self._kv.device),
        )

    def _lay_out(self, works: list[Work], start: int) -> list[_Chunk]:
        chunks = []
        for work in works:
            end = start + len(work.token_ids)
            num_blocks = -(-work.end // self._kv.block_size)
            blocks = self._tensor(work.block_ids[:num_blocks])
            mask = _causal(work, self._kv.device) if work.start else None
            chunks.append(_Chunk(start, end, work.end, blocks, mask))
            start = end
        return chunks

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._kv.device)


class Workspace:
    """A buffer that only grows, for values that live until the next `take`."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, rows: int, columns: int) -> Tensor:
        """An uninitialised (rows, columns) tensor, valid until the next call."""
        size = rows * columns
        if self._buffer.numel() < size:
            self._buffer = self._buffer.new_empty(size + size // 2)
        return self._buffer[:size].view(rows, columns)


def _causal(work: Work, device: torch.device) -> Tensor:
    """(tokens, context): token i sees the context up to itself."""
    positions = torch.arange(work.end, device=device)
    return positions <= positions[work.start :].unsqueeze(1)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """One request: query (n, H, D), key and value (L, K, D); causal from 0 without a mask."""
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)
