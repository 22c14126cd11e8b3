"""From the fleet as it is to the next placement: snapshot, plan, append if anything changed.

Level-triggered: an event may wake it, never inform it. The plan is appended with the version of
the placement it was planned from; if another controller was faster, this one has planned in vain
and plans again next time.
"""

import uuid
from collections import Counter

from controlplane.application.fleet import FleetLoads
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.domain import placement
from controlplane.domain.errors import VersionConflict
from controlplane.domain.ids import NodeId, VersionId, version_id
from controlplane.domain.node import DeviceInfo, Node
from controlplane.domain.placement import DecidePlacement
from controlplane.placement.plan import PlacementPlan, plan
from controlplane.placement.snapshot import (
    AssignedView,
    DeviceView,
    FailureView,
    FleetSnapshot,
    NodeView,
    VersionView,
)

RESERVED_BYTES = {"cuda": 2 * 1024**3}  # driver, workspace, fragmentation; by kind of device


def snapshot(state: FleetState, loads: FleetLoads, now: float, monotonic: float) -> FleetSnapshot:
    """Everything the planner needs, at the log position of ``state``."""
    return FleetSnapshot(
        nodes=tuple(
            _node_view(NodeId(node_id), node, loads)
            for node_id, node in sorted(state.nodes.items())
            if node.status != "absent"
        ),
        versions=tuple(_versions(state)),
        assigned=tuple(
            AssignedView(one, state.replica_state(one), loads.idle_s(one.replica_id, monotonic))
            for one in state.placement.assignments.values()
        ),
        failures=tuple(
            FailureView(VersionId(version), NodeId(node_id), code, count, at)
            for node_id, node in sorted(state.nodes.items())
            for version, (code, count, at) in sorted(node.failures.items())
        ),
        position=state.position,
        now=now,
    )


def _versions(state: FleetState) -> list[VersionView]:
    return [
        VersionView(version_id(name, version), spec, spec.min_replicas)
        for name, model in sorted(state.catalog.models.items())
        for version, spec in model.versions.items()
        if version not in model.retired
    ]


def _node_view(node_id: NodeId, node: Node, loads: FleetLoads) -> NodeView:
    load = loads.latest(node_id)
    foreign = {one.index: one.foreign_bytes for one in load.devices} if load else {}
    devices = tuple(_device_view(one, foreign.get(one.index, 0)) for one in node.devices)
    return NodeView(node_id, devices, node.status, node.draining, node.zone)


def _device_view(device: DeviceInfo, foreign_bytes: int) -> DeviceView:
    reserved = RESERVED_BYTES.get(device.kind, 0)
    return DeviceView(device.index, device.memory_bytes, reserved, foreign_bytes)


class Reconciler:
    """``step`` plans once. ``num_placed`` counts starts, stops and gaps by their code."""

    def __init__(
        self, handler: CommandHandler, clock: Clock, state: FleetState, loads: FleetLoads
    ) -> None:
        self._handler, self._clock, self._state, self._loads = handler, clock, state, loads
        self.num_decisions = 0
        self.num_conflicts = 0
        self.num_placed: Counter[str] = Counter()

    def step(self) -> bool:
        """Whether a decision was appended."""
        generation = self._state.placement.generation
        now, monotonic = self._clock.now(), self._clock.monotonic()
        made = plan(snapshot(self._state, self._loads, now, monotonic), generation + 1)
        command = DecidePlacement(
            f"dec-{uuid.uuid4().hex}",
            self._state.position,
            made.started,
            made.stopped,
            made.unplaced,
            now,
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
        self.num_decisions += 1
        self.num_placed.update(stop.code for stop in made.stopped)
        self.num_placed.update(gap.code for gap in made.unplaced)
        self.num_placed["started"] += len(made.started)
        return True
