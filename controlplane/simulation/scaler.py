"""Replicas by load: ``placement.autoscale`` on the figures of the simulated fleet.

As ``application.scaling`` does it, every ``EVERY_S`` instead of every second, and each second for
models that were asked for in vain. Room is made for one model in ``EVERY_S``, and looked for again
after ``AGAIN_S`` where there was none (there each second, for all), since a try plans several
times. Forecasts and loads ahead are left out: nothing is expected, so a model that is scaled to
zero is loaded by its first request.
Worked example, slots for 32 a replica, between 1 and 3::

    30 s   30 open for 1 replica      above 0.9 of its slots: remembered
    45 s   31 open                    ReplicasScaled 1 -> 2 (queue), loaded some seconds later
    300 s  12 open for 2, for 120 s   ReplicasScaled 2 -> 1 (slack)
"""

from collections.abc import Sequence

from controlplane.domain.ids import VersionId
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.autoscale import (
    DEFAULT_POLICY,
    TARGET_TTFT_S,
    Load,
    Memory,
    changed,
    decide,
)
from controlplane.placement.demand import Recent
from controlplane.placement.settling import Settling
from controlplane.simulation.control import Control
from controlplane.simulation.gateway import Gateway
from controlplane.simulation.jobs import Job
from controlplane.simulation.machines import Machines

EVERY_S, ASKED_S = 5.0, 30.0
AGAIN_S = 30.0  # after nobody could make room for a model in vain
DEMAND_S = (80.0, 320.0)  # averages, of which the higher counts
TTFT_S = 60.0


class Scaler:
    """For the versions whose minimum is below their maximum."""

    def __init__(
        self,
        control: Control,
        machines: Machines,
        gateway: Gateway,
        versions: Sequence[VersionId],
    ) -> None:
        self._control, self._machines, self._gateway = control, machines, gateway
        self._versions = versions
        specs = dict(control.versions())
        self._specs: list[VersionSpec] = [specs[one] for one in versions]
        self._scalable = [
            number
            for number, spec in enumerate(self._specs)
            if spec.min_replicas < spec.max_replicas and gateway.served[number]
        ]
        self._memories: dict[int, Memory] = {}
        self._settling = Settling()
        self._recent = [Recent(len(DEMAND_S)) for _ in versions]
        self._ttft: list[list[tuple[float, float]]] = [[] for _ in versions]
        self._last_open = [-1e9] * len(versions)
        self._in_vain_at = [-1e9] * len(versions)
        self._late_at = [-1e9] * len(versions)
        self._next = 0.0

    def note(self, job: Job) -> None:
        """A request has come."""
        self._recent[job.model].note(job.at, DEMAND_S)
        self._last_open[job.model] = job.at

    def ended(self, job: Job) -> None:
        """A request has ended, with what it says about waiting."""
        if job.first_at >= 0:
            ratio = (job.first_at - job.at) / TARGET_TTFT_S[job.latency_class]
            self._ttft[job.model].append((job.at, ratio))
            if ratio > 1:
                self._late_at[job.model] = job.first_at
        self._last_open[job.model] = job.ended_at

    def step(self, now: float, wall: float) -> bool:
        """Whether anything was decided."""
        before = self._control.num_scaled.total()
        is_round = now >= self._next
        if is_round:
            self._next = now + EVERY_S
        for number in self._scalable:
            is_asked = self._gateway.asked_at[number] > now - EVERY_S
            if is_asked or (is_round and not self._is_quiet(number, now)):
                self._scale(number, now, wall)
        if is_round:
            self._make_room(now, wall)
        return self._control.num_scaled.total() > before

    def _is_quiet(self, number: int, now: float) -> bool:
        """Whether ``decide`` would neither change nor remember anything: as few replicas as there
        may be, and far from any pressure. Asked first, since it is so of most models."""
        spec, memory = self._specs[number], self._memories.get(number)
        num = self._control.num_wanted(self._versions[number], spec)
        num_open = self._machines.num_open(number)
        if num_open:
            self._last_open[number] = now
        if num > max(1, spec.min_replicas) or (memory and memory.pressed_since is not None):
            return False
        if not spec.min_replicas and now - self._last_open[number] >= DEFAULT_POLICY.idle_s:
            return num == 0 and self._gateway.asked_at[number] <= now - ASKED_S
        if self._late_at[number] <= now - TTFT_S:
            self._ttft[number].clear()
            return num_open * 4 < spec.max_batch
        return False

    def _scale(self, number: int, now: float, wall: float) -> None:
        load = self._load(number, now)
        memory = self._memories.get(number, Memory())
        verdict, self._memories[number] = decide(load, memory, now)
        if verdict is not None:
            self._control.scale(self._versions[number], load.num, verdict, wall)
            self._memories[number] = changed(memory, load, verdict, now)

    def _load(self, number: int, now: float) -> Load:
        spec, machines = self._specs[number], self._machines
        num = self._control.num_wanted(self._versions[number], spec)
        num_ready = len(machines.ready[number])
        num_open = machines.num_open(number) + len(self._gateway.queues[number].jobs)
        if num_open:
            self._last_open[number] = now
        since = self._settling.since(
            self._versions[number], num, num_ready, num_open, spec.max_batch, now
        )
        return Load(
            num,
            spec.min_replicas,
            spec.max_replicas,
            num_ready,
            num_open,
            int(self._gateway.asked_at[number] > now - ASKED_S and num_ready == 0),
            spec.max_batch,
            machines.kv_used(number),
            self._median_ttft(number, since, now),
            max(self._recent[number].rates(now, DEMAND_S)),
            0.0,
            now - self._last_open[number],
        )

    def _median_ttft(self, number: int, since: float | None, now: float) -> float:
        """Over its target, of the last minute; 0 if nothing is known."""
        kept = [one for one in self._ttft[number] if one[0] > now - TTFT_S]
        self._ttft[number] = kept
        ratios = sorted(ratio for at, ratio in kept if since is not None and at >= since)
        return ratios[len(ratios) // 2] if ratios else 0.0

    def _make_room(self, now: float, wall: float) -> None:
        """For one model that is asked for and fits nowhere, idle ones leave."""
        unplaced = self._control.unplaced()
        for number in self._scalable:
            is_asked = self._gateway.asked_at[number] > now - ASKED_S
            is_due = now - self._in_vain_at[number] >= AGAIN_S
            name = self._versions[number]
            if name in unplaced and is_asked and is_due and not self._machines.ready[number]:
                if not self._control.displaced_for(name, self._idle(now), wall):
                    self._in_vain_at[number] = now
                return

    def _idle(self, now: float) -> list[str]:
        """Versions with replicas, none by their minimum, and no request open; least asked first."""
        found = [
            (max(self._recent[number].rates(now, DEMAND_S)), self._versions[number])
            for number in self._scalable
            if not self._specs[number].min_replicas
            and self._control.num_wanted(self._versions[number], self._specs[number])
            and not self._machines.num_open(number)
            and not self._gateway.queues[number].jobs
        ]
        return [str(name) for _, name in sorted(found)]
