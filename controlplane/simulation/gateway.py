"""Each request's way: the tenant's rate, a replica or a place in the queue, an end.

The product's own ``dispatch``: ``admit`` takes from the tenant's buckets, ``choose`` compares the
replicas. Where only one replica is ready and its node lives, ``choose`` has nothing to compare and
is not asked (a test says that it would have answered the same). With no replica a request is held
as ``application.hold`` does it, with its figures, and refused at once where it cannot be answered
in time. A job whose node died goes on elsewhere from the tokens it has. Worked example, 12 s to
load::

    0.0 s  a, standard: 12 s, 60 s allowed      held
    0.5 s  b, realtime: 11.5 s, 10 s allowed    refused, cold_too_slow
    12 s   ready                                a is sent
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.dispatch.admit import DEFAULT_RATES, Buckets, admit, full
from controlplane.dispatch.choose import RequestView, choose
from controlplane.dispatch.refusals import NotReady
from controlplane.domain.ids import VersionId
from controlplane.simulation.control import Control
from controlplane.simulation.jobs import FINISHED, LOST, REFUSED, Job
from controlplane.simulation.machines import Live, Machines
from controlplane.simulation.scenario import HOLD_S, SIZES, Scenario

MAX_HELD, UNPLACED_S, MAX_TRIES = 256, 3.0, 5
LOAD_FIRST_S, LOAD_BYTES_PER_S, DECIDE_S = 5.0, 500e6, 1.0  # as application.fleet_state


@dataclass(slots=True)
class Queue:
    """The held jobs of one model with their deadlines, first come first served."""

    jobs: deque[tuple[float, Job]] = field(default_factory=deque)
    unplaced_since: float | None = None


class Gateway:
    """``on_end`` is told of every job exactly once."""

    def __init__(
        self,
        scenario: Scenario,
        control: Control,
        machines: Machines,
        versions: list[VersionId],
        on_end: Callable[[Job], None],
    ) -> None:
        self._scenario, self._control, self._machines = scenario, control, machines
        self._versions, self._on_end = versions, on_end
        self._rates = [DEFAULT_RATES[one.tier] for one in scenario.tenants]
        self._buckets: list[Buckets] = [full(rate, 0.0) for rate in self._rates]
        self.queues = [Queue() for _ in versions]
        self.asked_at = [-1e9] * len(versions)  # last for a model that was not ready
        self.load_s: dict[int, float] = {}  # by model, of its last load
        self._sizes = [SIZES[one.size] for one in scenario.entries()]
        self.served = [True] * len(versions)

    def accept(self, job: Job, now: float) -> None:
        """A request has come."""
        number = job.tenant
        rate, tokens = self._rates[number], job.prompt + job.output
        answer = admit(self._buckets[number], rate, tokens, now)
        self._buckets[number] = answer.buckets
        if not answer.admitted:
            self._end(job, REFUSED, answer.code, now)
        else:
            self._send(job, now)

    def again(self, job: Job, now: float) -> None:
        """Its replica is gone: go on elsewhere."""
        job.num_tries += 1
        if job.num_tries > MAX_TRIES:
            self._end(job, LOST, "too_many_tries", now)
        else:
            self._send(job, now)

    def finished(self, job: Job, now: float) -> None:
        """It has all its tokens."""
        self._end(job, FINISHED, "", now)

    def _end(self, job: Job, end: str, code: str, now: float) -> None:
        job.end, job.code, job.ended_at = end, code, now
        self._on_end(job)

    def _send(self, job: Job, now: float) -> None:
        live = self._chosen(job, now)
        if live is None:
            self._hold(job, now)
        else:
            self._machines.submit(live, job, now)

    def _chosen(self, job: Job, now: float) -> Live | None:
        ready = self._machines.ready[job.model]
        if not ready:
            return None
        if len(ready) == 1:
            live = next(iter(ready.values()))
            if self._machines.hosts[live.place[0]].is_alive:
                return live
        views = self._machines.views(job.model, self._status, now)
        try:
            choice = choose(views, RequestView(job.num_known, job.num_left))
        except NotReady:
            return None
        return ready[choice.replica_id]

    def _status(self, node_id: str) -> str:
        return self._control.nodes[node_id].status

    # --- holding --------------------------------------------------------------------------------
    def _hold(self, job: Job, now: float) -> None:
        self.asked_at[job.model] = now
        queue, allowed = self.queues[job.model], HOLD_S[job.latency_class]
        if not self.served[job.model]:
            self._give_up(job, "model_not_ready", now)
        elif len(queue.jobs) >= MAX_HELD:
            self._give_up(job, "hold_full", now)
        elif self._wait_s(job.model, now) > allowed:
            self._give_up(job, "cold_too_slow", now)
        else:
            job.was_held = True
            queue.jobs.append((now + allowed, job))

    def _give_up(self, job: Job, code: str, now: float) -> None:
        self._end(job, LOST if job.num_done else REFUSED, code, now)

    def _wait_s(self, number: int, now: float) -> float:
        """As ``FleetState.wait_s`` expects it."""
        size = self._sizes[number] if number not in self.load_s else None
        typical = self.load_s.get(number, 0.0)
        if size:
            typical = LOAD_FIRST_S + size.gpu_memory / LOAD_BYTES_PER_S
        began = [
            one.began
            for one in self._machines.live.values()
            if one.model == number and one.state == "loading"
        ]
        if not began:
            return typical + DECIDE_S
        taken = max(0.0, now - min(began))
        return max(typical - taken, taken / 2 if taken > typical else 0.1)

    def ready(self, number: int, now: float) -> None:
        """A replica of the model can take requests: send what is held, in its order."""
        jobs, self.queues[number].jobs = self.queues[number].jobs, deque()
        for _, job in jobs:
            self._send(job, now)

    def expire(self, now: float) -> None:
        """Once a second: end what has waited too long, or waits for what fits nowhere."""
        unplaced = self._control.unplaced()
        for number, queue in enumerate(self.queues):
            if not queue.jobs:
                continue
            if self._is_given_up(number, queue, unplaced, now):
                self._give_all_up(queue, now)
            kept: deque[tuple[float, Job]] = deque()
            for until, job in queue.jobs:
                if until <= now:
                    self._give_up(job, "hold_deadline", now)
                else:
                    kept.append((until, job))
            queue.jobs = kept

    def _is_given_up(self, number: int, queue: Queue, unplaced: set[str], now: float) -> bool:
        is_coming = any(one.model == number for one in self._machines.live.values())
        if self._versions[number] not in unplaced or is_coming:
            queue.unplaced_since = None
            return False
        if queue.unplaced_since is None:
            queue.unplaced_since = now
        return now - queue.unplaced_since >= UNPLACED_S

    def _give_all_up(self, queue: Queue, now: float) -> None:
        jobs, queue.jobs = queue.jobs, deque()
        for _, job in jobs:
            self._give_up(job, "unplaced", now)
