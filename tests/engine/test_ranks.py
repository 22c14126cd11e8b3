"""Several ranks compute what one engine does, token by token; and what part of a model each has."""

import random
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuagent.engine.collective import LARGE
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.lines import Line, Met, framed
from gpuagent.engine.meeting import Board, BoardElsewhere
from gpuagent.engine.model_runner import ExecutorLost
from gpuagent.engine.ranks import Rank
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.models.config import read_config
from gpuagent.models.errors import LoadError
from gpuagent.models.llama import LlamaModel
from gpuagent.models.loader import load_tensors
from gpuagent.models.sharding import Slices, part_of, shard_config
from tests.engine.group import Group
from tests.engine.real_model import real_model
from tests.engine.tiny_model import tiny_model, uneven_tiny_model, wide_tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]

MODELS = {  # a folder, ranks, and what computes
    "plain": (tiny_model, 2, "torch-tp2"),
    "native kernels": (wide_tiny_model, 2, "native-"),
    "2 + 1 KV heads": (uneven_tiny_model, 2, "torch-tp2"),
    "three ranks": (uneven_tiny_model, 3, "torch-tp3"),
}
OPTIONS = {"num_blocks": 24, "max_batch_tokens": 16, "max_num_seqs": 4, "swap_bytes": 0}


def requests(num: int, seed: int, longest: int = 40) -> list[GenerationRequest]:
    """Every other prompt begins as another one; priorities mixed, so that some are preempted."""
    chance = random.Random(seed)
    shared = [chance.randrange(256) for _ in range(longest)]
    made = []
    for i in range(num):
        own = [chance.randrange(256) for _ in range(chance.randint(1, longest))]
        prompt = shared[: chance.randint(1, longest)] + own[:5] if i % 2 else own
        params = SamplingParams(chance.randint(1, 24), temperature=0.0, ignore_eos=True)
        latency = chance.choice(list(LatencyClass))
        made.append(GenerationRequest(f"r{i}", tuple(prompt), params, latency))
    return made


def served(
    engine: TorchEngine, asked: Sequence[GenerationRequest], seed: int, cancels: bool = True
) -> dict[str, tuple[list[int], str]]:
    """Tokens and end of each request, joining and leaving at random between steps."""
    chance, waiting = random.Random(seed), list(asked)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
    ends: dict[str, str] = {}
    while waiting or engine.has_work():
        while waiting and (chance.random() < 0.4 or not engine.has_work()):
            engine.add(waiting.pop(0))
        if cancels and chance.random() < 0.03:
            engine.cancel(chance.choice([*tokens]))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
    return {name: (tokens[name], ends[name]) for name in tokens}


@pytest.mark.parametrize("case", MODELS)
def test_ranks_give_the_tokens_of_one_engine(case: str) -> None:
    """Greedy, in batches that requests join and leave at random, in chunks, out of a cache that is
    too small for all of them: each request's tokens are those that it gets alone."""
    model, size, executor = MODELS[case]
    asked = requests(40, seed=size)
    alone = TorchEngine.load(model(), num_blocks=200, max_num_seqs=1)
    expected = served(alone, asked, 0, cancels=False)
    with Group(model(), size, **OPTIONS) as engine:
        for seed in (1, 2):
            found = served(engine, asked, seed)
            for name, (tokens, end) in found.items():
                whole = expected[name][0]
                assert tokens == (whole[: len(tokens)] if end == "cancelled" else whole), name
            assert {end for _, end in found.values()} == {"length", "cancelled"}
        stats = engine.stats()
        assert stats.executor.startswith(executor) and stats.executor.endswith(f"-tp{size}")
        assert stats.num_cached_tokens > 0 and stats.num_recomputed > 0
        assert stats.num_free_blocks == stats.num_blocks == OPTIONS["num_blocks"]


def test_guessing_by_lookup_changes_no_token() -> None:
    asked = requests(12, seed=5)
    expected = served(TorchEngine.load(tiny_model(), num_blocks=200), asked, 0, cancels=False)
    with Group(tiny_model(), 2, **OPTIONS, speculation="ngram") as engine:
        assert served(engine, asked, 1, cancels=False) == expected
        assert engine.stats().spec_decode_num_drafts > 0


def test_an_int8_cache_under_the_native_kernels() -> None:
    asked = requests(12, seed=8)
    options: dict[str, Any] = {"kv_cache_dtype": "int8"}
    whole = TorchEngine.load(wide_tiny_model(), num_blocks=200, **options)
    expected = served(whole, asked, 0, cancels=False)
    with Group(wide_tiny_model(), 2, **OPTIONS, **options) as engine:
        assert served(engine, asked, 1, cancels=False) == expected
        assert engine.executor.name.startswith("native-")


def test_ranks_that_made_different_engines_do_not_begin() -> None:
    """Their sums would not be of the same rows."""
    group = Group(tiny_model(), 2, **OPTIONS)
    group.own_options = {"max_num_seqs": 2}
    group.is_broken = True
    with pytest.raises(LoadError) as refused, group:
        pass
    assert refused.value.code == "group_mismatch"
    group.__exit__(None, None, None)


def test_half_precision_and_an_int8_cache_are_divided_too() -> None:
    """A token's int8 scale is of its KV head, so the cache's numbers are those of one engine."""
    asked = requests(12, seed=6)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "block_size": 8}
    whole = TorchEngine.load(uneven_tiny_model(), num_blocks=200, **options)
    expected = served(whole, asked, 0, cancels=False)
    with Group(uneven_tiny_model(), 2, **OPTIONS, **options) as engine:
        assert served(engine, asked, 1, cancels=False) == expected
    with Group(uneven_tiny_model(), 2, **OPTIONS, dtype="bfloat16") as engine:
        found = served(engine, asked, 1, cancels=False)
        assert {end for _, end in found.values()} == {"length"}


@pytest.mark.parametrize("model", [tiny_model, wide_tiny_model])
def test_what_goes_wrong_on_a_later_rank_alone_ends_the_request(
    model: Callable[[], Path], tmp_path: Path
) -> None:
    """Values of the last KV head, which is rank 1's, overflow in the last layer, in a chunk of a
    prompt that asks for no scores: rank 0 hears of it, and nothing is kept of the request."""
    folder = tmp_path / "overflowing"
    shutil.copytree(model(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][-1] = 3e38
    save_file(tensors, folder / "model.safetensors")
    params = SamplingParams(4, temperature=0.0)
    asked = GenerationRequest("r", tuple(range(1, 41)), params)
    for engine in (TorchEngine.load(folder, num_blocks=24, max_batch_tokens=16), None):
        with nullcontext(engine) if engine else Group(folder, 2, **OPTIONS) as running:
            for _ in range(2):
                running.add(asked)
                codes = [out.error_code for _ in range(4) for out in running.step()]
                assert codes == ["numerical_error"]
                assert running.stats().num_cached_tokens == 0


@pytest.mark.model
def test_the_real_model_on_two_ranks() -> None:
    """SmolLM2's three KV heads as two and one."""
    chance = random.Random(3)
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    prompts = [[chance.randrange(1000, 40000) for _ in range(n)] for n in (3, 20, 45, 70, 300)]
    asked = [GenerationRequest(f"r{i}", tuple(p), params) for i, p in enumerate(prompts)]
    folder = real_model().path
    whole = TorchEngine.load(folder, num_blocks=60, max_batch_tokens=128)
    expected = served(whole, asked, 0, cancels=False)
    del whole
    assert 128 * read_config(folder).hidden_size > LARGE, "both ways of summing are used"
    with Group(folder, 2, num_blocks=60, max_batch_tokens=128, swap_bytes=0) as engine:
        assert served(engine, asked, 1, cancels=False) == expected
        assert engine.executor.name.startswith("native-")


# --- death --------------------------------------------------------------------------------------
def test_a_rank_that_dies_ends_the_engine_and_the_other_ranks() -> None:
    """The engine's error is no request's: nothing is tried again."""
    group = Group(uneven_tiny_model(), 3, **OPTIONS)
    with group as engine:
        group.is_broken = True
        params = SamplingParams(200, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest("long", (1, 2, 3), params))
        engine.step()
        group.processes[1].kill()
        with pytest.raises(ExecutorLost):
            while engine.has_work():
                engine.step()
        assert group.processes[0].wait(20) != 0, "its sum failed as well"


def test_a_rank_that_does_not_come_in_time_is_a_typed_failure() -> None:
    ours, theirs = socket.socketpair()
    rank = Rank(0, 2, [Line(ours)])
    with theirs, pytest.raises(LoadError) as refused:
        rank.connect(1.0)
    assert refused.value.code == "group_incomplete"
    other, silent = socket.socketpair()
    with silent, pytest.raises(LoadError) as refused:
        Rank(1, 2, [Line(other)]).connect(0.2)
    assert refused.value.code == "group_incomplete"


@pytest.mark.parametrize(
    "said", [b"", b"\x00\x00\x00\x03\x80\x04\x95", b"\xff\xff\xff\xff", framed(Met())[:-1]]
)
def test_what_is_no_order_is_the_end_of_a_line(said: bytes) -> None:
    """From another machine too: nothing is built of it, and no more is read than an order has."""
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    theirs.close()
    with pytest.raises(EOFError):
        Line(ours).next(5.0)


def test_a_rank_that_is_lost_while_they_meet_is_no_longer_waited_for() -> None:
    board = Board(60.0)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=board.serve, args=(Line(ours),))
    thread.start()
    other = BoardElsewhere(Line(theirs), 5.0)
    other.set("a", b"1")
    assert (board.get("a"), other.get("a"), other.add("n", 2), board.add("n", 3)) == (
        b"1", b"1", 2, 5,
    )  # fmt: skip
    theirs.close()
    with pytest.raises(RuntimeError, match="another rank was not ready"):
        board.get("b")
    thread.join(5)


# --- parts --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("total", "size"), [(3, 2), (3, 3), (65, 2), (1536, 5), (9, 4)])
def test_parts_cover_all_once_and_differ_by_one_at_most(total: int, size: int) -> None:
    parts = [part_of(total, rank, size) for rank in range(size)]
    assert [i for part in parts for i in range(total)[part]] == list(range(total))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_the_example_of_the_modules_docstring() -> None:
    """SmolLM2's rows, as its checkpoint has them."""
    config = read_config(real_model().path)
    assert (config.num_heads, config.num_kv_heads) == (9, 3)
    first, second = (shard_config(config, rank, 2) for rank in range(2))
    assert [(c.num_heads, c.num_kv_heads, c.intermediate_size) for c in (first, second)] == [
        (6, 2, 768),
        (3, 1, 768),
    ]
    rows = torch.arange(576).unsqueeze(1).expand(576, 4)
    part = Slices(config, 1, 2).cut("model.layers.0.self_attn.q_proj.weight", rows)
    assert (int(part[0, 0]), int(part[-1, 0])) == (384, 575)


def test_slices_are_views_and_what_is_not_divided_is_whole() -> None:
    """No weight is copied; the bias of the projection out of a block is one rank's alone."""
    config = read_config(uneven_tiny_model())
    whole = load_tensors(uneven_tiny_model())
    name = "model.layers.0.self_attn.{}"
    parts = [
        {key: Slices(config, rank, 2).cut(key, tensor) for key, tensor in whole.items()}
        for rank in range(2)
    ]
    for key in ("q_proj.weight", "k_proj.bias", "v_proj.weight"):
        joined = torch.cat([part[name.format(key)] for part in parts])
        assert torch.equal(joined, whole[name.format(key)])
        assert parts[0][name.format(key)].data_ptr() == whole[name.format(key)].data_ptr()
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(torch.cat([part[down] for part in parts], 1), whole[down])
    bias = name.format("o_proj.bias")
    assert torch.equal(parts[0][bias], whole[bias]) and not parts[1][bias].any()
    for key in ("model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_norm.weight"):
        tensor = whole.get(key, torch.ones(16))
        assert Slices(config, 1, 2).cut(key, tensor) is tensor


def test_a_checkpoint_of_another_shape_is_refused_before_it_is_cut() -> None:
    config = read_config(tiny_model())
    with pytest.raises(LoadError) as refused:
        Slices(config, 0, 2).cut("model.layers.0.mlp.up_proj.weight", torch.ones(63, 48))
    assert refused.value.code == "weights_malformed"


@pytest.mark.parametrize("size", [0, 3])
def test_more_ranks_than_kv_heads_are_refused(size: int) -> None:
    config = read_config(tiny_model())
    with pytest.raises(LoadError) as refused:
        shard_config(config, 0, size)
    assert refused.value.code == "tensor_parallel_unsupported"


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int8-weight-only"},
        {"speculation": "draft", "draft_path": "x"},
        {"swap_bytes": 1 << 20},
    ],
)
def test_what_a_group_does_not_do_is_refused(options: dict[str, Any]) -> None:
    place = Rank(1, 2, [None])  # type: ignore[list-item]
    with pytest.raises(LoadError) as refused:
        TorchEngine.load(tiny_model(), num_blocks=8, rank=place, **{"swap_bytes": 0, **options})
    assert refused.value.code == "tensor_parallel_unsupported"


def test_a_rank_reads_only_its_part() -> None:
    """Parameters of two ranks: those of the layers once, norms and embeddings twice."""
    config = read_config(uneven_tiny_model())
    ranks = [shard_config(config, rank, 2) for rank in range(2)]
    assert sum(r.num_matrix_parameters for r in ranks) == config.num_matrix_parameters
    tensors = load_tensors(uneven_tiny_model(), Slices(config, 1, 2).cut)
    model = LlamaModel(ranks[1], tensors)
    whole = LlamaModel.load(uneven_tiny_model(), torch.float32, "cpu")
    assert model.weights_bytes < whole.weights_bytes
