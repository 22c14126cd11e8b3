"""Models on one device, a real worker: the guaranteed one keeps its time, idle time is used."""

import pytest

from gpuagent.wire.messages import ReplicaSpec
from tests.agent.conftest import StartAgent
from tests.agent.harness import Control, spec

SOURCE = "simulated://m?step_ms=20&prefill_tps=1000000&shares=1"
OWN, BULK = "own.1.g1.0", "bulk.1.g1.0"


def replica(replica_id: str, **fields: object) -> ReplicaSpec:
    model = replica_id.partition(".")[0]
    return spec(replica_id, model=model, version_id=f"{model}@1", source=SOURCE, **fields)


def num_tokens(plane: Control, request_ids: list[str]) -> int:
    return sum(len(d.token_ids) for name in request_ids for d in plane.deltas(name))


@pytest.mark.parametrize(("is_guaranteed", "low", "high"), [(True, 0, 15), (False, 60, 140)])
async def test_what_a_neighbour_gets_while_a_model_generates_a_hundred_tokens(
    plane: Control, start_agent: StartAgent, is_guaranteed: bool, low: int, high: int
) -> None:
    """Beside a guaranteed model a flood of best-effort work has a step now and then; beside an
    equal one every second step. Alone again it goes on to its end."""
    own = {"priority": "high", "guaranteed_percent": 60} if is_guaranteed else {}
    bulk = {"priority": "best-effort"} if is_guaranteed else {}
    agent = start_agent()
    await plane.place("n1", replica(OWN, **own), replica(BULK, **bulk))
    await plane.replica("n1", "ready", OWN)
    await plane.replica("n1", "ready", BULK)
    flood = [await plane.generate("n1", 200, BULK) for _ in range(16)]
    await plane.started(flood[-1], 5)
    before = num_tokens(plane, flood)
    request_id = await plane.generate("n1", 100, OWN)
    await plane.terminal(request_id)
    assert low <= (num_tokens(plane, flood) - before) / 16 <= high
    for name in flood:
        assert (await plane.terminal(name)).finish_reason == "length"
    lines = agent.get("/metrics")[1].splitlines()
    busy = {line.split('engine="')[1].partition('"')[0]: float(line.split()[-1])
            for line in lines if line.startswith("engine:busy_seconds_total{")}  # fmt: skip
    assert busy[OWN] > 1.5 and busy[BULK] > 1.5


async def test_who_waits_is_counted_by_class(plane: Control, start_agent: StartAgent) -> None:
    agent = start_agent()
    await plane.place("n1", replica(OWN, max_batch=1))
    await plane.replica("n1", "ready", OWN)
    first = await plane.generate("n1", 400, OWN)
    await plane.started(first)
    for latency_class in ("batch", "batch", "standard"):
        await plane.generate("n1", 4, OWN, latency_class=latency_class)
    shown = {}
    while len(shown) < 2:
        await plane.started(first, num_tokens(plane, [first]) + 1)
        shown = {line.split('latency_class="')[1].partition('"')[0]: float(line.split()[-1])
                 for line in agent.get("/metrics")[1].splitlines()
                 if line.startswith("engine:num_requests_waiting_by_class{")}  # fmt: skip
    assert shown == {"batch": 2.0, "standard": 1.0}
