"""What to do next on this node: desired replicas and running ones in, named buckets out.

Pure: same input, same answer. The caller executes the plan and asks again whenever anything has
changed; nothing is remembered between two calls. Example, one device of 4 GiB that runs ``a`` and
``c`` with 2 GiB each, and should run ``a`` and ``b``:

    reconcile(desired=[a, b], running={a: ready, c: ready})     stop c; b waits: "memory held by c"
    reconcile(desired=[a, b], running={a: ready, c: stopping})  b waits still
    reconcile(desired=[a, b], running={a: ready})               start b

A replica that can never fit is refused with a reason rather than tried: on a GPU the attempt would
take the memory of those that run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuagent.wire.messages import Device, ReplicaSpec

HOLDING = frozenset({"downloading", "loading", "ready", "stopping"})
PRIORITY = {"high": 0, "normal": 1, "best-effort": 2}


@dataclass(frozen=True)
class Running:
    """A replica as the agent has it; a failed one may be tried again from ``retry_at`` on."""

    spec: ReplicaSpec
    state: str
    retry_at: float = 0.0

    @property
    def holds_memory(self) -> bool:
        return self.state in HOLDING


@dataclass(frozen=True)
class Verdict:
    """One replica and why it is in its bucket; ``code`` is "" where nothing is wrong."""

    spec: ReplicaSpec
    reason: str
    code: str = ""


@dataclass(frozen=True)
class Plan:
    """Each desired replica is in exactly one of start, wait, refuse, keep."""

    start: tuple[Verdict, ...] = ()
    stop: tuple[Verdict, ...] = ()
    wait: tuple[Verdict, ...] = ()
    refuse: tuple[Verdict, ...] = ()
    keep: tuple[Verdict, ...] = ()


@dataclass
class _Budget:
    """Bytes still free of one device, and those that a stopping replica will give back."""

    free: int
    returning: int = 0
    holders: list[str] = field(default_factory=list)


def reconcile(
    desired: Iterable[ReplicaSpec],
    running: Mapping[str, Running],
    devices: Iterable[Device],
    now: float,
) -> Plan:
    """The plan for this moment; ``now`` is on the clock of ``Running.retry_at``."""
    wanted = {spec.replica_id: spec for spec in desired}
    stop = tuple(
        Verdict(have.spec, "not desired" if rid not in wanted else "specification changed")
        for rid, have in running.items()
        if have.state != "stopping" and have.spec != wanted.get(rid)
    )
    budgets = _budgets(running, devices, {verdict.spec.replica_id for verdict in stop})
    buckets: dict[str, list[Verdict]] = {"start": [], "wait": [], "refuse": [], "keep": []}
    for spec in sorted(wanted.values(), key=lambda s: PRIORITY.get(s.priority, 1)):
        bucket, verdict = _judge(spec, running.get(spec.replica_id), budgets, now)
        buckets[bucket].append(verdict)
    return Plan(stop=stop, **{name: tuple(found) for name, found in buckets.items()})


def _budgets(
    running: Mapping[str, Running], devices: Iterable[Device], stopping: set[str]
) -> dict[int, _Budget]:
    budgets = {device.index: _Budget(device.memory_bytes) for device in devices}
    for replica_id, have in running.items():
        budget = budgets.get(have.spec.device_index)
        if budget and have.holds_memory:
            budget.free -= have.spec.memory_bytes
            if have.state == "stopping" or replica_id in stopping:
                budget.returning += have.spec.memory_bytes
                budget.holders.append(replica_id)
    return budgets


def _judge(
    spec: ReplicaSpec, have: Running | None, budgets: dict[int, _Budget], now: float
) -> tuple[str, Verdict]:
    if have and (have.state == "stopping" or have.spec != spec):
        return "wait", Verdict(spec, "its former self is stopping")
    if have and have.holds_memory:
        return "keep", Verdict(spec, have.state)
    if have and have.state == "failed" and have.retry_at > now:
        return "wait", Verdict(spec, f"tried again in {have.retry_at - now:.0f} s", "backoff")
    return _fit(spec, budgets.get(spec.device_index))


def _fit(spec: ReplicaSpec, budget: _Budget | None) -> tuple[str, Verdict]:
    if budget is None:
        return "refuse", Verdict(spec, f"there is no device {spec.device_index}", "unknown_device")
    if spec.memory_bytes <= budget.free:
        budget.free -= spec.memory_bytes
        return "start", Verdict(spec, "desired")
    if spec.memory_bytes <= budget.free + budget.returning:
        return "wait", Verdict(spec, f"memory held by {', '.join(budget.holders)}")
    reason = f"needs {spec.memory_bytes} bytes, {max(budget.free, 0)} of the device are free"
    return "refuse", Verdict(spec, reason, "insufficient_memory")
