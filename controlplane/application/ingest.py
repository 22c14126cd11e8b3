"""From what nodes say, and from their silence, to facts in the log: transitions, not heartbeats.

``conclude`` compares a node as the log has it with its newest report and the age of its last
heartbeat, and gives the events that are still missing. Run again on the same input it gives
nothing, so it may be called as often as one likes::

    log: absent      report: boot b1, one device            -> NodeJoined
    log: ready       heartbeat 7 s old                      -> NodeSuspected  (no new work)
    log: suspect     heartbeat 16 s old                     -> NodeLost       (replaced elsewhere)
    log: lost        heard again                            -> NodeRecovered, then its replicas
    log: r loading   report: r ready                        -> ReplicaBecameReady
    log: r waiting   report: r pending, not_resident        -> ReplicaStateChanged, with the reason

A report counts only while the boot that made it is the one that is heard: the bus keeps the last
report of a dead node for ever. Ages are measured here, on arrival, with a monotonic clock; what a
node's own clock says decides nothing.

Many silent nodes at once are more likely *our* broken line than theirs. If more than a fifth of
them, and more than one, are silent, none is declared lost: the ingest is **frozen** and says so.
They stay suspect, so nothing new is sent to them; draining one by hand still moves its work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from controlplane.application.fleet import FleetLoads, NodeLoad, NodeReport, ReplicaReport
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.domain import node as nodes
from controlplane.domain.decider import Event, fold
from controlplane.domain.ids import NodeId, ReplicaId, VersionId
from controlplane.domain.node import Node, RecordNodeEvents


@dataclass(frozen=True)
class Timings:
    """Seconds of silence, and the share of nodes that may be lost at once."""

    suspect_s: float = 6.0
    lost_s: float = 15.0
    freeze_share: float = 0.2


DEFAULT_TIMINGS = Timings()


@dataclass(frozen=True)
class Heard:
    """What is known of a node besides the log. ``load`` and ``report`` None: nothing yet."""

    silent_s: float
    load: NodeLoad | None = None
    report: NodeReport | None = None

    @property
    def current(self) -> NodeReport | None:
        """The report, if the boot that made it is the one that sends heartbeats."""
        if self.load is None or self.report is None:
            return None
        return self.report if self.report.boot_id == self.load.boot_id else None


def conclude(
    node_id: str,
    node: Node,
    heard: Heard,
    now: float,
    timings: Timings = DEFAULT_TIMINGS,
    may_lose: bool = True,
) -> list[Event]:
    """The events missing from ``node``'s stream, in order. Pure."""
    events = _liveness(NodeId(node_id), node, heard, now, timings, may_lose)
    after = fold(nodes.DECIDER, events, node)
    report = heard.current
    if report is None or after.status != "ready" or report.boot_id != after.boot_id:
        return events
    if report.acked_generation != after.acked_generation:
        events.append(nodes.NodeAcknowledged(NodeId(node_id), report.acked_generation, now))
    return events + _replicas(NodeId(node_id), after, report, now)


def _liveness(
    node_id: NodeId, node: Node, heard: Heard, now: float, timings: Timings, may_lose: bool
) -> list[Event]:
    if heard.silent_s < timings.suspect_s:
        return _alive(node_id, node, heard, now)
    if heard.silent_s >= timings.lost_s and may_lose and node.status in ("ready", "suspect"):
        return [nodes.NodeLost(node_id, heard.silent_s, now)]
    if node.status == "ready":
        return [nodes.NodeSuspected(node_id, heard.silent_s, now)]
    return []


def _alive(node_id: NodeId, node: Node, heard: Heard, now: float) -> list[Event]:
    if heard.load is None:
        return []  # within the first seconds of this controller: nothing is known yet
    report = heard.current
    if report and _is_new(node, report):
        told = report.boot_id, report.zone, report.devices
        return [nodes.NodeJoined(node_id, *told, now, report.host)]
    if node.status in ("suspect", "lost") and node.boot_id == heard.load.boot_id:
        return [nodes.NodeRecovered(node_id, heard.load.boot_id, now)]
    return []


def _is_new(node: Node, report: NodeReport) -> bool:
    return (node.boot_id, node.zone, node.devices, node.host) != (
        report.boot_id,
        report.zone,
        report.devices,
        report.host,
    )


def _replicas(node_id: NodeId, node: Node, report: NodeReport, now: float) -> list[Event]:
    events: list[Event] = []
    for said in report.replicas:
        known = node.replicas.get(said.replica_id)
        is_same = known is not None and known[1] == said.state
        if not is_same or _waits_otherwise(node, said) or _failed_again(node, said):
            events.append(_transition(node_id, said, now))
    running = {said.replica_id for said in report.replicas}
    for replica_id, (version_id, _, _) in node.replicas.items():
        if replica_id not in running:
            events.append(
                nodes.ReplicaStopped(node_id, ReplicaId(replica_id), VersionId(version_id), now)
            )
    return events


def _waits_otherwise(node: Node, said: ReplicaReport) -> bool:
    """Whether it waits for another reason than the log has; figures alone are no news."""
    return said.state == nodes.WAITING and said.code != node.codes.get(said.replica_id, "")


def _failed_again(node: Node, said: ReplicaReport) -> bool:
    """Whether a try has failed between two reports: both say failed."""
    before = node.failed_since.get(said.replica_id, 0.0)
    return said.state == "failed" and before > 0 and said.since != before


def _transition(node_id: NodeId, said: ReplicaReport, now: float) -> Event:
    replica_id, version_id = ReplicaId(said.replica_id), VersionId(said.version_id)
    if said.state == "ready":
        return nodes.ReplicaBecameReady(
            node_id,
            replica_id,
            version_id,
            said.device_index,
            said.weights_bytes,
            said.kv_bytes,
            said.peak_bytes,
            said.load_seconds,
            said.sha256,
            now,
            said.detail,
        )
    if said.state == "failed":
        code = said.code or "unknown"
        about = node_id, replica_id, version_id
        return nodes.ReplicaFailed(*about, code, said.detail, now, said.retry_s, said.since)
    why = (said.code, said.detail) if said.state == nodes.WAITING else ("", "")
    return nodes.ReplicaStateChanged(node_id, replica_id, version_id, said.state, now, *why)


def num_silent(nodes_by_id: dict[str, Node], heard: dict[str, Heard], timings: Timings) -> int:
    """Nodes not declared lost that have been silent for longer than the suspect time."""
    return sum(
        heard[node_id].silent_s >= timings.suspect_s
        for node_id in _living(nodes_by_id)
        if node_id in heard
    )


def _living(nodes_by_id: dict[str, Node]) -> list[str]:
    return [name for name, node in nodes_by_id.items() if node.status in ("ready", "suspect")]


class Ingest:
    """Collects what nodes say (from any thread) and records what follows from it (``step``)."""

    def __init__(
        self,
        handler: CommandHandler,
        clock: Clock,
        state: FleetState,
        loads: FleetLoads,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self._handler, self._clock, self._state, self._loads = handler, clock, state, loads
        self._timings = timings
        self._inbox: SimpleQueue[tuple[Any, float]] = SimpleQueue()
        self._reports: dict[str, NodeReport] = {}
        self._listening_since = clock.monotonic()
        self.frozen = False
        self.num_silent = 0

    def on_load(self, load: NodeLoad) -> None:
        self._inbox.put((load, self._clock.monotonic()))

    def on_report(self, report: NodeReport) -> None:
        self._inbox.put((report, self._clock.monotonic()))

    def listen_anew(self) -> None:
        """We were deaf until now (start, reconnection): silence counts from here on."""
        self._listening_since = self._clock.monotonic()

    def report(self, node_id: str) -> NodeReport | None:
        """What the node last said, if the boot that said it is the one that is heard."""
        return Heard(0.0, self._loads.latest(node_id), self._reports.get(node_id)).current

    def step(self) -> int:
        """Record everything that follows from what was heard; the number of events."""
        self._take_in()
        monotonic = self._clock.monotonic()
        names = {*self._state.nodes, *self._reports}
        heard = {name: self._heard(name, monotonic) for name in names}
        self._judge_silence(heard)
        return sum(self._record(name, heard[name]) for name in sorted(names))

    def _take_in(self) -> None:
        while True:
            try:
                said, monotonic = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(said, NodeLoad):
                self._loads.record(said, monotonic)
            else:
                self._reports[said.node_id] = said

    def _heard(self, node_id: str, monotonic: float) -> Heard:
        deaf = monotonic - self._listening_since
        age = self._loads.age_s(node_id, monotonic)
        silent = deaf if age is None else min(age, deaf)
        return Heard(silent, self._loads.latest(node_id), self._reports.get(node_id))

    def _judge_silence(self, heard: dict[str, Heard]) -> None:
        self.num_silent = num_silent(self._state.nodes, heard, self._timings)
        allowed = self._timings.freeze_share * len(_living(self._state.nodes))
        self.frozen = self.num_silent > max(1.0, allowed)

    def _record(self, node_id: str, heard: Heard) -> int:
        now = self._clock.now()
        node = self._state.nodes.get(node_id, Node())
        events = conclude(node_id, node, heard, now, self._timings, not self.frozen)
        for group in _grouped(events):
            command = RecordNodeEvents(NodeId(node_id), group, now)
            self._handler.handle(nodes.DECIDER, nodes.DECIDER.stream(node_id), command, CONTROLLER)
        return len(events)


def _grouped(events: list[Event], size: int = 256) -> Iterable[tuple[Event, ...]]:
    for start in range(0, len(events), size):
        yield tuple(events[start : start + size])
