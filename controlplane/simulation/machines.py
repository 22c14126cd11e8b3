"""Nodes with their devices, and the replicas on them, as a gateway sees them and as they are.

A node that dies takes its replicas' work with it at once, but nobody knows yet: the gateway goes on
sending there until the node has been silent for ``SUSPECT_S``, and what it sent waits (``limbo``)
to be continued elsewhere. Loads on one node follow each other, since they share its disk. Example,
a node that has m on its disk and n nowhere, told at 0 s to load both (9 s and 17 s)::

    9 s m ready;   26 s n ready;   the next load of n on this node takes 9 s
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.dispatch.choose import ReplicaView
from controlplane.domain.placement import Assignment
from controlplane.simulation.control import SUSPECT_S
from controlplane.simulation.exact import EngineSpec, Tally
from controlplane.simulation.hardware import GPU_CLASSES, Efficiency, load_seconds, step_cost
from controlplane.simulation.jobs import Job
from controlplane.simulation.scenario import SIZES, ModelEntry, Scenario

HEARTBEAT_S = 2.0
Place = tuple[str, int]


class Device(Protocol):
    """``exact.ExactDevice`` or ``coarse.CoarseDevice``."""

    due: float
    tally: Tally

    def attach(self, replica_id: str, spec: EngineSpec) -> None: ...
    def detach(self, replica_id: str, now: float) -> list[Job]: ...
    def num_open(self, replica_id: str) -> tuple[int, int]: ...
    def kv_used(self, replica_id: str) -> float: ...
    def submit(self, replica_id: str, job: Job, now: float) -> None: ...
    def settle(self, now: float) -> None: ...
    def run(self, now: float) -> list[Job]: ...


@dataclass(slots=True)
class Live:
    """A replica: loading, ready, or gone. ``began``: when its node was told."""

    assignment: Assignment
    model: int
    place: Place
    engine: EngineSpec
    began: float
    load_s: float
    state: str = "loading"
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(slots=True)
class Host:
    """A node. ``died_at``: infinity while it lives; ``boot`` counts its starts."""

    node_id: str
    boot: int = 1
    died_at: float = math.inf
    busy_until: float = 0.0
    on_disk: set[int] = field(default_factory=set)
    limbo: list[Job] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.died_at == math.inf


@dataclass(slots=True)
class _Heard:
    """Utilisation as the last heartbeat said it."""

    at: float = 0.0
    busy_s: float = 0.0
    utilisation: float = 0.0


class Machines:
    """``make`` gives a new, empty device. ``on_due``: a device's next event has moved."""

    def __init__(
        self, scenario: Scenario, make: Callable[[], Device], on_due: Callable[[Place], None]
    ) -> None:
        self._groups = scenario.node_ids()
        self._entries = scenario.entries()
        self._scenario, self._make, self._on_due = scenario, make, on_due
        self.hosts = {name: Host(name) for name in self._groups}
        self.devices: dict[Place, Device] = {}
        self._heard: dict[Place, _Heard] = {}
        self.live: dict[str, Live] = {}
        self.ready: list[dict[str, Live]] = [{} for _ in self._entries]
        for name in self._groups:
            self._equip(name)

    def _equip(self, node_id: str) -> None:
        for index in range(self._groups[node_id].gpus):
            self.devices[node_id, index] = self._make()
            self._heard[node_id, index] = _Heard()

    # --- loading --------------------------------------------------------------------------------
    def begin(self, assignment: Assignment, number: int, now: float) -> Live:
        """The node is told to load model ``number``; it is ready at ``busy_until`` of the host."""
        host, entry = self.hosts[assignment.node_id], self._entries[number]
        how: Efficiency = self._scenario.efficiency
        seconds = load_seconds(SIZES[entry.size].shape, how, number in host.on_disk)
        host.busy_until = max(now, host.busy_until) + seconds
        place = assignment.node_id, assignment.device_index
        engine = self._engine(entry, place)
        live = Live(assignment, number, place, engine, now, seconds)
        live.prefill_tokens_per_s = 512 / engine.cost.seconds(512, 512)
        live.decode_step_s = engine.cost.seconds(8, 8 * 1024)
        self.live[assignment.replica_id] = live
        return live

    def _engine(self, entry: ModelEntry, place: Place) -> EngineSpec:
        size, gpu = SIZES[entry.size], GPU_CLASSES[self._groups[place[0]].gpu]
        wanted = self._scenario.arrivals
        return EngineSpec(
            step_cost(gpu, size.shape, self._scenario.efficiency),
            size.shape.num_kv_tokens(size.gpu_memory),
            entry.max_batch,
            wanted.max_prompt + wanted.max_output,
            self._scenario.batching,
            entry.priority,
        )

    def become_ready(self, live: Live) -> None:
        """It is loaded, and on the node's disk from now on."""
        live.state = "ready"
        self.hosts[live.place[0]].on_disk.add(live.model)
        self.devices[live.place].attach(live.assignment.replica_id, live.engine)
        self.ready[live.model][live.assignment.replica_id] = live

    def remove(self, replica_id: str, now: float) -> list[Job]:
        """It stops; what it had not finished."""
        live = self.live.pop(replica_id, None)
        if live is None or live.state == "gone":
            return []
        was_ready, live.state = live.state == "ready", "gone"
        self.ready[live.model].pop(replica_id, None)
        if not was_ready or not self.hosts[live.place[0]].is_alive:
            return []
        jobs = self.devices[live.place].detach(replica_id, now)
        self._on_due(live.place)
        return jobs

    # --- losses ---------------------------------------------------------------------------------
    def kill(self, node_id: str, now: float) -> None:
        """The node dies."""
        host = self.hosts[node_id]
        host.died_at = now
        for replica_id, live in self.live.items():
            if live.place[0] == node_id and live.state == "ready":
                host.limbo += self.devices[live.place].detach(replica_id, now)
        for place in self.places_of(node_id):
            self._on_due(place)

    def revive(self, node_id: str, now: float) -> None:
        """It has started again, with its disk and nothing loaded."""
        host = self.hosts[node_id]
        host.boot, host.died_at, host.busy_until = host.boot + 1, math.inf, now
        for replica_id in [r for r, live in self.live.items() if live.place[0] == node_id]:
            live = self.live.pop(replica_id)
            live.state = "gone"
            self.ready[live.model].pop(replica_id, None)
        self._equip(node_id)

    def places_of(self, node_id: str) -> Iterator[Place]:
        """The node's devices."""
        return ((node_id, index) for index in range(self._groups[node_id].gpus))

    # --- requests -------------------------------------------------------------------------------
    def submit(self, live: Live, job: Job, now: float) -> None:
        """Send a job there; into the void if the node is dead and nobody knows yet."""
        job.replica_id = live.assignment.replica_id
        host = self.hosts[live.place[0]]
        if not host.is_alive:
            host.limbo.append(job)
            return
        self.devices[live.place].submit(job.replica_id, job, now)
        self._on_due(live.place)

    def views(self, number: int, status: Callable[[str], str], now: float) -> list[ReplicaView]:
        """What a gateway knows of a model's ready replicas."""
        return [self._view(live, status, now) for live in self.ready[number].values()]

    def _view(self, live: Live, status: Callable[[str], str], now: float) -> ReplicaView:
        node_id, name = live.place[0], live.assignment.replica_id
        host = self.hosts[node_id]
        running, waiting = self.devices[live.place].num_open(name) if host.is_alive else (0, 0)
        return ReplicaView(
            name,
            node_id,
            node_status=status(node_id),
            age_s=0.0 if host.is_alive else now - host.died_at,
            utilization=self._utilisation(live.place, now),
            num_running=running,
            num_waiting=waiting,
            num_local=running + waiting,
            max_batch=live.engine.max_batch,
            num_blocks=live.engine.kv_tokens // 16,
            prefill_tokens_per_s=live.prefill_tokens_per_s,
            decode_step_s=live.decode_step_s,
        )

    def _utilisation(self, place: Place, now: float) -> float:
        heard = self._heard[place]
        passed = now - heard.at
        if passed >= HEARTBEAT_S:
            device = self.devices[place]
            device.settle(now)
            busy_s = device.tally.busy_s
            heard.utilisation = min(1.0, max(0.0, (busy_s - heard.busy_s) / passed))
            heard.at, heard.busy_s = now, busy_s
        return heard.utilisation

    def num_open(self, number: int) -> int:
        """Requests on a model's ready replicas."""
        return sum(
            sum(self.devices[live.place].num_open(name))
            for name, live in self.ready[number].items()
            if self.hosts[live.place[0]].is_alive
        )

    def kv_used(self, number: int) -> float:
        """Mean share of the keys' and values' memory in use over a model's ready replicas."""
        shares = [
            self.devices[live.place].kv_used(name)
            for name, live in self.ready[number].items()
            if self.hosts[live.place[0]].is_alive
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def is_suspect(self, node_id: str, now: float) -> bool:
        """Whether a gateway would no longer send there."""
        return now - self.hosts[node_id].died_at >= SUSPECT_S
