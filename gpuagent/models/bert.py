"""BERT encoders: a vector for each input, from the tokens of many inputs side by side.

Inputs are not padded. Their tokens lie in one row each after the other, shortest input first, and
the matrices take them all; only attention knows where one ends, and takes inputs of equal length
together. Example, inputs of 5, 3 and 5 tokens:

    order        3 | 5 5                   13 rows instead of 15 with padding
    matrices     (13, hidden)              once per layer
    attention    (1, heads, 3, D), then (2, heads, 5, D): no mask, nobody sees another input
    pooled       mean of rows 0..2, 3..7, 8..12, divided by its length

A vector is the mean of its tokens' last hidden states, or the first one's, and normalised if the
folder says so (`encoder_config`).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gpuagent.models.encoder_config import EncoderConfig, read_encoder_config
from gpuagent.models.errors import LoadError
from gpuagent.models.layers import Linear
from gpuagent.models.loader import load_tensors

UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
PREFIX = "bert."  # of checkpoints saved with a head on top
Run = tuple[int, int, int]  # first row, number of inputs, length of each


class _Weights:
    """The tensors of a checkpoint, each to be taken once, with its shape checked."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> None:
        named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        self._tensors = {name: each for name, each in named.items() if name not in UNUSED}
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the engine's dtype; a view of the file if it is stored so."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise LoadError("weights_malformed", f"{name} is missing")
        if tensor.shape != shape:
            code = "config_invalid" if "word_embeddings" in name else "weights_malformed"
            raise LoadError(code, f"{name} is {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """The projection `name` with weight (rows, columns) and bias."""
        return Linear(self.take(f"{name}.weight", rows, columns), self.take(f"{name}.bias", rows))

    def norm(self, name: str, config: EncoderConfig) -> "LayerNorm":
        """The norm `name` over the hidden size."""
        width = config.hidden_size
        weight, bias = self.take(f"{name}.weight", width), self.take(f"{name}.bias", width)
        return LayerNorm(weight, bias, config.layer_norm_eps)

    def finish(self) -> None:
        """Refuse tensors that nobody took: the model would compute something else."""
        if self._tensors:
            raise LoadError("weights_rejected", f"unexpected tensor {min(self._tensors):.80}")


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, eq. 4)."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(T, hidden) to the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Layer:
    """One encoder layer: attention and feed-forward, each added to its input and normed after."""

    def __init__(self, config: EncoderConfig, index: int, weights: _Weights) -> None:
        self._head_dim = config.head_dim
        name, hidden, middle = (
            f"encoder.layer.{index}",
            config.hidden_size,
            config.intermediate_size,
        )
        attention = f"{name}.attention"
        self.query = weights.linear(f"{attention}.self.query", hidden, hidden)
        self.key = weights.linear(f"{attention}.self.key", hidden, hidden)
        self.value = weights.linear(f"{attention}.self.value", hidden, hidden)
        self.output = weights.linear(f"{attention}.output.dense", hidden, hidden)
        self.attention_norm = weights.norm(f"{attention}.output.LayerNorm", config)
        self.up = weights.linear(f"{name}.intermediate.dense", middle, hidden)
        self.down = weights.linear(f"{name}.output.dense", hidden, middle)
        self.norm = weights.norm(f"{name}.output.LayerNorm", config)

    @property
    def num_bytes(self) -> int:
        """Bytes of matrices and norms."""
        parts = self.query, self.key, self.value, self.output, self.up, self.down
        return sum(each.num_bytes for each in (*parts, self.attention_norm, self.norm))

    def __call__(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """(T, hidden) to the same; `runs` say which rows are one input."""
        hidden = self.attention_norm(hidden + self._attend(hidden, runs))
        return self.norm(hidden + self.down(functional.gelu(self.up(hidden))))

    def _attend(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        mixed = torch.empty_like(query)
        for first, number, length in runs:
            rows = slice(first, first + number * length)
            q, k, v = (self._heads(each[rows], number, length) for each in (query, key, value))
            seen = functional.scaled_dot_product_attention(q, k, v)  # (number, heads, length, D)
            mixed[rows] = seen.transpose(1, 2).reshape(number * length, -1)
        return self.output(mixed)

    def _heads(self, rows: Tensor, number: int, length: int) -> Tensor:
        return rows.view(number, length, -1, self._head_dim).transpose(1, 2)


class BertEncoder:
    """Embeddings, layers and pooling. Holds no state between calls."""

    def __init__(
        self,
        config: EncoderConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        weights, hidden = _Weights(tensors, dtype, device), config.hidden_size
        self.config, self.device = config, device
        name = "embeddings"
        self.words = weights.take(f"{name}.word_embeddings.weight", config.vocab_size, hidden)
        self.places = weights.take(
            f"{name}.position_embeddings.weight", config.num_positions, hidden
        )
        self.types = weights.take(f"{name}.token_type_embeddings.weight", config.num_types, hidden)
        self.norm = weights.norm(f"{name}.LayerNorm", config)
        self.layers = [Layer(config, i, weights) for i in range(config.num_layers)]
        weights.finish()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str) -> "BertEncoder":
        """Open a safetensors folder; raises LoadError."""
        return cls(read_encoder_config(folder), load_tensors(folder), dtype, device)

    @property
    def weights_bytes(self) -> int:
        """Bytes of matrices, tables and norms."""
        tables = self.words.nbytes + self.places.nbytes + self.types.nbytes
        return tables + self.norm.num_bytes + sum(layer.num_bytes for layer in self.layers)

    def hidden_states(self, inputs: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Of inputs sorted by length: (T, hidden) after the embeddings and after each layer."""
        runs = _runs([len(each) for each in inputs])
        tokens = torch.tensor([token for each in inputs for token in each], device=self.device)
        lengths = [torch.arange(len(each), device=self.device) for each in inputs]
        places = functional.embedding(torch.cat(lengths), self.places)
        hidden = self.norm(functional.embedding(tokens, self.words) + self.types[0] + places)
        yield hidden
        for layer in self.layers:
            hidden = layer(hidden, runs)
            yield hidden

    def embed(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """Vectors (inputs, hidden) in float32 of non-empty inputs of token ids, in any order."""
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        by_length = [inputs[i] for i in order]
        *_, hidden = self.hidden_states(by_length)
        vectors = torch.empty(len(inputs), self.config.hidden_size, device=self.device)
        vectors[torch.tensor(order, device=self.device)] = self._pool(by_length, hidden.float())
        return functional.normalize(vectors, dim=1) if self.config.normalise else vectors

    def _pool(self, inputs: Sequence[Sequence[int]], hidden: Tensor) -> Tensor:
        pieces = hidden.split([len(each) for each in inputs])
        if self.config.pooling == "cls":
            return torch.stack([piece[0] for piece in pieces])
        return torch.stack([piece.mean(0) for piece in pieces])


def _runs(lengths: Sequence[int]) -> list[Run]:
    """Inputs of equal length beside each other: [3, 5, 5] is (0, 1, 3) and (3, 2, 5)."""
    runs, first = [], 0
    for length, group in groupby(lengths):
        number = len(list(group))
        runs.append((first, number, length))
        first += number * length
    return runs
