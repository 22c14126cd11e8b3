"""The native kernels against torch, and what only they promise: a token's results are the same
bits whoever is in the batch and however its prompt was cut."""

import ctypes
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from gpuagent.engine.batch import Work
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.executors import make_executor
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.native import build, structs
from gpuagent.engine.native.build import KernelsUnavailable, kernels
from gpuagent.engine.native.executor import NativeExecutor, check_supported
from gpuagent.engine.native.packing import interleaved, pack, stacked
from gpuagent.engine.precision import of_dtype
from gpuagent.engine.scheduler import SchedulerConfig
from gpuagent.models.config import read_config
from gpuagent.models.layers import Linear
from gpuagent.models.llama import LlamaModel
from tests.engine.tiny_model import tiny_model, wide_tiny_model

PRECISIONS = ["none", "int8"]
SCHEDULING = SchedulerConfig(num_blocks=40, block_size=16, max_batch_tokens=200)


def executor(quantization="none", monkeypatch=None):
    """The small model on the native kernels, or on torch if there is a monkeypatch."""
    if monkeypatch:
        monkeypatch.setenv(build.SWITCH_VARIABLE, "torch")
        kernels.cache_clear()
    model = LlamaModel.load(wide_tiny_model(), torch.float32, "cpu")
    made = make_executor(model, SCHEDULING, of_dtype("float32", quantization))
    kernels.cache_clear()
    return made


def work(name, tokens, start, blocks):
    return Work(name, start, tuple(tokens), tuple(blocks), True)


def prompt(seed, num):
    return torch.randint(0, 256, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_linear(packed, x):
    num, inputs = x.shape
    padded = -(-packed.struct.outputs // 32) * 32
    y = torch.full((num, padded), math.nan)
    buffers = [
        torch.zeros(num, inputs, dtype=torch.int8),
        torch.zeros(num, inputs // 32),
        torch.zeros(num, inputs // 32, dtype=torch.int32),
    ]
    space = structs.Workspace(0, 0, 0, 0, 0, *(b.data_ptr() for b in buffers))
    library = kernels()
    team = library.team_new(2)
    arguments = ctypes.byref(packed.struct), ctypes.byref(space), x.data_ptr(), num, y.data_ptr()
    library.linear_run(team, *arguments)
    library.team_delete(team)
    return y[:, : packed.struct.outputs]


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("num", [1, 2, 5, 6, 7, 12, 13, 24, 25, 70])
def test_a_product_is_torchs_product(num, is_int8):
    """All tile heights; outputs that fill no whole panel, and a bias."""
    torch.manual_seed(num)
    weight, bias, x = torch.randn(77, 96) * 0.1, torch.randn(77), torch.randn(num, 96)
    packed = pack(kernels(), [Linear(weight, bias)], stacked([77]), is_int8)
    expected = functional.linear(x, weight, bias)
    tolerance = 0.05 if is_int8 else 1e-5
    torch.testing.assert_close(run_linear(packed, x), expected, rtol=tolerance, atol=tolerance)


def test_int8_is_exact_where_nothing_is_lost():
    """Integers up to 127 survive quantisation, so the product is theirs to the last bit."""
    weight = torch.randint(-127, 128, (64, 64)).float()
    x = torch.randint(-127, 128, (9, 64)).float()
    weight[:, 0] = 127
    x[:, ::32] = 127
    packed = pack(kernels(), [Linear(weight)], stacked([64]), True)
    torch.testing.assert_close(run_linear(packed, x), x @ weight.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_of_a_product_is_the_same_bits_in_any_company(is_int8):
    weight, x = torch.randn(64, 160), torch.randn(30, 160)
    packed = pack(kernels(), [Linear(weight)], stacked([64]), is_int8)
    together = run_linear(packed, x)
    for i in (0, 11, 29):
        assert torch.equal(run_linear(packed, x[i : i + 1].contiguous())[0], together[i])


def test_gate_and_up_take_turns_of_16():
    gate, up = interleaved(48)
    assert gate.tolist() == [*range(16), *range(32, 48), *range(64, 80)]
    assert sorted(gate.tolist() + up.tolist()) == list(range(96))


def steps():
    """Prompts in one and in two chunks beside decoding requests, over scattered blocks."""
    a, b, c = prompt(1, 150), prompt(2, 40), prompt(3, 9)
    blocks = {"a": [7, 2, 30, 11, 5, 6, 21, 22, 23, 9], "b": [1, 39, 3], "c": [0]}
    yield [work("a", a[:70], 0, blocks["a"]), work("c", c[:8], 0, blocks["c"])]
    yield [work("c", c[8:], 8, blocks["c"]), work("a", a[70:], 70, blocks["a"])]
    yield [work("a", [17], 150, blocks["a"]), work("b", b, 0, blocks["b"])]
    yield [
        work("a", [18], 151, blocks["a"]),
        work("b", [19], 40, blocks["b"]),
        work("c", [20], 9, blocks["c"]),
    ]


@torch.inference_mode()
def test_against_torch(monkeypatch):
    """Hidden states and logits of mixed steps, and after copying and erasing."""
    native, reference = executor(), executor(monkeypatch=monkeypatch)
    assert native.name.startswith("native-") and reference.name == "torch"
    for works in steps():
        ours, theirs = native.forward(works).clone(), reference.forward(works)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(native.logits(ours), reference.logits(theirs), rtol=0, atol=1e-3)
    copied = [work("d", [21], 10, [33])]
    for each in (native, reference):
        each.copy_blocks([Copy(0, 33), Copy(33, 34)])
        each.erase(work("d", [0, 0], 3, [33]))
    torch.testing.assert_close(
        native.forward(copied), reference.forward(copied), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("quantization", PRECISIONS)
@torch.inference_mode()
def test_logits_do_not_depend_on_neighbours_or_chunks(quantization):
    """Bit for bit: alone and whole, or in pieces of any size among others."""
    alone, batched = executor(quantization), executor(quantization)
    tokens, blocks = prompt(5, 100), [4, 8, 15, 16, 23, 31, 2]
    expected = alone.logits(alone.forward([work("x", tokens, 0, blocks)])[-1:]).clone()
    start = 0
    for size in (1, 33, 1, 2, 50, 13):
        neighbours = [work(f"n{i}", prompt(i, 1 + i), 0, [25 + i]) for i in range(size % 6)]
        piece = work("x", tokens[start : start + size], start, blocks)
        hidden = batched.forward([*neighbours, piece])
        start += size
    assert torch.equal(batched.logits(hidden)[-1:], expected)


@torch.inference_mode()
def test_nan_stays_with_its_request():
    native = executor()
    native._tensors[-3][200] = math.nan  # the embedding
    hidden = native.forward([work("bad", [3, 200], 0, [1]), work("good", [3, 4], 0, [2])])
    assert torch.isfinite(hidden).all(-1).tolist()[1:] == [False, True, True]


def test_int8_weights_take_a_byte_each():
    """The embedding stays in float32; norms, scales, biases and rotation tables are the rest."""
    engine = TorchEngine.load(wide_tiny_model(), num_blocks=8, quantization="int8")
    config = read_config(wide_tiny_model())
    assert engine.stats().executor.startswith("native-")
    embedding, rest = 259 * 128, 30_000
    num_matrix = config.num_parameters - embedding
    assert num_matrix < engine.stats().weights_bytes - 4 * embedding < num_matrix + 4 * rest


def test_shapes_that_do_not_fit_are_computed_by_torch():
    config = read_config(tiny_model())
    with pytest.raises(KernelsUnavailable, match="multiple"):
        check_supported(config, 16, "cpu")
    assert TorchEngine.load(tiny_model(), num_blocks=8).stats().executor == "torch"
    with pytest.raises(KernelsUnavailable, match="block size"):
        check_supported(read_config(wide_tiny_model()), 4, "cpu")
    with pytest.raises(KernelsUnavailable, match="CPU"):
        check_supported(read_config(wide_tiny_model()), 16, "cuda")


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_without_a_compiler_torch_computes(monkeypatch, quantization):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.cache_clear()
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        kernels()
    engine = TorchEngine.load(wide_tiny_model(), num_blocks=8, quantization=quantization)
    assert engine.stats().executor == "torch"
    kernels.cache_clear()


def test_a_compiler_that_fails_is_a_reason_not_a_crash(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 || { echo no luck >&2; exit 1; }\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    kernels.cache_clear()
    with pytest.raises(KernelsUnavailable, match="no luck"):
        kernels()
    kernels.cache_clear()


def test_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    kernels.cache_clear()
    kernels()
    kernels.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    kernels()
    kernels.cache_clear()
    assert len(list(tmp_path.glob("decoder-*.so"))) == 1


def test_of_several_that_start_at_once_one_compiles(monkeypatch, tmp_path):
    """And what a killed one left behind is gone afterwards."""
    compiler, cache = tmp_path / "slow", tmp_path / "cache"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f'while [ "$1" != -o ]; do shift; done; echo >> {tmp_path}/runs; sleep 0.3; : > "$2"\n'
    )
    compiler.chmod(0o755)
    (cache / "unfinished-killed").mkdir(parents=True)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(cache))
    with ThreadPoolExecutor(3) as threads:
        (path,) = set(threads.map(build._library, [str(compiler)] * 3))
    assert (tmp_path / "runs").read_text() == "\n"
    assert sorted(cache.iterdir()) == [path, cache / "lock"]


def test_the_kernels_compile_without_warnings():
    command = ["g++", *build.FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*command, str(build.SOURCES / "decoder.cpp")], check=True, timeout=60)


def test_a_team_ends_its_threads():
    library = kernels()
    before = len(list(Path("/proc/self/task").iterdir()))
    team = library.team_new(3)
    assert len(list(Path("/proc/self/task").iterdir())) == before + 2
    library.team_delete(team)
    assert len(list(Path("/proc/self/task").iterdir())) == before


def test_an_executor_deletes_its_team():
    native, deleted = executor(), []
    assert isinstance(native, NativeExecutor)
    library, native._library = native._library, SimpleNamespace(team_delete=deleted.append)
    team = native._team
    del native
    assert deleted == [team]
    library.team_delete(team)


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_a_step_scores_what_a_forward_pass_and_the_head_score(quantization):
    """In one call, with a last layer that computes the wanted rows alone: the same bits."""
    whole, stepped = executor(quantization), executor(quantization)
    works = [
        work("long", prompt(1, 45), 0, [0, 1, 2]),
        Work("part", 0, tuple(prompt(2, 20)), (3, 4), samples=False),
        work("one", [5], 0, [5]),
        Work("drafts", 0, tuple(prompt(3, 9)), (6,), samples=True, num_drafts=3),
    ]
    hidden = whole.forward(works)
    expected = whole.logits(hidden[[44, 65, 71, 72, 73, 74]])
    scores = stepped.step(works)
    assert torch.equal(scores.logits, expected)
    assert list(scores.best) == expected.argmax(-1).tolist()
    assert scores.unsound == ()
    following = [work("part", [7], 20, [3, 4])]
    assert torch.equal(stepped.step(following).logits, whole.logits(whole.forward(following)))
    assert stepped.step(works[1:2]).best == ()


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_a_step_names_the_works_that_leave_nan(quantization):
    native = executor(quantization)
    weights = native._tensors[0]  # the first norm's
    native.step([work("good", [3], 0, [1])])
    weights[0] = math.nan
    scores = native.step([work("bad", [3, 4], 0, [1]), work("worse", [4], 0, [2])])
    assert [each.request_id for each in scores.unsound] == ["bad", "worse"]
    assert scores.best == (-1, -1)
