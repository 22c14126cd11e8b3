"""Weights of 8 or 4 bits with a scale per output and group of inputs, widened where they are used.

    w[o, i] = (code[o, i] - zero[i / group, o]) * scale[i / group, o]

Eight bits are signed and have no zeros: scale = max |w| / 127 over the group. Four bits come from
an AWQ checkpoint (`gpuagent.models.awq`). Activations stay as they are, so a request's numbers do
not depend on its neighbours'. Example, a group (0.5, -1.27) in 8 bits: codes 50 and -127, and the
scale 0.01.

Who multiplies: the native kernels widen a panel at a time in cache (`engine/native/grouped.h`).
In torch `GroupLinear` widens the whole matrix at each call, which saves memory and not time, and
with bfloat16 activations on a CPU `PackedInt4Linear` calls torch's packed kernel. With float32
activations that kernel is scalar: 1,536 x 576 took 0.75 ms for one row where a plain product took
0.07, and 12 ms for eight where it took 0.17; hence not there.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpuagent.models.awq import PLACES
from gpuagent.models.layers import Linear

GROUP = 32  # inputs that share a scale where this project quantises
PACKED_OUTPUTS = 16  # torch's packed kernel wants multiples
PACKED_MIDDLE = 8  # and counts codes from here


class GroupLinear(Linear):
    """y = x W^T + b. `codes` are (out, in) int8, or (out, in / 2) uint8 with the even input in the
    low half; `scales` and `zeros` (groups, out), the latter for four bits only."""

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.bias = bias

    @classmethod
    def rounded(cls, linear: Linear, group: int = GROUP) -> "GroupLinear":
        """A matrix rounded to 8 bits."""
        outputs, inputs = linear.weight.shape
        grouped = linear.weight.float().view(outputs, inputs // group, group)
        scales = grouped.abs().amax(-1, keepdim=True) / 127
        codes = (grouped / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
        codes = codes.to(torch.int8).view(outputs, inputs)
        return cls(codes, scales.squeeze(-1).T.contiguous(), None, linear.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, zeros and bias."""
        parts = (self.codes, self.scales, self.zeros, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.whole_codes().shape[1] // len(self.scales)

    def whole_codes(self) -> Tensor:
        """One code per element, (out, in)."""
        if self.zeros is None:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The widened matrix (out, in) in float32."""
        codes = self.whole_codes().float().view(len(self.codes), len(self.scales), -1)
        if self.zeros is not None:
            codes -= self.zeros.float().T.unsqueeze(-1)
        return (codes * self.scales.T.unsqueeze(-1)).flatten(1)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out)."""
        return functional.linear(x, self.weight.to(x.dtype), self.bias)


class PackedInt4Linear(Linear):
    """The same product by torch's packed kernel, for bfloat16 activations on a CPU."""

    def __init__(self, linear: GroupLinear) -> None:
        self.bias = linear.bias
        self._group = linear.group
        whole = linear.whole_codes().to(torch.int32).contiguous()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
        zeros = linear.zeros if linear.zeros is not None else torch.tensor(0)
        offsets = (PACKED_MIDDLE - zeros.float()) * linear.scales
        self._scales_and_zeros = torch.stack((linear.scales, offsets), -1).to(torch.bfloat16)

    @staticmethod
    def fits(linear: GroupLinear, dtype: torch.dtype) -> bool:
        """Whether the packed kernel takes this matrix."""
        is_int4 = linear.zeros is not None and linear.codes.device.type == "cpu"
        return is_int4 and dtype is torch.bfloat16 and not len(linear.codes) % PACKED_OUTPUTS

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self._packed.nbytes + self._scales_and_zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out) in bfloat16."""
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, self._group, self._scales_and_zeros
        )
        return y if self.bias is None else y + self.bias


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Linear:
    """The projection of an AWQ checkpoint, to be multiplied with activations of `dtype`."""
    codes = unpacked(qweight).T
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    linear = GroupLinear(packed, scales.float(), unpacked(qzeros), bias)
    return PackedInt4Linear(linear) if PackedInt4Linear.fits(linear, dtype) else linear


def unpacked(words: Tensor) -> Tensor:
    """The half-bytes (rows, out) as uint8 of words (rows, out / 8), in the order of outputs."""
    shifts = torch.tensor([4 * place for place in PLACES], dtype=torch.int32)
    halves = (words.unsqueeze(-1) >> shifts.to(words.device)) & 15
    return halves.flatten(1).to(torch.uint8)
