"""Faults of processes and of the bus, injected into a real agent (RELIABILITY F20, F26-F33)."""

import asyncio
import os
import signal
import time

import psutil
from nats.js.errors import ObjectNotFoundError
from nats.js.object_store import ObjectStore

from controlplane.adapters.natsbus.connection import ensure_buckets
from tests.agent.conftest import StartAgent
from tests.agent.harness import Agent, Control, control, eventually, spec
from tests.natsserver import NatsServer


async def test_a_killed_worker_ends_its_streams_typed_and_comes_back(
    plane: Control, start_agent: StartAgent
) -> None:
    """kill -9 mid-stream: engine_lost after what was delivered, failed, then ready again."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_ids = [await plane.generate("n1", max_tokens=1500) for _ in range(3)]
    for request_id in request_ids:
        await plane.started(request_id, 5)
    agent.workers()[0].kill()
    for request_id in request_ids:
        last = await plane.terminal(request_id, 3)
        assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
        plane.assert_contiguous(request_id)
    status = await plane.replica("n1", "failed", deadline_s=3)
    assert status.reason_code == "engine_lost" and "signal 9" in status.reason
    await plane.replica("n1", "ready", deadline_s=5)
    again = await plane.generate("n1")
    assert (await plane.terminal(again)).finish_reason == "length"


async def test_generations_can_continue_elsewhere_from_the_tokens_delivered(
    plane: Control, start_agent: StartAgent
) -> None:
    """Prompt plus delivered tokens, given to another replica, yield exactly the rest."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    whole = await plane.generate("n1", max_tokens=60)
    await plane.terminal(whole)
    broken = await plane.generate("n1", max_tokens=60)
    await plane.started(broken, 20)
    agent.workers()[0].kill()
    await plane.terminal(broken)
    delivered = plane.assert_contiguous(broken)
    await plane.replica("n1", "failed")
    await plane.replica("n1", "ready")
    prompt = (*range(20), *delivered)
    rest = await plane.generate("n1", max_tokens=60 - len(delivered), prompt_token_ids=prompt)
    await plane.terminal(rest)
    assert delivered + plane.assert_contiguous(rest) == plane.assert_contiguous(whole)


async def test_a_hung_worker_is_killed_by_the_watchdog(
    plane: Control, start_agent: StartAgent
) -> None:
    """SIGSTOP stands for a hung device: no step completes, so the process is replaced."""
    agent = start_agent("n1", "--watchdog-seconds", "2")
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", max_tokens=1500)
    await plane.started(request_id)
    hung = agent.workers()[0]
    os.kill(hung.pid, signal.SIGSTOP)
    last = await plane.terminal(request_id, 8)
    assert last.error_code == "engine_lost"
    await plane.replica("n1", "failed")
    await plane.replica("n1", "ready", deadline_s=5)
    assert agent.workers()[0].pid != hung.pid
    assert 'kind="workers_hung",node="n1"} 1.0' in agent.get("/metrics")[1]


async def test_dedicated_replicas_do_not_die_together(
    plane: Control, start_agent: StartAgent
) -> None:
    """Isolation: the death of one process ends one replica's streams only."""
    agent = start_agent()
    shared = spec("m.1.g1.0")
    own = spec("m.1.g1.1", isolation="dedicated")
    await plane.place("n1", shared, own)
    await plane.replica("n1", "ready", "m.1.g1.0")
    await plane.replica("n1", "ready", "m.1.g1.1")
    workers = agent.workers()
    assert len(workers) == 2
    first = await plane.generate("n1", max_tokens=200, replica_id="m.1.g1.0")
    second = await plane.generate("n1", max_tokens=200, replica_id="m.1.g1.1")
    await plane.started(first)
    await plane.started(second)
    workers[0].kill()
    ends = [
        (await plane.terminal(first)).finish_reason,
        (await plane.terminal(second)).finish_reason,
    ]
    assert sorted(ends) == ["error", "length"]


async def test_no_worker_outlives_its_agent(plane: Control, start_agent: StartAgent) -> None:
    """Also when the agent is killed and can clean nothing up."""
    agent = start_agent()
    await plane.place("n1", spec(), spec("m.1.g1.1", isolation="dedicated"))
    await plane.replica("n1", "ready")
    await plane.replica("n1", "ready", "m.1.g1.1")
    workers = agent.workers()
    agent.stop(signal.SIGKILL)
    await eventually(lambda: not any(map(psutil.Process.is_running, workers)), 3)


async def test_an_older_decision_is_refused_also_after_a_restart(
    plane: Control, start_agent: StartAgent
) -> None:
    """The newest (epoch, generation) is on disk; a control plane that went back is not obeyed."""
    agent = start_agent()
    await plane.place("n1", spec("m.1.g5.0"), epoch=2, generation=5)
    await plane.replica("n1", "ready", "m.1.g5.0")
    await plane.place("n1", spec("m.1.g4.0"), epoch=2, generation=4)
    await eventually(lambda: "stale_decision" in agent.log)
    observed = await plane.observed("n1")
    assert observed and [r.replica_id for r in observed.replicas] == ["m.1.g5.0"]
    assert (observed.acked_epoch, observed.acked_generation) == (2, 5)

    assert agent.stop() == 0
    agent.start()
    await eventually(lambda: agent.log.count("stale_decision") >= 2)
    observed = await plane.observed("n1")
    assert observed and observed.replicas == ()
    await plane.place("n1", spec("m.1.g5.1"), epoch=3, generation=5)
    await plane.replica("n1", "ready", "m.1.g5.1")


async def test_a_paused_agent_reads_before_it_serves(
    plane: Control, start_agent: StartAgent
) -> None:
    """SIGSTOP beyond the lease: what waits in its socket is refused, not run on an old plan."""
    agent = start_agent("n1", "--lease-seconds", "3")
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    os.kill(agent.pid, signal.SIGSTOP)
    await asyncio.sleep(3.5)
    waiting = await plane.generate("n1")
    await plane.place("n1", generation=2)
    await plane.bus.client.flush()
    os.kill(agent.pid, signal.SIGCONT)
    last = await plane.terminal(waiting)
    assert (last.error_code, last.num_output_tokens) == ("replica_not_ready", 0)
    observed = await plane.observed("n1")
    while observed is None or observed.acked_generation != 2 or observed.replicas:
        await asyncio.sleep(0.05)
        observed = await plane.observed("n1")
    late = await plane.generate("n1")
    assert (await plane.terminal(late)).error_code == "replica_not_ready"


async def test_losing_the_bus_ends_admission_but_no_stream(
    nats: NatsServer, plane: Control, start_agent: StartAgent
) -> None:
    """After the lease /readyz says no; when the bus is back the stream has no gap to be found."""
    agent = start_agent("n1", "--lease-seconds", "2")
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", max_tokens=600)
    await plane.started(request_id)
    nats.stop(kill=True)
    await eventually(lambda: agent.get("/readyz")[0] == 503, 6)
    nats.start()
    await eventually(lambda: agent.get("/readyz")[0] == 200, 8)
    await eventually(lambda: plane.bus.connected, 5)
    last = await _terminal_with_resends(plane, "n1", request_id)
    assert last == ("length", 600)


async def _terminal_with_resends(plane: Control, node: str, request_id: str) -> tuple[str, int]:
    """What a gateway does: ask again from the first missing token until the end is there."""
    have: dict[int, int] = {}
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        for delta in plane.deltas(request_id):
            have |= {delta.index + n: token for n, token in enumerate(delta.token_ids)}
            if delta.finish_reason and len(have) == delta.num_output_tokens:
                return delta.finish_reason, len(have)
        missing = next(n for n in range(len(have) + 1) if n not in have)
        await plane.resend(node, {request_id: missing})
        await asyncio.sleep(0.5)
    raise AssertionError(f"{len(have)} tokens and no end")


async def test_an_agent_waits_for_a_bus_that_is_not_there_yet(
    nats: NatsServer, start_agent: StartAgent
) -> None:
    """Alive but not ready; it joins when the bus comes up."""
    nats.stop()
    agent = start_agent()
    await eventually(lambda: (agent.directory / "port").exists())
    assert agent.get("/livez")[0] == 200
    assert agent.get("/readyz")[0] == 503
    nats.start()
    async with control(nats) as plane:
        await plane.place("n1", spec())
        await plane.replica("n1", "ready")


async def test_a_failed_load_is_a_typed_state_and_is_tried_again_later(
    plane: Control, start_agent: StartAgent
) -> None:
    """The code of the failure is observed; the backoff keeps it from looping."""
    agent = start_agent()
    await plane.place("n1", spec(source="simulated://m?load_fails=out_of_memory"))
    status = await plane.replica("n1", "failed")
    assert status.reason_code == "out_of_memory"
    await asyncio.sleep(1.5)
    assert agent.log.count("replica_start") == 1
    bad = spec("m.1.g2.0", source="simulated://m?step_ms=soon")
    unsafe = spec("m.1.g2.1", source="ftp://somewhere/model")
    await plane.place("n1", bad, unsafe, generation=2)
    assert (await plane.replica("n1", "failed", "m.1.g2.0")).reason_code == "source_invalid"
    assert (await plane.replica("n1", "failed", "m.1.g2.1")).reason_code == "source_not_allowed"


async def test_a_wrong_digest_is_not_served(plane: Control, start_agent: StartAgent) -> None:
    start_agent()
    await plane.place("n1", spec(sha256="0" * 64))
    assert (await plane.replica("n1", "failed")).reason_code == "checksum_mismatch"


async def test_what_does_not_fit_is_held_until_there_is_room(
    plane: Control, start_agent: StartAgent
) -> None:
    """The memory budget of the device holds; the one without room starts when another leaves, and
    one that no empty device would have room for is refused."""
    start_agent()
    big, second = spec(memory_bytes=700 << 20), spec("m.1.g1.1", memory_bytes=700 << 20)
    await plane.place("n1", big, second, spec("m.1.g1.2", memory_bytes=2 << 30))
    await plane.replica("n1", "ready")
    assert (await plane.replica("n1", "pending", "m.1.g1.1")).reason_code == "not_resident"
    assert (await plane.replica("n1", "failed", "m.1.g1.2")).reason_code == "insufficient_memory"
    await plane.place("n1", second, generation=2)
    await plane.replica("n1", "ready", "m.1.g1.1")


async def test_a_replica_that_must_go_first_finishes_what_runs(
    plane: Control, start_agent: StartAgent
) -> None:
    """Stopping: nothing new, the running stream ends by itself, then the worker is gone."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    running = await plane.generate("n1", max_tokens=100)
    await plane.started(running)
    await plane.place("n1", generation=2)
    await plane.replica("n1", "stopping")
    late = await plane.generate("n1")
    assert (await plane.terminal(late)).error_code == "replica_not_ready"
    assert (await plane.terminal(running)).finish_reason == "length"
    await eventually(lambda: not agent.workers(), 5)


async def test_a_stream_longer_than_the_drain_ends_as_retired(
    plane: Control, start_agent: StartAgent
) -> None:
    """No crash: the code says that the replica was to end, after all that was delivered."""
    start_agent("n1", "--drain-seconds", "0.5")
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    running = await plane.generate("n1", max_tokens=1500)
    await plane.started(running)
    await plane.place("n1", generation=2)
    last = await plane.terminal(running)
    assert (last.finish_reason, last.error_code) == ("error", "replica_retired")
    assert "ended 0.5 s after it was told to stop" in last.error_message
    assert 0 < len(plane.assert_contiguous(running)) < 1500


async def test_sigterm_ends_everything_within_five_seconds(
    plane: Control, start_agent: StartAgent
) -> None:
    """Exit code 0, a terminal delta for every stream, no process left, nothing shown as ready."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", max_tokens=1500)
    await plane.started(request_id)
    workers = agent.workers()
    asked_at = time.monotonic()
    code = await asyncio.to_thread(agent.stop)
    assert (code, time.monotonic() - asked_at < 5.5) == (0, True)
    assert (await plane.terminal(request_id)).error_code == "engine_lost"
    assert not any(map(psutil.Process.is_running, workers))
    observed = await plane.observed("n1")
    assert observed and observed.replicas == ()


async def test_a_hung_worker_does_not_hold_up_the_end(
    plane: Control, start_agent: StartAgent
) -> None:
    """SIGTERM with a stopped worker: killed, exit code 0, still within five seconds."""
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    worker = agent.workers()[0]
    os.kill(worker.pid, signal.SIGSTOP)
    await plane.generate("n1")
    asked_at = time.monotonic()
    code = await asyncio.to_thread(agent.stop)
    assert (code, time.monotonic() - asked_at < 5.5) == (0, True)
    assert not worker.is_running()


async def test_a_second_sigterm_ends_at_once(plane: Control, start_agent: StartAgent) -> None:
    agent = start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    await plane.started(await plane.generate("n1", max_tokens=1500))
    worker = agent.workers()[0]
    asked_at = time.monotonic()
    os.kill(agent.pid, signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert await asyncio.to_thread(agent.stop) == 1
    assert time.monotonic() - asked_at < 2
    await eventually(lambda: not worker.is_running(), 2)


async def test_a_death_while_loading_waits_before_the_next_try(
    plane: Control, start_agent: StartAgent
) -> None:
    """The kernel's answer to too much memory looks like this; no crash loop follows."""
    agent = start_agent()
    await plane.place("n1", spec(source="simulated://m?load_ms=60000"))
    await plane.replica("n1", "loading")
    worker = await eventually(lambda: next(iter(agent.workers()), None))
    worker.kill()
    status = await plane.replica("n1", "failed")
    assert status.reason_code == "load_failed" and "signal 9" in status.reason
    await asyncio.sleep(1.5)
    assert agent.log.count("replica_start") == 1


async def test_one_nodes_credentials_are_of_no_use_to_another(
    nats: NatsServer, plane: Control, start_agent: StartAgent
) -> None:
    """An agent that calls itself n2 with n1's file hears nothing, says nothing, is not ready."""
    await plane.place("n2", spec())
    agent = start_agent("n2", "--creds", str(nats.node_creds("n1")))
    await eventually(lambda: "bus_" in _metrics(agent))
    assert agent.get("/readyz")[0] == 503
    assert not agent.workers()
    assert await plane.observed("n2") is None and "n2" not in plane.telemetry


def _metrics(agent: Agent) -> str:
    """The metrics page; "" while the port is not bound yet."""
    return agent.get("/metrics")[1] if (agent.directory / "port").exists() else ""


async def test_an_engine_that_raises_takes_no_other_replica_with_it(
    plane: Control, start_agent: StartAgent
) -> None:
    """On the CPU an exception ends one engine; its neighbour in the same process streams on."""
    agent = start_agent()
    bad = spec("m.1.g1.1", source="simulated://m?step_ms=10&raises_at=10")
    await plane.place("n1", spec(), bad)
    await plane.replica("n1", "ready")
    await plane.replica("n1", "ready", "m.1.g1.1")
    worker = agent.workers()[0].pid
    good = await plane.generate("n1", max_tokens=100)
    doomed = await plane.generate("n1", max_tokens=100, replica_id="m.1.g1.1")
    assert (await plane.terminal(doomed)).error_code == "engine_lost"
    assert "as the source asks" in (await plane.replica("n1", "failed", "m.1.g1.1")).reason
    assert (await plane.terminal(good)).finish_reason == "length"
    assert [process.pid for process in agent.workers()] == [worker]
    await plane.replica("n1", "ready", "m.1.g1.1")


async def test_a_paused_agent_does_not_blame_its_workers(
    plane: Control, start_agent: StartAgent
) -> None:
    """After SIGSTOP beyond the watchdog the worker, which waited, goes on with its stream."""
    agent = start_agent("n1", "--watchdog-seconds", "2")
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1", max_tokens=600)
    await plane.started(request_id)
    worker = agent.workers()[0].pid
    os.kill(agent.pid, signal.SIGSTOP)
    await asyncio.sleep(4)
    os.kill(agent.pid, signal.SIGCONT)
    assert (await plane.terminal(request_id)).finish_reason == "length"
    plane.assert_contiguous(request_id)
    assert [process.pid for process in agent.workers()] == [worker]


async def test_sigterm_without_a_bus_ends_cleanly(
    nats: NatsServer, start_agent: StartAgent
) -> None:
    nats.stop()
    agent = start_agent()
    await eventually(lambda: (agent.directory / "port").exists())
    assert await asyncio.to_thread(agent.stop) == 0


async def test_wiped_bus_storage_is_filled_again(
    nats: NatsServer, plane: Control, start_agent: StartAgent
) -> None:
    """JetStream is a conveyor: after its loss the node keeps serving and reports again."""
    start_agent()
    await plane.place("n1", spec())
    await plane.replica("n1", "ready")
    nats.stop(kill=True)
    nats.wipe()
    nats.start()
    await eventually(lambda: plane.bus.num_reconnects and plane.bus.connected, 5)
    await ensure_buckets(plane.bus)
    await plane.replica("n1", "ready")
    request_id = await plane.generate("n1")
    assert (await plane.terminal(request_id)).finish_reason == "length"
    store = await plane.bus.jetstream().object_store("tokenizers")
    give_up = time.monotonic() + 15
    while not await _holds(store, "m@1"):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.2)


async def _holds(store: ObjectStore, name: str) -> bool:
    try:
        await store.get_info(name)
    except ObjectNotFoundError:
        return False
    return True


async def test_an_idle_node_uses_almost_no_cpu(plane: Control, start_agent: StartAgent) -> None:
    """Two loaded models and nobody asking: under 3 % of a core for agent and workers together."""
    agent = start_agent()
    await plane.place("n1", spec(), spec("m.1.g1.1", isolation="dedicated"))
    await plane.replica("n1", "ready")
    await plane.replica("n1", "ready", "m.1.g1.1")
    processes = [psutil.Process(agent.pid), *agent.workers()]
    await asyncio.sleep(1)
    before = [sum(p.cpu_times()[:2]) for p in processes]
    await asyncio.sleep(5)
    spent = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert spent[1:] == [0.0, 0.0], "an idle worker sleeps"
    assert spent[0] < 0.15
