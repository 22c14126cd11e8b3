"""What a controller tells Prometheus, read from its memory when asked."""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.application.publish import OVERDUE_S
from controlplane.entrypoints.processes.controller import Controller

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ControllerMetrics(Collector):
    """Names start with ``engine_``; every figure is of this process or of the log it has read."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._leadership()
        yield from self._loops()
        yield from self._fleet()
        yield from self._desired()
        yield from self._sealed()
        yield from self._bus()
        yield from self._devices()

    def _leadership(self) -> Iterable[Metric]:
        one = self._controller
        yield _gauge("controller_leader", "1 on the controller that leads.", float(one.leads))
        epoch = one.lease.epoch if one.lease else 0
        yield _gauge("controller_epoch", "Epoch of the lease held here.", epoch)
        yield _gauge("log_head_position", "Position of the log's last event.", one.head)
        lag = GaugeMetricFamily(
            "engine_projection_lag_events", "Events not projected yet.", labels=["projection"]
        )
        lag.add_metric(["readmodel"], max(0, one.head - one.projected))
        lag.add_metric(["controller"], max(0, one.head - one.state.position))
        yield lag
        yield _counter("events_appended", "Events in the log by type.", "type", Counter(one.events))

    def _loops(self) -> Iterable[Metric]:
        stats = self._controller.stats
        for name, text, value in (
            ("controller_rounds", "Rounds of each loop.", lambda s: s.num_rounds),
            ("controller_round_failures", "Rounds that failed.", lambda s: s.num_failures),
            ("controller_round_seconds", "Time spent in rounds.", lambda s: s.seconds),
        ):
            figures = {loop: value(one) for loop, one in stats.items()}
            yield _counter(name, text, "loop", figures)

    def _fleet(self) -> Iterable[Metric]:
        one = self._controller
        statuses = Counter(node.status for node in list(one.state.nodes.values()))
        yield _labelled("nodes", "Nodes by status.", "status", statuses)
        assignments = list(one.state.placement.assignments.values())
        states = Counter(one.state.replica_state(each) for each in assignments)
        yield _labelled("replicas", "Wanted replicas by reported state.", "state", states)
        gaps = Counter({gap.code: gap.num_missing for gap in one.state.placement.unplaced})
        yield _labelled("replicas_unplaced", "Replicas that fit nowhere, by code.", "code", gaps)
        yield from self._stuck()
        generation = one.state.placement.generation
        yield _gauge("placement_generation", "Generation of the newest placement.", generation)
        yield _counter(
            "placements",
            "Starts, stops, gaps and changes of tier decided.",
            "reason",
            one.reconciler.num_placed,
        )
        scaled = one.scaler.num_scaled if one.scaler else {}
        help_text = "Changes of a version's number of replicas by load or expectation."
        yield _counter("scalings", help_text, "code", scaled)
        conflicts = {"placement": one.reconciler.num_conflicts}
        yield _counter("command_conflicts", "Plans made in vain.", "stream", conflicts)
        yield _gauge(
            "controller_frozen", "1 while too many nodes are silent at once.",
            float(one.ingest.frozen),
        )  # fmt: skip
        yield _gauge("nodes_silent", "Nodes silent beyond the suspect time.", one.ingest.num_silent)

    def _stuck(self) -> Iterable[Metric]:
        state = self._controller.state
        placed = list(state.placement.assignments.values())
        codes = Counter(code for one in placed if (code := state.overdue_code(one)) is not None)
        text = "Wanted replicas of which nothing moves beyond its deadline, by why."
        yield _labelled("stuck_replicas", text, "code", codes)
        late = Counter(node.late for node in list(state.nodes.values()) if node.late)
        text = "Nodes that have not accepted what they were told in time, by why."
        yield _labelled("stuck_nodes", text, "code", late)

    def _desired(self) -> Iterable[Metric]:
        publisher = self._controller.publisher
        ages = publisher.unacknowledged() if publisher else {}
        overdue = sum(age >= OVERDUE_S for age in ages.values())
        text = f"Nodes that have not accepted their desired state for {OVERDUE_S:g} s."
        yield _gauge("desired_overdue_nodes", text, overdue)
        text = "How long the slowest node has not accepted its desired state."
        yield _gauge("desired_unacknowledged_seconds", text, max(ages.values(), default=0.0))
        written = {"written": publisher.num_written if publisher else 0}
        yield _counter("desired_states", "Desired states written.", "outcome", written)

    def _sealed(self) -> Iterable[Metric]:
        sealing = self._controller.sealing
        last = dict(sealing.last) if sealing else {}
        sizes = Counter({log: one.size for log, one in last.items()})
        yield _labelled("sealed_records", "Records under the newest checkpoint.", "log", sizes)
        family = GaugeMetricFamily(
            "engine_checkpoint_time_seconds", "Unix time of the newest checkpoint.", labels=["log"]
        )
        for log, one in sorted(last.items()):
            family.add_metric([log], one.at)
        yield family

    def _bus(self) -> Iterable[Metric]:
        bus, subscriber = self._controller.bus, self._controller.subscriber
        yield _gauge(
            "bus_connected", "1 while the bus is connected.", float(bool(bus and bus.connected))
        )
        yield _counter("bus_errors", "Errors the bus client reported.", "error",
                       Counter(bus.errors) if bus else {})  # fmt: skip
        yield _counter("telemetry_rejected", "Messages of nodes that were not believed.", "node",
                       Counter(subscriber.rejected) if subscriber else {})  # fmt: skip

    def _devices(self) -> Iterable[Metric]:
        loads = self._controller.loads.all()
        for name, text, value in (
            ("utilization_ratio", "Busy share of the step loop.", lambda d: d.utilization),
            ("memory_used_bytes", "Memory used.", lambda d: d.memory_used_bytes),
            ("temperature_celsius", "Temperature.", lambda d: d.temperature_c),
            ("power_watts", "Power drawn.", lambda d: d.power_w),
        ):
            family = GaugeMetricFamily(f"engine_node_gpu_{name}", text, labels=["node", "device"])
            for load in loads:
                for device in load.devices:
                    family.add_metric([load.node_id, str(device.index)], value(device))
            yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"engine_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = GaugeMetricFamily(f"engine_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"engine_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
