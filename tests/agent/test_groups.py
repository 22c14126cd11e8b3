"""A replica on several devices, through a real agent: streams, deaths, refusals, what is left."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gpuagent.agent import groups, ipc
from gpuagent.agent.backends.memory import divide, divide_among
from gpuagent.agent.groups import Group
from gpuagent.engine.precision import precision
from gpuagent.models.config import read_config
from gpuagent.models.sharding import shard_config
from gpuagent.wire.messages import ReplicaSpec, Sampling, TokenizerBundle
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Agent, Control, eventually, spec
from tests.engine.tiny_model import tiny_model, uneven_tiny_model, wide_tiny_model

pytestmark = pytest.mark.timeout(240)

DEADLINE_S = 90.0  # two interpreters that import torch, where others work too
GREEDY = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)


def model(size: int, replica_id: str = "g.1.g1.0", **fields: Any) -> ReplicaSpec:
    folder = fields.pop("folder", uneven_tiny_model())
    values = {"source": f"file://{folder}", "max_model_len": 200, "max_batch": 4, **fields}
    return spec(replica_id, tensor_parallel=size, memory_bytes=GIB // 4, **values)


def start(start_agent: StartAgent, *options: str, num_devices: int = 2) -> Agent:
    devices = ",".join(["cpu:1GiB"] * num_devices)
    roots = ",".join(str(each().parent) for each in (uneven_tiny_model, wide_tiny_model))
    return start_agent("n1", "--devices", devices, "--file-roots", roots, *options)


def ranks(agent: Agent) -> dict[int, psutil.Process]:
    """The workers of groups, by rank."""
    found = {}
    for each in agent.workers():
        with suppress(psutil.Error, ValueError, AttributeError):  # it has just ended, or not begun
            if group := json.loads(each.cmdline()[-1]).get("group"):
                found[group["rank"]] = each
    return found


async def streamed(
    plane: Control, replica_id: str, num: int = 6, sampling: Sampling = GREEDY
) -> list[list[int]]:
    """Greedy tokens of prompts of several lengths, all at once."""
    asked = [
        await plane.generate(
            "n1", 0, replica_id, prompt_token_ids=tuple(range(i, 12 * i + 3)), sampling=sampling
        )
        for i in range(num)
    ]
    for request_id in asked:
        await plane.terminal(request_id, DEADLINE_S)
    return [plane.assert_contiguous(request_id) for request_id in asked]


async def test_a_group_streams_what_one_device_does(
    plane: Control, start_agent: StartAgent
) -> None:
    """Placed on both devices, counted with its share on each; cancelled and stopped as one."""
    agent = start(start_agent)
    await plane.place("n1", model(1, "one.1.g1.0"), model(2))
    await plane.replica("n1", "ready", "one.1.g1.0", DEADLINE_S)
    status = await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    assert sorted(ranks(agent)) == [0, 1]
    assert await streamed(plane, "g.1.g1.0") == await streamed(plane, "one.1.g1.0")
    assert status.estimate_bytes == GIB // 8 and 0 < status.charged_bytes <= GIB // 8
    await eventually(lambda: all(each.kv_pool_bytes > 0 for each in plane.telemetry["n1"].devices))

    long = msgspec.structs.replace(GREEDY, max_tokens=180)
    request_id = await plane.generate("n1", 0, "g.1.g1.0", sampling=long)
    await plane.started(request_id, 3)
    await plane.cancel("n1", request_id)
    assert (await plane.terminal(request_id)).finish_reason == "cancelled"
    assert await streamed(plane, "g.1.g1.0", 2)

    old = list(ranks(agent).values())
    await plane.place("n1", model(1, "one.1.g1.0"), generation=2)
    await eventually(lambda: not any(each.is_running() for each in old), DEADLINE_S)
    assert len(agent.workers()) == 1


async def test_a_simulated_group_has_its_workers_too(
    plane: Control, start_agent: StartAgent
) -> None:
    """For load and crash tests: the second rank computes nothing, and lives and dies with it."""
    agent = start(start_agent)
    await plane.place("n1", spec(tensor_parallel=2))
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", 500)
    await plane.started(request_id, 3)
    old = ranks(agent)
    old[1].kill()
    assert (await plane.terminal(request_id)).error_code == "engine_lost"
    await eventually(lambda: not old[0].is_running() and len(ranks(agent)) == 2)
    await plane.replica("n1", "ready")
    again = await plane.generate("n1", 5)
    assert (await plane.terminal(again)).finish_reason == "length"
    await plane.place("n1", generation=2)
    await eventually(lambda: not agent.workers())


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_any_rank_ends_the_replica_and_it_begins_anew(
    plane: Control, start_agent: StartAgent, rank: int
) -> None:
    """One typed end for its request, no process of the old group, and a new one that answers."""
    agent = start(start_agent)
    await plane.place("n1", model(2))
    await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    before = await streamed(plane, "g.1.g1.0", 2)
    old = ranks(agent)
    request_id = await plane.generate(
        "n1", 0, "g.1.g1.0", sampling=msgspec.structs.replace(GREEDY, max_tokens=190)
    )
    await plane.started(request_id, 3)
    old[rank].kill()
    last = await plane.terminal(request_id)
    assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
    await eventually(lambda: not any(each.is_running() for each in old.values()))
    await eventually(lambda: len(ranks(agent)) == 2, DEADLINE_S)
    await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    assert await streamed(plane, "g.1.g1.0", 2) == before
    assert not {each.pid for each in old.values()} & {each.pid for each in ranks(agent).values()}


async def test_a_rank_that_stands_still_is_a_hang_of_the_replica(
    plane: Control, start_agent: StartAgent
) -> None:
    """Nobody is ended while nothing is asked, however long; with work, the watchdog ends all."""
    agent = start(start_agent, "--watchdog-seconds", "10")
    await plane.place("n1", model(2))
    await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    old = ranks(agent)
    os.kill(old[1].pid, signal.SIGSTOP)
    request_id = await plane.generate("n1", 0, "g.1.g1.0", sampling=GREEDY)
    assert (await plane.terminal(request_id, DEADLINE_S)).error_code == "engine_lost"
    await eventually(lambda: not any(each.is_running() for each in old.values()))
    await eventually(lambda: len(ranks(agent)) == 2, DEADLINE_S)
    await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    assert len(await streamed(plane, "g.1.g1.0", 2)) == 2


async def test_a_rank_that_never_comes_is_a_typed_failure(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start(start_agent, "--group-start-seconds", "4")
    await plane.place("n1", model(2))
    await eventually(lambda: len(ranks(agent)) == 2)
    os.kill(ranks(agent)[1].pid, signal.SIGSTOP)
    old = list(ranks(agent).values())
    status = await plane.replica("n1", "failed", "g.1.g1.0", DEADLINE_S)
    assert status.reason_code == "group_incomplete"
    old[1].send_signal(signal.SIGCONT)
    await eventually(lambda: not any(each.is_running() for each in old))


async def test_no_rank_outlives_its_agent(plane: Control, start_agent: StartAgent) -> None:
    """Neither at rest nor in the middle of a step."""
    agent = start(start_agent)
    await plane.place("n1", model(2))
    await plane.replica("n1", "ready", "g.1.g1.0", DEADLINE_S)
    await plane.generate("n1", 0, "g.1.g1.0", sampling=GREEDY)
    old = list(ranks(agent).values())
    agent.stop(signal.SIGKILL)
    await eventually(lambda: not any(each.is_running() for each in old))


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (model(3), "unknown_device"),
        (model(3, device_indices=(0, 1)), "tensor_parallel_unsupported"),
        (model(2, quantization="int8"), "tensor_parallel_unsupported"),
        (model(2, swap_bytes=1 << 20), "tensor_parallel_unsupported"),
        (model(2, disaggregation="prefill-decode"), "tensor_parallel_unsupported"),
        (msgspec.structs.replace(model(2), memory_bytes=1 << 20), "insufficient_memory"),
    ],
)
async def test_what_a_group_cannot_be_is_refused_with_a_code(
    plane: Control, start_agent: StartAgent, wanted: ReplicaSpec, code: str
) -> None:
    """And no worker is left that waits for the others."""
    agent = start(start_agent)
    await plane.place("n1", wanted)
    status = await plane.replica("n1", "failed", "g.1.g1.0", DEADLINE_S)
    assert status.reason_code == code
    await eventually(lambda: not agent.workers())


async def test_more_ranks_than_kv_heads_are_refused(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start(start_agent, num_devices=3)
    await plane.place("n1", model(3, folder=wide_tiny_model()))
    status = await plane.replica("n1", "failed", "g.1.g1.0", DEADLINE_S)
    assert status.reason_code == "tensor_parallel_unsupported"
    assert "2 KV heads" in status.reason
    await eventually(lambda: not agent.workers())


# --- bookkeeping --------------------------------------------------------------------------------
BUNDLE = TokenizerBundle(version_id="m@1", tokenizer_json=b"")


def loaded(num_bytes: int) -> ipc.Loaded:
    return ipc.Loaded("g", num_bytes, num_bytes, num_bytes, 1.0, "", 100, BUNDLE)


def test_a_group_is_loaded_when_every_rank_is_with_the_figures_of_the_fullest_device() -> None:
    group = Group("g", 3)
    assert group.passed_on("rank 2", loaded(30)) is None
    assert group.passed_on("rank 0", loaded(10)) is None
    said = group.passed_on("rank 1", loaded(20))
    assert isinstance(said, ipc.Loaded) and said.peak_bytes == said.kv_bytes == 30


def test_only_the_first_rank_speaks_for_the_group_but_any_may_fail() -> None:
    group = Group("g", 2)
    for message in (ipc.Progress("g", "loading", "weights", 0.0), ipc.Stats([]), ipc.Unloaded("g")):
        assert group.passed_on("rank 0", message) is message
        assert group.passed_on("rank 1", message) is None
    failure = ipc.LoadFailed("g", "insufficient_memory", "")
    assert group.passed_on("rank 1", failure) is failure


def test_every_rank_but_the_first_has_one_line_and_none_stays_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with groups.lines((0, 1, 2), 3, 9.0) as places:
        assert [(one.rank, len(one.lines)) for one in places] == [(0, 2), (1, 1), (2, 1)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_all_ranks_have_as_many_blocks_as_the_tightest() -> None:
    """Of two and one KV heads the two need twice the bytes for a block."""
    config, formats = read_config(uneven_tiny_model()), precision()
    wanted = msgspec.structs.replace(model(2), max_batch=1000)
    division = divide_among(2, wanted, config, formats, 200)
    share = msgspec.structs.replace(wanted, memory_bytes=GIB // 8, swap_bytes=0)
    first = divide(share, shard_config(config, 0, 2), formats, 200)
    width = 16 * formats.kv_bytes_per_token(shard_config(config, 0, 2))
    assert division.num_blocks == first.kv_bytes // width
    assert division.swap_bytes == 0 and read_config(tiny_model()).num_kv_heads == 2
