"""A BERT encoder's shape and what is made of its outputs, read with suspicion. No torch.

`config.json` says the shape; the rest comes from the files of a sentence-transformers folder:

    modules.json                 Transformer, Pooling and perhaps Normalize, in this order
    1_Pooling/config.json        mean of the tokens, or the first one's ([CLS])
    sentence_bert_config.json    max_seq_length, at most the positions of the model

Without `modules.json` an embedding is the normalised mean, as of all-MiniLM-L6-v2. What those files
ask for beyond this (a dense layer, lower case before the tokenizer) would change the vectors, so it
is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuagent.models.config import (
    ARCHITECTURES,
    DTYPE_BYTES,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    read_json,
)
from gpuagent.models.errors import LoadError

ENCODERS = ("BertModel",)
SIZE_LIMITS = {  # largest accepted value; the smallest is 1
    "vocab_size": 1 << 21,
    "hidden_size": 1 << 12,  # 32 vectors of it fit into one message
    "intermediate_size": 1 << 16,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "max_position_embeddings": 1 << 20,
    "type_vocab_size": 1 << 10,
}
USED_KEYS = {
    *SIZE_LIMITS,
    *("architectures", "model_type", "hidden_act", "layer_norm_eps", "position_embedding_type"),
    *("is_decoder", "add_cross_attention", "chunk_size_feed_forward", "pad_token_id"),
    *("bos_token_id", "eos_token_id"),
}
HARMLESS_KEYS = {  # training settings and records, which do not change what is computed
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "use_cache"),
    *("gradient_checkpointing", "initializer_range", "transformers_version", "_name_or_path"),
    *("dtype", "torch_dtype", "id2label", "label2id", "tie_word_embeddings", "model_max_length"),
}
NEUTRAL = {  # values of keys that would otherwise mean another computation
    "hidden_act": (None, "gelu"),
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
}
MODULES = ("Transformer", "Pooling", "Normalize")
POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of a BERT encoder; sizes in elements, `max_length` in tokens of one input."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_types: int
    layer_norm_eps: float
    max_length: int
    pooling: str = "mean"  # mean | cls
    normalise: bool = True

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Parameters without a pooler, which embeddings do not use."""
        hidden, middle = self.hidden_size, self.intermediate_size
        layer = 4 * (hidden * hidden + hidden) + 2 * hidden * middle + middle + 5 * hidden
        tables = self.vocab_size + self.num_positions + self.num_types
        return tables * hidden + 2 * hidden + self.num_layers * layer

    def weights_bytes(self, dtype: str) -> int:
        """Bytes of the weights when loaded."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def workspace_bytes(self, dtype: str, num_tokens: int) -> int:
        """Bytes of activations alive at once in a step of `num_tokens`: residual, query, key,
        value, output, the feed-forward's middle twice, and attention's scores twice."""
        scores = 2 * self.num_heads * min(self.max_length, num_tokens)
        per_token = 6 * self.hidden_size + 2 * self.intermediate_size + scores
        return num_tokens * per_token * DTYPE_BYTES[dtype]


def is_encoder(folder: Path) -> bool:
    """Whether the folder's architecture is one that is served as embeddings."""
    values = read_json(folder / "config.json", MAX_CONFIG_BYTES, "config_invalid")
    return values.get("architectures") in [[name] for name in ENCODERS]


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Read and check an encoder's files; raises LoadError config_invalid, config_rejected or, for
    a decoder, checkpoint_mismatch."""
    values = read_json(folder / "config.json", MAX_CONFIG_BYTES, "config_invalid")
    _reject_unknown(values)
    sizes = {key: _size(values, key, limit) for key, limit in SIZE_LIMITS.items()}
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise LoadError("config_invalid", "hidden_size is no multiple of the heads")
    pooling, normalise = _pipeline(folder, sizes["hidden_size"])
    config = EncoderConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_positions=sizes["max_position_embeddings"],
        num_types=sizes["type_vocab_size"],
        layer_norm_eps=_epsilon(values.get("layer_norm_eps", 1e-12)),
        max_length=_max_length(folder, sizes["max_position_embeddings"]),
        pooling=pooling,
        normalise=normalise,
    )
    if config.num_parameters * 2 > MAX_WEIGHTS_BYTES:
        raise LoadError("config_invalid", f"{config.num_parameters} parameters are too many")
    return config


def _reject_unknown(values: Mapping[str, Any]) -> None:
    found = values.get("architectures")
    if found in [[name] for name in ARCHITECTURES]:
        raise LoadError("checkpoint_mismatch", f"{found[0]} generates: task is generate")
    if found not in [[name] for name in ENCODERS]:
        raise LoadError("config_rejected", f"architecture {found!r:.80} is not {ENCODERS}")
    if unknown := sorted(set(values) - USED_KEYS - HARMLESS_KEYS):
        raise LoadError("config_rejected", f"keys not on the list: {', '.join(unknown)[:200]}")
    for key, allowed in NEUTRAL.items():
        if values.get(key) not in allowed:
            raise LoadError("config_rejected", f"{key} is {values[key]!r:.80}, not {allowed[1]}")


def _size(values: Mapping[str, Any], key: str, limit: int) -> int:
    value = values.get(key, 2 if key == "type_vocab_size" else None)
    if type(value) is not int or not 1 <= value <= limit:
        raise LoadError("config_invalid", f"{key} is {value!r:.80}, not in 1..{limit}")
    return value


def _epsilon(value: Any) -> float:
    if type(value) is not float or not 0 < value <= 1:
        raise LoadError("config_invalid", f"layer_norm_eps is {value!r:.80}, not in (0, 1]")
    return value


def _pipeline(folder: Path, hidden_size: int) -> tuple[str, bool]:
    """(pooling, whether vectors are normalised) of `modules.json`; the default without one."""
    path = folder / "modules.json"
    if not path.exists():
        return "mean", True
    steps = _modules(path)
    kinds = tuple(kind for kind, _ in steps)
    if kinds not in (MODULES, MODULES[:2]):
        raise LoadError("config_rejected", f"modules {kinds!r:.120} are not {MODULES}")
    pooling = read_json(_inside(folder, steps[1][1]), MAX_CONFIG_BYTES, "config_invalid")
    return _pooling(pooling, hidden_size), len(steps) == len(MODULES)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Name of the class (its module is never imported) and folder of each step."""
    listed = read_json(path, MAX_CONFIG_BYTES, "config_invalid", list)
    try:
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (KeyError, TypeError) as error:
        raise LoadError("config_invalid", f"modules.json: {error!r:.120}") from error


def _inside(folder: Path, name: str) -> Path:
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise LoadError("config_invalid", f"{name!r:.80} is not a folder beside modules.json")
    return folder / name / "config.json"


def _pooling(values: Mapping[str, Any], hidden_size: int) -> str:
    if values.get("word_embedding_dimension", hidden_size) != hidden_size:
        raise LoadError("config_invalid", "the pooling is for another width than the model's")
    modes = [key for key, value in values.items() if key.startswith("pooling_mode") and value]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise LoadError("config_rejected", f"pooling {modes!r:.120} is not mean or cls")
    return POOLINGS[modes[0]]


def _max_length(folder: Path, num_positions: int) -> int:
    path = folder / "sentence_bert_config.json"
    if not path.exists():
        return num_positions
    values = read_json(path, MAX_CONFIG_BYTES, "config_invalid")
    if values.get("do_lower_case"):
        raise LoadError("config_rejected", "do_lower_case is the tokenizer's to say")
    length = values.get("max_seq_length")
    if length is None:
        return num_positions
    if type(length) is not int or not 1 <= length <= num_positions:
        raise LoadError("config_invalid", f"max_seq_length is {length!r:.80}")
    return length
