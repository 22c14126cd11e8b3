"""Where replicas are now: what their nodes said last, beside what the log wants.

The log holds where a replica is placed, and so does every reading of the past. Where it is changes
with each swap, so that is taken from the telemetry that this process has heard, and only from nodes
that are not silent::

    placed warm since 12:00    n1, 1 s ago: resident since 12:04      live_tier resident
    the same                   n1 was heard 7 s ago                   live_tier null
    the same, as of 11:00                                             live_tier null
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from controlplane import bootstrap
from controlplane.application.fleet import ReplicaLoad
from controlplane.application.ingest import DEFAULT_TIMINGS
from controlplane.entrypoints.rest.sources import DatabaseSource, Source
from controlplane.projections.fleet import Replica


def live_load(source: Source, row: Replica) -> ReplicaLoad | None:
    """What its node says of it; None if it is silent, has no tiers, or ``source`` is the past."""
    if not isinstance(source, DatabaseSource):
        return None
    loads = bootstrap.heard_loads()
    age_s = loads.age_s(row.node_id, bootstrap.clock().monotonic())
    load = loads.latest(row.node_id)
    if load is None or age_s is None or age_s >= DEFAULT_TIMINGS.suspect_s:
        return None
    found = (one for one in load.replicas if one.replica_id == row.replica_id)
    return next((one for one in found if one.tier), None)


def live_tier(source: Source, row: Replica) -> dict[str, Any]:
    """The two fields of a replica's body."""
    load = live_load(source, row)
    return {
        "live_tier": load.tier if load else None,
        "live_tier_since": load.tier_since or None if load else None,
    }


def by_tier(source: Source, rows: Iterable[Replica]) -> dict[str, dict[str, int]]:
    """The two fields of a version's body; ``rows`` are its replicas that are wanted."""
    replicas = list(rows)
    said = (live_load(source, one) for one in replicas)
    return {
        "placed_tiers": dict(Counter(one.tier for one in replicas)),
        "live_tiers": dict(Counter(one.tier for one in said if one)),
    }
