"""The gateway's figures under vLLM's names, cheap enough to count every token.

``prometheus_client``'s own histogram takes a lock and a label look-up for each observation; at
13,000 tokens a second that would be a twentieth of a core. ``Buckets`` is one bisection and one
addition in the event loop's own thread; a collector reads it when somebody scrapes. Label values
that clients could multiply are bounded: beyond ``MAX_TENANTS`` a tenant counts as ``other``.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from controlplane.application.inference import Job
from controlplane.application.ports import Terminal

MAX_TENANTS = 200
MAX_MODELS = 1000
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Upper bounds in seconds, those of vLLM, so that dashboards made for it fit.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
              10.0, 20.0, 40.0, 80.0)  # fmt: skip
E2E_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


class Buckets:
    """A histogram's counts; ``bounds`` in seconds, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        pairs, running = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class ModelFigures:
    """The histograms of one model version."""

    __slots__ = ("e2e", "itl", "queue", "ttft")

    def __init__(self) -> None:
        self.ttft, self.itl = Buckets(TTFT_BOUNDS), Buckets(ITL_BOUNDS)
        self.e2e, self.queue = Buckets(E2E_BOUNDS), Buckets(E2E_BOUNDS)


class Gauges(msgspec.Struct, frozen=True):
    """Figures of the moment, read when somebody scrapes."""

    num_running: int = 0
    num_waiting: dict[str, int] = {}  # by latency class
    num_held: int = 0
    num_uncontinued: int = 0
    continued: dict[str, int] = {}  # by cause, since the start
    num_unsettled: int = 0
    num_websockets: int = 0
    log_position: int = 0
    is_bus_connected: bool = False
    are_limits_shared: bool = False


class GatewayMetrics:
    """Counted in the event loop."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._models: dict[str, ModelFigures] = {}
        self._finished: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()  # (model, kind)
        self._tenant_requests: Counter[tuple[str, str]] = Counter()
        self._tenant_tokens: Counter[tuple[str, str]] = Counter()
        self._class_tokens: Counter[tuple[str, str]] = Counter()  # (latency class, tenant)
        self._refused: Counter[str] = Counter()
        self._tenants: set[str] = set()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, version_id: str) -> ModelFigures:
        """The figures to count on for one model version."""
        figures = self._models.get(version_id)
        if figures is None:
            name = version_id if len(self._models) < MAX_MODELS else "other"
            figures = self._models.setdefault(name, ModelFigures())
        return figures

    def ended(self, job: Job, terminal: Terminal) -> None:
        model, tenant = job.version_id, self._tenant(job.tenant_id)
        figures = self.of(model)
        figures.e2e.observe(terminal.duration_ms / 1000)
        if terminal.ttft_ms is not None:
            figures.ttft.observe(terminal.ttft_ms / 1000)
        if terminal.queue_ms is not None:
            figures.queue.observe(terminal.queue_ms / 1000)
        reason = terminal.finish_reason if terminal.outcome == "ok" else terminal.outcome
        self._finished[model, reason if len(reason) <= 16 else "mixed"] += 1
        self._tenant_requests[tenant, terminal.outcome] += 1
        for kind, count in (
            ("prompt", terminal.num_prompt_tokens),
            ("prompt_cached", terminal.num_cached_tokens),
            ("generation", terminal.num_output_tokens),
        ):
            self._tokens[model, kind] += count
            self._tenant_tokens[tenant, kind] += count
        computed = terminal.num_prompt_tokens - terminal.num_cached_tokens
        served = computed + terminal.num_output_tokens
        self._class_tokens[job.latency_class, tenant] += served

    def refused(self, code: str) -> None:
        self._refused[code] += 1

    def _tenant(self, tenant_id: str) -> str:
        if tenant_id in self._tenants or len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant_id)
            return tenant_id
        return "other"

    # --- scraping -------------------------------------------------------------------------------
    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._histograms()
        yield from self._model_counters()
        yield from self._other_counters()
        yield from _gauges(self._gauges())

    def _histograms(self) -> Iterator[Metric]:
        for family, field in (
            (HistogramMetricFamily("engine:time_to_first_token_seconds",
             "From a request's arrival to its first token.", labels=["model_name"]), "ttft"),
            (HistogramMetricFamily("engine:inter_token_latency_seconds",
             "Between two writes of tokens of one stream.", labels=["model_name"]), "itl"),
            (HistogramMetricFamily("engine:e2e_request_latency_seconds",
             "From a request's arrival to its end.", labels=["model_name"]), "e2e"),
            (HistogramMetricFamily("engine:request_queue_time_seconds",
             "In the engine's queue.", labels=["model_name"]), "queue"),
        ):  # fmt: skip
            for model, figures in self._models.items():
                buckets: Buckets = getattr(figures, field)
                family.add_metric([model], buckets.cumulative(), buckets.total)
            yield family

    def _model_counters(self) -> Iterator[Metric]:
        label = ["model_name"]
        for family, kind in (
            (CounterMetricFamily("engine:prompt_tokens", "Prompt tokens.", labels=label), "prompt"),
            (CounterMetricFamily("engine:prompt_tokens_cached",
             "Prompt tokens found in a prefix cache.", labels=label), "prompt_cached"),
            (CounterMetricFamily("engine:generation_tokens",
             "Generated tokens.", labels=label), "generation"),
        ):  # fmt: skip
            for (model, of_kind), count in self._tokens.items():
                if of_kind == kind:
                    family.add_metric([model], count)
            yield family

    def _other_counters(self) -> Iterator[Metric]:
        for family, counts in (
            (CounterMetricFamily("engine:request_success", "Requests by how they ended.",
             labels=["model_name", "finished_reason"]), self._finished),
            (CounterMetricFamily("engine_tenant_requests", "Requests of a tenant by outcome.",
             labels=["tenant", "outcome"]), self._tenant_requests),
            (CounterMetricFamily("engine_tenant_tokens", "Tokens of a tenant by kind.",
             labels=["tenant", "kind"]), self._tenant_tokens),
            (CounterMetricFamily("engine_class_tokens",
             "Tokens computed for a tenant in a latency class, whose tenants share its slots.",
             labels=["latency_class", "tenant"]), self._class_tokens),
        ):  # fmt: skip
            for labels, count in counts.items():
                family.add_metric(list(labels), count)
            yield family
        refused = CounterMetricFamily(
            "engine_requests_refused", "Requests answered with an error.", labels=["code"]
        )
        for code, count in self._refused.items():
            refused.add_metric([code], count)
        yield refused


def _gauges(now: Gauges) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "engine:num_requests_running", "Requests in flight in this gateway.", now.num_running
    )
    waiting = GaugeMetricFamily(
        "engine_gateway_requests_waiting",
        "Requests in flight here without a token yet, by latency class.",
        labels=["latency_class"],
    )
    for name, number in now.num_waiting.items():
        waiting.add_metric([name], number)
    yield waiting
    yield GaugeMetricFamily(
        "engine_gateway_held_requests",
        "Requests held here until their model is loaded.",
        now.num_held,
    )
    yield GaugeMetricFamily(
        "engine_gateway_waiting_continuations",
        "Choices that were begun and wait for a replica that goes on with them.",
        now.num_uncontinued,
    )
    continued = CounterMetricFamily(
        "engine_gateway_continuations",
        "Choices that another replica went on with, by what became of the one before.",
        labels=["cause"],
    )
    for cause, count in now.continued.items():
        continued.add_metric([cause], count)
    yield continued
    yield GaugeMetricFamily(
        "engine_gateway_unsettled_requests",
        "Ended requests whose record the store has not taken yet.",
        now.num_unsettled,
    )
    yield GaugeMetricFamily(
        "engine_gateway_websockets", "Open token websockets.", now.num_websockets
    )
    yield GaugeMetricFamily(
        "engine_gateway_log_position", "Log position this gateway has read.", now.log_position
    )
    yield GaugeMetricFamily(
        "engine_gateway_bus_connected", "1 while the bus is connected.", now.is_bus_connected
    )
    yield GaugeMetricFamily(
        "engine_gateway_limits_shared",
        "1 while rate limits are counted over all gateways.",
        now.are_limits_shared,
    )
