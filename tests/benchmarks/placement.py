"""Placement on a real cluster's nodes and workloads, and the time of a plan with its reasons.

``python -m tests.benchmarks.placement --nodes PATH --workloads PATH [--json F]``

The product places on 1,213 nodes with 6,212 GPUs (Alibaba cluster-trace-gpu-v2023): each workload
is a model version that takes so many thousandths of a GPU's memory, or several whole GPUs, and
cores and memory of the node; ``survey`` and ``score`` choose as they do in every plan. Workloads
are drawn with replacement until they ask for 1.3 times the fleet's GPUs, and placed in order
without violating a constraint. Ratios are of the allocated share of all GPUs at the first failure
and after 100, means over the seeds, the same draws for all.

The score's weights were chosen on seeds 0 to 4: ``--first-seed 10`` draws others. With ``--unseen``
policies are told of the first half of the trace as typical, and what comes is drawn from the second
half.
"""

import argparse
import bisect
import csv
import gzip
import json
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from controlplane.dispatch.choose import ReplicaView, RequestView, choose
from controlplane.dispatch.record import dispatch_of, encode
from controlplane.domain.ids import NodeId, ReplicaId, VersionId
from controlplane.domain.placement import Assignment, Shard
from controlplane.domain.version_spec import Needs, VersionSpec
from controlplane.placement.feasible import Fleet, Resident
from controlplane.placement.plan import plan
from controlplane.placement.snapshot import DeviceView, FleetSnapshot, NodeView, VersionView
from controlplane.placement.survey import survey
from tests.benchmarks.placement_peers import PEERS, Machine, Workload

MIB = 2**20
ASKED = 1.3  # of the fleet's GPUs
NUM_FAILURES = 100
Reached = dict[str, float]


# --- the trace --------------------------------------------------------------------------------
def rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        return list(csv.DictReader(file))


def machines_of(path: Path) -> list[Machine]:
    return [
        Machine(int(one["gpu"]), one["model"], int(one["cpu_milli"]), int(one["memory_mib"]))
        for one in rows(path)
    ]


def workloads_of(path: Path) -> list[Workload]:
    return [
        Workload(
            int(one["num_gpu"]),
            int(one["gpu_milli"] or 0),
            int(one["cpu_milli"]),
            int(one["memory_mib"]),
        )
        for one in rows(path)
    ]


def draw(workloads: Sequence[Workload], capacity: int, seed: int) -> Iterable[Workload]:
    chance, asked = random.Random(seed), 0
    while asked < ASKED * capacity:
        one = chance.choice(workloads)
        asked += one.total_milli
        yield one


# --- the product ------------------------------------------------------------------------------
class Product:
    """The planner's workbench, one replica after the other. A workload of no GPU takes nothing on
    a device, only of its node; it is a model of 0 bytes."""

    name = "ours"

    def __init__(self, machines: Sequence[Machine], typical: Counter[Workload], seed: int) -> None:
        self._versions = {one: self._version(one, number) for one, number in typical.items()}
        wanted = tuple(v for one, v in self._versions.items() if one.num_gpus)
        nodes = tuple(_node(number, one) for number, one in enumerate(machines))
        self._fleet = Fleet(FleetSnapshot(nodes, wanted, (), (), 0, 0.0))
        self._num = 0

    @staticmethod
    def _version(one: Workload, number: int) -> VersionView:
        spec = VersionSpec(
            version="v1",
            source="simulated://m",
            gpu_memory=one.total_milli,
            tensor_parallel=max(1, one.num_gpus),
            needs=Needs(cpu_milli=one.cpu_milli, host_memory=one.memory_mib * MIB),
        )
        name = "-".join(map(str, one))
        return VersionView(VersionId(f"{name}@v1"), spec, number)

    def place(self, wanted: Workload) -> bool:
        version = self._versions.get(wanted) or self._version(wanted, 1)
        self._num += 1
        found = survey(self._fleet, version)
        if not found.num_candidates:
            return False
        slots = [self._fleet.slots[cell] for cell in found.group(found.best)]
        shards = tuple(Shard(one.node.node_id, one.device.index) for one in slots)
        # A version of its own for each: two workloads of a kind may share a device.
        own = VersionView(VersionId(f"{self._num}@v1"), version.spec, 1)
        self._fleet.add(
            Resident(
                Assignment(
                    ReplicaId(f"r{self._num}"),
                    own.version_id,
                    shards[0].node_id,
                    shards[0].device_index,
                    version.spec.gpu_memory,
                    shards if len(shards) > 1 else (),
                ),
                own,
            )
        )
        return True


def _node(number: int, one: Machine) -> NodeView:
    devices = tuple(
        DeviceView(index, 1000, kind="cuda", name=one.model) for index in range(one.num_gpus)
    )
    return NodeView(
        NodeId(f"n{number:04}"),
        devices,
        cpu_milli=one.cpu_milli,
        host_memory=one.memory_mib * MIB,
    )


# --- filling the fleet ------------------------------------------------------------------------
def fill(policy: Any, order: Iterable[Workload], capacity: int) -> tuple[Reached, list[float]]:
    """Allocated share at the first failure and after 100, and the seconds of each placement."""
    allocated, failures, seconds = 0, 0, []
    reached: Reached = {}
    for wanted in order:
        started = time.perf_counter()
        placed = policy.place(wanted)
        seconds.append(time.perf_counter() - started)
        allocated += wanted.total_milli if placed else 0
        failures += not placed
        if failures:
            reached.setdefault("at_first_failure", allocated / capacity)
        if failures == NUM_FAILURES:
            break
    reached["after_100_failures"] = allocated / capacity
    return reached, seconds


def compare(
    machines: Sequence[Machine],
    known: Sequence[Workload],
    workloads: Sequence[Workload],
    seeds: Iterable[int],
) -> tuple[dict[str, Reached], list[float]]:
    """By policy the means over the seeds; and the product's seconds for each placement. Policies
    are told of the ``known`` workloads as typical ones; ``workloads`` are those drawn from."""
    capacity, typical = 1000 * sum(one.num_gpus for one in machines), Counter(known)
    found: dict[str, list[Reached]] = {}
    seconds: list[float] = []
    for seed in seeds:
        order = list(draw(workloads, capacity, seed))
        for make in (Product, *PEERS):
            policy = make(machines, typical, seed)
            reached, took = fill(policy, order, capacity)
            found.setdefault(policy.name, []).append(reached)
            seconds += took if policy.name == "ours" else []
    return {name: _means(each) for name, each in found.items()}, seconds


def _means(each: list[Reached]) -> Reached:
    return {key: statistics.fmean(one[key] for one in each) for key in each[0]}


# --- planning time ----------------------------------------------------------------------------
def catalog(num_models: int, num_nodes: int) -> FleetSnapshot:
    """Models of many sizes that fill two thirds of nodes with eight GPUs of 80 GB."""
    chance = random.Random(num_models)
    mean = num_nodes * 8 * 80e9 * 0.66 / num_models
    versions = tuple(
        VersionView(
            VersionId(f"m{number:04}@v1"),
            VersionSpec(
                version="v1",
                source="simulated://m",
                gpu_memory=int(mean * chance.uniform(0.2, 1.8)),
                priority=chance.choice(("high", "normal", "best-effort")),
            ),
            1,
        )
        for number in range(num_models)
    )
    devices = tuple(DeviceView(index, 80 * 10**9) for index in range(8))
    nodes = tuple(NodeView(NodeId(f"n{i:03}"), devices, zone=f"z{i % 4}") for i in range(num_nodes))
    return FleetSnapshot(nodes, versions, (), (), 0, 0.0)


def bare_best_fit(snapshot: FleetSnapshot) -> int:
    """Best-fit decreasing in plain Python, an index of free memory and nothing else: the floor."""
    free = sorted(
        (device.capacity_bytes, number, device.index)
        for number, node in enumerate(snapshot.nodes)
        for device in node.devices
    )
    placed = 0
    for version in sorted(snapshot.versions, key=lambda one: -one.spec.gpu_memory):
        at = bisect.bisect_left(free, (version.spec.gpu_memory, -1, -1))
        if at < len(free):
            room, number, index = free.pop(at)
            bisect.insort(free, (room - version.spec.gpu_memory, number, index))
            placed += 1
    return placed


def seconds_of(work: Any, repeats: int) -> float:
    """Median of this process's own time, since others may share the machine."""
    took = []
    for _ in range(repeats):
        started = time.process_time_ns()
        work()
        took.append((time.process_time_ns() - started) / 1e9)
    return statistics.median(took)


def planning(num_models: int, num_nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds; every start has its sentence, best candidates and counted rejections."""
    snapshot = catalog(num_models, num_nodes)
    assert len(plan(snapshot, 1).started) == num_models == bare_best_fit(snapshot)
    name = f"{num_models}_models_on_{num_nodes * 8}"
    return {
        f"plan_ms_{name}": 1e3 * seconds_of(lambda: plan(snapshot, 1), repeats),
        f"bare_ms_{name}": 1e3 * seconds_of(lambda: bare_best_fit(snapshot), repeats),
    }


def choosing(num_nodes: int = 64) -> dict[str, float]:
    """Microseconds of one request's choice, with all that explains it kept; of that explanation
    once it is asked for; and of its JSON as it goes on record."""
    chance = random.Random(0)
    views = [
        ReplicaView(
            f"r{number}", f"n{number}", utilization=chance.random(), temperature_c=50.0,
            memory_free_bytes=2**33, memory_total_bytes=2**36, num_running=chance.randrange(16),
            num_waiting=chance.randrange(4), prefill_tokens_per_s=4000.0, decode_step_s=0.02,
        )
        for number in range(num_nodes)
    ]  # fmt: skip
    request = RequestView(400, 128)
    choice = choose(views, request)
    kept = dispatch_of(choice, 0, 1, 0.0, "sampled", 1)
    return {
        f"choose_us_{num_nodes}": 1e6 * seconds_of(lambda: choose(views, request), 2000),
        f"explain_us_{num_nodes}": 1e6 * seconds_of(choice.explain, 500),
        f"record_us_{num_nodes}": 1e6 * seconds_of(lambda: encode(kept), 500),
        f"record_bytes_{num_nodes}": len(encode(kept)),
    }


# --- the report -------------------------------------------------------------------------------
def report(nodes: Path, workloads: Path, seeds: range, unseen: bool = False) -> dict[str, Any]:
    machines, wanted = machines_of(nodes), workloads_of(workloads)
    half = len(wanted) // 2
    known, drawn = (wanted[:half], wanted[half:]) if unseen else (wanted, wanted)
    shares, seconds = compare(machines, known, drawn, seeds)
    ratios = {}
    for name, reached in shares.items():
        for key, value in reached.items():
            suffix = "" if key == "after_100_failures" else f"_{key}"
            if name != "ours":
                ratios[f"allocated_vs_{name}{suffix}"] = shares["ours"][key] / value
    figures = {
        f"allocated_{name}_{key}": value
        for name, reached in shares.items()
        for key, value in reached.items()
    }
    ordered = sorted(seconds)
    figures["decision_ms_p50"] = 1e3 * ordered[len(ordered) // 2]
    figures["decision_ms_p99"] = 1e3 * ordered[int(0.99 * len(ordered))]
    figures |= planning(200, 6, 15) | planning(2000, 128, 5)
    figures |= choosing()
    return {
        "name": "placement",
        "machine": f"{platform.machine()}, seeds {seeds[0]} to {seeds[-1]}, unseen: {unseen}",
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "figures": {name: round(value, 4) for name, value in figures.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--unseen", action="store_true", help="draw from workloads not told of")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = report(options.nodes, options.workloads, seeds, options.unseen)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
