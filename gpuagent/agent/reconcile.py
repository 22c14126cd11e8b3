"""What to do next on this node: desired replicas and running ones in, named buckets out.

Pure: same input, same answer. The caller executes the plan and asks again whenever anything has
changed; nothing is remembered between two calls. Example, one device of 4 GiB that runs ``a`` and
``c`` with 2 GiB each, and should run ``a`` and ``b``:

    reconcile(desired=[a, b], running={a: ready, c: ready})     stop c; b waits: "memory held by c"
    reconcile(desired=[a, b], running={a: ready, c: stopping})  b waits still
    reconcile(desired=[a, b], running={a: ready})               start b
    reconcile(desired=[a, b, d], running={a, b: ready})         hold d: "... memory held by a, b"

A replica that can never fit is refused with a reason rather than tried: on a GPU the attempt would
take the memory of those that run. One that would fit alone but not beside those that run is held:
it is loaded when somebody asks for it or memory is free, see ``residency``.

    M_total = sum of weights + KV pool + workspace + reserved      for each device

A replica counts with its ``memory_bytes`` until it has been loaded once, then with its measured
peak: weights, workspace and its guaranteed part of the KV pool. The reserve and what other
processes hold are taken off what the device offers (``rooms``). A group over several devices takes
its share on each, and starts when there is room on all of them: with 3 GiB on two devices of 4 GiB,
on one of which another replica has 3, it is held.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuagent.agent.sizes import size_text
from gpuagent.wire.messages import Device, ReplicaSpec

MIN_SECRET_BYTES = 16
HOLDING = frozenset({"downloading", "loading", "ready", "stopping"})
PRIORITY = {"high": 0, "normal": 1, "best-effort": 2}


def devices_of(spec: ReplicaSpec) -> tuple[int, ...]:
    """The devices of this node that a replica takes, that of its first rank first."""
    first = spec.device_index
    return spec.device_indices or tuple(range(first, first + spec.tensor_parallel))


def share_bytes(spec: ReplicaSpec) -> int:
    """What a replica may take of each of its devices."""
    return -(-spec.memory_bytes // spec.tensor_parallel)


@dataclass(frozen=True)
class Running:
    """A replica as the agent has it; a failed one may be tried again from ``retry_at`` on."""

    spec: ReplicaSpec
    state: str
    retry_at: float = 0.0
    charged_bytes: int = 0  # measured, of each of its devices; 0: not yet
    is_away: bool = False  # loaded, and not on the device

    @property
    def holds_memory(self) -> bool:
        return self.state in HOLDING and not self.is_away

    @property
    def num_bytes(self) -> int:
        """Of each of its devices, while it is there."""
        return self.charged_bytes or share_bytes(self.spec)


@dataclass(frozen=True)
class Verdict:
    """One replica and why it is in its bucket; ``code`` is "" where nothing is wrong."""

    spec: ReplicaSpec
    reason: str
    code: str = ""


@dataclass(frozen=True)
class Plan:
    """Each desired replica is in exactly one of start, wait, refuse, hold, keep."""

    start: tuple[Verdict, ...] = ()
    stop: tuple[Verdict, ...] = ()
    wait: tuple[Verdict, ...] = ()
    refuse: tuple[Verdict, ...] = ()
    hold: tuple[Verdict, ...] = ()
    keep: tuple[Verdict, ...] = ()


@dataclass
class _Budget:
    """Bytes still free of one device, and those that a stopping replica will give back.
    ``holders`` are the stopping ones, ``held_by`` all that have memory of it."""

    room: int
    free: int
    returning: int = 0
    holders: list[str] = field(default_factory=list)
    held_by: list[str] = field(default_factory=list)


def reconcile(
    desired: Iterable[ReplicaSpec],
    running: Mapping[str, Running],
    devices: Iterable[Device],
    now: float,
    rooms: Mapping[int, int] | None = None,
    reserved: Mapping[int, int] | None = None,
) -> Plan:
    """The plan for this moment; ``now`` is on the clock of ``Running.retry_at``.

    ``rooms``: what each device offers, if not all of it; ``reserved``: bytes kept for others.
    """
    wanted = {spec.replica_id: spec for spec in desired}
    stop = tuple(
        Verdict(have.spec, "not desired" if rid not in wanted else "specification changed")
        for rid, have in running.items()
        if have.state != "stopping" and have.spec != wanted.get(rid)
    )
    offered = {device.index: device.memory_bytes for device in devices} | dict(rooms or {})
    budgets = _budgets(running, offered, {verdict.spec.replica_id for verdict in stop})
    for index, num_bytes in (reserved or {}).items():
        budgets[index].free -= num_bytes
    names = "start", "wait", "refuse", "hold", "keep"
    buckets: dict[str, list[Verdict]] = {name: [] for name in names}
    for spec in sorted(wanted.values(), key=lambda s: PRIORITY.get(s.priority, 1)):
        bucket, verdict = _judge(spec, running.get(spec.replica_id), budgets, now)
        buckets[bucket].append(verdict)
    return Plan(stop=stop, **{name: tuple(found) for name, found in buckets.items()})


def _budgets(
    running: Mapping[str, Running], rooms: Mapping[int, int], stopping: set[str]
) -> dict[int, _Budget]:
    budgets = {index: _Budget(room, room) for index, room in rooms.items()}
    for replica_id, have in running.items():
        held = [budgets[index] for index in devices_of(have.spec) if index in budgets]
        for budget in held if have.holds_memory else ():
            budget.free -= have.num_bytes
            budget.held_by.append(replica_id)
            if have.state == "stopping" or replica_id in stopping:
                budget.returning += have.num_bytes
                budget.holders.append(replica_id)
    return budgets


def _judge(
    spec: ReplicaSpec, have: Running | None, budgets: dict[int, _Budget], now: float
) -> tuple[str, Verdict]:
    if have and (have.state == "stopping" or have.spec != spec):
        return "wait", Verdict(spec, "its former self is stopping")
    if have and (have.holds_memory or have.is_away):
        return "keep", Verdict(spec, have.state)
    if have and have.state == "failed" and have.retry_at > now:
        return "wait", Verdict(spec, f"tried again in {have.retry_at - now:.0f} s", "backoff")
    num_bytes = have.num_bytes if have and have.spec == spec else share_bytes(spec)
    return _unfit(spec, budgets) or _fit(spec, num_bytes, [budgets[i] for i in devices_of(spec)])


def _unfit(spec: ReplicaSpec, budgets: dict[int, _Budget]) -> tuple[str, Verdict] | None:
    """Why it could not run here if everything were free."""
    indices = devices_of(spec)
    if reason := _misplaced(spec, indices):
        return "refuse", Verdict(spec, reason, "tensor_parallel_unsupported")
    absent = next((index for index in indices if index not in budgets), None)
    if absent is None:
        return None
    return "refuse", Verdict(spec, f"there is no device {absent}", "unknown_device")


def _misplaced(spec: ReplicaSpec, indices: tuple[int, ...]) -> str:
    """Why its devices or ranks here make no sense; "" if they do."""
    ranks = range(spec.tensor_parallel) if spec.group is None else spec.group.ranks
    if not ranks or list(ranks) != sorted({*ranks} & {*range(spec.tensor_parallel)}):
        return f"its ranks here, {list(ranks)}, are not of {spec.tensor_parallel} in order"
    if len(set(indices)) != len(ranks) or indices[0] != spec.device_index:
        return f"its {len(ranks)} devices are not all of this node"
    if spec.group is not None and len(spec.group.secret) < MIN_SECRET_BYTES:
        return "the other nodes of its group could not be told from strangers"
    return ""


def _fit(spec: ReplicaSpec, num_bytes: int, budgets: list[_Budget]) -> tuple[str, Verdict]:
    """Whether there is room now, on all of its devices."""
    room, free = min(one.room for one in budgets), min(one.free for one in budgets)
    if num_bytes > room:
        reason = (
            f"needs {size_text(num_bytes)}, the device offers {size_text(max(room, 0))} when empty"
        )
        return "refuse", Verdict(spec, reason, "insufficient_memory")
    if num_bytes <= free:
        for budget in budgets:
            budget.free -= num_bytes
        return "start", Verdict(spec, "desired")
    if num_bytes <= min(one.free + one.returning for one in budgets):
        leaving = dict.fromkeys(name for one in budgets for name in one.holders)
        return "wait", Verdict(spec, f"memory held by {', '.join(leaving)}")
    held_by = ", ".join(dict.fromkeys(name for one in budgets for name in one.held_by))
    reason = f"needs {size_text(num_bytes)}, {size_text(max(free, 0))} of the device are free"
    reason += f"; memory held by {held_by}" if held_by else ""
    return "hold", Verdict(spec, reason, "not_resident")
