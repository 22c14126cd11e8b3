"""The parts of a decoder layer. Plain classes and functions: no modules, no autograd.

Shapes: T tokens of all requests side by side, whatever their positions; H heads, K KV heads,
D elements per head.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Attention(Protocol):
    """What a model asks of whoever keeps keys and values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value (T, K, D) of this layer, and return what query (T, H, D)
        attends to: (T, H, D). Each token sees its own request's tokens up to itself."""


class Linear:
    """y = x W^T + b with W (out, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out)."""
        return functional.linear(x, self.weight, self.bias)


class Int8Linear(Linear):
    """y = x W^T + b with W rounded to int8, one scale per output: max |w| / 127.

    Only the weights are quantised; they are widened at each call, which saves memory, not time.
    """

    def __init__(self, linear: Linear) -> None:
        largest = linear.weight.float().abs().amax(1, keepdim=True)
        self._scales = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        super().__init__((linear.weight / self._scales).round().to(torch.int8), linear.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, scales and bias."""
        return super().num_bytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) to (T, out)."""
        y = functional.linear(x, self.weight.to(x.dtype)) * self._scales.T.to(x.dtype)
        return y if self.bias is None else y + self.bias


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """(T, hidden) to the same, in the dtype of `x`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class RotaryEmbedding:
    """Rotates element i with element i + D/2 by position * theta^(-2i/D) (RoFormer, eq. 34).

    This is Hugging Face's layout of halves; weights from elsewhere may need permuting.
    """

    def __init__(self, head_dim: int, theta: float, max_position: int, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        positions = torch.arange(max_position, dtype=torch.int64).float()
        angles = torch.outer(positions, 1.0 / theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = angles.cos().to(dtype)
        self._sin = angles.sin().to(dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions: each (positions, D)."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions (T,): each (T, 1, D)."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `RotaryEmbedding.at` to x (T, heads, D)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class MLP:
    """down(silu(gate(x)) * up(x)), the SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.gate = gate
        self.up = up
        self.down = down

    @property
    def parts(self) -> tuple[Linear, Linear, Linear]:
        """Its matrices."""
        return self.gate, self.up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """(T, hidden) to the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))
