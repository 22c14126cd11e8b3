"""How a replica's memory is divided, and what of a version a node refuses."""

import dataclasses

import pytest
from msgspec.structs import replace

from gpuagent.agent.backends import loading
from gpuagent.agent.backends import torch as backend
from gpuagent.agent.backends.base import LoadedModel, LoadError
from gpuagent.agent.backends.memory import (
    BLOCK_SIZE,
    MAX_DEFAULT_SWAP_BYTES,
    check_encoder,
    divide,
)
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.sizes import at_least, size_text
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.precision import of_dtype, precision
from gpuagent.models.config import estimate_memory, read_config
from gpuagent.models.encoder_config import read_encoder_config
from gpuagent.models.errors import LoadError as ModelError
from gpuagent.wire.messages import Device, ReplicaSpec
from tests.agent.harness import GIB, spec
from tests.engine.tiny_encoder import tiny_encoder
from tests.engine.tiny_model import wide_tiny_model
from tests.models.awq_export import export

MIB = 1 << 20
CONFIG = read_config(wide_tiny_model())
LENGTH = 256
ONE = (LENGTH + BLOCK_SIZE) * CONFIG.kv_bytes_per_token("float32")


def fixed(formats, config=CONFIG):
    return estimate_memory(config, formats.dtype, 0, 512, formats.quantization)


@pytest.mark.parametrize("quantization", ["none", "int8", "int8-weight-only", "awq-int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "int8"])
@pytest.mark.parametrize("memory", [8 * MIB, 40 * MIB, 800 * MIB])
def test_the_parts_never_exceed_the_whole(quantization, kv_cache_dtype, memory):
    formats = of_dtype("float32", quantization, kv_cache_dtype)
    parts = divide(spec(memory_bytes=memory), CONFIG, formats, LENGTH)
    assert fixed(formats) + parts.kv_bytes + parts.swap_bytes <= memory
    assert parts.swap_bytes <= MAX_DEFAULT_SWAP_BYTES


def test_an_int8_cache_is_counted_as_int8():
    """With scales: 36 bytes instead of 128 for a head of 32, so 3.6 times the tokens."""
    wide, narrow = (of_dtype("float32", "none", kv) for kv in ("float32", "int8"))
    assert wide.kv_bytes_per_token(CONFIG) / narrow.kv_bytes_per_token(CONFIG) == 128 / 36
    memory = fixed(wide) + 4 * ONE
    tokens = [
        divide(spec(memory_bytes=memory, max_batch=64, swap_bytes=0), CONFIG, each, LENGTH).kv_bytes
        // each.kv_bytes_per_token(CONFIG)
        for each in (wide, narrow)
    ]
    assert tokens[1] / tokens[0] == pytest.approx(128 / 36, rel=0.01)


def test_swap_space_is_inside_the_budget():
    formats = of_dtype("float32")
    memory = fixed(formats) + 4 * ONE
    asked = divide(spec(memory_bytes=memory, swap_bytes=ONE), CONFIG, formats, LENGTH)
    assert (asked.swap_bytes, asked.kv_bytes) == (ONE, 3 * ONE)
    none = divide(spec(memory_bytes=memory, swap_bytes=0), CONFIG, formats, LENGTH)
    assert (none.swap_bytes, none.kv_bytes) == (0, 4 * ONE)
    chosen = divide(spec(memory_bytes=memory), CONFIG, formats, LENGTH)
    assert chosen.swap_bytes == 4 * ONE // 8
    with pytest.raises(LoadError, match="of swap space"):
        divide(spec(memory_bytes=memory, swap_bytes=4 * ONE), CONFIG, formats, LENGTH)


def test_room_for_one_sequence_is_never_given_to_swap_space():
    formats = of_dtype("float32")
    parts = divide(spec(memory_bytes=fixed(formats) + ONE), CONFIG, formats, LENGTH)
    assert (parts.kv_bytes, parts.swap_bytes) == (ONE, 0)
    with pytest.raises(LoadError, match="insufficient_memory"):
        divide(spec(memory_bytes=fixed(formats) + ONE - 1), CONFIG, formats, LENGTH)


@pytest.mark.parametrize("swap", [None, 0, 3 * MIB])
@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_a_refusal_says_what_would_do(role, swap):
    """That many MiB are enough; one fewer is refused with the same advice."""
    formats = of_dtype("float32")
    short = spec(memory_bytes=MIB, swap_bytes=swap)
    with pytest.raises(LoadError, match=r"more than the budget of 1\.0 MiB; give it") as refused:
        divide(short, CONFIG, formats, LENGTH, role=role)
    advice = refused.value.message.partition("give it at least ")[2]
    least = int(advice.removesuffix(" MiB"))
    divide(replace(short, memory_bytes=least * MIB), CONFIG, formats, LENGTH, role=role)
    with pytest.raises(LoadError, match=f"give it at least {advice}$"):
        divide(replace(short, memory_bytes=(least - 1) * MIB), CONFIG, formats, LENGTH, role=role)


def test_an_encoder_is_told_what_would_do():
    config = read_encoder_config(tiny_encoder())
    short = spec(memory_bytes=1000, max_model_len=LENGTH)
    with pytest.raises(LoadError, match=r"budget of 1000 bytes; give it at least 2 MiB$"):
        check_encoder(short, config, "float32")
    check_encoder(replace(short, memory_bytes=2 * MIB), config, "float32")


def test_sizes_read_well():
    assert [size_text(n) for n in (0, 1023, 1536, 10 * MIB, 3 * GIB // 2)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "10.0 MiB", "1.5 GiB",
    ]  # fmt: skip
    assert (at_least(MIB), at_least(MIB + 1)) == ("1 MiB", "2 MiB")


def test_a_draft_models_weights_and_cache_are_inside_the_budget():
    formats = of_dtype("float32")
    memory = fixed(formats) + fixed(formats.of_draft()) + 2 * ONE
    parts = divide(spec(memory_bytes=memory, swap_bytes=0), CONFIG, formats, LENGTH, CONFIG)
    assert parts.kv_bytes == 2 * ONE
    with pytest.raises(LoadError, match="insufficient_memory"):
        short = spec(memory_bytes=memory - 1, swap_bytes=0)
        divide(short, CONFIG, formats, LENGTH, CONFIG)


@pytest.mark.parametrize("quantization", ["none", "int8", "int8-weight-only"])
def test_the_estimate_of_weights_is_what_is_loaded(quantization):
    """Up to 15 %: padding, tables and scales are small, and differ from format to format."""
    loaded = load(replica(quantization=quantization))
    measured = loaded.engine.stats().weights_bytes
    assert CONFIG.weights_bytes("float32", quantization) == pytest.approx(measured, rel=0.15)


def test_the_estimate_of_an_awq_checkpoint_follows_its_groups(tmp_path):
    folder = export(wide_tiny_model(), tmp_path / "awq", 32)
    measured = TorchEngine.load(folder, num_blocks=4, quantization="awq-int4").stats().weights_bytes
    config = read_config(folder)
    assert config.weights_bytes("float32", "awq-int4") == pytest.approx(measured, rel=0.2)
    coarse = dataclasses.replace(config, awq_group=128)
    saved = config.weights_bytes("float32", "awq-int4") - coarse.weights_bytes(
        "float32", "awq-int4"
    )
    assert saved == config.num_matrix_parameters * 8 * (1 / 32 - 1 / 128)


# --- what a node refuses ------------------------------------------------------------------------
def replica(**fields: object) -> ReplicaSpec:
    folder = wide_tiny_model()
    return spec(source=f"file://{folder}", max_model_len=LENGTH, memory_bytes=64 * MIB, **fields)


def load(wanted: ReplicaSpec, tmp_path="/tmp/engine-test-models") -> LoadedModel:
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB)
    config = WorkerConfig(device, 1, str(tmp_path), (str(wide_tiny_model().parent),))
    return backend.load_torch(wanted, config, lambda *_: None)


def test_every_choice_reaches_the_engine(tmp_path):
    """The scheduler's policy, the cache's format, swap space and who guesses."""
    folder = wide_tiny_model()
    choices = {"policy": "prefill-first", "kv_cache_dtype": "int8", "swap_bytes": MIB}
    wanted = replica(**choices, speculation="draft", draft_model=f"file://{folder}")
    engine = load(wanted, tmp_path).engine
    config = engine._scheduler.config
    assert config.policy == "prefill-first"
    assert engine.executor.kv.is_int8 and engine.draft.kv.is_int8
    block = BLOCK_SIZE * CONFIG.kv_bytes_per_token("int8")
    assert config.num_host_blocks == MIB // block
    plain = load(replica(), tmp_path).engine
    assert plain.draft is None and not plain.executor.kv.is_int8


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"quantization": "fp8"}, "quantization_unsupported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype_unsupported"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype_unsupported"),
        ({"tensor_parallel": 2}, "tensor_parallel_unsupported"),
        ({"speculation": "draft", "draft_model": "ftp://x"}, "source_not_allowed"),
    ],
)
def test_what_this_node_cannot_load_is_refused_with_a_code(fields, code, tmp_path):
    with pytest.raises(LoadError) as refused:
        load(replica(**fields), tmp_path)
    assert refused.value.code == code


def test_on_a_gpu_full_precision_is_bfloat16():
    assert precision("none", "auto", "cuda").dtype == "bfloat16"
    with pytest.raises(ModelError, match="kv_cache_dtype_unsupported"):
        precision("none", "float32", "cuda")


def test_slow_bf16_is_said_in_the_log_and_to_the_agent(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(loading, "has_fast_bf16", lambda: False)
    slow = load(replica(quantization="bf16"), tmp_path)
    assert slow.warning[0] == "slow_bf16" and "slow_bf16" in caplog.text
    monkeypatch.setattr(loading, "has_fast_bf16", lambda: True)
    assert load(replica(quantization="bf16"), tmp_path).warning == ("", "")
    assert load(replica(), tmp_path).warning == ("", "")
