"""What should have happened and has not: replicas that get stuck, nodes that do not accept.

A watch for each replica that is placed and not ready starts anew whenever something moves, and when
it runs out the log is told (``ReplicaOverdue``). What has to move, and within which time::

    its node says nothing of it   it does, within 60 s
    pending                       it begins to load, within 60 s; a warm one waits to be asked for
    downloading, loading          its worker works (``load_work``), within 5 min; and the stage that
                                  its node names changes within an hour: a worker may serve others
    ready, failed                 nothing: a failed one says when it is tried again

So no load is too large to be waited for, as long as it goes on. One that waits for room is told
again after 2, 4, 8 … minutes, then hourly: each time counts as a failure of its version there, and
the planner looks for a better node (``placement.failing``). A load that goes on after all is told,
too. A node that has not accepted for 30 s what it was told is told of once, with why.

Times are measured here with a monotonic clock; a controller that takes over begins anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.application.fleet import FleetLoads, NodeReport, ReplicaReport
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.application.publish import OVERDUE_S, Late
from controlplane.domain import node as nodes
from controlplane.domain.decider import Event
from controlplane.domain.ids import NodeId
from controlplane.domain.node import WAITING, Node, RecordNodeEvents
from controlplane.domain.placement import Assignment

STARTING = frozenset({"downloading", "loading"})
WORK = 1.0  # a second of processor, or 16 MiB: less is what an idle worker does, too


@dataclass(frozen=True)
class Deadlines:
    """Seconds, as above."""

    unreported_s: float = 60.0
    waiting_s: float = 60.0
    idle_s: float = 300.0
    stage_s: float = 3600.0
    repeat_limit_s: float = 3600.0
    accepted_s: float = OVERDUE_S


DEADLINES = Deadlines()


@dataclass(slots=True)
class Watch:
    """``sign``: state, and the stage of a load. The times are of what last changed of it."""

    sign: tuple[str, str]
    moved_at: float
    worked_at: float
    work: float
    due_s: float

    def waited_s(self, now: float, limits: Deadlines) -> float | None:
        """For how long nothing has moved, if that is too long."""
        still_s, idle_s = now - self.moved_at, now - self.worked_at
        if self.sign[0] not in STARTING:
            return still_s if still_s >= self.due_s else None
        if idle_s >= limits.idle_s:
            return idle_s
        return still_s if still_s >= limits.stage_s else None


class _Said(NamedTuple):
    """What a node says of each of its replicas, by id: the newest report, and ``load_work``."""

    reports: dict[str, ReplicaReport]
    work: dict[str, float]


class Overdue:
    """``step`` records what is overdue now. ``report`` and ``late`` are the ingest's and the
    publisher's; None while nobody publishes."""

    def __init__(
        self,
        handler: CommandHandler,
        clock: Clock,
        state: FleetState,
        loads: FleetLoads,
        report: Callable[[str], NodeReport | None],
        late: Callable[[], Mapping[str, Late] | None],
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self._handler, self._clock, self._state, self._loads = handler, clock, state, loads
        self._report, self._late, self._limits = report, late, deadlines
        self._watches: dict[str, Watch] = {}
        self._said: dict[str, _Said] = {}  # by node, for one step

    def step(self) -> int:
        """The number of events recorded."""
        events = [*self._of_nodes(), *self._of_replicas()]
        now = self._clock.now()
        for event in events:
            node_id: NodeId = event.node_id  # type: ignore[attr-defined]
            command = RecordNodeEvents(node_id, (event,), now)
            self._handler.handle(nodes.DECIDER, nodes.DECIDER.stream(node_id), command, CONTROLLER)
        return len(events)

    # --- nodes ------------------------------------------------------------------------------
    def _of_nodes(self) -> list[Event]:
        late = self._late()
        if late is None:
            return []
        known = [(name, node) for name, node in self._state.nodes.items() if node.status == "ready"]
        found = (self._of_node(NodeId(name), node, late.get(name)) for name, node in sorted(known))
        return [event for event in found if event is not None]

    def _of_node(self, node_id: NodeId, node: Node, late: Late | None) -> Event | None:
        now = self._clock.now()
        if late is None:
            if not node.late:
                return None
            return nodes.NodeAcknowledged(node_id, node.acked_generation, now)
        if late.age_s < self._limits.accepted_s:
            return None
        code, reason = _why_late(late, self._report(node_id))
        if code == node.late:
            return None
        return nodes.NodeOverdue(node_id, *late.told, code, reason, late.age_s, now)

    # --- replicas ---------------------------------------------------------------------------
    def _of_replicas(self) -> list[Event]:
        placed = self._state.placement.assignments
        for gone in self._watches.keys() - placed.keys():
            del self._watches[gone]
        self._said.clear()
        found = (self._of_replica(one) for one in placed.values())
        return [event for event in found if event is not None]

    def _of_replica(self, placed: Assignment) -> Event | None:
        node = self._state.nodes.get(placed.node_id)
        said = node.replicas.get(placed.replica_id) if node else None
        state = said[1] if said else ""
        if node is None or node.status != "ready" or not _is_due(placed, state):
            self._watches.pop(placed.replica_id, None)
            return None
        node_says = self._said_by(placed.node_id)
        report = node_says.reports.get(placed.replica_id)
        watch = self._watch(placed, state, report, node_says.work.get(placed.replica_id, 0.0))
        waited_s = watch.waited_s(self._clock.monotonic(), self._limits)
        is_known = placed.replica_id in node.overdue
        if waited_s is None:
            goes_on = is_known and state in STARTING
            return _goes_on(placed, state, self._clock.now()) if goes_on else None
        if is_known and state != WAITING:
            return None
        watch.due_s += min(watch.due_s, self._limits.repeat_limit_s)
        about = placed.node_id, placed.replica_id, placed.version_id, state
        return nodes.ReplicaOverdue(*about, *_why(node, state, report), waited_s, self._clock.now())

    def _said_by(self, node_id: str) -> _Said:
        """Gathered once a step, and only of nodes with a replica that is due: a lookup in the
        node's list for each of its replicas would be quadratic."""
        found = self._said.get(node_id)
        if found is None:
            report, load = self._report(node_id), self._loads.latest(node_id)
            reports = {one.replica_id: one for one in (report.replicas if report else ())}
            work = {one.replica_id: one.load_work for one in (load.replicas if load else ())}
            found = self._said[node_id] = _Said(reports, work)
        return found

    def _watch(
        self, placed: Assignment, state: str, report: ReplicaReport | None, work: float
    ) -> Watch:
        """Its watch, started anew if something has moved."""
        now = self._clock.monotonic()
        sign = state, report.detail if report and state in STARTING else ""
        watch = self._watches.get(placed.replica_id)
        if watch is None or watch.sign != sign:
            due_s = self._limits.waiting_s if state else self._limits.unreported_s
            watch = self._watches[placed.replica_id] = Watch(sign, now, now, work, due_s)
        elif abs(work - watch.work) >= WORK:
            watch.work, watch.worked_at = work, now
        return watch


def _is_due(placed: Assignment, state: str) -> bool:
    """Whether something is to happen to it without anybody asking for it."""
    if state == WAITING:
        return placed.tier != "warm"
    return state in STARTING or not state


def _goes_on(placed: Assignment, state: str, now: float) -> Event:
    about = placed.node_id, placed.replica_id, placed.version_id
    return nodes.ReplicaStateChanged(*about, state, now)


def _why(node: Node, state: str, report: ReplicaReport | None) -> tuple[str, str]:
    """Code and sentence."""
    said = report.detail if report else ""
    if state in STARTING:
        return "no_progress", f"Nothing moves. {said}".strip()
    if state == WAITING:
        return (report.code if report else "") or "waiting", said
    if node.late:
        return "not_accepted", "Its node has not accepted what it was told."
    return "unreported", "Its node has accepted the plan, and says nothing of it."


def _why_late(late: Late, report: NodeReport | None) -> tuple[str, str]:
    if late.is_ahead:
        return "refused", (
            f"It has accepted {late.accepted}, which is newer than {late.told}: the log went back, "
            "or another control plane with this cluster's id tells it what to run. If the database "
            f"was restored: manage.py advance_epoch {late.accepted[0]}."
        )
    if report and report.refusal:
        return "refused", f"It refuses {late.told}: {report.refusal}."
    return "silent", f"It lives, and has not accepted {late.told}; it has {late.accepted}."
