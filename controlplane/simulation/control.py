"""The control plane of a simulated fleet: its log, what follows from it, and its decisions.

Everything is decided by the product's own pure parts (``domain``, ``placement``) and kept as their
events; the state is folded from these and from nothing else. So the log of a simulation can be read
like any other: its read model rebuilt, its decisions replayed bit for bit. Worked example::

    TenantCreated, ModelRegistered, ModelVersionAdded, NodeJoined …       the beginning
    plan           PlacementDecided, planned from the position before it
    a load ends    NodeAcknowledged, ReplicaStateChanged, ReplicaBecameReady
    6 s of silence NodeSuspected;   15 s   NodeLost, and the next plan places elsewhere

Times here are Unix seconds.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from controlplane.dispatch.resolve import Catalog
from controlplane.domain import model, node, placement, scaling, tenant
from controlplane.domain.decider import Decider, Event
from controlplane.domain.ids import NodeId, ReplicaId, TenantId, VersionId, version_id
from controlplane.domain.node import DeviceInfo, HostInfo, Node
from controlplane.domain.placement import Assignment, Placement, PlacementDecided, PlanInputs
from controlplane.domain.scaling import Scaling
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.ahead import room_for
from controlplane.placement.autoscale import Verdict
from controlplane.placement.plan import PLANNER, PlacementPlan, plan
from controlplane.placement.snapshot import (
    AssignedView,
    DeviceView,
    FleetSnapshot,
    NodeView,
    VersionView,
)
from controlplane.simulation.hardware import GIB, GPU_CLASSES
from controlplane.simulation.scenario import NodeGroup, Scenario, spec_of

RESERVED_BYTES = {"cuda": 2 * GIB}  # as application.reconcile
SUSPECT_S, LOST_S, FREEZE_SHARE = 6.0, 15.0, 0.2  # as application.ingest
INPUTS = PlanInputs(reserved_bytes=tuple(sorted(RESERVED_BYTES.items())), planner=PLANNER)
_MOVES = frozenset({"node_lost", "node_draining", "evicted", "moved", "failed", "no_room"})


@dataclass
class Control:
    """``events``: (stream, event) in order; a position of the log is an index into it, from 1."""

    events: list[tuple[str, Event]] = field(default_factory=list)
    catalog: Catalog = field(default_factory=Catalog)
    nodes: dict[str, Node] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    scaling: Scaling = field(default_factory=Scaling)
    num_started: int = 0
    num_moved: int = 0
    num_scaled: Counter[str] = field(default_factory=Counter)
    _versions: list[tuple[VersionId, VersionSpec]] = field(default_factory=list)
    _views: dict[str, VersionView] = field(default_factory=dict)

    # --- the log --------------------------------------------------------------------------------
    def record(self, stream: str, event: Event) -> None:
        """Append an event, and take it in."""
        self.events.append((stream, event))
        if isinstance(event, node.NodeEvent):
            known = self.nodes.get(event.node_id, Node())
            self.nodes[event.node_id] = node.evolve(known, event)
        elif isinstance(event, PlacementDecided):
            self.placement = placement.evolve(self.placement, event)
        elif isinstance(event, scaling.ScalingEvent):
            self.scaling = scaling.evolve(self.scaling, event)
        else:
            self.catalog.apply(event)

    def _order(self, decider: Decider[Any], target: str, state: Any, command: Any) -> Any:
        """Decide and record; the state afterwards. Raises Invalid for what a scenario asks in
        vain, as the product would."""
        for event in decider.decide(state, command):
            self.record(decider.stream(target), event)
            state = decider.evolve(state, event)
        return state

    # --- the beginning --------------------------------------------------------------------------
    def found(self, scenario: Scenario, now: float) -> None:
        """Tenants, models and nodes; raises Invalid."""
        for one in scenario.tenants:
            name = TenantId(one.name)
            create = tenant.CreateTenant(name, one.name, one.tier, now)
            self._order(tenant.DECIDER, name, tenant.Tenant(), create)
        served = _served(scenario)
        for entry in scenario.entries():
            spec = spec_of(entry, scenario, entry.name in served)
            register = model.RegisterModel(entry.name, now)
            state = self._order(model.DECIDER, entry.name, model.Model(), register)
            self._order(model.DECIDER, entry.name, state, model.AddVersion(entry.name, spec, now))
        for node_id in scenario.node_ids():
            self.joined(scenario, NodeId(node_id), 1, now)
        for version, spec in self.versions():
            if scenario.warm and not spec.min_replicas and version.partition("@")[0] in served:
                in_use = Verdict(1, "woken", "It is in use when the time begins.")
                self.scale(version, 0, in_use, now)
        self.num_scaled.clear()

    def joined(self, scenario: Scenario, node_id: NodeId, boot: int, now: float) -> None:
        """The node's first report after a boot."""
        group = scenario.node_ids()[node_id]
        event = node.NodeJoined(
            node_id, f"boot-{boot}", group.zone, tuple(_devices(group)), now, HostInfo()
        )
        self.say(node.RecordNodeEvents(node_id, (event,), now))

    def say(self, command: node.RecordNodeEvents) -> None:
        """What a node's reports, or its silence, come to."""
        known = self.nodes.get(command.node_id, Node())
        self._order(node.DECIDER, command.node_id, known, command)

    # --- placement ------------------------------------------------------------------------------
    def snapshot(self, now: float) -> FleetSnapshot:
        """As ``application.reconcile.snapshot`` makes it of the same log."""
        return FleetSnapshot(
            nodes=tuple(_node_view(name, one) for name, one in sorted(self.nodes.items())),
            versions=tuple(self._view(one, spec) for one, spec in self._known_versions()),
            assigned=tuple(
                AssignedView(one, self.state_of(one)) for one in self.placement.assignments.values()
            ),
            failures=(),
            position=len(self.events),
            now=now,
        )

    def versions(self) -> Iterator[tuple[VersionId, VersionSpec]]:
        """All, by the model's name."""
        for name, one in sorted(self.catalog.models.items()):
            for version, spec in one.versions.items():
                yield version_id(name, version), spec

    def _known_versions(self) -> list[tuple[VersionId, VersionSpec]]:
        """The same, kept: no scenario adds one later."""
        if len(self._versions) != len(self.catalog.models):
            self._versions = list(self.versions())
        return self._versions

    def _view(self, version: VersionId, spec: VersionSpec) -> VersionView:
        """Kept while the number is the same: a view remembers what it has computed of itself."""
        number = self.num_wanted(version, spec)
        known = self._views.get(version)
        if known is None or known.num_replicas != number:
            known = self._views[version] = VersionView(version, spec, number)
        return known

    def num_wanted(self, version: str, spec: VersionSpec) -> int:
        """Replicas there should be now."""
        return self.scaling.num_wanted(version, spec.min_replicas, spec.max_replicas)

    def state_of(self, assignment: Assignment) -> str:
        """As its node last said."""
        known = self.nodes.get(assignment.node_id)
        said = known.replicas.get(assignment.replica_id) if known else None
        return said[1] if said else "pending"

    def place(self, now: float) -> PlacementPlan | None:
        """Plan once; None if all is as it should be."""
        made = plan(self.snapshot(now), self.placement.generation + 1)
        command = placement.DecidePlacement(
            f"dec-{self.placement.generation + 1}",
            len(self.events),
            made.started,
            made.stopped,
            made.unplaced,
            now,
            INPUTS,
            made.retiered,
        )
        events = placement.decide(self.placement, command)
        for event in events:
            self.record(placement.STREAM, event)
        self.num_started += len(made.started)
        self.num_moved += sum(stop.code in _MOVES for stop in made.stopped)
        return made if events else None

    def unplaced(self) -> set[str]:
        """Versions of which a wanted replica runs nowhere."""
        return {str(gap.version_id) for gap in self.placement.unplaced}

    # --- scaling --------------------------------------------------------------------------------
    def scale(self, version: str, before: int, verdict: Verdict, now: float) -> None:
        """Record a change of the number of replicas."""
        command = scaling.ScaleReplicas(
            VersionId(version), before, verdict.after, verdict.code, verdict.reason, (), now
        )
        for event in scaling.decide(self.scaling, command):
            self.record(scaling.STREAM, event)
            self.num_scaled[verdict.code] += 1

    def displaced_for(self, version: str, idle: list[str], now: float) -> tuple[str, ...]:
        """Idle versions that gave up their replicas for one that is asked for in vain."""
        leaving = room_for(self.snapshot(now), version, idle) or ()
        for name in leaving:
            text = f"It is idle, and {version} needs its room."
            spec = self.catalog.spec(VersionId(name)) or VersionSpec(version="", source="")
            self.scale(name, self.num_wanted(name, spec), Verdict(0, "displaced", text), now)
        return leaving

    # --- nodes ----------------------------------------------------------------------------------
    def may_lose(self, num_silent: int) -> bool:
        """Not frozen: no more silent nodes than one, or a fifth, of those not lost."""
        living = sum(one.status in ("ready", "suspect") for one in self.nodes.values())
        return num_silent <= max(1.0, FREEZE_SHARE * living)

    def loading(self, assignment: Assignment, now: float) -> None:
        """Its node has read what it should run, and begun."""
        name, generation = assignment.node_id, self.placement.generation
        events: list[Event] = []
        if self.nodes[name].acked_generation != generation:
            events.append(node.NodeAcknowledged(name, generation, now))
        ids = assignment.replica_id, assignment.version_id
        events.append(node.ReplicaStateChanged(name, *ids, "loading", now))
        self.say(node.RecordNodeEvents(name, tuple(events), now))

    def ready(self, assignment: Assignment, weights: int, seconds: float, now: float) -> None:
        """It is loaded."""
        event = node.ReplicaBecameReady(
            assignment.node_id,
            assignment.replica_id,
            assignment.version_id,
            assignment.device_index,
            weights,
            assignment.memory_bytes - weights,
            assignment.memory_bytes,
            seconds,
            "",
            now,
        )
        self.say(node.RecordNodeEvents(assignment.node_id, (event,), now))

    def stopped(self, assignment: Assignment, now: float) -> None:
        """It runs no more, and its node lives."""
        name, replica_id = assignment.node_id, ReplicaId(assignment.replica_id)
        if replica_id in self.nodes[name].replicas:
            event = node.ReplicaStopped(name, replica_id, assignment.version_id, now)
            self.say(node.RecordNodeEvents(name, (event,), now))


def _served(scenario: Scenario) -> set[str]:
    """Models that get replicas at all: with one per GPU, as many as there are GPUs, those asked
    for most."""
    entries = sorted(scenario.entries(), key=lambda one: -one.share)
    if scenario.sharing == "one_model_per_gpu":
        entries = entries[: sum(one.count * one.gpus for one in scenario.nodes)]
    return {one.name for one in entries}


def _devices(group: NodeGroup) -> Iterator[DeviceInfo]:
    gpu = GPU_CLASSES[group.gpu]
    for index in range(group.gpus):
        yield DeviceInfo(index, "cuda", gpu.name, gpu.memory_bytes, "nvlink")


def _node_view(name: str, one: Node) -> NodeView:
    devices = tuple(
        DeviceView(
            each.index,
            each.memory_bytes,
            RESERVED_BYTES.get(each.kind, 0),
            kind=each.kind,
            name=each.name,
            link=each.link,
        )
        for each in one.devices
    )
    host = one.host
    where = one.zone, host.cpu_milli, host.memory_bytes, host.fabric
    return NodeView(NodeId(name), devices, one.status, one.draining, *where)
