"""A device under the product's own scheduler and its own turns, one step at a time.

Every replica has a real ``gpuagent.engine.scheduler.Scheduler``; which of them steps next is the
worker's own rule (``gpuagent.agent.turns``). Only the forward pass is replaced, by its cost
(``hardware.StepCost``). Prompts hold no text, so no prefix is ever found in the cache. Example, one
replica, steps of 10 ms and 2 ms for each 100 prompt tokens::

    0 ms    job of 512 + 3 tokens comes     step of 512 tokens, 20 ms
    20 ms   its first token                 step of 1 token, 10 ms
    30 ms   the second; 40 ms the third, and it has ended
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

from controlplane.simulation.hardware import StepCost
from controlplane.simulation.jobs import Job
from gpuagent.agent.turns import Turns
from gpuagent.engine.batch import SchedulerOutput
from gpuagent.engine.policies import Policy
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512  # a step's, as a node's desired state has it
TARGET_ITL_S = 0.2  # as the engine's default


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a loaded replica can do. ``kv_tokens``: tokens of keys and values it holds at most."""

    cost: StepCost
    kv_tokens: int
    max_batch: int
    max_model_len: int
    policy: str = "continuous"
    priority: str = "normal"

    def fits(self, job: Job) -> bool:
        """Whether it can ever run here."""
        return job.prompt + job.output <= min(self.max_model_len, self.kv_tokens)


@dataclass(slots=True)
class Tally:
    """What a device has done: seconds of steps, tokens computed of prompts and generated."""

    busy_s: float = 0.0
    num_prompt: int = 0
    num_output: int = 0


@lru_cache(maxsize=4096)
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (1,) * num_tokens


def scheduler_of(spec: EngineSpec) -> Scheduler:
    """As a node sets it up for a version."""
    return Scheduler(
        SchedulerConfig(
            num_blocks=max(1, spec.kv_tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_batch_tokens=max(MAX_BATCH_TOKENS, spec.max_batch),
            max_num_seqs=spec.max_batch,
            max_model_len=spec.max_model_len + 1,
            policy=Policy(spec.policy),
            prefix_caching=False,
            target_itl_seconds=TARGET_ITL_S,
        )
    )


def seconds_of(cost: StepCost, output: SchedulerOutput) -> float:
    """Of the planned step."""
    return cost.seconds(output.num_tokens, sum(work.end for work in output.work))


@dataclass(slots=True)
class _Replica:
    spec: EngineSpec
    scheduler: Scheduler
    jobs: dict[str, Job] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """The step that the device is in."""

    replica_id: str
    output: SchedulerOutput
    seconds: float


class ExactDevice:
    """``due`` is when its step ends; ``run`` ends that and begins the next."""

    def __init__(self) -> None:
        self.due = math.inf
        self.tally = Tally()
        self._turns = Turns()
        self._replicas: dict[str, _Replica] = {}
        self._running: _Running | None = None

    def attach(self, replica_id: str, spec: EngineSpec) -> None:
        """A replica is ready."""
        self._replicas[replica_id] = _Replica(spec, scheduler_of(spec))
        self._turns.join(replica_id, 0, spec.priority)

    def detach(self, replica_id: str, now: float) -> list[Job]:
        """A replica is gone; its unfinished jobs, with what they had by then."""
        gone = self._replicas.pop(replica_id)
        self._turns.leave(replica_id)
        if self._running and self._running.replica_id == replica_id:
            self.tally.busy_s -= self.due - now
            self._running, self.due = None, math.inf
            self._begin(now)
        return list(gone.jobs.values())

    def num_open(self, replica_id: str) -> tuple[int, int]:
        """Running and waiting."""
        scheduler = self._replicas[replica_id].scheduler
        return scheduler.num_running, scheduler.num_waiting

    def kv_used(self, replica_id: str) -> float:
        """Share of its blocks in use."""
        pool = self._replicas[replica_id].scheduler.kv.pool
        return 1 - pool.num_free / pool.num_blocks

    def submit(self, replica_id: str, job: Job, now: float) -> None:
        """Queue a job; one begun elsewhere computes what it has, and goes on."""
        replica = self._replicas[replica_id]
        name = f"{job.number}.{job.num_tries}"
        request = GenerationRequest(
            name,
            _prompt(job.num_known),
            SamplingParams(max_tokens=job.num_left),
            LatencyClass(job.latency_class),
            cache_salt=b"%d" % job.tenant,
        )
        replica.scheduler.add(request)
        replica.jobs[name] = job
        if self._running is None:
            self._begin(now)

    def settle(self, now: float) -> None:
        """Nothing to do: a step's work counts when it ends."""

    def run(self, now: float) -> list[Job]:
        """End the step that is due at ``now``; the jobs that ended with it."""
        assert self._running is not None
        running, self._running, self.due = self._running, None, math.inf
        ended = self._complete(running, now)
        self._turns.charge(running.replica_id, running.seconds)
        self._begin(now)
        return ended

    def _begin(self, now: float) -> None:
        working = {
            name: one.scheduler.urgency()
            for name, one in self._replicas.items()
            if one.scheduler.has_work()
        }
        if not working:
            return
        name = self._turns.choose(working)
        replica = self._replicas[name]
        output = replica.scheduler.schedule()
        seconds = seconds_of(replica.spec.cost, output)
        self._running, self.due = _Running(name, output, seconds), now + seconds
        self.tally.busy_s += seconds

    def _complete(self, running: _Running, now: float) -> list[Job]:
        replica = self._replicas[running.replica_id]
        scheduler, output = replica.scheduler, running.output
        sampled = [work.request_id for work in output.work if work.samples]
        decoding = {name for name, one in scheduler.running.items() if one.num_output}
        self.tally.num_prompt += sum(
            work.end - work.start for work in output.work if work.request_id not in decoding
        )
        scheduler.complete(output, {name: (1,) for name in sampled})
        scheduler.observe(output, running.seconds)
        self.tally.num_output += len(sampled)
        ended: list[Job] = []
        for name in sampled:
            job = replica.jobs[name]
            job.num_done += 1
            if job.first_at < 0:
                job.first_at = now
            if not job.num_left:
                scheduler.finish(name)
                ended.append(replica.jobs.pop(name))
        return ended
