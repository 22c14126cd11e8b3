"""A fleet in simulated time: what comes, what fails, what is decided, in one order of events.

Everything that decides is the product's: the planner (``placement``), the choice of a replica and
the tenants' rates (``dispatch``), the number of replicas (``placement.autoscale``), and in mode
``exact`` every step's batch (``gpuagent.engine.scheduler``); ``coarse`` runs the same batches in
jumps. The scenario, its seed and a trace are all that goes in, so the same run comes out again.
Worked example, a model with one replica on n1, loads of 9 s::

    100.0 s   n1 dies; what it ran, and what is still sent there, waits
    106.0 s   NodeSuspected: those jobs are held for another replica, and all that come now
    115.0 s   NodeLost; the next plan, within a second, places the model on n2
    116.0 s   n2 is told, and loads
    125.0 s   ReplicaBecameReady: what is held goes there, the interrupted jobs from where they were
    900.0 s   n1 is back: NodeJoined with another boot

The fleet is loaded when the time begins. A replica that a plan stops hands its unfinished jobs to
others at once. What may stop since another is ready is planned every ``SETTLE_S`` (the product
looks each second). Left out: tensor parallelism, swapping weights, prefix caches, speculation,
loads ahead of demand, the network's time.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from controlplane.domain import node
from controlplane.domain.ids import NodeId, VersionId, version_id
from controlplane.domain.placement import Assignment
from controlplane.placement.plan import PlacementPlan
from controlplane.simulation.arrivals import Lengths, arrivals
from controlplane.simulation.calibration import rooms
from controlplane.simulation.coarse import CoarseDevice
from controlplane.simulation.control import LOST_S, SUSPECT_S, Control
from controlplane.simulation.exact import ExactDevice
from controlplane.simulation.gateway import DECIDE_S, Gateway
from controlplane.simulation.jobs import Job
from controlplane.simulation.machines import Device, Live, Machines, Place
from controlplane.simulation.outcome import Outcome
from controlplane.simulation.sampling import Window, outages, windows
from controlplane.simulation.scaler import Scaler
from controlplane.simulation.scenario import SIZES, Scenario, check

TICK_S, SETTLE_S, ACCOUNT_S, MAX_ROUNDS = 1.0, 5.0, 60.0, 50
Timer = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Fleet:
    """One run. ``on_end`` is told of every job at its end. Raises Invalid for a wrong scenario."""

    def __init__(
        self,
        scenario: Scenario,
        trace: Lengths | None = None,
        on_end: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.scenario = check(scenario)
        self._trace, self._observe = trace, on_end
        self.control, self.outcome = Control(), Outcome()
        self._timers: list[Timer] = []
        self._dues: list[tuple[float, int, Place]] = []
        self._numbers = count()
        self._versions: list[VersionId] = [version_id(one.name, "v1") for one in scenario.entries()]
        self._weights = [SIZES[one.size].shape.weights_bytes for one in scenario.entries()]
        self._models = {str(name): number for number, name in enumerate(self._versions)}
        self.machines = Machines(scenario, self._device, self._push)
        self.gateway = Gateway(scenario, self.control, self.machines, self._versions, self._end)
        self._is_dirty, self._settle_at = False, -math.inf
        self._busy_seen: dict[Place, float] = {}
        self._accounted_at = 0.0
        self._window = Window(0.0, 0.0, scenario.seconds)

    def _device(self) -> Device:
        return ExactDevice() if self.scenario.mode == "exact" else CoarseDevice(rooms)

    # --- the run --------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """From the beginning until the last request has ended."""
        self._found()
        losses = outages(self.scenario, np.random.default_rng([self.scenario.seed, 0]))
        stretches = windows(self.scenario, losses, np.random.default_rng([self.scenario.seed, 1]))
        for one in losses:
            self._schedule(stretches, one.at, self._kill, one.node)
            self._schedule(stretches, one.at + one.seconds, self._revive, one.node)
        self._at(TICK_S, self._tick)
        for number, window in enumerate(stretches):
            self._run_window(window, np.random.default_rng([self.scenario.seed, 2, number]))
        while self.outcome.num_arrived > self.outcome.ends.total():
            self._step(math.inf)
        return self._finish()

    def _run_window(self, window: Window, chance: np.random.Generator) -> None:
        self._window = window
        for job in arrivals(self.scenario, window, self._trace, chance):
            self._advance(job.at)
            job.number = self.outcome.num_arrived
            self.outcome.num_arrived += 1
            self._scaler.note(job)
            self.gateway.accept(job, job.at)
        end = window.at + window.seconds
        self._advance(end)
        self._account(end)

    def _finish(self) -> Outcome:
        outcome = self.outcome
        outcome.seconds = self.scenario.seconds
        end = self._window.at + self._window.seconds
        outcome.overtime_s = max(0.0, outcome.last_end - end)
        outcome.num_events = len(self.control.events)
        outcome.num_cold_starts = self.control.num_scaled["woken"]
        outcome.num_movements = self.control.num_moved
        return outcome

    def _found(self) -> None:
        """The fleet as it stands at the beginning: placed, and loaded."""
        wall = self.scenario.start
        self.control.found(self.scenario, wall)
        specs = dict(self.control.versions())
        if self.scenario.sharing == "one_model_per_gpu":
            self.gateway.served = [specs[one].min_replicas > 0 for one in self._versions]
        for _ in range(MAX_ROUNDS):
            made = self.control.place(wall)
            if made is None:
                break
            for stop in made.stopped:
                self.machines.remove(stop.assignment.replica_id, 0.0)
                self.control.stopped(stop.assignment, wall)
            for start in made.started:
                self.control.loading(start.assignment, wall)
                self._ready(self._begin(start.assignment, 0.0), 0.0)
        for host in self.machines.hosts.values():
            host.busy_until = 0.0
        self.control.num_started = self.control.num_moved = self.outcome.num_loads = 0
        self._scaler = Scaler(self.control, self.machines, self.gateway, self._versions)

    def _end(self, job: Job) -> None:
        self.outcome.end(job)
        self._scaler.ended(job)
        self._observe(job)

    # --- the order of events --------------------------------------------------------------------
    def _at(self, at: float, what: Callable[..., None], *args: Any) -> None:
        heappush(self._timers, (at, next(self._numbers), what, args))

    def _schedule(
        self, stretches: list[Window], wall: float, what: Callable[..., None], *args: Any
    ) -> None:
        """At a time of the scenario that one of the stretches holds."""
        for window in stretches:
            if window.wall <= wall < window.wall + window.seconds:
                self._at(window.at + wall - window.wall, what, *args)

    def _push(self, place: Place) -> None:
        due = self.machines.devices[place].due
        if due < math.inf:
            heappush(self._dues, (due, next(self._numbers), place))

    def _advance(self, until: float) -> None:
        while self._step(until):
            pass

    def _step(self, until: float) -> bool:
        """The next event, if it is not after ``until``."""
        timer = self._timers[0][0] if self._timers else math.inf
        due = self._dues[0][0] if self._dues else math.inf
        if min(timer, due) > until:
            return False
        if timer <= due:
            at, _, what, args = heappop(self._timers)
            what(at, *args)
            return True
        _, _, place = heappop(self._dues)
        device = self.machines.devices[place]
        if device.due == due:  # else it has moved since, and was pushed again
            ended = device.run(due)
            self._push(place)
            for job in ended:
                self.gateway.finished(job, due)
        return True

    def _wall(self, now: float) -> float:
        return self.scenario.start + self._window.wall_at(now)

    def _tick(self, now: float) -> None:
        self.gateway.expire(now)
        self._is_dirty |= self._scaler.step(now, self._wall(now))
        if self._is_dirty or now - TICK_S < self._settle_at <= now:
            self._is_dirty = False
            made = self.control.place(self._wall(now))
            if made is not None:
                self._carry_out(made, now)
        if now - self._accounted_at >= ACCOUNT_S:
            self._account(now)
        self._at(now + TICK_S, self._tick)

    # --- placement ------------------------------------------------------------------------------
    def _carry_out(self, made: PlacementPlan, now: float) -> None:
        again: list[Job] = []
        for stop in made.stopped:
            again += self.machines.remove(stop.assignment.replica_id, now)
            if self.machines.hosts[stop.assignment.node_id].is_alive:
                self.control.stopped(stop.assignment, self._wall(now))
        for start in made.started:
            self._at(now + DECIDE_S, self._told, start.assignment)
        for job in again:
            self.gateway.again(job, now)

    def _told(self, now: float, assignment: Assignment) -> None:
        """The node reads its desired state."""
        is_wanted = assignment.replica_id in self.control.placement.assignments
        host = self.machines.hosts[assignment.node_id]
        if is_wanted and host.is_alive and assignment.replica_id not in self.machines.live:
            self.control.loading(assignment, self._wall(now))
            live = self._begin(assignment, now)
            self._at(host.busy_until, self._loaded, live)

    def _begin(self, assignment: Assignment, now: float) -> Live:
        return self.machines.begin(assignment, self._models[assignment.version_id], now)

    def _loaded(self, now: float, live: Live) -> None:
        if live.state == "loading" and self.machines.hosts[live.place[0]].is_alive:
            self._ready(live, now)
            self.gateway.ready(live.model, now)
            if now > self._settle_at:  # others may leave now
                self._settle_at = now + SETTLE_S

    def _ready(self, live: Live, now: float) -> None:
        self.machines.become_ready(live)
        self.outcome.num_loads += 1
        self.gateway.load_s[live.model] = live.load_s
        weights = self._weights[live.model]
        self.control.ready(live.assignment, weights, live.load_s, self._wall(now))

    # --- losses ---------------------------------------------------------------------------------
    def _kill(self, now: float, node_id: str) -> None:
        self._account(now)
        self.machines.kill(node_id, now)
        self.outcome.num_losses += 1
        boot = self.machines.hosts[node_id].boot
        self._at(now + SUSPECT_S, self._suspect, node_id, boot)
        self._at(now + LOST_S, self._lose, node_id, boot)

    def _is_still_away(self, node_id: str, boot: int) -> bool:
        host = self.machines.hosts[node_id]
        return host.boot == boot and not host.is_alive

    def _say(self, now: float, node_id: str, event: Any) -> None:
        self.control.say(node.RecordNodeEvents(NodeId(node_id), (event,), self._wall(now)))

    def _suspect(self, now: float, node_id: str, boot: int) -> None:
        if self._is_still_away(node_id, boot):
            self._say(now, node_id, node.NodeSuspected(NodeId(node_id), SUSPECT_S, self._wall(now)))
            self._free_limbo(node_id, now)

    def _lose(self, now: float, node_id: str, boot: int) -> None:
        if not self._is_still_away(node_id, boot):
            return
        silent = [
            name
            for name, host in self.machines.hosts.items()
            if now - host.died_at >= SUSPECT_S and self.control.nodes[name].status != "lost"
        ]
        if not self.control.may_lose(len(silent)):  # frozen: it is asked again
            self._at(now + TICK_S, self._lose, node_id, boot)
            return
        silent_s = now - self.machines.hosts[node_id].died_at
        self._say(now, node_id, node.NodeLost(NodeId(node_id), silent_s, self._wall(now)))
        self._is_dirty = True

    def _free_limbo(self, node_id: str, now: float) -> None:
        host = self.machines.hosts[node_id]
        jobs, host.limbo = host.limbo, []
        for job in jobs:
            self.gateway.again(job, now)

    def _revive(self, now: float, node_id: str) -> None:
        if self.machines.hosts[node_id].is_alive:
            return
        self._account(now)
        self.machines.revive(node_id, now)
        for place in self.machines.places_of(node_id):
            self._busy_seen.pop(place, None)
        boot = self.machines.hosts[node_id].boot
        self.control.joined(self.scenario, NodeId(node_id), boot, self._wall(now))
        self._free_limbo(node_id, now)
        for assignment in self.control.placement.assignments.values():
            if assignment.node_id == node_id:  # it was not declared lost yet
                self._at(now + DECIDE_S, self._told, assignment)
        self._is_dirty = True

    # --- what the devices did -------------------------------------------------------------------
    def _account(self, now: float) -> None:
        """Count the time since the last account, by the weight of the stretch it is in."""
        weight, passed = self._window.weight, now - self._accounted_at
        self._accounted_at = now
        alive = {name for name, host in self.machines.hosts.items() if host.is_alive}
        for place, device in self.machines.devices.items():
            if place[0] in alive:
                device.settle(now)
                busy_s = device.tally.busy_s
                self.outcome.busy_s += (busy_s - self._busy_seen.get(place, 0.0)) * weight
                self.outcome.device_s += passed * weight
                self._busy_seen[place] = busy_s
        num = sum(
            one.state == "ready" and one.place[0] in alive for one in self.machines.live.values()
        )
        self.outcome.model_s += num * passed * weight
