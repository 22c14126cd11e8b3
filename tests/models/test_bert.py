"""BERT encoders against transformers and sentence-transformers' pooling, and files that are bad."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel

from gpuagent.models.bert import BertEncoder
from gpuagent.models.encoder_config import is_encoder, read_encoder_config
from gpuagent.models.errors import LoadError
from tests.engine.real_model import MINILM, real_model
from tests.engine.tiny_model import tiny_model

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
INPUTS = [[5, 9, 3], [7], [8, 8, 1, 4, 90, 2, 6], [1, 2, 3], list(range(64)), [3, 2, 1]]
POOLING = {"word_embedding_dimension": 48, "pooling_mode_cls_token": True}


def saved(folder, **options):
    """transformers' model with random weights and biases, saved to `folder`."""
    torch.manual_seed(3)
    reference = BertModel(BertConfig(**SMALL, **options), add_pooling_layer=False).eval()
    for parameter in reference.parameters():
        if parameter.dim() == 1:  # biases start at 0 and norms at 1, which would hide mistakes
            parameter.data += 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    return reference


def pipeline(folder, pooling, *, normalise):
    """The files by which sentence-transformers says what is made of the hidden states."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    steps = [
        {
            "idx": i,
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def padded(reference, inputs):
    """transformers' hidden states of one padded batch, and its mask (B, T, 1)."""
    longest = max(map(len, inputs))
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in inputs])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in inputs])
    hidden = reference(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden, mask.unsqueeze(-1)


def mean_pooled(hidden, mask):
    """sentence_transformers.models.Pooling, mode mean, then Normalize."""
    summed = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return normalize(summed, p=2, dim=1)


@torch.inference_mode()
def test_every_layer_is_that_of_transformers(tmp_path):
    reference = saved(tmp_path)
    model = BertEncoder.load(tmp_path, torch.float32, "cpu")
    tokens = INPUTS[4]
    theirs = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for ours, expected in zip(model.hidden_states([tokens]), theirs, strict=True):
        torch.testing.assert_close(ours, expected[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_vectors_without_padding_are_those_of_a_padded_batch(tmp_path):
    """Inputs of six lengths, in no order; without modules.json the normalised mean."""
    reference = saved(tmp_path)
    model = BertEncoder.load(tmp_path, torch.float32, "cpu")
    expected = mean_pooled(*padded(reference, INPUTS))
    torch.testing.assert_close(model.embed(INPUTS), expected, rtol=1e-5, atol=1e-5)
    alone = torch.cat([model.embed([each]) for each in INPUTS])
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_first_token_is_the_vector_where_the_folder_says_so(tmp_path):
    reference = saved(tmp_path)
    pipeline(tmp_path, POOLING, normalise=False)
    model = BertEncoder.load(tmp_path, torch.float32, "cpu")
    hidden, _ = padded(reference, INPUTS)
    torch.testing.assert_close(model.embed(INPUTS), hidden[:, 0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_checkpoint_with_a_head_or_a_pooler_is_read(tmp_path):
    """Names with `bert.` before them, and the pooler that embeddings do not use."""
    saved(tmp_path)
    plain = BertEncoder.load(tmp_path, torch.float32, "cpu").embed(INPUTS)
    path = tmp_path / "model.safetensors"
    renamed = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    renamed["bert.pooler.dense.weight"] = torch.zeros(48, 48)
    renamed["bert.pooler.dense.bias"] = torch.zeros(48)
    save_file(renamed, path)
    assert torch.equal(BertEncoder.load(tmp_path, torch.float32, "cpu").embed(INPUTS), plain)


def test_the_estimate_of_the_weights_is_what_they_take(tmp_path):
    saved(tmp_path)
    model = BertEncoder.load(tmp_path, torch.float32, "cpu")
    assert model.weights_bytes == read_encoder_config(tmp_path).weights_bytes("float32")


@pytest.mark.model
@torch.inference_mode()
def test_minilm_is_that_of_transformers():
    folder = real_model(MINILM).path
    config = read_encoder_config(folder)
    assert (config.max_length, config.pooling, config.normalise) == (256, "mean", True)
    reference = BertModel.from_pretrained(folder, local_files_only=True).eval()
    generator = torch.Generator().manual_seed(4)
    inputs = [
        [101, *torch.randint(1000, 30000, (length,), generator=generator).tolist(), 102]
        for length in (3, 40, 7, 254, 1, 40, 18, 100)
    ]
    ours = BertEncoder.load(folder, torch.float32, "cpu").embed(inputs)
    expected = mean_pooled(*padded(reference, inputs))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


# --- refusals -----------------------------------------------------------------------------------
BAD_CONFIGS = [
    ({"architectures": ["RobertaModel"]}, "config_rejected"),
    ({"architectures": ["LlamaForCausalLM"]}, "checkpoint_mismatch"),
    ({"auto_map": {"AutoModel": "evil.Model"}}, "config_rejected"),
    ({"hidden_act": "relu"}, "config_rejected"),
    ({"position_embedding_type": "relative_key"}, "config_rejected"),
    ({"is_decoder": True}, "config_rejected"),
    ({"hidden_size": 1 << 40}, "config_invalid"),
    ({"num_hidden_layers": -1}, "config_invalid"),
    ({"num_attention_heads": 0}, "config_invalid"),
    ({"num_attention_heads": 5}, "config_invalid"),
    ({"vocab_size": 95}, "config_invalid"),
    ({"layer_norm_eps": float("nan")}, "config_invalid"),
    ({"intermediate_size": 81}, "weights_malformed"),
    ({"num_hidden_layers": 2}, "weights_rejected"),
    ({"num_hidden_layers": 4}, "weights_malformed"),
]


@pytest.mark.parametrize("change,code", BAD_CONFIGS)
def test_a_bad_config_is_refused(tmp_path, change, code):
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LoadError) as refusal:
        BertEncoder.load(tmp_path, torch.float32, "cpu")
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "pooling,code",
    [
        ({"pooling_mode_max_tokens": True}, "config_rejected"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "config_rejected"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 12}, "config_invalid"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(tmp_path, pooling, code):
    saved(tmp_path)
    pipeline(tmp_path, pooling, normalise=True)
    with pytest.raises(LoadError) as refusal:
        read_encoder_config(tmp_path)
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "name,content,code",
    [
        ("modules.json", [{"type": "a.Transformer", "path": ""}], "config_rejected"),
        ("modules.json", [{"type": "a.Transformer"}], "config_invalid"),
        ("modules.json", {"type": "a"}, "config_invalid"),
        (
            "modules.json",
            [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../x"}],
            "config_invalid",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 65}, "config_invalid"),
        ("sentence_bert_config.json", {"max_seq_length": True}, "config_invalid"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "config_rejected"),
    ],
)
def test_a_bad_file_beside_the_config_is_refused(tmp_path, name, content, code):
    saved(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(LoadError) as refusal:
        read_encoder_config(tmp_path)
    assert refusal.value.code == code


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.LayerNorm.bias"][3] = float("nan")
    save_file(tensors, path)
    with pytest.raises(LoadError) as refusal:
        BertEncoder.load(tmp_path, torch.float32, "cpu")
    assert refusal.value.code == "weights_rejected"


def test_encoders_and_decoders_are_told_apart(tmp_path):
    saved(tmp_path)
    assert is_encoder(tmp_path)
    assert not is_encoder(tiny_model())
