"""The Llama family of decoders: Llama, and Mistral without a sliding window.

`LlamaModel.forward` takes the tokens of many requests side by side; only attention knows
where one ends, and it is passed in, so the model has no idea of blocks, batches or phases.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gpuagent.models.config import ModelConfig, read_config
from gpuagent.models.errors import LoadError
from gpuagent.models.grouped import from_awq
from gpuagent.models.layers import (
    MLP,
    Attention,
    Int8Linear,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    rotate,
)
from gpuagent.models.loader import load_tensors
from gpuagent.models.sharding import Shard, Slices, shard_config

IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # stored by old checkpoints, computed here


class _Weights:
    """The tensors of a checkpoint, each to be taken once, with its shape checked."""

    def __init__(
        self, tensors: dict[str, Tensor], dtype: torch.dtype, device: str, awq_group: int = 0
    ) -> None:
        self._awq_group = awq_group
        self._tensors = {k: v for k, v in tensors.items() if not k.endswith(IGNORED_SUFFIX)}
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in the engine's dtype or this one; a view of the file if it is stored so."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise LoadError("weights_malformed", f"{name} is missing")
        if tensor.shape != shape:
            code = "config_invalid" if "embed_tokens" in name else "weights_malformed"
            raise LoadError(code, f"{name} is {tuple(tensor.shape)}, the config says {shape}")
        if dtype is torch.int32 and tensor.dtype is not dtype:
            raise LoadError("weights_malformed", f"{name} is stored as {tensor.dtype}")
        tensor = tensor.to(device=self._device, dtype=dtype or self._dtype)
        return tensor

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> Linear:
        """The projection `name` with weight (rows, columns), or what AWQ made of it."""
        offsets = self.take(f"{name}.bias", rows) if bias else None
        if not self._awq_group or ".layers." not in name:
            return Linear(self.take(f"{name}.weight", rows, columns), offsets)
        groups, rest = divmod(columns, self._awq_group)
        if rest or rows % 8:
            raise LoadError("config_invalid", f"{name} has no whole groups of {self._awq_group}")
        codes = self.take(f"{name}.qweight", columns, rows // 8, dtype=torch.int32)
        zeros = self.take(f"{name}.qzeros", groups, rows // 8, dtype=torch.int32)
        scales = self.take(f"{name}.scales", groups, rows, dtype=torch.float32)
        return from_awq(codes, zeros, scales, offsets, self._dtype)

    def drop(self, name: str) -> None:
        """Leave out a tensor that is known to be a copy."""
        self._tensors.pop(name, None)

    def finish(self) -> None:
        """Refuse tensors that nobody took: the model would compute something else."""
        if self._tensors:
            raise LoadError("weights_rejected", f"unexpected tensor {min(self._tensors):.80}")


def _as_it_is(whole: Tensor) -> Tensor:
    return whole


class Layer:
    """One decoder layer: attention and MLP, each normed before and added to its input."""

    def __init__(
        self, config: ModelConfig, index: int, weights: _Weights, shard: Shard | None = None
    ) -> None:
        self._index = index
        self._total = shard.total if shard else _as_it_is
        self._head_dim = config.head_dim
        name, hidden = f"model.layers.{index}", config.hidden_size
        heads, kv_heads = config.num_heads * self._head_dim, config.num_kv_heads * self._head_dim
        bias, middle = config.attention_bias, config.intermediate_size
        self.query = weights.linear(f"{name}.self_attn.q_proj", heads, hidden, bias)
        self.key = weights.linear(f"{name}.self_attn.k_proj", kv_heads, hidden, bias)
        self.value = weights.linear(f"{name}.self_attn.v_proj", kv_heads, hidden, bias)
        self.output = weights.linear(f"{name}.self_attn.o_proj", hidden, heads, bias)
        self.mlp = MLP(
            weights.linear(f"{name}.mlp.gate_proj", middle, hidden),
            weights.linear(f"{name}.mlp.up_proj", middle, hidden),
            weights.linear(f"{name}.mlp.down_proj", hidden, middle),
        )
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.take(f"{name}.input_layernorm.weight", hidden), eps)
        self.mlp_norm = RMSNorm(
            weights.take(f"{name}.post_attention_layernorm.weight", hidden), eps
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of matrices and norms."""
        parts = self.query, self.key, self.value, self.output, *self.mlp.parts
        norms = self.input_norm.weight, self.mlp_norm.weight
        return sum(part.num_bytes for part in parts) + sum(norm.nbytes for norm in norms)

    def quantise(self, rounded: Callable[[Linear], Linear]) -> None:
        """Put `rounded` matrices in the place of the layer's."""
        for name in ("query", "key", "value", "output"):
            setattr(self, name, rounded(getattr(self, name)))
        self.mlp = MLP(*map(rounded, self.mlp.parts))

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        attended = self._attend(self.input_norm(hidden), rotation, attention)
        hidden = hidden + self._total(attended)
        return hidden + self._total(self.mlp(self.mlp_norm(hidden)))

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        query = rotate(self._split_heads(self.query(x)), *rotation)
        key = rotate(self._split_heads(self.key(x)), *rotation)
        value = self._split_heads(self.value(x))
        return self.output(attention.attend(self._index, query, key, value).flatten(1))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._head_dim)


class LlamaModel:
    """Embedding, layers, norm and head. Holds no state between calls."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_model_len: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        weights = _Weights(tensors, dtype, device, config.awq_group)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.config = config
        self.shard = shard
        self.rank_configs: Sequence[ModelConfig] = (config,)  # the shapes of all parts
        self.embedding = weights.take("model.embed_tokens.weight", vocab, hidden)
        self._layers = [Layer(config, i, weights, shard) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights.take("model.norm.weight", hidden), config.rms_norm_eps)
        if config.tie_embeddings:
            weights.drop("lm_head.weight")
            self.head = Linear(self.embedding)
        else:
            self.head = weights.linear("lm_head", vocab, hidden)
        weights.finish()
        length = max_model_len or config.max_position
        with torch.device(device):
            self.rope = RotaryEmbedding(config.head_dim, config.rope_theta, length, dtype)

    @property
    def weights_bytes(self) -> int:
        """Bytes of matrices and norms; a head that is the embedding counts once."""
        is_shared = getattr(self.head, "weight", None) is self.embedding
        outside = self.embedding.nbytes + self.norm.weight.nbytes
        layers = sum(layer.num_bytes for layer in self._layers)
        return layers + outside + (0 if is_shared else self.head.num_bytes)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        max_model_len: int | None = None,
        shard: Shard | None = None,
    ) -> "LlamaModel":
        """Open a safetensors folder, or one rank's part of it; raises LoadError."""
        config, cut = read_config(folder), None
        size, rank = (shard.size, shard.rank) if shard else (1, 0)
        parts = tuple(shard_config(config, each, size) for each in range(size))
        if shard:
            cut = Slices(config, rank, size).cut
        model = cls(parts[rank], load_tensors(folder, cut), dtype, device, max_model_len, shard)
        model.rank_configs = parts
        return model

    def take_layers(self) -> Iterator[Layer]:
        """Hand out the layers one by one; each is dropped here before the next."""
        self._layers.reverse()
        while self._layers:
            yield self._layers.pop()

    def quantise(self, rounded: Callable[[Linear], Linear] = Int8Linear) -> None:
        """Put `rounded` matrices in the place of all but the embedding."""
        for layer in self._layers:
            layer.quantise(rounded)
        self.head = rounded(self.head)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (T, hidden) of tokens (T,) at positions (T,), before the last norm."""
        hidden = functional.embedding(tokens, self.embedding)
        rotation = self.rope.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (rows, vocab) in float32 of hidden states (rows, hidden)."""
        return self.head(self.norm(hidden)).float()
