"""Whether a stored decision is what the planner decides again from what it saw then."""

from dataclasses import asdict
from typing import Any, cast

import msgspec

from controlplane import bootstrap
from controlplane.application.ports import RecordedEvent
from controlplane.application.replay import Replay, replay, whole
from controlplane.domain.placement import PlacementDecided
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.sources import Source
from controlplane.placement.explain import explain
from controlplane.projections.fleet import Replica


def replay_at(position: int) -> Replay:
    """Replay the decision recorded there."""
    recorded = _decision_at(position)
    assert isinstance(recorded.event, PlacementDecided)
    return replay(bootstrap.fleet_timeline().at(recorded.event.planned_from), recorded)


def told(position: int) -> dict[str, Any]:
    """What else a decision says of itself: the observed inputs, and all of it as sentences."""
    event = _decision_at(position).event
    assert isinstance(event, PlacementDecided)
    return {"inputs": msgspec.to_builtins(event.inputs), "sentences": explain(event)}


def _whole(position: int, replica_id: str) -> dict[str, Any]:
    """Every candidate and rejection of a start, made again from the decision's inputs."""
    recorded = _decision_at(position)
    assert isinstance(recorded.event, PlacementDecided)
    fleet = bootstrap.fleet_timeline().at(recorded.event.planned_from)
    found = whole(fleet, recorded.event, replica_id)
    return {} if found is None else cast(dict[str, Any], msgspec.to_builtins(found))


def _decision_at(position: int) -> RecordedEvent:
    return bootstrap.event_store().read_all(position - 1, 1, position)[0]


def replayed(decision_id: str, upto: int) -> dict[str, Any]:
    """The body of ``decisions/{id}/replay/``; raises NotFound."""
    return _json(replay_at(reading.decision(decision_id, upto).body["position"]))


def explained(source: Source, replica_id: str, upto: int) -> reading.Found:
    """The replica, the decision that last wanted it so, what that says of it, its replay, and what
    last changed the number of replicas that the decision was to place."""
    row = reading.required(source.get(Replica, replica_id), "replica", replica_id)
    decision = reading.decision(row.decision_id, upto)
    complete = _whole(decision.body["position"], replica_id)
    about = [
        {"change": change, **one, **(complete if change == "started" else {})}
        for change in ("started", "stopped")
        for one in decision.body[change]
        if one["assignment"]["replica_id"] == replica_id
    ]
    body = {
        "replica_id": replica_id,
        "version_id": row.version_id,
        "node_id": row.node_id,
        "device_index": row.device_index,
        "state": row.state,
        "reason": row.reason,
        "tier": row.tier,
        "tier_since": row.tier_since,
        "tier_reason": row.tier_reason,
        "decision_id": row.decision_id,
        "decided_at": decision.body["at"],
        "decision_position": decision.body["position"],
        "changes": about,
        "scaling": reading.scaling_before(row.version_id, decision.body["position"]),
        "replay": _json(replay_at(decision.body["position"])),
    }
    return reading.Found(body, row.generation)


def _json(done: Replay) -> dict[str, Any]:
    return {
        **asdict(done),
        "differences": [asdict(one) for one in done.differences],
        "equal": done.equal,
    }
