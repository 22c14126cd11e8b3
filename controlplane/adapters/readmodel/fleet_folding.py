"""The planner's view of the fleet as a folding, so that a decision of any age is soon replayed."""

import inspect
from hashlib import sha256

import msgspec

from controlplane.application import fleet_state
from controlplane.application.fleet_state import FleetState
from controlplane.application.ports import RecordedEvent
from controlplane.dispatch import resolve
from controlplane.dispatch.resolve import Catalog
from controlplane.domain import model, node, placement, route, routing, scaling
from controlplane.domain.node import Node
from controlplane.domain.placement import Placement
from controlplane.domain.routing import Routing
from controlplane.domain.scaling import Scaling


class _Kept(msgspec.Struct):
    catalog: Catalog
    placement: Placement
    nodes: dict[str, Node]
    scaling: Scaling
    load_seconds: dict[str, float]
    routing: Routing
    position: int


def _of_code() -> str:
    """Changes with whatever folds the fleet: aggregates have no version to raise."""
    folding = (fleet_state, resolve, model, node, placement, route, routing, scaling)
    return sha256("".join(map(inspect.getsource, folding)).encode()).hexdigest()


class FleetFolding:
    """``timeline.Folding`` of FleetState."""

    kind = "fleet"

    def __init__(self) -> None:
        self.made_by = _of_code()
        self._decoder = msgspec.msgpack.Decoder(_Kept)

    def start(self) -> FleetState:
        return FleetState()

    def apply(self, state: FleetState, recorded: RecordedEvent) -> None:
        state.apply(recorded)

    def size(self, state: FleetState) -> int:
        return len(state.nodes) + len(state.catalog.models) + len(state.placement.assignments)

    def encode(self, state: FleetState) -> bytes:
        return msgspec.msgpack.encode(_kept(state))

    def decode(self, body: bytes) -> FleetState:
        kept = self._decoder.decode(body)
        return FleetState.restored(
            kept.catalog,
            kept.placement,
            kept.nodes,
            kept.scaling,
            kept.load_seconds,
            kept.routing,
            kept.position,
        )

    def digest(self, state: FleetState) -> str:
        """Sorted, since a set's order changes from process to process; ``encode`` must not sort,
        since the order of a model's versions has a meaning."""
        return sha256(msgspec.msgpack.encode(_kept(state), order="deterministic")).hexdigest()


def _kept(state: FleetState) -> _Kept:
    return _Kept(
        state.catalog,
        state.placement,
        state.nodes,
        state.scaling,
        state.load_seconds,
        state.routing,
        state.position,
    )
