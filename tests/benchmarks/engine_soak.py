"""A long life of the scheduler in seconds: every class, cancels, preemptions, swaps, proposals.

    python -m tests.benchmarks.engine_soak [--json FILE] [--num-requests 24000] [--seed 0]

Everything but the model is real: queue, block pool, prefix cache, host pool, proposals with a
part of them rejected. The model is a cheap rule, so a day's requests take a minute. Printed are
blocks leaked (always 0), the Python heap when a fifth and when all of the requests have
arrived, and what happened on the way.
"""

import argparse
import gc
import json
import platform
import random
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuagent.engine.batch import Work
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.scheduler import Scheduler, SchedulerConfig

CLASSES = (LatencyClass.REALTIME, LatencyClass.STANDARD, LatencyClass.BATCH)
CONFIG = SchedulerConfig(
    num_blocks=160,
    block_size=16,
    max_batch_tokens=256,
    max_num_seqs=16,
    max_model_len=1024,
    num_host_blocks=64,
    target_itl_seconds=0.05,
)
MAX_QUEUE = 200


@dataclass
class Soak:
    """A scheduler, a pretended model, and clients that come and go at random."""

    num_requests: int
    seed: int
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(CONFIG))
    live: dict[str, int] = field(default_factory=dict)  # output tokens still to come
    num_added: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    longest_wait: dict[LatencyClass, int] = field(default_factory=dict)  # steps to first token
    added_at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prefixes = [self._tokens(200) for _ in range(20)]

    def run(self) -> Iterator[int]:
        """Step to the end; yields the number of requests so far."""
        while self.num_added < self.num_requests or self.scheduler.has_work():
            self._arrive()
            self._leave()
            self._step()
            yield self.num_added

    def _arrive(self) -> None:
        if self.scheduler.num_waiting < MAX_QUEUE:
            num_left = self.num_requests - self.num_added
            for _ in range(min(self.random.choice((0, 0, 1, 3)), num_left)):
                self._add(self._request(f"r{self.num_added}"))

    def _add(self, request: GenerationRequest) -> None:
        self.scheduler.add(request)
        self.live[request.request_id] = request.sampling.max_tokens
        self.added_at[request.request_id] = self.scheduler.num_steps
        self.num_added += 1

    def _request(self, name: str) -> GenerationRequest:
        rng = self.random
        prefix = rng.choice(self.prefixes)[: rng.choice((0, 0, 64, 200))]
        prompt = prefix + self._tokens(min(1 + int(rng.expovariate(1 / 60)), 500))
        sampling = SamplingParams(max_tokens=1 + min(int(rng.expovariate(1 / 30)), 250))
        latency_class = rng.choices(CLASSES, (1, 3, 9))[0]
        salt = rng.choice((b"a", b"b"))
        return GenerationRequest(name, prompt, sampling, latency_class, salt)

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(50_000) for _ in range(num))

    def _leave(self) -> None:
        if self.live and self.random.random() < 0.03:
            self._finish(self.random.choice(list(self.live)))
            self.num_cancelled += 1

    def _finish(self, name: str) -> None:
        self.scheduler.finish(name)
        del self.live[name]
        self.added_at.pop(name, None)

    def _step(self) -> None:
        rng = self.random
        names = [s.request_id for s in self.scheduler.decoding()]
        drafts = {name: (7,) * rng.randrange(4) for name in names if rng.random() < 0.3}
        output = self.scheduler.schedule(drafts)
        chosen = {work.request_id: self._choose(work) for work in output.work if work.samples}
        self.scheduler.observe(output, 0.02 + 0.0005 * output.num_extra)
        self.scheduler.complete(output, chosen)
        for name, tokens in chosen.items():
            self._deliver(name, len(tokens))

    def _choose(self, work: Work) -> tuple[int, ...]:
        num_accepted = self.random.randint(0, work.num_drafts)
        self.num_accepted += num_accepted
        return (7,) * num_accepted + (self.random.randrange(50_000),)

    def _deliver(self, name: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if added_at := self.added_at.pop(name, None):
            sequence = self.scheduler.sequence(name)
            assert sequence is not None
            kind, wait = sequence.request.latency_class, self.scheduler.num_steps - added_at
            self.longest_wait[kind] = max(self.longest_wait.get(kind, 0), wait)
        self.live[name] -= num_tokens
        if self.live[name] <= 0:
            self._finish(name)


def measure(num_requests: int, seed: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    soak, start = Soak(num_requests, seed), time.perf_counter()
    heaps: dict[int, int] = {}  # by number of requests, the queue being full at both
    tracemalloc.start()
    for num_added in soak.run():
        for mark in (num_requests // 5, num_requests):
            if mark not in heaps and num_added >= mark:
                heaps[mark] = heap_bytes()
    early, late = heaps.values()
    tracemalloc.stop()
    scheduler = soak.scheduler
    figures = {
        "num_requests": num_requests,
        "num_cancelled": soak.num_cancelled,
        "num_tokens": soak.num_tokens,
        "num_accepted_tokens": soak.num_accepted,
        "num_steps": scheduler.num_steps,
        "num_swapped_out": scheduler.num_swapped_out,
        "num_recomputed": scheduler.num_recomputed,
        "num_cached_tokens": scheduler.num_cached_tokens,
        "leaked_blocks": CONFIG.num_blocks - scheduler.kv.pool.num_free,
        "leaked_host_blocks": CONFIG.num_host_blocks - scheduler.host.num_free,
        "heap_bytes_after_a_fifth": early,
        "heap_bytes_at_the_last": late,
        "seconds": round(time.perf_counter() - start, 1),
    }
    figures |= {f"longest_wait_steps_{k}": v for k, v in sorted(soak.longest_wait.items())}
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    ratios = {"heap_at_the_last_over_a_fifth": late / early}
    return {"name": "engine_soak", "machine": machine, "ratios": ratios, "figures": figures}


def heap_bytes() -> int:
    """Bytes that Python holds now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--num-requests", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    answer = measure(options.num_requests, options.seed)
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:34} {value:12,.2f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
