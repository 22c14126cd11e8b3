"""The fleet as a process sees it: catalog, placement and nodes folded from the log, plus loads.

The controller plans from it and the gateway routes by it. A replica can be routed to only while it
stands in the newest placement **and** its node said that it is ready: after a partition heals, an
old replica still runs somewhere, but no decision names it any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from controlplane.application.fleet import DeviceLoad, FleetLoads, ReplicaLoad
from controlplane.application.ports import RecordedEvent
from controlplane.dispatch.choose import ReplicaView, zone_hops
from controlplane.dispatch.prefix import Cache, cache_of
from controlplane.dispatch.resolve import Catalog
from controlplane.domain import node as nodes
from controlplane.domain import placement as placements
from controlplane.domain import routing as routings
from controlplane.domain import scaling as scalings
from controlplane.domain.ids import VersionId
from controlplane.domain.node import Node
from controlplane.domain.placement import Assignment, Placement, PlacementDecided
from controlplane.domain.routing import Routing, RoutingEvent
from controlplane.domain.scaling import Scaling
from controlplane.domain.version_spec import VersionSpec

LOAD_FIRST_S, LOAD_BYTES_PER_S = 5.0, 500e6  # of what was never loaded yet
HELD = frozenset({"pending", "downloading", "loading"})
DECIDE_S = 1.0  # until a node has been told
AGED_S = 0.1  # how much too young a node's telemetry may seem
LOSE_S = 9.0  # from suspect to lost
DEFAULT_SPEC = VersionSpec(version="", source="")


@dataclass
class FleetState:
    """Folded in place by ``apply``, in log order; not safe for use from several threads."""

    catalog: Catalog = field(default_factory=Catalog)
    placement: Placement = field(default_factory=Placement)
    nodes: dict[str, Node] = field(default_factory=dict)
    scaling: Scaling = field(default_factory=Scaling)
    load_seconds: dict[str, float] = field(default_factory=dict)  # by version, of its last load
    routing: Routing = field(default_factory=Routing)
    position: int = 0
    zone: str = ""  # of the process that asks, where it is known
    _by_version: dict[str, tuple[Assignment, ...]] = field(default_factory=dict)
    _views: "dict[str, _Seen]" = field(default_factory=dict)
    _views_of: tuple[int, int] = (0, 0)  # what they were made of: log position, telemetry

    @classmethod
    def restored(
        cls,
        catalog: Catalog,
        placement: Placement,
        nodes: dict[str, Node],
        scaling: Scaling,
        load_seconds: dict[str, float],
        routing: Routing,
        position: int,
    ) -> "FleetState":
        """As it was when these were taken from it."""
        by_version = _by_version(placement)
        return cls(
            catalog,
            placement,
            nodes,
            scaling,
            load_seconds,
            routing,
            position,
            _by_version=by_version,
        )

    def apply(self, recorded: RecordedEvent) -> None:
        event = recorded.event
        if isinstance(event, nodes.NodeEvent):
            known = self.nodes.get(event.node_id, Node())
            self.nodes[event.node_id] = nodes.evolve(known, event)
            if isinstance(event, nodes.ReplicaBecameReady):
                self.load_seconds[event.version_id] = event.load_seconds
        elif isinstance(event, PlacementDecided):
            self.placement = placements.evolve(self.placement, event)
            self._by_version = _by_version(self.placement)
        elif isinstance(event, scalings.ScalingEvent):
            self.scaling = scalings.evolve(self.scaling, event)
        elif isinstance(event, RoutingEvent):
            self.routing = routings.evolve(self.routing, event)
        else:
            self.catalog.apply(event)
        self.position = recorded.position

    def replica_state(self, assignment: Assignment) -> str:
        """What the node last said of it; ``pending`` if it said nothing yet."""
        known = self.nodes.get(assignment.node_id)
        said = known.replicas.get(assignment.replica_id) if known else None
        return said[1] if said else "pending"

    def overdue_code(self, assignment: Assignment) -> str | None:
        """Why it is stuck; None if it is not."""
        known = self.nodes.get(assignment.node_id)
        return known.overdue.get(assignment.replica_id) if known else None

    def num_ready(self, version_id: str) -> int:
        return sum(
            self.replica_state(assignment) == "ready"
            and self.nodes[assignment.node_id].status == "ready"
            for assignment in self._by_version.get(version_id, ())
        )

    def num_wanted(self, version_id: str, spec: VersionSpec) -> int:
        """Replicas there should be now, within the version's bounds."""
        return self.scaling.num_wanted(version_id, spec.min_replicas, spec.max_replicas)

    def assignments_of(self, version_id: str) -> tuple[Assignment, ...]:
        return self._by_version.get(version_id, ())

    def wait_s(self, version_id: str, now: float, loads: FleetLoads | None = None) -> float | None:
        """Expected seconds until a replica is ready; None if one is already, by its node's word. A
        suspect node's word does not count: it has to be lost before another one loads.

        With ``loads`` one that is ready but swapped out is waited for as its node expects.

        What its last load took, less what the present one has taken; once it takes longer, half as
        long again as it has. 12 s last time: 13 s when asked for, 4 s after 8 s of loading, 10 s
        after 20.
        """
        began: list[float] = []
        away: list[float] = []
        silent = False
        for one in self.assignments_of(version_id):
            node = self.nodes.get(one.node_id)
            said = node.replicas.get(one.replica_id) if node else None
            load = self._load_of(one, loads) if loads else None
            if node is not None and node.status == "suspect":
                silent = silent or said is not None
            elif load and load.is_away and self._is_sendable(one, load):
                away.append(load.expected_wait_s)
            elif said and said[1] == "ready":
                return None
            elif said and said[1] != "failed":
                began.append(said[2])
        if away:
            return min(away)
        typical = self.load_seconds.get(version_id)
        if typical is None:
            spec = self.catalog.spec(VersionId(version_id)) or DEFAULT_SPEC
            typical = LOAD_FIRST_S + spec.gpu_memory / LOAD_BYTES_PER_S
        if not began:
            return typical + DECIDE_S + (LOSE_S if silent else 0.0)
        taken = max(0.0, now - min(began))
        return max(typical - taken, taken / 2 if taken > typical else 0.1)

    def _load_of(self, assignment: Assignment, loads: FleetLoads) -> ReplicaLoad | None:
        load = loads.latest(assignment.node_id)
        return _find(load.replicas if load else (), assignment.replica_id)

    def _is_sendable(self, assignment: Assignment, load: ReplicaLoad | None) -> bool:
        """Whether its node takes requests for it: ready, or placed to take turns and not loaded
        yet."""
        if self.replica_state(assignment) == "ready":
            return True
        held = load is not None and load.tier == "storage" and load.state in HELD
        return assignment.tier in ("warm", "storage") and held

    def unplaced_reason(self, version_id: str) -> str:
        """The planner's sentence on why a wanted replica runs nowhere; "" if none is missing."""
        for gap in self.placement.unplaced:
            if gap.version_id == version_id:
                return gap.reason
        return ""

    def candidates(
        self,
        version_id: str,
        loads: FleetLoads,
        monotonic: float,
        num_local: Mapping[str, int] | None = None,
        num_local_tokens: Mapping[str, int] | None = None,
        num_cached: Mapping[str, int] | None = None,
    ) -> list[ReplicaView]:
        """Every replica of the version for ``dispatch.choose``, whatever its state.

        By replica id: ``num_local`` counts this gateway's own requests in flight and
        ``num_local_tokens`` what they have to prefill, ``num_cached`` what of the prompt is cached.
        """
        local, tokens, cached = num_local or {}, num_local_tokens or {}, num_cached or {}
        views = self._seen(version_id, loads, monotonic).views
        if not local and not cached:
            return list(views)
        return [_for_request(view, local, tokens, cached) for view in views]

    def prefix_caches(self, version_id: str, loads: FleetLoads, monotonic: float) -> list[Cache]:
        """What the version's replicas have cached; empty where there is no choice anyway."""
        return self._seen(version_id, loads, monotonic).caches

    def _seen(self, version_id: str, loads: FleetLoads, monotonic: float) -> "_Seen":
        """Made anew when an event or a telemetry message has come, or ages have grown by
        ``AGED_S``; not for each request."""
        made_of = (self.position, loads.num_recorded)
        if made_of != self._views_of:
            self._views_of = made_of
            self._views.clear()
        seen = self._views.get(version_id)
        if seen is None or not 0 <= monotonic - seen.at < AGED_S:
            seen = seen or self._look(version_id, loads)
            views = [replace(one, age_s=loads.age_s(one.node_id, monotonic)) for one in seen.views]
            seen = self._views[version_id] = _Seen(views, seen.caches, monotonic)
        return seen

    def _look(self, version_id: str, loads: FleetLoads) -> "_Seen":
        assignments = self._by_version.get(version_id, ())
        caches = _caches(assignments, loads) if len(assignments) > 1 else []
        return _Seen([self._view(one, loads) for one in assignments], caches, 0.0)

    def _view(self, assignment: Assignment, loads: FleetLoads) -> ReplicaView:
        known = self.nodes.get(assignment.node_id, Node())
        spec = self.catalog.spec(assignment.version_id) or DEFAULT_SPEC
        load = loads.latest(assignment.node_id)
        replica = _find(load.replicas if load else (), assignment.replica_id)
        device = _device(load.devices if load else (), assignment.device_index)
        return ReplicaView(
            replica_id=assignment.replica_id,
            node_id=assignment.node_id,
            state=self.replica_state(assignment),
            node_status=known.status,
            draining=known.draining,
            max_batch=spec.max_batch,
            is_held=self._is_sendable(assignment, replica),
            zone_hops=zone_hops(self.zone, known.zone),
            num_local_then=loads.num_local_then(assignment.replica_id),
            **_device_figures(device),
            **_replica_figures(replica),
        )


class _Seen(NamedTuple):
    """The replicas of a version, ``at`` monotonic seconds."""

    views: list[ReplicaView]
    caches: list[Cache]
    at: float


def _for_request(
    view: ReplicaView,
    local: Mapping[str, int],
    tokens: Mapping[str, int],
    cached: Mapping[str, int],
) -> ReplicaView:
    num_local, num_cached = local.get(view.replica_id, 0), cached.get(view.replica_id, 0)
    if not num_local and not num_cached:
        return view
    return replace(
        view,
        num_local=num_local,
        num_local_tokens=tokens.get(view.replica_id, 0),
        num_cached_tokens=num_cached,
    )


def _caches(assignments: Sequence[Assignment], loads: FleetLoads) -> list[Cache]:
    found: list[Cache] = []
    for one in assignments:
        load = loads.latest(one.node_id)
        replica = _find(load.replicas, one.replica_id) if load else None
        if load is None or replica is None or replica.is_away:
            continue
        bits = load.prefix_filters.get(one.replica_id, b"")
        cache = cache_of(one.replica_id, bits, max(1, replica.block_size))
        found += [cache] if cache else []
    return found


def _by_version(placement: Placement) -> dict[str, tuple[Assignment, ...]]:
    """So that a request looks at its own version's replicas and not at the whole fleet's."""
    grouped: dict[str, list[Assignment]] = {}
    for assignment in placement.assignments.values():
        grouped.setdefault(assignment.version_id, []).append(assignment)
    return {version: tuple(found) for version, found in grouped.items()}


def _find(replicas: tuple[ReplicaLoad, ...], replica_id: str) -> ReplicaLoad | None:
    return next((one for one in replicas if one.replica_id == replica_id), None)


def _device(devices: tuple[DeviceLoad, ...], index: int) -> DeviceLoad | None:
    return next((one for one in devices if one.index == index), None)


def _device_figures(device: DeviceLoad | None) -> dict[str, Any]:
    if device is None:
        return {}
    used = device.memory_used_bytes
    return {
        "utilization": device.utilization,
        "temperature_c": device.temperature_c,
        "memory_free_bytes": max(0, device.memory_total_bytes - used),
        "memory_total_bytes": max(1, device.memory_total_bytes),
    }


def _replica_figures(replica: ReplicaLoad | None) -> dict[str, Any]:
    if replica is None:
        return {}
    return {
        "num_running": replica.num_running,
        "num_waiting": replica.num_waiting,
        "num_blocks": replica.num_blocks,
        "block_size": max(1, replica.block_size),
        "prefill_tokens_per_s": replica.prefill_tokens_per_s,
        "decode_step_s": replica.decode_step_s,
        "resident": not replica.is_away,
        "load_seconds": replica.expected_wait_s if replica.is_away else 0.0,
    }
