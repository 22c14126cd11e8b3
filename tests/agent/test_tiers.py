"""More models than fit, a real agent and real workers: who waits is served, nothing is lost."""

import asyncio
import os
import signal

import psutil

from gpuagent.wire.messages import ReplicaSpec, Sampling
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Control, eventually, spec
from tests.engine.tiny_model import wide_tiny_model

NAMES = ("a", "b", "c")
PROMPT = tuple(range(1, 40))
GREEDY = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)


def replica(name: str, memory_bytes: int = GIB * 6 // 10, **fields: object) -> ReplicaSpec:
    """Of a device of 1 GiB: one fits."""
    values = {"version_id": f"{name}@1", "model": name, "memory_bytes": memory_bytes, **fields}
    return spec(f"{name}.1.g1.0", **values)


def simulated(name: str, query: str = "", **fields: object) -> ReplicaSpec:
    source = f"simulated://{name}?step_ms=10&prefill_tps=100000{query}"
    return replica(name, source=source, **fields)


async def ask(plane: Control, name: str, max_tokens: int = 4, **fields: object) -> str:
    return await plane.generate("n1", max_tokens, f"{name}.1.g1.0", **fields)


async def tiers(plane: Control) -> dict[str, str]:
    observed = await plane.observed("n1")
    return {r.replica_id[0]: r.tier for r in observed.replicas} if observed else {}


async def wait_for(plane: Control, **wanted: str) -> None:
    for _ in range(500):
        found = await tiers(plane)
        if wanted.items() <= found.items():
            return
        await asyncio.sleep(0.03)
    raise AssertionError(f"{await plane.observed('n1')} is not {wanted}")


async def test_three_models_on_a_device_for_one_all_answer(
    plane: Control, start_agent: StartAgent
) -> None:
    """In turn, whoever is asked; what was resident goes to the host and comes back from there."""
    agent = start_agent("n1", "--host-memory", "2GiB")
    await plane.place("n1", *(simulated(name) for name in NAMES))
    await wait_for(plane, a="resident", b="storage", c="storage")
    for name in ("b", "c", "a", "b", "a"):
        last = await plane.terminal(await ask(plane, name))
        assert (last.finish_reason, last.num_output_tokens) == ("length", 4)
    await wait_for(plane, a="resident", b="host", c="host")
    assert len(agent.workers()) == 1, "shared models have one worker"
    assert agent.log.count("replica_start") == 3, "each was loaded once"
    statuses = (await plane.observed("n1")).replicas
    assert all(status.state == "ready" and status.swap_in_s > 0 for status in statuses)
    report = await eventually(lambda: plane.telemetry.get("n1"))
    assert report.devices[0].host_total_bytes == 2 * GIB


async def test_requests_for_a_cold_model_load_it_once_and_are_answered_in_order(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", simulated("a"), simulated("b", "&load_ms=600"))
    await wait_for(plane, a="resident", b="storage")
    names = [await ask(plane, "b") for _ in range(20)]
    gone = await ask(plane, "b")
    await plane.cancel("n1", gone)
    assert (await plane.terminal(gone, 1)).finish_reason == "cancelled", "while it is held"
    for name in names:
        assert (await plane.terminal(name)).finish_reason == "length"
    first = [plane.arrived_at[name][0] for name in names]
    assert first == sorted(first)
    assert agent.log.count('"b.1.g1.0"') >= 1 and agent.log.count("replica_start") == 2


async def test_the_wait_is_said_while_it_lasts(plane: Control, start_agent: StartAgent) -> None:
    start_agent()
    await plane.place("n1", simulated("a"), simulated("b", "&load_ms=3000"))
    await wait_for(plane, a="resident", b="storage")
    name = await ask(plane, "b")
    load = await eventually(lambda: (one := plane.load("n1", "b.1.g1.0")) and one.num_held and one)
    assert 0 < load.expected_wait_s <= 10 and load.tier == "storage"
    await plane.terminal(name)
    await eventually(lambda: (one := plane.load("n1", "b.1.g1.0")) and one.tier == "resident")


async def test_a_full_host_lets_go_and_loads_again(plane: Control, start_agent: StartAgent) -> None:
    """Without room off the device a model goes to storage; its worker stays."""
    agent = start_agent("n1", "--host-memory", "1MiB")
    await plane.place("n1", simulated("a"), simulated("b"))
    await wait_for(plane, a="resident", b="storage")
    worker = agent.workers()[0].pid
    for name in ("b", "a", "b"):
        assert (await plane.terminal(await ask(plane, name))).finish_reason == "length"
    await wait_for(plane, a="storage", b="resident")
    assert [process.pid for process in agent.workers()] == [worker]
    await plane.place("n1", generation=2)
    await eventually(lambda: not agent.workers())


async def test_busy_models_take_turns_and_lose_nothing(
    plane: Control, start_agent: StartAgent
) -> None:
    """Two real engines with long work on a device for one: each leaves in the middle, and says
    what it says alone."""
    folder = wide_tiny_model()
    options = ("--turn-seconds", "0.05", "--file-roots", str(folder.parent), "--threads", "1")
    agent = start_agent("n1", *options)
    source = {"source": f"file://{folder}", "max_model_len": 256, "max_batch": 4}
    source["swap_bytes"] = GIB // 2  # untouched, and counted: only one of the two fits
    await plane.place("n1", replica("a", **source), replica("b", **source))
    await wait_for(plane, a="resident", b="storage")
    kinds = {"prompt_token_ids": PROMPT, "sampling": GREEDY}
    alone = await ask(plane, "a", **kinds)
    await plane.terminal(alone)
    expected = plane.assert_contiguous(alone)
    assert len(expected) == 150
    names = [await ask(plane, which, **kinds) for which in "aabbaabb"]
    for name in names:
        await plane.terminal(name)
        assert plane.assert_contiguous(name) == expected
    assert agent.log.count("replica_swapped") >= 3, "out, in, and out again"


async def test_a_busy_model_is_put_out_for_a_higher_priority_and_goes_on_afterwards(
    plane: Control, start_agent: StartAgent
) -> None:
    start_agent()
    await plane.place("n1", simulated("a", priority="best-effort"), simulated("b", priority="high"))
    await wait_for(plane, b="resident", a="storage")
    long = await ask(plane, "a", 200)
    await plane.started(long, 20)
    urgent = await ask(plane, "b", 40)
    assert (await plane.terminal(urgent)).finish_reason == "length"
    assert not plane.deltas(long)[-1].finish_reason
    assert (await plane.terminal(long)).finish_reason == "length"
    assert len(plane.assert_contiguous(long)) == 200


async def test_a_suspended_request_can_be_cancelled(
    plane: Control, start_agent: StartAgent
) -> None:
    start_agent()
    await plane.place("n1", simulated("a", priority="best-effort"), simulated("b", priority="high"))
    await wait_for(plane, b="resident", a="storage")
    long = await ask(plane, "a", 1000)
    await plane.started(long, 5)
    urgent = await ask(plane, "b", 300)
    await plane.started(urgent)
    await plane.cancel("n1", long)
    assert (await plane.terminal(long, 1)).finish_reason == "cancelled"
    assert (await plane.terminal(urgent)).finish_reason == "length"


async def answered(plane: Control, name: str) -> None:
    """Ask until the model, which its worker's death took along, answers again."""
    for _ in range(20):
        if (await plane.terminal(await ask(plane, name))).finish_reason == "length":
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{name} does not answer")


async def test_a_worker_killed_in_the_middle_of_a_swap_comes_back(
    plane: Control, start_agent: StartAgent
) -> None:
    """Out, then in: whoever waited gets a typed end, and the node is what it should be again."""
    agent = start_agent()
    models = [simulated(name, "&swap_ms=1500") for name in "ab"]
    await plane.place("n1", *models)
    await wait_for(plane, a="resident", b="storage")
    asked = await ask(plane, "b")
    await asyncio.sleep(0.5)  # a is on its way out
    os.kill(agent.workers()[0].pid, signal.SIGKILL)
    last = await plane.terminal(asked)
    assert last.finish_reason == "length" or last.error_code == "engine_lost"
    await answered(plane, "b")
    await plane.replica("n1", "ready", "b.1.g1.0")
    await answered(plane, "a")
    assert all(map(psutil.Process.is_running, agent.workers()))


async def test_a_watchdog_does_not_blame_a_worker_for_who_waits_elsewhere(
    plane: Control, start_agent: StartAgent
) -> None:
    """Held and suspended requests are no sign of a hang."""
    agent = start_agent("n1", "--watchdog-seconds", "1", "--turn-seconds", "60")
    await plane.place("n1", simulated("a"), simulated("b"))
    await wait_for(plane, a="resident", b="storage")
    long = await ask(plane, "a", 350)
    await plane.started(long)
    held = await ask(plane, "b")
    assert (await plane.terminal(long)).finish_reason == "length"
    assert (await plane.terminal(held)).finish_reason == "length"
    assert "worker_hung" not in agent.log


async def test_a_dedicated_model_has_a_process_of_its_own_in_every_tier(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", simulated("a", isolation="dedicated"), simulated("b"))
    await wait_for(plane, a="resident", b="storage")
    assert (await plane.terminal(await ask(plane, "b"))).finish_reason == "length"
    await wait_for(plane, a="host", b="resident")
    assert len(agent.workers()) == 2
    assert (await plane.terminal(await ask(plane, "a"))).finish_reason == "length"
    await wait_for(plane, a="resident", b="host")


async def test_a_model_that_fits_nowhere_is_refused_and_costs_its_neighbour_nothing(
    plane: Control, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await plane.place("n1", simulated("a"), simulated("b", memory_bytes=2 * GIB))
    await wait_for(plane, a="resident")
    status = await plane.replica("n1", "failed", "b.1.g1.0")
    assert status.reason_code == "insufficient_memory" and "needs 2.0 GiB" in status.reason
    assert (await plane.terminal(await ask(plane, "a"))).finish_reason == "length"
    assert (await plane.terminal(await ask(plane, "b"))).error_code == "replica_not_ready"
    assert agent.log.count("replica_start") == 1
