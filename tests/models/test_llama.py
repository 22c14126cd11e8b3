"""The Llama family against transformers on random weights: hidden states, logits, tokens."""

import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from gpuagent.models.config import read_config
from gpuagent.models.errors import LoadError
from gpuagent.models.llama import LlamaModel

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
VARIANTS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "theta": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_theta=500_000.0, rms_norm_eps=1e-5)),
    "bias": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True)),
    "no grouping": (LlamaForCausalLM, LlamaConfig(**SMALL | {"num_key_value_heads": 8})),
    "wide heads": (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=24)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
}


class CausalAttention:
    """Attention over one whole sequence, nothing kept."""

    def attend(self, layer, query, key, value):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


def saved(folder, name):
    """transformers' model of a variant with random weights and biases, saved to `folder`."""
    torch.manual_seed(len(name))
    model_class, config = VARIANTS[name]
    reference = model_class(config).eval()
    for parameter in reference.parameters():
        if parameter.dim() == 1:  # biases start at 0 and norms at 1, which would hide mistakes
            parameter.data += 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_against_transformers(tmp_path, name):
    """Every layer's output, the logits, and 20 greedy tokens."""
    reference = saved(tmp_path, name)
    model = LlamaModel.load(tmp_path, torch.float32, "cpu")
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40)
    theirs = reference(tokens[None], output_hidden_states=True)
    layers, model._layers = model._layers, []
    for depth in range(3):
        hidden = model.forward(tokens, positions, CausalAttention())
        torch.testing.assert_close(hidden, theirs.hidden_states[depth][0], rtol=1e-4, atol=1e-4)
        model._layers = layers[: depth + 1]
    hidden = model.forward(tokens, positions, CausalAttention())
    torch.testing.assert_close(model.logits(hidden), theirs.logits[0], rtol=1e-4, atol=1e-4)
    expected = reference.generate(tokens[None, :8], max_new_tokens=20, do_sample=False)
    assert greedy(model, tokens[:8], 20) == expected[0, 8:].tolist()


def greedy(model, tokens, num):
    for _ in range(num):
        hidden = model.forward(tokens, torch.arange(len(tokens)), CausalAttention())
        tokens = torch.cat((tokens, model.logits(hidden[-1:]).argmax(-1)))
    return tokens[-num:].tolist()


def test_the_config_counts_exactly_the_parameters(tmp_path):
    for name in VARIANTS:
        folder = tmp_path / name
        reference = saved(folder, name)
        assert read_config(folder).num_parameters == reference.num_parameters()


def test_bfloat16_is_close(tmp_path):
    reference = saved(tmp_path, "llama")
    model = LlamaModel.load(tmp_path, torch.bfloat16, "cpu")
    tokens = torch.arange(20)
    hidden = model.forward(tokens, tokens, CausalAttention())
    theirs = reference(tokens[None]).logits[0]
    cosine = torch.cosine_similarity(model.logits(hidden), theirs, dim=-1)
    assert cosine.min() > 0.99


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("config_invalid", {"vocab_size": 95}),
        ("weights_malformed", {"intermediate_size": 111}),
        ("weights_malformed", {"num_hidden_layers": 4}),
        ("weights_rejected", {"num_hidden_layers": 2}),
        ("weights_malformed", {"attention_bias": True}),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, code, change):
    saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(LoadError) as refusal:
        LlamaModel.load(tmp_path, torch.float32, "cpu")
    assert refusal.value.code == code
