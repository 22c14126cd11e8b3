"""From the fleet as it is to the next placement: snapshot, plan, append if anything changed.

Level-triggered: an event may wake it, never inform it. The plan is appended with the version of
the placement it was planned from; if another controller was faster, this one has planned in vain
and plans again next time.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from controlplane.application.fleet import DeviceLoad, FleetLoads, NodeLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.domain import placement
from controlplane.domain.errors import VersionConflict
from controlplane.domain.ids import NodeId, ReplicaId, VersionId, version_id
from controlplane.domain.node import WAITING, Node
from controlplane.domain.placement import Assignment, DecidePlacement, PlanInputs
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.plan import (
    PLANNER,
    PLANNERS_THAT_JOIN_ALL,
    PLANNERS_THAT_SAY_NOT_WHOSE,
    PLANNERS_THAT_STOP_FAILING,
    PLANNERS_THAT_TAKE_TURNS,
    PLANNERS_WITHOUT_TIERING,
    PLANNERS_WITHOUT_WHOLES,
    PlacementPlan,
    plan,
)
from controlplane.placement.snapshot import (
    AssignedView,
    DeviceView,
    FailureView,
    FleetSnapshot,
    NodeView,
    VersionView,
)

NO_RATES: Mapping[str, float] = {}
RESERVED_BYTES = {"cuda": 2 * 1024**3}  # driver, workspace, fragmentation; by kind of device


def inputs_of(
    state: FleetState, loads: FleetLoads, monotonic: float, rates: Mapping[str, float] = NO_RATES
) -> PlanInputs:
    """What no event says: the nodes' telemetry, what is asked for (requests a minute by version),
    and what this release keeps free."""
    return PlanInputs(
        foreign_bytes=tuple(
            (NodeId(node_id), device.index, device.foreign_bytes)
            for node_id in sorted(state.nodes)
            for device in _devices(loads.latest(node_id))
            if device.foreign_bytes
        ),
        idle_s=tuple(
            (one.replica_id, idle_s)
            for one in state.placement.assignments.values()
            if (idle_s := loads.idle_s(one.replica_id, monotonic))
        ),
        reserved_bytes=tuple(sorted(RESERVED_BYTES.items())),
        planner=PLANNER,
        host_bytes=_host_bytes(state, loads),
        charged_bytes=_charged_bytes(state, loads),
        steady=_steady(state, loads, monotonic),
        rates=_rates(state, rates),
    )


def _host_bytes(state: FleetState, loads: FleetLoads) -> tuple[tuple[NodeId, int], ...]:
    return tuple(
        (NodeId(node_id), most)
        for node_id in sorted(state.nodes)
        if (most := max((one.host_bytes for one in _devices(loads.latest(node_id))), default=0))
    )


def _charged_bytes(state: FleetState, loads: FleetLoads) -> tuple[tuple[ReplicaId, int], ...]:
    """Of replicas that take less than they were given; a group's are of each device already."""
    return tuple(
        (one.replica_id, charged)
        for one in state.placement.assignments.values()
        if 0 < (charged := loads.charged_bytes(one.replica_id)) < one.memory_bytes
        and not one.shards
    )


def _steady(state: FleetState, loads: FleetLoads, monotonic: float) -> tuple[ReplicaId, ...]:
    """Of versions for which it matters."""
    return tuple(
        one.replica_id
        for one in state.placement.assignments.values()
        if (spec := state.catalog.spec(one.version_id)) is not None
        and spec.residency == "swappable"
        and loads.is_steady(one.replica_id, monotonic)
    )


def _rates(state: FleetState, rates: Mapping[str, float]) -> tuple[tuple[VersionId, float], ...]:
    """Of versions whose replicas have tiers."""
    return tuple(
        (name, rate)
        for name, spec in live_versions(state)
        if spec.residency == "swappable"
        and state.assignments_of(name)
        and (rate := round(rates.get(name, 0.0), 3)) > 0
    )


def _devices(load: NodeLoad | None) -> tuple[DeviceLoad, ...]:
    return load.devices if load else ()


def snapshot(state: FleetState, inputs: PlanInputs, now: float) -> FleetSnapshot:
    """Everything the planner needs, at the log position of ``state``. Pure: ``replay`` calls it
    with what an event recorded."""
    idle_s, charged = dict(inputs.idle_s), dict(inputs.charged_bytes)
    steady = frozenset(inputs.steady)
    keeps_failing = inputs.planner not in PLANNERS_THAT_STOP_FAILING
    return FleetSnapshot(
        nodes=node_views(state, inputs),
        versions=tuple(_versions(state)),
        assigned=tuple(
            AssignedView(
                one,
                _state_of(state, one, keeps_failing),
                idle_s.get(one.replica_id, 0.0),
                charged.get(one.replica_id, 0),
                one.replica_id in steady,
                state.placement.retiered_at.get(one.replica_id, 0.0),
            )
            for one in state.placement.assignments.values()
        ),
        failures=tuple(
            FailureView(VersionId(version), NodeId(node_id), code, count, at)
            for node_id, node in sorted(state.nodes.items())
            for version, (code, count, at) in sorted(node.failures.items())
        ),
        position=state.position,
        now=now,
        keeps_wholes=inputs.planner not in PLANNERS_WITHOUT_WHOLES,
        keeps_failing=keeps_failing,
        retiers=inputs.planner not in PLANNERS_WITHOUT_TIERING,
        keeps_siblings=inputs.planner not in PLANNERS_THAT_TAKE_TURNS,
        says_whose=inputs.planner not in PLANNERS_THAT_SAY_NOT_WHOSE,
        rates=dict(inputs.rates),
    )


def _state_of(state: FleetState, placed: Assignment, knows_stuck: bool) -> str:
    """As its node last said; stuck, if that is that it waits, and its time for that is over."""
    said = state.replica_state(placed)
    is_stuck = knows_stuck and said == WAITING and state.overdue_code(placed) is not None
    return "stuck" if is_stuck else said


def _versions(state: FleetState) -> list[VersionView]:
    return [
        VersionView(one, spec, state.num_wanted(one, spec)) for one, spec in live_versions(state)
    ]


def live_versions(state: FleetState) -> Iterator[tuple[VersionId, VersionSpec]]:
    """All that are not retired, by model's name."""
    for name, model in sorted(state.catalog.models.items()):
        for version, spec in model.versions.items():
            if version not in model.retired:
                yield version_id(name, version), spec


def node_views(state: FleetState, inputs: PlanInputs) -> tuple[NodeView, ...]:
    """All that have joined, by id."""
    return tuple(
        _node_view(NodeId(node_id), node, inputs)
        for node_id, node in sorted(state.nodes.items())
        if node.status != "absent"
    )


def _node_view(node_id: NodeId, node: Node, inputs: PlanInputs) -> NodeView:
    reserved = dict(inputs.reserved_bytes)
    foreign = {index: held for owner, index, held in inputs.foreign_bytes if owner == node_id}
    devices = tuple(
        DeviceView(
            one.index,
            one.memory_bytes,
            reserved.get(one.kind, 0),
            foreign.get(one.index, 0),
            one.kind,
            one.name,
            one.link,
        )
        for one in node.devices
    )
    host = node.host
    joins = host.fabric_address or inputs.planner in PLANNERS_THAT_JOIN_ALL
    where = node.zone, host.cpu_milli, host.memory_bytes, host.fabric if joins else ""
    kept = next((held for owner, held in inputs.host_bytes if owner == node_id), 0)
    return NodeView(node_id, devices, node.status, node.draining, *where, kept, host.engines)


class Reconciler:
    """``step`` plans once. ``num_placed`` counts starts, stops, gaps and changes of tier by their
    code; ``rates`` says how often each version is asked for, in requests a minute."""

    def __init__(
        self,
        handler: CommandHandler,
        clock: Clock,
        state: FleetState,
        loads: FleetLoads,
        rates: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._handler, self._clock, self._state, self._loads = handler, clock, state, loads
        self._rates = rates
        self.num_conflicts = 0
        self.num_placed: Counter[str] = Counter()

    def step(self) -> bool:
        """Whether a decision was appended."""
        generation = self._state.placement.generation
        now, monotonic = self._clock.now(), self._clock.monotonic()
        inputs = inputs_of(self._state, self._loads, monotonic, self._rates())
        made = plan(snapshot(self._state, inputs, now), generation + 1)
        command = DecidePlacement(
            f"dec-{uuid.uuid4().hex}",
            self._state.position,
            made.started,
            made.stopped,
            made.unplaced,
            now,
            inputs,
            made.retiered,
        )
        if not placement.decide(self._state.placement, command):
            return False
        return self._append(command, generation, made)

    def _append(self, command: DecidePlacement, generation: int, made: PlacementPlan) -> bool:
        try:
            self._handler.handle(
                placement.DECIDER,
                placement.STREAM,
                command,
                CONTROLLER,
                expected_version=generation,
            )
        except VersionConflict:
            self.num_conflicts += 1
            return False
        self.num_placed.update(stop.code for stop in made.stopped)
        self.num_placed.update(gap.code for gap in made.unplaced)
        self.num_placed.update(one.code for one in made.retiered)
        self.num_placed["started"] += len(made.started)
        return True
