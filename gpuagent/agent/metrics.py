"""Prometheus metrics of one agent: vLLM's suffixes under the prefix ``engine:``.

Values are read when scraped, from the same objects that telemetry reads, so the two cannot
disagree, and a replica that is gone takes its series with it. Only latencies are counted as they
happen, by one bisection per token; prometheus_client's own histogram takes a lock each time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gpuagent.wire.messages import DeviceLoad, ReplicaLoad

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
END_TO_END_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts per bucket; ``bounds`` are upper bounds in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count ``seconds``, spread evenly over ``times`` observations."""
        self.counts[bisect_left(self.bounds, seconds / times)] += times
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        rows, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


@dataclass(slots=True)
class Served:
    """What one replica has served: exact token counts, TTFT, ITL and whole generations."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS))


@dataclass(frozen=True)
class Snapshot:
    """What one scrape shows. ``models`` maps replica id to model name."""

    node_id: str
    models: Mapping[str, str]
    replicas: tuple[ReplicaLoad, ...]
    devices: tuple[DeviceLoad, ...]
    served: Mapping[str, Served]
    finished: Mapping[tuple[str, str], int]
    counts: Mapping[str, int]


GAUGES: tuple[tuple[str, str, Callable[[ReplicaLoad], float]], ...] = (
    ("num_requests_running", "Generations that hold KV blocks.", lambda r: r.num_running),
    ("num_requests_waiting", "Generations that wait for a slot.", lambda r: r.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda r: _kv_usage(r)),
    ("num_requests_held", "Generations held until the replica is resident.", lambda r: r.num_held),
    ("is_resident", "1 if the weights are on the device.", lambda r: r.tier == "resident"),
    ("swap_in_expected_seconds", "Until a held generation starts.", lambda r: r.expected_wait_s),
    ("step_seconds", "Mean time of a step in the last report.", lambda r: r.step_s),
)
COUNTERS: tuple[tuple[str, str, Callable[[ReplicaLoad], float]], ...] = (
    ("generation_tokens", "Tokens generated.", lambda r: r.generated_tokens),
    ("prompt_tokens", "Prompt tokens, cached ones included.", lambda r: r.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens found in the cache.", lambda r: r.cached_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda r: r.prompt_tokens),
    ("prefix_cache_hits", "Of these, tokens found.", lambda r: r.cached_tokens),
    ("num_preemptions", "Generations that gave their blocks back.", lambda r: r.num_preemptions),
    ("num_swapped_out", "Of these, kept in host memory.", lambda r: r.num_swapped_out),
    ("num_recomputed", "Of these, computed anew.", lambda r: r.num_recomputed),
    ("swapped_bytes", "KV bytes moved to host memory or back.", lambda r: r.swapped_bytes),
    ("num_steps", "Steps of the engine.", lambda r: r.num_steps),
    ("busy_seconds", "Time of the device in steps of this model.", lambda r: r.busy_seconds),
    ("spec_decode_num_drafts", "Guesses computed ahead.", lambda r: r.num_drafts),
    ("spec_decode_num_draft_tokens", "Their tokens.", lambda r: r.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Of these, accepted.", lambda r: r.num_accepted_tokens),
)
LATENCIES: tuple[tuple[str, str, Callable[[Served], Histogram]], ...] = (
    ("time_to_first_token_seconds", "TTFT seen by the agent.", lambda x: x.first_token),
    ("inter_token_latency_seconds", "Time between two tokens.", lambda x: x.inter_token),
    ("e2e_request_latency_seconds", "Arrival to last token.", lambda x: x.end_to_end),
)
DEVICE_GAUGES: tuple[tuple[str, str, Callable[[DeviceLoad], float]], ...] = (
    ("utilization_ratio", "Busy share of the step loop.", lambda d: d.utilization),
    ("memory_used_bytes", "Memory in use.", lambda d: d.memory_used_bytes),
    ("memory_total_bytes", "Memory of the device.", lambda d: d.memory_total_bytes),
    ("memory_foreign_bytes", "Held by other processes.", lambda d: d.foreign_bytes),
    ("kv_pool_bytes", "KV memory of the resident replicas.", lambda d: d.kv_pool_bytes),
    ("kv_used_bytes", "Of this, held by generations.", lambda d: d.kv_used_bytes),
    ("swapped_weights_bytes", "In host memory, of all devices.", lambda d: d.host_used_bytes),
    ("temperature_celsius", "Temperature; 0 if unknown.", lambda d: d.temperature_c),
    ("power_watts", "Power; 0 if unknown.", lambda d: d.power_w),
)
REPLICA_LABELS = ["model_name", "engine", "node"]


class AgentCollector:
    """Turns a snapshot into metric families at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        shot = self._snapshot()
        yield from _replica_metrics(shot)
        yield _waiting_by_class(shot)
        yield from _latency_metrics(shot)
        yield from _device_metrics(shot)
        yield from _agent_metrics(shot)


def _replica_metrics(shot: Snapshot) -> Iterator[Metric]:
    kinds: tuple[tuple[type[Metric], tuple], ...] = (
        (GaugeMetricFamily, GAUGES),
        (CounterMetricFamily, COUNTERS),
    )
    for kind, rows in kinds:
        for name, text, value in rows:
            family = kind(f"engine:{name}", text, labels=REPLICA_LABELS)  # type: ignore[call-arg]
            for load in shot.replicas:
                family.add_metric(_labels(shot, load.replica_id), value(load))  # type: ignore[attr-defined]
            yield family


def _waiting_by_class(shot: Snapshot) -> Metric:
    family = GaugeMetricFamily(
        "engine:num_requests_waiting_by_class",
        "Generations in the engine's queue, by latency class.",
        labels=[*REPLICA_LABELS, "latency_class"],
    )
    for load in shot.replicas:
        for name, number in load.waiting_by_class.items():
            family.add_metric([*_labels(shot, load.replica_id), name], number)
    return family


def _latency_metrics(shot: Snapshot) -> Iterator[Metric]:
    for name, text, pick in LATENCIES:
        family = HistogramMetricFamily(f"engine:{name}", text, labels=REPLICA_LABELS)
        for replica_id, served in shot.served.items():
            histogram = pick(served)
            labels = _labels(shot, replica_id)
            family.add_metric(labels, histogram.cumulative(), histogram.total)
        yield family


def _device_metrics(shot: Snapshot) -> Iterator[Metric]:
    for name, text, value in DEVICE_GAUGES:
        family = GaugeMetricFamily(f"engine:node_gpu_{name}", text, labels=["node", "gpu"])
        for device in shot.devices:
            family.add_metric([shot.node_id, str(device.index)], value(device))
        yield family


def _agent_metrics(shot: Snapshot) -> Iterator[Metric]:
    done = CounterMetricFamily(
        "engine:request_success", "Generations ended.", labels=[*REPLICA_LABELS, "finished_reason"]
    )
    for (replica_id, reason), count in shot.finished.items():
        done.add_metric([*_labels(shot, replica_id), reason], count)
    yield done
    events = CounterMetricFamily(
        "engine:agent_messages", "What the agent counted.", labels=["node", "kind"]
    )
    for kind, count in shot.counts.items():
        events.add_metric([shot.node_id, kind], count)
    yield events


def _labels(shot: Snapshot, replica_id: str) -> list[str]:
    return [shot.models.get(replica_id, ""), replica_id, shot.node_id]


def _kv_usage(load: ReplicaLoad) -> float:
    return 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0


def render(snapshot: Callable[[], Snapshot]) -> bytes:
    """The text exposition of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(snapshot))
    return generate_latest(registry)
