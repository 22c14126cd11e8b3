"""Weights in the layout that the kernels read; see linear.h.

Several projections of the same input become one matrix, so that a step reads one stream:

    q, k, v      -> qkv: rows 0..H*D-1, then the keys', then the values'
    gate, up     -> panels of 16 gates and their 16 ups, so that silu(gate) * up is computed
                    where the two sums still are in registers

`int8` keeps one scale per output, max |w| / 127.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuagent.engine.native import structs
from gpuagent.models.layers import Linear

PANEL = 32
GROUP = 32
HALF = PANEL // 2


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
    library: ctypes.CDLL, parts: Sequence[Linear], places: Sequence[Tensor], is_int8: bool
) -> PackedLinear:
    """One matrix of several; output i of part p becomes output places[p][i]."""
    inputs = parts[0].weight.shape[1]
    outputs = sum(part.weight.shape[0] for part in parts)
    padded = -(-outputs // PANEL) * PANEL
    dtype = torch.uint8 if is_int8 else torch.float32
    weight = torch.empty(padded * inputs, dtype=dtype)
    library.advise_huge(weight.data_ptr(), weight.nbytes)
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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
