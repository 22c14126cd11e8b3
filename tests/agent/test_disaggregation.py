"""A replica on two workers, through a real agent: streams, cancels, deaths, and what is left."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from gpuagent.wire.messages import Sampling
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Agent, Control, eventually, spec
from tests.engine.tiny_model import wide_tiny_model

SPLIT = {"disaggregation": "prefill-decode"}
SLOW = "simulated://m?step_ms=20&prefill_tps=2000"
DEADLINE_S = 30


def worker(agent: Agent, role: str) -> psutil.Process:
    """The worker with that role."""
    return next(w for w in agent.workers() if role_of(w) == role)


def role_of(process: psutil.Process) -> str:
    role: str = json.loads(process.cmdline()[-1])["role"]
    return role


def num_shared(pid: int) -> int:
    """Mappings and descriptors of shared KV memory that a process has."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:engine-kv")
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return maps + sum("memfd:engine-kv" in str(link) for link in links)


def metric(agent: Agent, text: str) -> float:
    lines = agent.get("/metrics")[1].splitlines()
    return float(next(line for line in lines if text in line).split()[-1])


def handed_over(agent: Agent) -> float:
    return metric(agent, 'kind="handed_over"')


def num_accepted(agent: Agent) -> float:
    """Unfinished generations that the agent has taken."""
    return sum(metric(agent, f"engine:num_requests_{each}{{") for each in ("running", "waiting"))


async def test_streams_are_those_of_one_worker(plane: Control, start_agent: StartAgent) -> None:
    """Tokens, text, counts and frames; prompts go through one process, tokens come from another."""
    agent = start_agent()
    plain, split = spec("plain.1.g1.0"), spec(**SPLIT)
    await plane.place("n1", plain, split)
    for each in (plain, split):
        await plane.replica("n1", "ready", each.replica_id)
    assert sorted(map(role_of, agent.workers())) == ["both", "decode", "prefill"]
    asked = {}
    for i in range(10):
        prompt = tuple(range(i, i + 30 + i))
        for each in (plain, split):
            asked[i, each.replica_id] = await plane.generate(
                "n1", 3 + 4 * i, each.replica_id, prompt_token_ids=prompt
            )
    for request_id in asked.values():
        await plane.terminal(request_id, DEADLINE_S)
    for i in range(10):
        ours, theirs = (asked[i, each.replica_id] for each in (split, plain))
        assert plane.assert_contiguous(ours) == plane.assert_contiguous(theirs)
        assert plane.text(ours) == plane.text(theirs)
        last = plane.deltas(ours)[-1]
        assert (last.num_prompt_tokens, last.finish_reason) == (30 + i, "length")
    assert handed_over(agent) == 10
    load = await eventually(
        lambda: (found := plane.load("n1")) and found.generated_tokens == 210 and found
    )
    assert load.num_running == load.num_waiting == 0


@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_a_cancel_ends_a_request_wherever_it_is(
    plane: Control, start_agent: StartAgent, when: str
) -> None:
    start_agent()
    await plane.place("n1", spec(source=SLOW, max_model_len=4096, **SPLIT))
    await plane.replica("n1", "ready")
    prompt = tuple(i % 250 for i in range(2500))
    request_id = await plane.generate("n1", 1000, prompt_token_ids=prompt)
    if when == "decode":
        await plane.started(request_id, 3)
    else:
        await asyncio.sleep(0.3)
    await plane.cancel("n1", request_id)
    last = await plane.terminal(request_id, 3)
    assert last.finish_reason == "cancelled"
    num_tokens = len(plane.assert_contiguous(request_id))
    assert num_tokens == 0 if when == "prefill" else num_tokens >= 3
    load = await eventually(
        lambda: (found := plane.load("n1")) and found.num_running == 0 and found, DEADLINE_S
    )
    await eventually(lambda: plane.load("n1").num_free_blocks == load.num_blocks)  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_death_of_either_worker_is_typed_and_both_begin_anew(
    plane: Control, start_agent: StartAgent, role: str
) -> None:
    """Requests in both phases end with what was delivered; nothing of the old pair remains."""
    agent = start_agent()
    await plane.place("n1", spec(source=SLOW, max_model_len=4096, **SPLIT))
    await plane.replica("n1", "ready")
    decoding = await plane.generate("n1", 2000)
    await plane.started(decoding, 5)
    prompt = tuple(i % 250 for i in range(3000))
    prefilling = await plane.generate("n1", 500, prompt_token_ids=prompt)
    await eventually(lambda: num_accepted(agent) == 2)
    old = agent.workers()
    assert all(num_shared(each.pid) for each in old) and not num_shared(agent.pid)
    worker(agent, role).kill()
    for request_id in (decoding, prefilling):
        last = await plane.terminal(request_id, 3)
        assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
        assert f"the {role} worker was ended by signal 9" in last.error_message
        plane.assert_contiguous(request_id)
    status = await plane.replica("n1", "failed", deadline_s=3)
    assert status.reason_code == "engine_lost" and role in status.reason
    await plane.replica("n1", "ready", deadline_s=10)
    assert not any(each.is_running() for each in old), "the other worker ended too"
    assert len(agent.workers()) == 2
    again = await plane.generate("n1")
    assert (await plane.terminal(again)).finish_reason == "length"


async def test_an_unloaded_pair_leaves_no_process_and_no_memory(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", spec(**SPLIT))
    await plane.replica("n1", "ready")
    running = await plane.generate("n1", 40)
    await plane.started(running)
    await plane.place("n1", generation=2)
    assert (await plane.terminal(running)).finish_reason == "length", "drained, not dropped"
    await eventually(lambda: not agent.workers())
    assert num_shared(agent.pid) == 0


async def test_a_load_that_fails_in_either_worker_is_one_typed_failure(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", spec(source="simulated://m?load_fails=out_of_memory", **SPLIT))
    status = await plane.replica("n1", "failed")
    assert status.reason_code == "out_of_memory"
    await eventually(lambda: not agent.workers())


async def test_an_idle_half_is_not_taken_for_a_hung_one(
    plane: Control, start_agent: StartAgent
) -> None:
    """A decode worker is silent during a long prompt, and a prefill worker during long answers."""
    agent = start_agent("n1", "--watchdog-seconds", "2")
    source = "simulated://m?step_ms=50&prefill_tps=400"
    await plane.place("n1", spec(source=source, max_model_len=4096, **SPLIT))
    await plane.replica("n1", "ready")
    pids = sorted(each.pid for each in agent.workers())
    prompt = tuple(i % 250 for i in range(1500))
    request_id = await plane.generate("n1", 80, prompt_token_ids=prompt)
    assert (await plane.terminal(request_id, DEADLINE_S)).finish_reason == "length"
    assert sorted(each.pid for each in agent.workers()) == pids


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
async def test_a_computed_model_continues_bit_by_bit(
    plane: Control, start_agent: StartAgent, kv_cache_dtype: str
) -> None:
    """Greedy and seeded requests on the engine's own kernels, split and not."""
    folder = wide_tiny_model()
    agent = start_agent("n1", "--devices", "cpu:3GiB", "--file-roots", str(folder.parent))
    shape = {"source": f"file://{folder}", "max_model_len": 256, "memory_bytes": GIB // 2}
    options = {**shape, "kv_cache_dtype": kv_cache_dtype, "speculation": "ngram"}
    plain, split = spec("plain.1.g1.0", **options), spec(**options, **SPLIT)
    await plane.place("n1", plain, split)
    for each in (plain, split):
        await plane.replica("n1", "ready", each.replica_id, deadline_s=90)
    asked = {}
    for i in range(8):
        sampling = Sampling(max_tokens=30, temperature=float(i % 2), seed=i, ignore_eos=True)
        prompt = tuple(range(i, i + 20 + 5 * i))
        for each in (plain, split):
            asked[i, each.replica_id] = await plane.generate(
                "n1", 0, each.replica_id, prompt_token_ids=prompt, sampling=sampling
            )
    for request_id in asked.values():
        await plane.terminal(request_id, DEADLINE_S)
    for i in range(8):
        ours, theirs = (asked[i, each.replica_id] for each in (split, plain))
        assert len(plane.assert_contiguous(ours)) == 30
        assert plane.assert_contiguous(ours) == plane.assert_contiguous(theirs)
        assert plane.text(ours) == plane.text(theirs)
    assert handed_over(agent) == 8
