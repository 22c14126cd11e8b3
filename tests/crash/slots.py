"""Whether an old generation of a replica's slot was ever served beside the new one.

A generation is a replica id: one decision starts it, one stops it, and it never comes back. Judged
from the log and from the ledger's attempts, whoever was cut off, hung or dead meanwhile::

    decided 10.0   a.g1.0 on n1, a.g1.1 on n2
    lost    30.0   n1
    decided 30.1   stop a.g1.0, start a.g2.0 on n3        in one decision: n1 keeps nothing
    attempt 29.0 on a.g1.0    right: it was in the placement
    attempt 31.0 on a.g2.0    right
    attempt 34.0 on a.g1.0    wrong: out of the placement for more than ``LAG_S``

Where a replica moves and its node lives (a drain, or spreading again), the old one leaves as soon
as the new one is ready: then one too many can be routed to, for ``LAG_S`` at most.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

LAG_S = 3.0  # until the planner has seen it, and until a gateway has read what was decided
ROUNDING_S = 0.05  # of times that are taken in two processes

Json = Mapping[str, Any]


@dataclass
class Generation:
    version_id: str
    node_id: str
    since: float
    until: float = float("inf")


@dataclass
class Fleet:
    """The log, folded: ``problems`` are what no log should hold."""

    wanted: Mapping[str, int]
    generations: dict[str, Generation] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)
    nodes: dict[str, str] = field(default_factory=dict)  # node -> ready | suspect | lost
    ready: dict[str, set[str]] = field(default_factory=dict)  # node -> replicas
    boots: dict[str, str] = field(default_factory=dict)
    lost_at: dict[str, int] = field(default_factory=dict)  # node -> log position
    excess_since: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apply(self, event: Json) -> None:
        kind, data = str(event["type"]), event["data"]
        if kind == "PlacementDecided":
            self._decided(data)
        elif kind.startswith("Node"):
            self._node(kind, data, event["position"])
        elif kind.startswith("Replica"):
            known = self.ready.setdefault(data["node_id"], set())
            (known.add if kind == "ReplicaBecameReady" else known.discard)(data["replica_id"])
        if "at" in data:
            self._count(data["at"])

    def _decided(self, data: Json) -> None:
        for stop in data["stopped"]:
            replica_id = stop["assignment"]["replica_id"]
            self.placed.discard(replica_id)
            self.generations[replica_id].until = data["at"]
        for start in data["started"]:
            one = start["assignment"]
            if one["replica_id"] in self.generations:
                self.problems.append(f"{one['replica_id']} was started again")
            found = Generation(one["version_id"], one["node_id"], data["at"])
            self.generations[one["replica_id"]] = found
            self.placed.add(one["replica_id"])
        for replica_id in sorted(self.placed):
            lost_at = self.lost_at.get(self.generations[replica_id].node_id)
            if lost_at is not None and lost_at <= data["planned_from"]:
                self.problems.append(f"{replica_id} stays on a lost node")

    def _node(self, kind: str, data: Json, position: int) -> None:
        node_id = data["node_id"]
        if kind == "NodeJoined":
            if data["boot_id"] != self.boots.get(node_id):
                self.ready[node_id] = set()
            self.boots[node_id] = data["boot_id"]
        if kind in ("NodeJoined", "NodeRecovered"):
            self.nodes[node_id] = "ready"
            self.lost_at.pop(node_id, None)
        elif kind == "NodeSuspected":
            self.nodes[node_id] = "suspect"
        elif kind == "NodeLost":
            self.nodes[node_id], self.ready[node_id] = "lost", set()
            self.lost_at[node_id] = position

    def _count(self, at: float) -> None:
        """Note how long there have been more to be routed to than there should be."""
        routable = Counter(
            self.generations[one].version_id for one in self.placed if self._is_routable(one)
        )
        for version_id, most in self.wanted.items():
            since = self.excess_since.pop(version_id, at)
            if at - since > LAG_S:
                self.problems.append(f"{version_id}: one too many for {at - since:.1f} s at {at}")
            if routable[version_id] > most:
                self.excess_since[version_id] = since

    def _is_routable(self, replica_id: str) -> bool:
        node_id = self.generations[replica_id].node_id
        is_heard = self.nodes.get(node_id) == "ready"
        return is_heard and replica_id in self.ready.get(node_id, set())


def violations(folder: Path, events: Iterable[Json], wanted: Mapping[str, int]) -> Iterator[str]:
    """Of a data folder whose log is ``events`` and of whose versions so many should be ready."""
    fleet = Fleet(wanted)
    for event in events:
        fleet.apply(event)
    yield from fleet.problems
    yield from misdirected(attempts_of(folder), fleet.generations)


def attempts_of(folder: Path) -> list[Json]:
    """Of all requests on record, choice by choice."""
    connection = sqlite3.connect(folder / "engine.sqlite3", timeout=10)
    connection.row_factory = sqlite3.Row
    sql = "SELECT * FROM ledger_attempt ORDER BY request_id, choice, attempt"
    try:
        return [dict(row) for row in connection.execute(sql)]
    finally:
        connection.close()


def misdirected(attempts: list[Json], generations: Mapping[str, Generation]) -> Iterator[str]:
    """Attempts on what was not placed (any more), and such as ran beside the one before."""
    for one in attempts:
        found, began = generations.get(one["replica_id"]), one["started_at"]
        name = f"{one['request_id']} attempt {one['attempt']} on {one['replica_id']}"
        if found is None or found.node_id != one["node_id"]:
            yield f"{name}: not placed on {one['node_id']}"
        elif began < found.since - ROUNDING_S:
            yield f"{name}: before it was decided"
        elif began > found.until + LAG_S:
            yield f"{name}: {began - found.until:.1f} s after it was stopped"
    for before, after in pairwise(attempts):
        if _choice(before) == _choice(after):
            ended = before["started_at"] + before["duration_ms"] / 1000
            if after["started_at"] < ended - ROUNDING_S:
                yield f"{after['request_id']}: two attempts at once"


def _choice(attempt: Json) -> tuple[str, int]:
    return attempt["request_id"], attempt["choice"]
