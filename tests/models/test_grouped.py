"""Weights of 8 and 4 bits: what they mean, how AWQ stores them, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuagent.engine.batch import Work
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.native import build
from gpuagent.engine.native.build import kernels
from gpuagent.engine.request import GenerationRequest, SamplingParams
from gpuagent.models import awq
from gpuagent.models.config import read_config
from gpuagent.models.errors import LoadError
from gpuagent.models.grouped import GroupLinear, PackedInt4Linear, from_awq, unpacked
from gpuagent.models.layers import Linear
from tests.engine.tiny_model import wide_tiny_model
from tests.models.awq_export import export, packed, rounded, widened

GROUP = 32


def matrix(outputs=64, inputs=96, seed=0):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def read(weight, dtype=torch.float32, group=GROUP):
    codes, zeros, scales = rounded(weight, group)
    linear = from_awq(packed(codes.T), packed(zeros.T), scales.T, None, dtype)
    return linear, widened(codes, zeros, scales)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model as AWQ, and the same weights in float32."""
    target = tmp_path_factory.mktemp("awq") / "model"
    return export(wide_tiny_model(), target, GROUP), target.with_name("model-widened")


@pytest.fixture
def on_torch(monkeypatch):
    monkeypatch.setenv(build.SWITCH_VARIABLE, "torch")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def greedy(folder, num=20, **options):
    engine = TorchEngine.load(folder, num_blocks=40, **options)
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    for i in range(3):
        engine.add(GenerationRequest(str(i), tuple(range(i, i + 30)), sampling))
    tokens = {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens, engine


def test_eight_outputs_of_a_word_are_interleaved():
    """The word that every reader of AWQ agrees on: outputs 0 to 7 with the values 0 to 7."""
    word = packed(torch.arange(8).unsqueeze(0))
    assert word.tolist() == [[0x75316420]]
    assert unpacked(word).tolist() == [list(range(8))]
    negative = packed(torch.full((1, 8), 15))
    assert negative.tolist() == [[-1]] and unpacked(negative).tolist() == [[15] * 8]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_read_matrix_is_what_was_written_exactly(group):
    linear, expected = read(matrix(inputs=2 * group), group=group)
    assert isinstance(linear, GroupLinear) and linear.group == group
    assert torch.equal(linear.weight, expected)


def test_four_bits_are_within_half_a_step_of_the_weights():
    weight = matrix()
    steps = rounded(weight, GROUP)[2].float().repeat_interleave(GROUP, 1)
    off = (read(weight)[1] - weight).abs() / steps
    assert off.max() < 1.01 and off.mean() < 0.26, "a quarter of a step is the mean of rounding"


def test_eight_bits_are_within_half_a_step_of_the_weights():
    weight = matrix()
    linear = GroupLinear.rounded(Linear(weight))
    steps = weight.view(64, -1, 32).abs().amax(-1).repeat_interleave(32, 1) / 127
    assert ((linear.weight - weight).abs() / steps).max() < 0.501
    zero = GroupLinear.rounded(Linear(torch.zeros(32, 32)))
    assert not zero.weight.any(), "a group of zeros has no scale to divide by"


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_torchs_packed_kernel_agrees_with_the_widened_matrix(rows):
    """In bfloat16, so up to its eight bits."""
    linear, expected = read(matrix(), torch.bfloat16)
    assert isinstance(linear, PackedInt4Linear)
    x = matrix(rows, 96, seed=1).bfloat16()
    exact = x.double() @ expected.double().T
    assert (linear(x).double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_shapes_that_the_packed_kernel_does_not_take_are_widened():
    linear, expected = read(matrix(outputs=40), torch.bfloat16)
    assert isinstance(linear, GroupLinear)
    x = matrix(3, 96, seed=1)
    assert torch.allclose(linear(x), x @ expected.T, atol=1e-4)


def test_on_the_native_kernels_four_bits_give_the_bits_of_their_widened_matrix(folders):
    """Logits of a whole step, prompts and decoding, are equal to the last bit."""
    quantised, plain = (load_native(folder) for folder in folders)
    assert quantised.executor.name.startswith("native")
    for start, tokens in ((0, range(5, 45)), (40, (7,))):
        rows = [logits(engine, start, tokens) for engine in (quantised, plain)]
        assert torch.equal(*rows)
    assert quantised.stats().weights_bytes < 0.75 * plain.stats().weights_bytes


def load_native(folder):
    quantization = "awq-int4" if read_config(folder).awq_group else "none"
    return TorchEngine.load(folder, num_blocks=8, quantization=quantization)


def logits(engine, start, tokens):
    work = Work("a", start, tuple(tokens), (0, 1, 2), True)
    return engine.executor.logits(engine.executor.forward([work])).clone()


def test_native_and_torch_agree_on_an_awq_checkpoint(folders, on_torch):
    by_torch, engine = greedy(folders[0], quantization="awq-int4")
    assert engine.executor.name == "torch"
    kernels.cache_clear()
    plain, _ = greedy(folders[1])
    assert by_torch == plain


@pytest.mark.parametrize("quantization", ["int8-weight-only"])
def test_native_and_torch_round_to_the_same_eight_bits(quantization, on_torch):
    by_torch, engine = greedy(wide_tiny_model(), quantization=quantization)
    assert engine.executor.name == "torch"
    rounded_bytes = engine.stats().weights_bytes
    kernels.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(build.SWITCH_VARIABLE)
        native, engine = greedy(wide_tiny_model(), quantization=quantization)
    assert engine.executor.name.startswith("native") and native == by_torch
    assert engine.stats().weights_bytes == pytest.approx(rounded_bytes, rel=0.15)


def test_bfloat16_activations_use_torchs_packed_kernel(folders):
    """Chosen by a bfloat16 cache; the texts of a random model may differ, the numbers hardly."""
    engine = TorchEngine.load(folders[0], num_blocks=8, dtype="bfloat16", quantization="awq-int4")
    exact = load_native(folders[1])
    rows = [logits(each, 0, range(5, 45))[-1].float() for each in (engine, exact)]
    assert torch.corrcoef(torch.stack(rows))[0, 1] > 0.995


def test_a_checkpoint_is_loaded_as_what_it_is(folders):
    with pytest.raises(LoadError, match="checkpoint_mismatch"):
        TorchEngine.load(folders[0], num_blocks=8)
    with pytest.raises(LoadError, match="checkpoint_mismatch"):
        TorchEngine.load(folders[1], num_blocks=8, quantization="awq-int4")


PUBLISHED = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}


def test_a_published_configuration_is_read():
    assert awq.group_size({}) == 0
    assert awq.group_size({"quantization_config": PUBLISHED}) == 128
    more = {"version": "GEMM", "do_fuse": False, "modules_to_not_convert": ["lm_head"]}
    assert awq.group_size({"quantization_config": {**PUBLISHED, **more}}) == 128


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"bits": 8},
        {"group_size": -1},
        {"group_size": "128"},
        {"group_size": True},
        {"version": "gemv"},
        {"zero_point": False},
        {"modules_to_not_convert": ["model.layers.0.self_attn"]},
        {"modules_to_not_convert": "lm_head"},
        {"desc_act": True},
    ],
)
def test_other_quantisations_are_refused(change):
    with pytest.raises(LoadError, match=r"config_(rejected|invalid)"):
        awq.group_size({"quantization_config": {**PUBLISHED, **change}})


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("qweight", lambda t: t[:-1], "weights_malformed"),
        ("qzeros", lambda t: t[:, :-1], "weights_malformed"),
        ("scales", lambda t: t * float("nan"), "weights_rejected"),
        ("qweight", lambda t: t.float(), "weights_malformed"),
        ("scales", lambda t: t.int(), "weights_rejected"),
    ],
)
def test_a_damaged_checkpoint_is_refused(folders, tmp_path, name, change, code):
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(folders[0] / "model.safetensors")
    key = f"model.layers.0.self_attn.q_proj.{name}"
    tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError) as refused:
        TorchEngine.load(tmp_path, num_blocks=8, quantization="awq-int4")
    assert refused.value.code == code


def test_a_group_that_does_not_divide_the_inputs_is_refused(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 256
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="whole groups of 256"):
        TorchEngine.load(tmp_path, num_blocks=8, quantization="awq-int4")
