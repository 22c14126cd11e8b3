"""Runs a step of a Llama-type decoder as one call into the C++ kernels.

What torch would do in about 20 calls per layer, with Python between them, is here one call per
step. The step's tokens are described by flat arrays; for contexts of 40 and 100 tokens, where
the first request decodes and the second computes the last 36 tokens of its prompt:

    spans    (row 0, start 39, count 1, table 0), (row 1, start 64, count 36, table 3)
    tables   7 2 9 | 4 5 6 11 12 13 1            block tables side by side
    slots    9 * 16 + 7, 12 * 16 + 0, ...        where each token's key and value go

Everything a step needs is allocated before the first one, for `max_batch_tokens` rows.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.model_runner import Scores, wanted_rows
from gpuagent.engine.native import structs
from gpuagent.engine.native.build import KernelsUnavailable, kernels
from gpuagent.engine.native.kv import BLOCK_SIZE, BlockedKV
from gpuagent.engine.native.packing import (
    PANEL,
    Arena,
    PackedLinear,
    interleaved,
    pack,
    padded_outputs,
    stacked,
)
from gpuagent.engine.native.sums import Sums
from gpuagent.models.config import ModelConfig
from gpuagent.models.grouped import GroupLinear
from gpuagent.models.layers import Linear
from gpuagent.models.llama import Layer, LlamaModel
from gpuagent.models.mapping import MappedFiles

LANES = 16


def check_supported(config: ModelConfig, block_size: int, device: str) -> None:
    """Raise KernelsUnavailable where the kernels' loops do not fit the model's shape."""
    sizes = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    problems = {
        "the device is not a CPU": device != "cpu",
        f"the block size is not {BLOCK_SIZE}": block_size != BLOCK_SIZE,
        f"a width is no multiple of {PANEL}": any(size % PANEL for size in (*sizes, kv_width)),
        f"the heads are no multiple of {PANEL} wide": bool(config.head_dim % PANEL),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise KernelsUnavailable(problem)


class NativeExecutor:
    """A packed model and its cache. Takes the weights out of `model`, which is empty after."""

    is_apart = False

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int,
        max_batch_tokens: int,
        is_int8: bool = False,
        is_int8_kv: bool = False,
        is_leased: bool = False,
    ) -> None:
        self._library = kernels()
        self._config = model.config
        self.kv = BlockedKV(model.config, num_blocks, is_int8_kv, is_leased)
        self._packed: list[PackedLinear] = []
        self._tensors: list[Tensor] = []
        self._is_int8 = is_int8
        self._max_tokens = max_batch_tokens
        has_head = model.shard is None or model.shard.rank == 0
        self._arena = Arena(self._library, packed_bytes(model.config, is_int8, has_head))
        self._model = self._pack_model(model)
        self._seconds = torch.zeros(3, dtype=torch.float64)
        self._hidden, self._workspace = self._allocate(max_batch_tokens)
        self._sums = Sums(model.shard, self._hidden) if model.shard else None
        if self._sums:
            self._model.total = self._sums.address
            self._model.is_later_rank = self._sums.shard.rank > 0
        self._padded_vocab = padded_outputs(model.config.vocab_size)
        self._logits = torch.empty(0, self._padded_vocab)
        self._unsound = torch.zeros(max_batch_tokens, dtype=torch.uint8)
        self._team = self._library.team_new(torch.get_num_threads())

    def __del__(self) -> None:
        if team := getattr(self, "_team", None):
            self._library.team_delete(team)

    @property
    def name(self) -> str:
        """Which kernels these are."""
        kind: str = self._library.kernels().decode()
        return f"native-{kind}"

    @property
    def weights_bytes(self) -> int:
        """Bytes of all packed weights, norms and tables."""
        tensors = sum(tensor.nbytes for tensor in self._tensors)
        return tensors + sum(packed.num_bytes for packed in self._packed)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.kv.num_bytes

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Time since load in matrix products, in attention, and in the rest of the kernels."""
        products, attention, rest = self._seconds.tolist()
        return products, attention, rest

    def step(self, works: Sequence[Work]) -> Scores:
        """Store keys and values of the works' tokens, and score what they ask for, in one call.

        The logits are valid until the next.
        """
        batch, keep_alive = self._describe_step(works)
        num = batch.num_wanted
        best = array("i", bytes(4 * num))
        batch.best = best.buffer_info()[0]
        batch.logits = self._logits_for(num).data_ptr()
        self._forward(batch)
        del keep_alive
        logits = self._logits[:num, : self._config.vocab_size]
        return Scores(logits, tuple(best), self._find_unsound(works, batch.num_tokens))

    def follow(self, works: Sequence[Work]) -> None:
        """The same without the head."""
        batch, keep_alive = self._describe_step(works)
        self._forward(batch)
        del keep_alive
        self._find_unsound(works, batch.num_tokens)

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Hidden states (T, hidden) of the works' tokens side by side, valid until the next."""
        batch, keep_alive = self._describe(works)
        self._forward(batch)
        del keep_alive
        return self._hidden[: batch.num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32 of hidden states (rows, hidden), valid until the next."""
        hidden, vocab = hidden.contiguous(), self._config.vocab_size
        self._library.decoder_logits(
            self._team,
            ctypes.byref(self._model),
            ctypes.byref(self._workspace),
            hidden.data_ptr(),
            len(hidden),
            self._logits_for(len(hidden)).data_ptr(),
        )
        return self._logits[: len(hidden), :vocab]

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Do block copies; once, before `forward`."""
        self.kv.copy_blocks(copies)

    def erase(self, work: Work) -> None:
        """Zero the keys and values of the work's tokens."""
        self.kv.erase(work)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Contents (len(blocks), ...) of blocks, in memory of its own."""
        return self.kv.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Set the contents of blocks."""
        self.kv.write_blocks(blocks, contents)

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the memory of neighbouring blocks back."""
        self.kv.discard(blocks)

    def offload(self) -> int:
        """Nothing moves: what the device computes with is in the host's memory already."""
        return 0

    def restore(self) -> int:
        """See `offload`."""
        return 0

    def _forward(self, batch: structs.Batch) -> None:
        self._library.decoder_forward(
            self._team,
            ctypes.byref(self._model),
            ctypes.byref(self._workspace),
            ctypes.byref(batch),
        )
        if self._sums:
            self._sums.check()

    def _logits_for(self, num: int) -> Tensor:
        if len(self._logits) < num:
            self._logits = torch.empty(num, self._padded_vocab)
        return self._logits

    def _find_unsound(self, works: Sequence[Work], num_tokens: int) -> tuple[Work, ...]:
        """The works with a token that has left something in the cache that is not finite."""
        marks = self._unsound[:num_tokens]
        marks = self._sums.any(marks) if self._sums else marks
        if not marks.any():
            return ()
        ends = list(accumulate(len(work.token_ids) for work in works))
        return tuple(
            w for w, e in zip(works, ends, strict=True) if marks[e - len(w.token_ids) : e].any()
        )

    def _describe_step(self, works: Sequence[Work]) -> tuple[structs.Batch, list["array[int]"]]:
        """With what is wanted of it."""
        batch, arrays = self._describe(works)
        rows = wanted_rows(works)
        wanted = array("i", (*rows, 0))  # an empty one has no address, and no address is `forward`
        batch.wanted, batch.num_wanted = wanted.buffer_info()[0], len(rows)
        batch.unsound = self._unsound.data_ptr()
        return batch, [*arrays, wanted]

    def _describe(self, works: Sequence[Work]) -> tuple[structs.Batch, list["array[int]"]]:
        spans, table, row = array("i"), 0, 0
        for work in works:
            spans.extend((row, work.start, len(work.token_ids), table))
            row += len(work.token_ids)
            table += len(work.block_ids)
        assert row <= self._max_tokens, "more tokens than there is workspace for"
        arrays = [
            array("i", chain.from_iterable(work.token_ids for work in works)),
            array("i", chain.from_iterable(range(work.start, work.end) for work in works)),
            array("i", chain.from_iterable(map(_slots, works))),
            spans,
            array("i", chain.from_iterable(work.block_ids for work in works)),
        ]
        tokens, positions, slots, spans_at, tables = (a.buffer_info()[0] for a in arrays)
        batch = structs.Batch(tokens, positions, slots, row, spans_at, len(works), tables)
        kv = self.kv
        batch.keys, batch.values = kv.keys.data_ptr(), kv.values.data_ptr()
        if kv.is_int8:
            batch.key_scales = kv.key_scales.data_ptr()
            batch.value_scales = kv.value_scales.data_ptr()
        batch.num_blocks, batch.null_block = kv.null_block + 1, kv.null_block
        return batch, arrays

    def _pack_model(self, model: LlamaModel) -> structs.Model:
        config = self._config
        layers, files = (structs.Layer * config.num_layers)(), MappedFiles()
        for i, layer in enumerate(model.take_layers()):
            self._pack_layer(layer, layers[i])
            mlp = layer.mlp
            files.forget(_matrices(layer.query, layer.key, layer.value, layer.output))
            files.forget(_matrices(mlp.gate, mlp.up, mlp.down))
        embedding = model.embedding
        head, has_head = structs.Linear(), model.shard is None or model.shard.rank == 0
        if has_head:
            head = self._pack([model.head], stacked([config.vocab_size]))
        is_plain = not (self._is_int8 or isinstance(model.head, GroupLinear))
        is_in_head = has_head and is_plain and model.head.weight is embedding
        files.forget(_matrices(model.head))
        cosines, sines = model.rope.tables()
        half = config.head_dim // 2
        return structs.Model(
            layers=layers,
            num_layers=config.num_layers,
            head=head,
            norm=self._keep(model.norm.weight),
            embedding=None if is_in_head else self._use(embedding),
            cosines=self._keep(cosines[:, :half]),
            sines=self._keep(sines[:, :half]),
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            middle=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=1 / math.sqrt(config.head_dim),
        )

    def _pack_layer(self, layer: Layer, struct: structs.Layer) -> None:
        attention = [layer.query, layer.key, layer.value]
        struct.qkv = self._pack(attention, stacked(self._qkv_sizes()))
        struct.output = self._pack([layer.output], stacked([self._config.hidden_size]))
        mlp = layer.mlp
        places = interleaved(self._config.intermediate_size)
        struct.gate_up = self._pack([mlp.gate, mlp.up], places)
        struct.down = self._pack([mlp.down], stacked([self._config.hidden_size]))
        struct.attention_norm = self._keep(layer.input_norm.weight)
        struct.mlp_norm = self._keep(layer.mlp_norm.weight)

    def _qkv_sizes(self) -> list[int]:
        config = self._config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return [num * config.head_dim for num in (heads, kv_heads, kv_heads)]

    def _pack(self, parts: Sequence[Linear], places: Sequence[Tensor]) -> structs.Linear:
        packed = pack(self._library, parts, places, self._is_int8, self._arena)
        self._packed.append(packed)
        return packed.struct

    def _keep(self, tensor: Tensor) -> int:
        return self._use(tensor.float().contiguous().clone())

    def _use(self, tensor: Tensor) -> int:
        """Without a copy where it is float32: of a mapped table only the used rows are read."""
        self._tensors.append(tensor.float().contiguous())
        return self._tensors[-1].data_ptr()

    def _allocate(self, num: int) -> tuple[Tensor, structs.Workspace]:
        config = self._config
        attended = config.num_heads * config.head_dim
        qkv = attended + 2 * config.num_kv_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, attended)
        widths = config.hidden_size, config.hidden_size, qkv, attended, config.intermediate_size
        buffers = [torch.zeros(num, width) for width in widths]
        quantised = [
            torch.zeros(num, widest, dtype=torch.int8),
            torch.zeros(num, widest // PANEL),
            torch.zeros(num, widest // PANEL, dtype=torch.int32),
            self._seconds,
        ]
        self._buffers = (*buffers, *quantised)
        addresses = [buffer.data_ptr() for buffer in self._buffers]
        return buffers[0], structs.Workspace(*addresses)


def _matrices(*parts: Linear) -> list[Tensor]:
    return [part.weight for part in parts if not isinstance(part, GroupLinear)]


def packed_bytes(config: ModelConfig, is_int8: bool, has_head: bool = True) -> int:
    """Bytes of all packed matrices without their scales and biases."""
    attended, hidden = config.num_heads * config.head_dim, config.hidden_size
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    layer = (
        padded_outputs(qkv) * hidden
        + padded_outputs(hidden) * attended
        + padded_outputs(2 * config.intermediate_size) * hidden
        + padded_outputs(hidden) * config.intermediate_size
    )
    weights = config.num_layers * layer
    weights += padded_outputs(config.vocab_size) * hidden if has_head else 0
    return weights if is_int8 else 4 * weights


def _slots(work: Work) -> list[int]:
    """Where in the pool each of the work's tokens is stored."""
    return [
        work.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(work.start, work.end)
    ]
