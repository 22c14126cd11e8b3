"""A model's shape, read from config.json with suspicion. No torch.

Only keys on a list are accepted: a key such as `auto_map` or `_attn_implementation_internal`
has made other loaders fetch and run code, and an unknown key may change what the weights
mean. Sizes are bounded before anything is allocated.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuagent.models.awq import group_size
from gpuagent.models.errors import LoadError

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 1 << 42
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
QUANTIZED_BYTES = {"int8": 1.0, "int8-weight-only": 1.0, "awq-int4": 0.5}
SCALE_BYTES = {"int8": 4, "int8-weight-only": 4, "awq-int4": 8}  # of one group
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

# Largest accepted value of each size; the smallest is 1.
SIZE_LIMITS = {
    "vocab_size": 1 << 21,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 19,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,
}
USED_KEYS = {
    *SIZE_LIMITS,
    *("architectures", "model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias"),
    *("sliding_window", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
}
HARMLESS_KEYS = {  # training settings and records, which do not change what is computed
    *("attention_dropout", "dtype", "torch_dtype", "initializer_range", "pretraining_tp"),
    *("transformers_version", "use_cache", "_name_or_path", "is_llama_config"),
    *("rope_interleaved", "transformers.js_config"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder; sizes in elements, lengths in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    awq_group: int = 0  # inputs that share a scale, in a checkpoint quantised by AWQ

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder and its head, biases included."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (heads + kv_heads)
        bias = (heads + 2 * kv_heads + self.hidden_size) if self.attention_bias else 0
        layer = attention + bias + 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token over all layers; int8 has a scale per head."""
        width = self.head_dim + 4 if dtype == "int8" else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * width

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters of the layers' matrices, which quantisation makes smaller."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * self.hidden_size * (heads + kv_heads)
        return self.num_layers * (layer + 3 * self.hidden_size * self.intermediate_size)

    def weights_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Bytes of the weights when loaded, with a scale (and AWQ's zero) for each group of 32
        inputs or the checkpoint's."""
        width, embedding = DTYPE_BYTES[dtype], self.vocab_size * self.hidden_size
        if quantization == "none":
            return self.num_parameters * width
        quantised = self.num_matrix_parameters
        rest = self.num_parameters - quantised
        if quantization != "awq-int4":  # the head is int8 too, beside the embedding
            quantised += embedding
            rest -= 0 if self.tie_embeddings else embedding
        each = QUANTIZED_BYTES[quantization] + SCALE_BYTES[quantization] / (self.awq_group or 32)
        return int(quantised * each) + rest * width


def estimate_memory(
    config: ModelConfig,
    dtype: str,
    kv_bytes: int,
    max_batch_tokens: int = 512,
    quantization: str = "none",
) -> int:
    """Bytes that a loaded model needs: weights, KV pool and the activations of one step.

    The activations are those alive at once: the residual stream, the MLP's two halves, the
    attention's inputs and, per sampled row (at most 64), float32 logits three times over.
    """
    width = DTYPE_BYTES[dtype]
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * attention
    logits = 3 * 4 * min(max_batch_tokens, 64) * config.vocab_size
    activations = max_batch_tokens * per_token * width + logits
    return config.weights_bytes(dtype, quantization) + kv_bytes + activations


def read_config(folder: Path) -> ModelConfig:
    """Read and check `config.json`; raises LoadError config_invalid or config_rejected."""
    values = read_json(folder / "config.json", MAX_CONFIG_BYTES, "config_invalid")
    return parse_config(values)


def read_json(path: Path, max_bytes: int, code: str, kind: type = dict) -> Any:
    """A JSON object (or a list) without duplicate keys and not too large, or LoadError `code`."""
    try:
        if path.stat().st_size > max_bytes:
            raise LoadError(code, f"{path.name} is larger than {max_bytes} bytes")
        value = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(code, f"{path.name}: {error}") from error
    if not isinstance(value, kind):
        raise LoadError(code, f"{path.name} is not {'an object' if kind is dict else 'a list'}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    """The shape stated by the contents of a config.json."""
    _reject_unknown(values)
    sizes = {key: _size(values, key) for key in SIZE_LIMITS if key not in ("head_dim",)}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % kv_heads:
        raise LoadError("config_invalid", f"{heads} heads cannot share {kv_heads} KV heads")
    config = ModelConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(values, sizes),
        max_position=sizes["max_position_embeddings"],
        rms_norm_eps=_positive(values.get("rms_norm_eps", 1e-6), "rms_norm_eps", 1.0),
        rope_theta=_rope_theta(values),
        tie_embeddings=_flag(values, "tie_word_embeddings"),
        attention_bias=_flag(values, "attention_bias"),
        eos_token_ids=eos_ids(values.get("eos_token_id"), sizes["vocab_size"]),
        awq_group=group_size(values),
    )
    if config.num_parameters * 2 > MAX_WEIGHTS_BYTES:
        raise LoadError("config_invalid", f"{config.num_parameters} parameters are too many")
    return config


def eos_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: the files hold null, one id or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise LoadError("config_invalid", f"eos_token_id {value!r:.80} is not in the vocabulary")
    return tuple(ids)


def _reject_unknown(values: Mapping[str, Any]) -> None:
    if unknown := sorted(set(values) - USED_KEYS - HARMLESS_KEYS):
        raise LoadError("config_rejected", f"keys not on the list: {', '.join(unknown)[:200]}")
    if values.get("architectures") not in [[name] for name in ARCHITECTURES]:
        found = values.get("architectures")
        raise LoadError("config_rejected", f"architecture {found!r:.80} is not {ARCHITECTURES}")
    if values.get("hidden_act", "silu") != "silu" or _flag(values, "mlp_bias"):
        raise LoadError("config_rejected", "only SiLU without bias is supported")
    window, length = values.get("sliding_window"), values.get("max_position_embeddings")
    if window is None:
        return
    if type(window) is not int or type(length) is not int:
        raise LoadError("config_invalid", "sliding_window must be an integer or null")
    if window < length:
        raise LoadError("config_rejected", "a sliding window below the context is not supported")


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if value is None and key == "num_key_value_heads":
        value = values.get("num_attention_heads")  # models from before grouped queries
    if type(value) is not int or not 1 <= value <= SIZE_LIMITS[key]:
        raise LoadError("config_invalid", f"{key} is {value!r:.80}, not in 1..{SIZE_LIMITS[key]}")
    return value


def _head_dim(values: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    if values.get("head_dim") is not None:
        head_dim = _size(values, "head_dim")
    else:
        head_dim, rest = divmod(sizes["hidden_size"], sizes["num_attention_heads"])
        if rest:
            raise LoadError("config_invalid", "hidden_size is no multiple of the heads")
    if head_dim % 2:
        raise LoadError("config_invalid", f"head_dim {head_dim} is odd and cannot be rotated")
    return head_dim


def _rope_theta(values: Mapping[str, Any]) -> float:
    """Written as `rope_theta`, or inside `rope_parameters` since transformers 5."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise LoadError("config_invalid", "the rotation's parameters are not an object")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise LoadError("config_rejected", "scaled rotary embeddings are not supported")
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    return _positive(theta, "rope_theta", 1e12)


def _positive(value: Any, key: str, limit: float) -> float:
    is_number = type(value) in (int, float)
    if not is_number or not math.isfinite(value) or not 0 < value <= limit:
        raise LoadError("config_invalid", f"{key} is {value!r:.80}, not in (0, {limit}]")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if type(value) is not bool:
        raise LoadError("config_invalid", f"{key} is {value!r:.80}, not a boolean")
    return value
