"""The same device in jumps: steps with prompts one by one, stretches of mere decoding at once.

Between two events nothing about a batch that only decodes changes but its context, by one token a
request and step. So the steps until the first of them ends are one *span*, whose seconds follow
from the mean context. An arrival that can be admitted cuts the span at the end of the step it came
in; a step that computes prompt tokens is a span of its own. Worked example, steps of 10 ms::

    0 ms     a (512 + 101 tokens) comes      span of 1 step, 512 prompt tokens, 20 ms
    20 ms    its first token                 span of 100 steps, ends at 1,020 ms
    433 ms   b comes                         the span is cut to 42 steps, ends at 440 ms
    440 ms   b's prompt and a's next token   span of 1 step, and so on

What a step gives to prompts beside decoding requests is measured on the real scheduler
(``calibration``). Replicas of one device that have work share its time by their weights
(``gpuagent.agent.turns``), here as a flow and not step by step.

Left out against ``exact``: preemption (a request is admitted once its whole answer will fit), aging
of classes, turns among tenants. Stated and tested agreement on equal arrivals below saturation
(``tests/simulation/test_coarse.py``): tokens equal, mean TTFT within 15 % and 5 ms, mean ITL within
10 %, busy time within 5 %.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from controlplane.simulation.exact import MAX_BATCH_TOKENS, EngineSpec, Tally
from controlplane.simulation.jobs import RANK, Job
from gpuagent.agent.turns import PRIORITY_WEIGHTS

CLASS_WEIGHTS = (10.0, 1.0, 0.1)  # of gpuagent.engine.batch, by ``RANK``
Rooms = Callable[[EngineSpec], tuple[int, ...]]
_EPSILON = 1e-9


@dataclass(slots=True)
class _Span:
    """``num_steps`` steps of ``seconds`` in all were the device the replica's alone; ``chunks``:
    prompt tokens computed, by job. ``decodes``: whether the decoding requests take part."""

    num_steps: int
    seconds: float
    chunks: list[tuple[list, int]]
    decodes: bool = True


@dataclass(slots=True, eq=False)
class _Replica:
    """``prompts``: admitted jobs, [rank, number, job, tokens still to compute]. ``decoding``:
    (step after which it ends, number, job). ``held``: tokens that the admitted may come to hold;
    ``context``: those of the decoding. ``num_by_class``: open jobs by rank."""

    spec: EngineSpec
    rooms: tuple[int, ...]
    waiting: list[tuple[int, int, Job]] = field(default_factory=list)
    prompts: list[list] = field(default_factory=list)
    decoding: list[tuple[int, int, Job]] = field(default_factory=list)
    num_by_class: list[int] = field(default_factory=lambda: [0, 0, 0])
    step: int = 0
    held: int = 0
    context: int = 0
    num_joined: int = 0
    has_decoded: bool = False
    span: _Span | None = None
    ends_at: float = math.inf
    share: float = 1.0
    weight: float = 1.0  # of the device's time, against others that have work

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    def count(self, job: Job, change: int) -> None:
        """A job has come, or gone: what the most urgent one makes of its weight."""
        self.num_by_class[RANK[job.latency_class]] += change
        urgent = 1.0
        for weight, number in zip(CLASS_WEIGHTS, self.num_by_class, strict=True):
            if number:
                urgent = weight
                break
        self.weight = PRIORITY_WEIGHTS[self.spec.priority] * urgent

    def can_admit(self) -> bool:
        """Whether the first that waits may join now."""
        if not self.waiting or self.num_running >= self.spec.max_batch:
            return False
        if self.spec.policy == "static" and not self._is_forming():
            return False
        job = self.waiting[0][2]
        return not self.num_running or self.held + job.prompt + job.output <= self.spec.kv_tokens

    def _is_forming(self) -> bool:
        if not self.num_running:
            self.num_joined, self.has_decoded = 0, False
        return self.num_joined < self.spec.max_batch and not self.has_decoded

    def begin(self) -> _Span | None:
        """The next span from a boundary between steps; None without work."""
        if not self.num_running and not self.waiting:
            return None
        is_continuous = self.spec.policy == "continuous"
        num = len(self.decoding) if is_continuous else 0
        chunks, end = self._take_prompts(self._room(num))
        if chunks:
            tokens = sum(taken for _, taken in chunks)
            context = end + (self.context if is_continuous else 0)
            seconds = self.spec.cost.seconds(tokens + num, context)
            return _Span(1, seconds, chunks, is_continuous)
        return self._decode()

    def _room(self, num: int) -> int:
        budget = max(MAX_BATCH_TOKENS, self.spec.max_batch) - num
        return min(budget, self.rooms[min(num, len(self.rooms) - 1)]) if num else budget

    def _take_prompts(self, room: int) -> tuple[list[tuple[list, int]], int]:
        """Who computes how many prompt tokens, and the tokens those then have computed."""
        chunks: list[tuple[list, int]] = []
        end = 0
        for entry in sorted(self.prompts):
            if room <= 0:
                return chunks, end
            room, end = self._take(entry, room, chunks, end)
        while room > 0 and self.can_admit():
            entry = self._admit()
            room, end = self._take(entry, room, chunks, end)
        return chunks, end

    def _take(self, entry: list, room: int, chunks: list, end: int) -> tuple[int, int]:
        taken = min(entry[3], room)
        chunks.append((entry, taken))
        return room - taken, end + entry[2].num_known - entry[3] + taken

    def _admit(self) -> list:
        rank, number, job = heappop(self.waiting)
        entry = [rank, number, job, job.num_known]
        self.prompts.append(entry)
        self.held += job.prompt + job.output
        self.num_joined += 1
        return entry

    def _decode(self) -> _Span | None:
        if not self.decoding:
            return None
        num, steps = len(self.decoding), self.decoding[0][0] - self.step
        context = self.context + num * (steps - 1) / 2
        return _Span(steps, steps * self.spec.cost.seconds(num, context), [])

    def finish(self, now: float, tally: Tally) -> list[Job]:
        """Apply the span; the jobs that ended with it."""
        span, self.span, self.ends_at = self.span, None, math.inf
        assert span is not None
        if span.decodes:
            self._advance(span.num_steps, tally)
        for entry, taken in span.chunks:
            entry[3] -= taken
            tally.num_prompt += taken
        ended = [job for entry, _ in span.chunks if (job := self._first_token(entry, now, tally))]
        while self.decoding and self.decoding[0][0] <= self.step:
            job = heappop(self.decoding)[2]
            self.context -= job.prompt + job.output
            job.num_done = job.output
            ended.append(job)
        for job in ended:
            self._forget(job)
        return ended

    def _advance(self, num_steps: int, tally: Tally) -> None:
        num = len(self.decoding) * num_steps
        self.has_decoded |= num > 0
        self.step += num_steps
        self.context += num
        tally.num_output += num

    def _first_token(self, entry: list, now: float, tally: Tally) -> Job | None:
        """The job, if its first token here is its last."""
        if entry[3]:
            return None
        job = entry[2]
        self.prompts.remove(entry)
        tally.num_output += 1
        job.num_done += 1
        if job.first_at < 0:
            job.first_at = now
        if not job.num_left:
            return job
        heappush(self.decoding, (self.step + job.num_left, job.number, job))
        self.context += job.num_known
        return None

    def _forget(self, job: Job) -> None:
        self.held -= job.prompt + job.output
        self.count(job, -1)

    def cut(self, now: float) -> None:
        """End a stretch of decoding with the step it is in."""
        span = self.span
        if span is None or span.num_steps == 1 or not self.can_admit():
            return
        one = span.seconds / span.num_steps
        done = span.seconds - (self.ends_at - now) * self.share
        steps = max(1, math.ceil(done / one - _EPSILON))
        if steps < span.num_steps:
            self.ends_at = now + max(0.0, steps * one - done) / self.share
            span.num_steps, span.seconds = steps, steps * one

    def unfinished(self, now: float) -> list[Job]:
        """All its jobs, with the tokens they have by ``now``."""
        passed = 0
        if self.span and self.span.decodes:
            left = (self.ends_at - now) * self.share
            passed = int(self.span.num_steps * (1 - left / self.span.seconds) + _EPSILON)
        for finish, _, job in self.decoding:
            job.num_done = min(job.output - 1, job.output - (finish - self.step) + passed)
        found = [job for *_, job in self.decoding] + [job for *_, job in self.waiting]
        return sorted(found + [entry[2] for entry in self.prompts], key=lambda job: job.number)


class CoarseDevice:
    """As ``exact.ExactDevice``. ``rooms`` gives a replica's prompt tokens a step by how many
    decode beside them."""

    def __init__(self, rooms: Rooms) -> None:
        self.due = math.inf
        self.tally = Tally()
        self._rooms = rooms
        self._replicas: dict[str, _Replica] = {}
        self._busy_since = math.inf

    def attach(self, replica_id: str, spec: EngineSpec) -> None:
        """A replica is ready."""
        self._replicas[replica_id] = _Replica(spec, self._rooms(spec))

    def detach(self, replica_id: str, now: float) -> list[Job]:
        """A replica is gone; its unfinished jobs, with what they had by then."""
        gone = self._replicas.pop(replica_id)
        self._share(now)
        return gone.unfinished(now)

    def num_open(self, replica_id: str) -> tuple[int, int]:
        """Running and waiting."""
        replica = self._replicas[replica_id]
        return replica.num_running, len(replica.waiting)

    def kv_used(self, replica_id: str) -> float:
        """Share of its tokens of keys and values that the admitted may come to use."""
        replica = self._replicas[replica_id]
        return replica.held / replica.spec.kv_tokens

    def submit(self, replica_id: str, job: Job, now: float) -> None:
        """Queue a job; one begun elsewhere computes what it has, and goes on."""
        replica, rank = self._replicas[replica_id], RANK[job.latency_class]
        heappush(replica.waiting, (rank, job.number, job))
        before = replica.weight
        replica.count(job, 1)
        if replica.span is None:
            self._begin(replica, now)
            self._share(now)
        else:
            replica.cut(now)
            if before != replica.weight:
                self._share(now)
            elif replica.ends_at < self.due:
                self.due = replica.ends_at

    def settle(self, now: float) -> None:
        """Count the work up to ``now``."""
        if self._busy_since <= now:
            self.tally.busy_s += now - self._busy_since
            self._busy_since = now

    def run(self, now: float) -> list[Job]:
        """End the spans that are due and begin the next; the jobs that ended."""
        ended: list[Job] = []
        for replica in self._replicas.values():
            if replica.ends_at <= now:
                ended += replica.finish(now, self.tally)
                self._begin(replica, now)
        self._share(now)
        return ended

    def _begin(self, replica: _Replica, now: float) -> None:
        replica.span = replica.begin()
        if replica.span:
            replica.ends_at = now + replica.span.seconds / replica.share

    def _share(self, now: float) -> None:
        """Divide the device among those that have work, and look who is next."""
        working = [one for one in self._replicas.values() if one.span]
        total = sum(one.weight for one in working) if len(working) > 1 else 0.0
        self.due = math.inf
        for one in working:
            share = one.weight / total if total else 1.0
            if share != one.share:
                one.ends_at = now + max(0.0, one.ends_at - now) * one.share / share
                one.share = share
            if one.ends_at < self.due:
                self.due = one.ends_at
        self._note_busy(bool(working), now)

    def _note_busy(self, is_busy: bool, now: float) -> None:
        if is_busy and self._busy_since == math.inf:
            self._busy_since = now
        elif not is_busy and self._busy_since < math.inf:
            self.settle(now)
            self._busy_since = math.inf
