"""Replicas by load and by expectation: the two rules of ``placement`` applied to the whole fleet.

``step`` runs on the planner's thread before each plan. It only writes decisions into the log
(``domain.scaling``); the plan that follows reads them there, and so does its replay::

    3 requests open for m@v1, 0 replicas wanted     ReplicasScaled 0 -> 1 (woken)
    PlacementDecided                                m@v1 fits nowhere, n@v1 is idle beside it
    the next step                                   ReplicasScaled n@v1 1 -> 0 (displaced)
    PlacementDecided                                n@v1 stopped, m@v1 started

Once an interval what is expected is recorded, what came of the last forecast with it, and models
likely to be asked for are loaded ahead; a load ahead is judged when its time is over, and ends then
if nobody came and nobody is expected any more. Versions whose minimum is 1 or more are never loaded
ahead: they are always there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from controlplane.application.demand import HORIZON_S, DemandWatch, Expectation
from controlplane.application.fleet import FleetLoads, ReplicaLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import CONTROLLER, Clock
from controlplane.application.reconcile import inputs_of, live_versions, snapshot
from controlplane.domain import scaling
from controlplane.domain.decider import Command
from controlplane.domain.ids import VersionId
from controlplane.domain.scaling import (
    Came,
    Expected,
    JudgePreload,
    Reading,
    RecordForecast,
    ScaleReplicas,
)
from controlplane.domain.version_spec import VersionSpec
from controlplane.placement.ahead import Load as Ahead
from controlplane.placement.ahead import loads_ahead, room_for, worths
from controlplane.placement.autoscale import (
    DEFAULT_POLICY,
    TARGET_TTFT_S,
    Load,
    Memory,
    Policy,
    decide,
)
from controlplane.placement.settling import Settling
from controlplane.placement.snapshot import FleetSnapshot

ASKED_S = 30.0
STAY_S = 60.0
AHEAD_EVERY_S = 5.0
SAID_EXPECTED = 0.05  # requests within the horizon, below which a forecast leaves a version out


class Scaler:
    """``num_scaled`` counts the decisions by their code."""

    def __init__(
        self,
        handler: CommandHandler,
        clock: Clock,
        state: FleetState,
        loads: FleetLoads,
        watch: DemandWatch,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        self._handler, self._clock, self._state, self._loads = handler, clock, state, loads
        self._watch, self._policy = watch, policy
        self._memories: dict[str, Memory] = {}
        self._settling = Settling(policy)
        self._ahead_at = float("-inf")
        self._seen = (0.0, -1)
        self.num_scaled: Counter[str] = Counter()

    def step(self) -> int:
        """The number of decisions recorded."""
        now, before = self._clock.now(), self.num_scaled.total()
        seen = (self._watch.view.at, self._state.position)
        if not self._watch.view.at or seen == self._seen:
            return 0  # the ledger is not read yet, or a heartbeat changed nothing
        self._seen = seen
        over = self._judge(now)
        for version_id, spec in list(live_versions(self._state)):
            if spec.min_replicas < spec.max_replicas and version_id not in over:
                self._scale_by_load(version_id, spec, now)
            if self._displaced_for(version_id, spec, now):
                break  # what follows must see it
        self._forecast(now)
        num = self.num_scaled.total() - before
        if not num and now - self._ahead_at >= AHEAD_EVERY_S:
            self._ahead_at = now
            self._load_ahead(now)
        return self.num_scaled.total() - before

    # --- by load --------------------------------------------------------------------------------
    def _scale_by_load(self, version_id: VersionId, spec: VersionSpec, now: float) -> None:
        load = self._load_of(version_id, spec, now)
        scale = self._state.scaling.scales.get(version_id)
        is_less = scale is not None and scale.code == "slack"
        memory = self._memories.get(version_id, Memory(has_pile=not is_less))
        if scale is not None:
            since, too_few = scale.since, scale.too_few
            memory = replace(memory, since=since, too_few=too_few, for_pile=scale.for_pile)
        verdict, memory = decide(load, memory, now, self._policy)
        self._memories[version_id] = memory
        if verdict is None:
            return
        del self._memories[version_id]
        readings = tuple(Reading(name, value) for name, value in load.readings())
        if verdict.is_for_pile:
            readings += (Reading(scaling.FOR_PILE, 1.0),)
        self._scale(version_id, load.num, verdict.after, verdict.code, verdict.reason, readings)

    def _load_of(self, version_id: VersionId, spec: VersionSpec, now: float) -> Load:
        view = self._watch.view
        num, num_ready = self._state.num_wanted(version_id, spec), self._state.num_ready(version_id)
        num_open = view.num_open.get(version_id, 0)
        settled_at = self._settling.since(version_id, num, num_ready, num_open, spec.max_batch, now)
        return Load(
            num,
            spec.min_replicas,
            spec.max_replicas,
            num_ready,
            num_open,
            self._num_asked(version_id, now),
            spec.max_batch,
            self._kv_used(version_id),
            self._ttft(version_id, settled_at),
            view.demand.get(version_id, 0.0),
            self._expected(version_id).num,
            now - view.last_open.get(version_id, 0.0),
        )

    def _num_asked(self, version_id: str, now: float) -> int:
        """Who was refused at once is gone, and comes again to find the model loaded."""
        scale = self._state.scaling.scales.get(version_id)
        since = max(now - ASKED_S, scale.since if scale else 0.0)
        return self._watch.view.num_since(version_id, since)

    def _kv_used(self, version_id: str) -> float:
        """Share of the blocks of all its replicas; 0 where no node has said."""
        told = [one for one in self._replica_loads(version_id) if one.num_blocks]
        total = sum(one.num_blocks for one in told)
        return 1 - sum(one.num_free_blocks for one in told) / total if total else 0.0

    def _replica_loads(self, version_id: str) -> Iterator[ReplicaLoad]:
        for assignment in self._state.assignments_of(version_id):
            load = self._loads.latest(assignment.node_id)
            for one in load.replicas if load else ():
                if one.replica_id == assignment.replica_id:
                    yield one

    def _ttft(self, version_id: str, since: float | None) -> float:
        """The worst class's median of the last minute, over its target; 0 if nothing is known."""
        if since is None:
            return 0.0
        by_class: dict[str, list[float]] = {}
        for one in self._watch.view.ttft.get(version_id, ()):
            if one.at >= since:
                by_class.setdefault(one.latency_class, []).append(one.ttft_s)
        return max(
            (sorted(all_of)[len(all_of) // 2] / TARGET_TTFT_S.get(name, TARGET_TTFT_S["standard"])
             for name, all_of in by_class.items()),
            default=0.0,
        )  # fmt: skip

    def _displaced_for(self, version_id: VersionId, spec: VersionSpec, now: float) -> bool:
        """Whether idle versions gave up their replicas for one that is asked for in vain."""
        view = self._watch.view
        is_asked = view.num_open.get(version_id) or view.num_since(version_id, now - ASKED_S)
        if not is_asked or not self._state.unplaced_reason(version_id):
            return False
        if self._state.num_ready(version_id):
            return False
        rates = view.rates
        idle = [one for one in self._idle() if not self._is_awaited(one, now)]
        idle.sort(key=lambda one: (rates.get(one, 0.0), one))
        leaving = room_for(self._snapshot(now), version_id, idle)
        for name in leaving or ():
            self._displace(name, version_id)
        return bool(leaving)

    def _is_awaited(self, version_id: str, now: float) -> bool:
        """Whether it still loads for somebody who was told to come again."""
        scale = self._state.scaling.scales.get(version_id)
        is_new = scale is not None and scale.since > now - ASKED_S
        return is_new and not self._state.num_ready(version_id)

    def _displace(self, name: str, by: str) -> None:
        expected = (
            Reading("expected", self._expected(name).num),
            Reading("expected_of_other", self._expected(by).num),
        )
        spec = self._state.catalog.spec(VersionId(name))
        assert spec is not None
        num, text = self._state.num_wanted(name, spec), f"It is idle, and {by} needs its room."
        self._scale(VersionId(name), num, 0, "displaced", text, expected)

    def _idle(self) -> list[str]:
        """Versions that have replicas, none by their minimum, and no request open."""
        view = self._watch.view
        return [
            version_id
            for version_id, spec in live_versions(self._state)
            if not spec.min_replicas
            and self._state.num_wanted(version_id, spec)
            and not view.num_open.get(version_id)
        ]

    def _spare(self, now: float) -> list[str]:
        """Of these, who may leave for what is only expected: nobody whose number of replicas has
        just changed, who was just asked for, or whose own load ahead is not judged yet."""
        scales, view = self._state.scaling.scales, self._watch.view
        return [
            one
            for one in self._idle()
            if one not in self._state.scaling.preloads
            and (one not in scales or scales[one].since < now - STAY_S)
            and view.last_open.get(one, 0.0) < now - STAY_S
        ]

    def _snapshot(self, now: float) -> FleetSnapshot:
        inputs = inputs_of(self._state, self._loads, self._clock.monotonic())
        return snapshot(self._state, inputs, now)

    # --- by expectation -------------------------------------------------------------------------
    def _expected(self, version_id: str) -> Expectation:
        return self._watch.view.expected.get(version_id, Expectation(0.0, "averages"))

    def _forecast(self, now: float) -> None:
        last = self._state.scaling.forecast
        if not self._watch.view.at or (last is not None and last.until > now):
            return
        names = [version_id for version_id, _ in live_versions(self._state)]
        expected = [(name, self._expected(name)) for name in names]
        self._order(
            RecordForecast(
                now + HORIZON_S,
                tuple(
                    Expected(name, round(one.num, 3), one.method)
                    for name, one in expected
                    if one.num >= SAID_EXPECTED
                ),
                self._what_came(names),
                now,
            )
        )

    def _what_came(self, names: list[VersionId]) -> tuple[Came, ...]:
        """Of the last forecast's versions, and of those that came without one."""
        last = self._state.scaling.forecast
        if last is None:
            return ()
        expected = {one.version_id: one.num_requests for one in last.expected}
        came = {
            name: sum(last.at <= at < last.until for at in self._watch.view.arrivals.get(name, ()))
            for name in {*expected, *names}
        }
        return tuple(
            Came(name, expected.get(name, 0.0), num)
            for name, num in sorted(came.items())
            if num or name in expected
        )

    def _load_ahead(self, now: float) -> None:
        """Of the versions that come and go, by what is expected of each."""
        specs = {name: spec for name, spec in live_versions(self._state) if not spec.min_replicas}
        expected: dict[str, float] = {name: self._expected(name).num for name in specs}
        if not any(
            num >= SAID_EXPECTED and not self._state.num_wanted(name, specs[VersionId(name)])
            for name, num in expected.items()
        ):
            return
        view = self._watch.view.rates
        rates = {name: view[name] for name in expected if name in view}
        worth = worths(expected, rates)
        for load in loads_ahead(self._snapshot(now), expected, rates, self._spare(now)):
            for name in load.leaving:
                self._displace(name, load.version_id)
            self._preload(load, worth, now)

    def _preload(self, load: Ahead, worth: Mapping[str, float], now: float) -> None:
        """``worth`` is by what it was weighed against those who leave for it."""
        expected = self._expected(load.version_id)
        lost = sum(worth.get(name, 0.0) for name in load.leaving)
        self._scale(
            VersionId(load.version_id), 0, 1, scaling.PRELOAD,
            f"{expected.num:.1f} requests for it are expected within {HORIZON_S:g} s "
            f"({expected.method}).",
            (Reading("expected", expected.num),
             Reading("rate", worth[load.version_id]),
             Reading("rate_of_leaving", lost)),
            now + HORIZON_S,
        )  # fmt: skip

    def _judge(self, now: float) -> set[str]:
        """Each load ahead whose time is over, or whose version is gone; those that ended by it."""
        over: set[str] = set()
        specs = dict(live_versions(self._state))
        for name, preload in list(self._state.scaling.preloads.items()):
            version_id = VersionId(name)
            if preload.until > now and version_id in specs:
                continue
            view = self._watch.view
            first = view.first_since(name, preload.at)
            num = view.num_since(name, preload.at)
            ahead = None if first is None else first - preload.at
            self._order(JudgePreload(version_id, num, ahead, now))
            unused = not num and self._expected(name).num < self._policy.keep_expected
            spec = specs.get(version_id)
            if unused and spec and self._state.num_wanted(name, spec) == 1:
                expected = (Reading("expected", self._expected(name).num),)
                text = "It was loaded ahead, nobody came, and nobody is expected any more."
                self._scale(version_id, 1, 0, "preload_over", text, expected)
                over.add(name)
        return over

    # --- recording ------------------------------------------------------------------------------
    def _scale(
        self,
        version_id: VersionId,
        before: int,
        after: int,
        code: str,
        reason: str,
        readings: tuple[Reading, ...],
        until: float = 0.0,
    ) -> None:
        now = self._clock.now()
        self._order(ScaleReplicas(version_id, before, after, code, reason, readings, now, until))
        self.num_scaled[code] += 1

    def _order(self, command: Command) -> None:
        self._handler.handle(scaling.DECIDER, scaling.STREAM, command, CONTROLLER)
