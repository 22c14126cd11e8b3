"""Turn a Llama-family GGUF file into a safetensors folder, the same bytes every time.

GGUF stores what llama.cpp needs; Hugging Face readers want it laid out differently:

* weights are quantised in blocks (Q4_1: 32 values as 4-bit codes, a scale and a minimum):
  dequantised, value = scale * code + minimum, in float32;
* the rows of the query and key projections are permuted, because llama.cpp rotates
  neighbouring pairs (0,1), (2,3) ... where Hugging Face rotates halves (0,d/2), (1,d/2+1) ...
  For one head of width 4 the file holds rows [0, 2, 1, 3]; read as (2, 2) and transposed
  they are [0, 1, 2, 3] again;
* there is no head tensor: it is the embedding (tied).

safetensors and tokenizer.json are written here rather than by their libraries, so that the
folder's digest depends on this file alone and not on the versions installed.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from gpuagent.agent.model_store.errors import ModelStoreError

CONTROL_TOKEN = 3  # GGUF token type of <|im_end|> and the like
SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Progress = Callable[[str, float], None]


def convert_gguf(source: Path, target: Path, dtype: str, progress: Progress) -> None:
    """Write `source` as a safetensors folder into `target` (which exists and is empty).

    `dtype` is "float32" or "bfloat16". Raises `conversion_failed` for a file that is not a
    Llama-family GGUF with a byte-level BPE vocabulary.
    """
    reader = _open(source)
    fields = _Fields(reader)
    _write_json(target / "config.json", _model_config(fields, dtype))
    _write_json(target / "generation_config.json", _generation_config(fields))
    _write_json(target / "tokenizer.json", _tokenizer(fields))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))
    _write_weights(reader, fields, target / "model.safetensors", dtype, progress)


class _Fields:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader
        if self["general.architecture"] != "llama" or self["tokenizer.ggml.model"] != "gpt2":
            raise ModelStoreError("conversion_failed", "not a Llama model with a byte-level BPE")

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelStoreError("conversion_failed", f"the GGUF file lacks {key}")
        return field.contents()


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelStoreError("conversion_failed", f"unreadable GGUF file: {error}") from error


def _model_config(fields: _Fields, dtype: str) -> dict[str, Any]:
    epsilon = fields["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored as float32: 9.99999974e-06 is 1e-05
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "vocab_size": fields["llama.vocab_size"],
    }


def _generation_config(fields: _Fields) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: _Fields) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, token)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe_model(tokens, fields["tokenizer.ggml.merges"]),
    }


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def _bpe_model(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }


def _tokenizer_config(fields: _Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    indent = None if path.name == "tokenizer.json" else 2  # a vocabulary is not for reading
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    path.write_text(text + "\n", encoding="utf-8")


def _write_weights(
    reader: GGUFReader, fields: _Fields, path: Path, dtype: str, progress: Progress
) -> None:
    """safetensors: header length (u64, little endian), JSON header, then the data."""
    tensors = sorted((_rename(t.name), t) for t in reader.tensors)
    header = _header([(name, _shape(t)) for name, t in tensors], dtype)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for i, (name, tensor) in enumerate(tensors):
            progress("convert", i / len(tensors))
            stream.write(_encode(_dequantised(name, tensor, fields), dtype))


def _rename(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    if kind == "weight" and stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}.weight"
    raise ModelStoreError("conversion_failed", f"unexpected tensor {name}")


def _shape(tensor: Any) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


def _header(tensors: list[tuple[str, list[int]]], dtype: str) -> bytes:
    width = 4 if dtype == "float32" else 2
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, shape), start, end in _offsets(tensors, width):
        entries[name] = {
            "dtype": SAFETENSORS_DTYPE[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _offsets(
    tensors: list[tuple[str, list[int]]], width: int
) -> Iterator[tuple[tuple[str, list[int]], int, int]]:
    start = 0
    for tensor in tensors:
        end = start + int(np.prod(tensor[1])) * width
        yield tensor, start, end
        start = end


def _dequantised(name: str, tensor: Any, fields: _Fields) -> np.ndarray:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if name.endswith("q_proj.weight"):
        return _unpermute(values, fields["llama.attention.head_count"])
    if name.endswith("k_proj.weight"):
        return _unpermute(values, fields["llama.attention.head_count_kv"])
    return values


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from neighbouring pairs to halves: (heads * dim, hidden) both ways."""
    rows, columns = values.shape
    half = rows // num_heads // 2
    return values.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "float32":
        return np.ascontiguousarray(values, "<f4").tobytes()
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
    return (rounded >> 16).astype("<u2").tobytes()
