"""Weights in the layout that the kernels read; see linear.h.

Several projections of the same input become one matrix, and all matrices lie in one `Arena` in
the order in which a step reads them, so that it reads one stream, in pages of 2 MiB (which the
two or three megabytes of a matrix alone would seldom fill):

    q, k, v      -> qkv: rows 0..H*D-1, then the keys', then the values'
    gate, up     -> panels of 16 gates and their 16 ups, so that silu(gate) * up is computed
                    where the two sums still are in registers

`int8` keeps one scale per output, max |w| / 127. Weights that are rounded already (`GroupLinear`)
keep their codes, scales and zeros, in panels; see grouped.h.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuagent.engine.native import structs
from gpuagent.models.grouped import GroupLinear
from gpuagent.models.layers import Linear

PANEL = 32
GROUP = 32
HALF = PANEL // 2
HUGE_PAGE = 2 << 20


class Arena:
    """One piece of memory, handed out front to back."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
        library.advise_huge(self._memory.data_ptr(), self._memory.nbytes)
        self._used = -self._memory.data_ptr() % HUGE_PAGE

    def take(self, num: int, dtype: torch.dtype) -> Tensor:
        """The next `num` elements, not initialised."""
        start, self._used = self._used, self._used + num * dtype.itemsize
        return self._memory[start : self._used].view(dtype)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed matrix and the memory it lives in."""

    struct: structs.Linear
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, scales and bias."""
        return sum(tensor.nbytes for tensor in self.tensors)


def stacked(sizes: Sequence[int]) -> list[Tensor]:
    """Output numbers of matrices put one below the other."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def interleaved(size: int) -> list[Tensor]:
    """Output numbers of gate and up, each with `size` outputs, in turns of 16."""
    gate = torch.arange(size) // HALF * PANEL + torch.arange(size) % HALF
    return [gate, gate + HALF]


def pack(
    library: ctypes.CDLL,
    parts: Sequence[Linear],
    places: Sequence[Tensor],
    is_int8: bool,
    arena: Arena | None = None,
) -> PackedLinear:
    """One matrix of several; output i of part p becomes output places[p][i]."""
    if isinstance(parts[0], GroupLinear):
        return _pack_groups([part for part in parts if isinstance(part, GroupLinear)], places)
    inputs = parts[0].weight.shape[1]
    outputs = sum(part.weight.shape[0] for part in parts)
    padded = padded_outputs(outputs)
    dtype = torch.uint8 if is_int8 else torch.float32
    arena = arena or Arena(library, padded * inputs * dtype.itemsize)
    weight = arena.take(padded * inputs, dtype)
    weight[outputs // PANEL * PANEL * inputs :] = 0  # of a last panel that is not full
    scales = torch.zeros(padded) if is_int8 else None
    bias = torch.zeros(padded) if any(part.bias is not None for part in parts) else None
    for part, place in zip(parts, places, strict=True):
        rows = part.weight.float().contiguous()
        arguments = rows.data_ptr(), place.data_ptr(), len(rows), inputs, weight.data_ptr()
        if scales is None:
            library.pack_floats(*arguments)
        else:
            library.pack_int8s(*arguments, scales.data_ptr())
        if bias is not None and part.bias is not None:
            bias[place] = part.bias.float()
    struct = structs.Linear(weight.data_ptr(), _address(scales), _address(bias), inputs, outputs)
    return PackedLinear(struct, tuple(t for t in (weight, scales, bias) if t is not None))


def _pack_groups(parts: Sequence[GroupLinear], places: Sequence[Tensor]) -> PackedLinear:
    """The same for rounded weights: bytes of (panels, inputs, 32), or 16 with two codes each."""
    codes = _placed([part.whole_codes() for part in parts], places)
    scales = _placed([part.scales.T for part in parts], places).T.contiguous()
    zeros = bias = None
    panels = codes.view(-1, PANEL, codes.shape[1]).transpose(1, 2)
    if parts[0].zeros is None:
        weight = panels.contiguous()
    else:
        weight = (panels[..., :HALF] | panels[..., HALF:] << 4).contiguous()
        stored = [part.zeros.T for part in parts if part.zeros is not None]
        zeros = _placed(stored, places).T.float().contiguous()
    if any(part.bias is not None for part in parts):
        empty = torch.zeros(1)
        offsets = [
            empty.expand(len(part.codes)) if part.bias is None else part.bias for part in parts
        ]
        bias = _placed([each.float().unsqueeze(1) for each in offsets], places).flatten()
    inputs, outputs = codes.shape[1], sum(len(part.codes) for part in parts)
    addresses = weight.data_ptr(), _address(scales), _address(bias)
    group = inputs // len(scales)
    struct = structs.Linear(*addresses, inputs, outputs, _address(zeros), group)
    return PackedLinear(struct, tuple(t for t in (weight, scales, zeros, bias) if t is not None))


def _placed(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Row i of part p becomes row places[p][i]; as many rows of zeros as a last panel lacks."""
    num = sum(len(part) for part in parts)
    rows = parts[0].new_zeros(-(-num // PANEL) * PANEL, parts[0].shape[1])
    for part, place in zip(parts, places, strict=True):
        rows[place] = part
    return rows


def padded_outputs(outputs: int) -> int:
    """Outputs in whole panels."""
    return -(-outputs // PANEL) * PANEL


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
