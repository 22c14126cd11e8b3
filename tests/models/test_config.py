"""config.json is read with suspicion: sizes are bounded, unknown keys refused."""

import json

import pytest

from gpuagent.models.config import estimate_memory, parse_config, read_config
from gpuagent.models.errors import LoadError

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_the_shape_of_smollm2():
    config = parse_config(SMOLLM2)
    assert config.num_parameters == 134_515_008
    assert config.head_dim == 64
    assert config.eos_token_ids == (2,)
    # 30 layers * keys and values * 3 heads * 64 * 4 bytes
    assert config.kv_bytes_per_token("float32") == 46_080


def test_rope_theta_is_found_in_either_place():
    moved = {k: v for k, v in SMOLLM2.items() if k != "rope_theta"}
    moved["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_config(moved).rope_theta == 5e5
    assert parse_config(SMOLLM2).rope_theta == 1e5


def test_memory_is_weights_and_cache_and_a_little():
    config = parse_config(SMOLLM2)
    weights, cache = 4 * config.num_parameters, 512 << 20
    needed = estimate_memory(config, "float32", cache)
    assert weights + cache < needed < 1.1 * (weights + cache)


INVALID = [
    {"hidden_size": 2**40},
    {"hidden_size": 577},
    {"hidden_size": 576.0},
    {"hidden_size": "576"},
    {"hidden_size": None},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": True},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 4},
    {"vocab_size": 0},
    {"head_dim": 63},
    {"rms_norm_eps": 0},
    {"rms_norm_eps": float("nan")},
    {"rope_theta": float("nan")},
    {"rope_theta": float("inf")},
    {"rope_theta": -1.0},
    {"rope_theta": "10000"},
    {"rope_parameters": [1]},
    {"tie_word_embeddings": "yes"},
    {"eos_token_id": 49152},
    {"eos_token_id": [2, "3"]},
    {"sliding_window": "none"},
    {
        "vocab_size": 1 << 21,
        "hidden_size": 1 << 16,
        "intermediate_size": 1 << 19,
        "num_hidden_layers": 512,
    },
]
REJECTED = [
    {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    {"_attn_implementation_internal": "evil/kernels"},
    {"trust_remote_code": True},
    {"quantization_config": {"quant_method": "awq"}},
    {"architectures": ["GPT2LMHeadModel"]},
    {"architectures": ["LlamaForCausalLM", "Evil"]},
    {"architectures": None},
    {"hidden_act": "gelu"},
    {"mlp_bias": True},
    {"sliding_window": 4096},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
]


@pytest.mark.parametrize(
    ("code", "change"),
    [("config_invalid", c) for c in INVALID] + [("config_rejected", c) for c in REJECTED],
    ids=str,
)
def test_absurd_and_unknown_configurations_are_refused(code, change):
    with pytest.raises(LoadError) as refusal:
        parse_config({**SMOLLM2, **change})
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"a":' * 50_000,
        " " * (1 << 20) + "{}",
        "\x80",
    ],
    ids=lambda text: text[:10],
)
def test_a_file_that_is_no_small_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(LoadError) as refusal:
        read_config(tmp_path)
    assert refusal.value.code == "config_invalid"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(LoadError, match="config_invalid"):
        read_config(tmp_path)


def test_a_good_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert read_config(tmp_path) == parse_config(SMOLLM2)
