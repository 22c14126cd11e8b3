"""What a simulation comes to: every request counted once, and figures over them.

A request that stands for several (``sampling``) counts for as many. *Available* is a request that
was answered whole and whose first token came within its class's limit (``scenario.HOLD_S``: 10, 60
and 300 s); what a tenant's own rate refused is no matter of availability. Example, 1,000 requests::

    10 rate_limit_exceeded, 3 hold_deadline, 1 lost, 1 late     availability 985 / 990 = 0.9949
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.simulation.jobs import FINISHED, Job
from controlplane.simulation.scenario import HOLD_S

OWN_FAULT = frozenset({"rate_limit_exceeded", "request_too_large"})


@dataclass
class Outcome:
    """Counts are of requests simulated; ``reasons``, ``asked``, ``available`` and the tokens of
    what they stand for. Times in seconds."""

    num_arrived: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, float] = field(default_factory=dict)
    num_held: int = 0
    num_continued: int = 0
    asked: float = 0.0
    available: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    busy_s: float = 0.0
    device_s: float = 0.0
    model_s: float = 0.0
    seconds: float = 0.0
    overtime_s: float = 0.0
    last_end: float = 0.0
    num_events: int = 0
    num_cold_starts: int = 0
    num_loads: int = 0
    num_movements: int = 0
    num_losses: int = 0
    ttft: array = field(default_factory=lambda: array("d"))
    itl: array = field(default_factory=lambda: array("d"))
    weights: array = field(default_factory=lambda: array("d"))

    def end(self, job: Job) -> None:
        """Count a request at its one end."""
        assert job.end, "without an end"
        self.ends[job.end] += 1
        self.num_held += job.was_held
        self.num_continued += job.num_tries > 0
        if job.code:
            self._note(job.code, job.weight)
        if job.code not in OWN_FAULT:
            self.asked += job.weight
        if job.end == FINISHED:
            self._finished(job)

    def _finished(self, job: Job) -> None:
        ttft = job.first_at - job.at
        is_late = ttft > HOLD_S[job.latency_class]
        if is_late:
            self._note("late", job.weight)
        self.available += 0.0 if is_late else job.weight
        self.output_tokens += job.output * job.weight
        self.prompt_tokens += job.prompt * job.weight
        self.last_end = max(self.last_end, job.ended_at)
        self.ttft.append(ttft)
        self.itl.append((job.ended_at - job.first_at) / (job.output - 1) if job.output > 1 else -1)
        self.weights.append(job.weight)

    def _note(self, code: str, weight: float) -> None:
        self.codes[code] += 1
        self.reasons[code] = self.reasons.get(code, 0.0) + weight

    @property
    def availability(self) -> float:
        return self.available / self.asked if self.asked else 1.0

    @property
    def utilisation(self) -> float:
        """Busy share of the time of all devices whose node lives."""
        return self.busy_s / self.device_s if self.device_s else 0.0

    @property
    def models_per_gpu(self) -> float:
        """Replicas on a device in the mean over time, of those whose node lives."""
        return self.model_s / self.device_s if self.device_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated, by the time stood for and what it took beyond its end to finish."""
        whole = self.seconds + self.overtime_s
        return self.output_tokens / whole if whole else 0.0

    def ttft_s(self, share: float) -> float:
        """The time to the first token that ``share`` of the requests do not pass."""
        return _quantile(np.array(self.ttft), np.array(self.weights), share)

    def itl_s(self, share: float) -> float:
        """The same of the mean time between a request's tokens, of those with two or more."""
        values = np.array(self.itl)
        return _quantile(values[values >= 0], np.array(self.weights)[values >= 0], share)

    def figures(self) -> dict[str, float]:
        """All of it, by name."""
        return {
            "availability": self.availability,
            "ttft_p50_s": self.ttft_s(0.5),
            "ttft_p99_s": self.ttft_s(0.99),
            "itl_p50_s": self.itl_s(0.5),
            "itl_p99_s": self.itl_s(0.99),
            "utilisation": self.utilisation,
            "models_per_gpu": self.models_per_gpu,
            "tokens_per_s": self.tokens_per_s,
            "cold_starts": self.num_cold_starts,
            "movements": self.num_movements,
            "loads": self.num_loads,
            "node_losses": self.num_losses,
            "requests_simulated": self.num_arrived,
            "requests_stood_for": self.asked,
            "held": self.num_held,
            "continued": self.num_continued,
            **{f"reason_{name}": weight for name, weight in sorted(self.reasons.items())},
        }

    def lines(self) -> list[str]:
        """To print: every line says that it is simulated."""
        ends = ", ".join(f"{name} {number}" for name, number in sorted(self.ends.items()))
        codes = ", ".join(f"{name} {weight:.6g}" for name, weight in sorted(self.reasons.items()))
        figures = self.figures().items()
        told = [f"{key:<20} {one:.6g}" for key, one in figures if not key.startswith("reason_")]
        told.append(f"{'ends':<20} {ends or 'none'}")
        told.append(f"{'reasons':<20} {codes or 'none'}")
        return [f"simulated  {line}" for line in told]


def _quantile(values: NDArray[np.float64], weights: NDArray[np.float64], share: float) -> float:
    """Weighted; the least value with at least ``share`` of the weight at or below it."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    place = int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-12)))
    return float(values[order[min(place, len(order) - 1)]])
