"""From the newest placement to every node's desired state on the bus.

Whole values, level-triggered: each round computes what every node should be told and delivers
what is not known to be there. Every few seconds, and after a reconnection, all of them are
compared with what the bus really holds, so a bus that lost its store is filled again.

A node whose replicas did not change keeps the generation it was first told with; that one it must
acknowledge. ``unacknowledged`` says who has not, and for how long. Worked example, epoch 2::

    placement 7 starts a on n1     n1 is told (2, 7) [a]
    placement 8 starts b on n2     n2 is told (2, 8) [b]; n1 nothing: it runs what it should
    n1 acknowledges (2, 7)         nobody waits for n1, though the placement is at 8
    n1 says it accepted (5, 40)    it takes nothing of epoch 2: waited for, until we are past 5
    the bus lost its store         the next comparison finds nothing there: n1 is told (2, 8) [a]

A group over several nodes is told to each of them, with the ranks that are its own. Its agents know
each other by a secret of this one placement, made of its id (which is never used again) and a key
that all controllers have: an agent that is still at an earlier placement has another one.
"""

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from controlplane.application.failpoints import passing
from controlplane.application.fleet import (
    DesiredNode,
    DesiredReplica,
    DesiredStates,
    DesiredTooLarge,
    FleetLoads,
    GroupPart,
    StaleDesired,
)
from controlplane.application.fleet_state import FleetState
from controlplane.application.ports import Clock
from controlplane.domain.placement import Assignment, shards_of

VERIFY_S = 5.0
OVERDUE_S = 30.0


def desired_nodes(state: FleetState, epoch: int, key: bytes = b"") -> list[DesiredNode]:
    """What every known node should run, by node id; replicas by replica id. ``key``: of which the
    secrets of groups over nodes are made; ValueError if there is such a group, and no key."""
    wanted: dict[str, list[DesiredReplica]] = {
        node_id: [] for node_id, node in state.nodes.items() if node.status != "absent"
    }
    for assignment in state.placement.assignments.values():
        for node_id, replica in _replicas(state, assignment, key):
            if node_id in wanted:
                wanted[node_id].append(replica)
    return [
        DesiredNode(
            node_id,
            epoch,
            state.placement.generation,
            state.nodes[node_id].draining,
            _with_tiers(sorted(replicas, key=lambda one: one.replica_id), state),
        )
        for node_id, replicas in sorted(wanted.items())
    ]


def _with_tiers(replicas: list[DesiredReplica], state: FleetState) -> tuple[DesiredReplica, ...]:
    """Said only where replicas share a device by turns: elsewhere nothing needs to move."""
    if not any(one.spec.residency == "swappable" for one in replicas):
        return tuple(replicas)
    placed = state.placement.assignments
    return tuple(replace(one, tier=_tier(one, placed[one.replica_id])) for one in replicas)


def _tier(replica: DesiredReplica, placed: Assignment) -> str:
    if placed.tier in ("warm", "storage"):
        return placed.tier
    return "swappable" if replica.spec.residency == "swappable" else "resident"


def _replicas(
    state: FleetState, assignment: Assignment, key: bytes
) -> Iterator[tuple[str, DesiredReplica]]:
    """What each of its nodes is told of a replica; of all but groups over nodes, one."""
    spec = state.catalog.spec(assignment.version_id)
    if spec is None:
        return
    whole = DesiredReplica(
        assignment.replica_id,
        assignment.version_id,
        assignment.version_id.partition("@")[0],
        assignment.device_index,
        assignment.memory_bytes,
        spec,
    )
    if spec.tensor_parallel == 1:
        yield assignment.node_id, whole
        return
    parts = parts_of(assignment, spec.tensor_parallel)
    for node_id, part in parts.items():
        indices = tuple(device_index for _, device_index in part)
        told = replace(whole, device_index=indices[0], device_indices=indices)
        if len(parts) > 1:
            ranks = tuple(rank for rank, _ in part)
            told = replace(told, group=_group(state, assignment, ranks, key))
        yield node_id, told


def parts_of(
    assignment: Assignment, tensor_parallel: int
) -> dict[str, tuple[tuple[int, int], ...]]:
    """A group's (rank, device index) by node, that of rank 0 first."""
    parts: dict[str, tuple[tuple[int, int], ...]] = {}
    for rank, one in enumerate(shards_of(assignment, tensor_parallel)):
        parts[one.node_id] = (*parts.get(one.node_id, ()), (rank, one.device_index))
    return parts


def _group(
    state: FleetState, assignment: Assignment, ranks: tuple[int, ...], key: bytes
) -> GroupPart:
    """Rank 0's own node knows where it listens: it is not told, and need not begin anew when that
    changes."""
    if not key:
        raise ValueError("a group over nodes needs a key: without one its secret could be guessed")
    first = state.nodes.get(assignment.node_id)
    address = first.host.fabric_address if first and 0 not in ranks else ""
    named = f"group {assignment.replica_id}".encode()
    return GroupPart(ranks, address, hmac.digest(key, named, hashlib.sha256))


@dataclass(slots=True)
class _Told:
    """What the bus holds for a node, or did not take, and since when (monotonic) it waits for an
    acknowledgement."""

    desired: DesiredNode
    epoch: int
    generation: int
    since: float
    is_on_bus: bool = True


class Late(NamedTuple):
    """What a node was told last and has not accepted, what it has, and for how long (seconds)."""

    told: tuple[int, int]
    accepted: tuple[int, int]
    age_s: float

    @property
    def is_ahead(self) -> bool:
        """It accepted something newer: the log went back, or is not the only one."""
        return self.accepted > self.told


class Publisher:
    """Delivers for one leadership; a new leader makes a new one, with its epoch."""

    def __init__(
        self,
        states: DesiredStates,
        clock: Clock,
        state: FleetState,
        loads: FleetLoads,
        epoch: int,
        verify_s: float = VERIFY_S,
        key: bytes = b"",
    ) -> None:
        self._key = key
        self._states, self._clock, self._state, self._loads = states, clock, state, loads
        self._epoch, self._verify_s = epoch, verify_s
        self._told: dict[str, _Told] = {}
        self._verified_at: float | None = None
        self.num_written = 0

    def verify_soon(self) -> None:
        """Compare everything with the bus in the next round."""
        self._verified_at = None

    async def step(self) -> int:
        """Deliver what is missing; the number of states written.

        Raises BusUnavailable (next time); and, when all others were told, StaleDesired (somebody
        else leads by now, or did before the log went back) or DesiredTooLarge for a node.
        """
        now = self._clock.monotonic()
        verify = self._verified_at is None or now - self._verified_at >= self._verify_s
        before, failure = self.num_written, None
        for desired in desired_nodes(self._state, self._epoch, self._key):
            if verify or not self._is_told(desired):
                try:
                    self.num_written += await self._deliver(desired, now)
                except (DesiredTooLarge, StaleDesired) as error:
                    failure = error
                    self._note(desired, (desired.epoch, desired.generation), now, False)
        if verify:
            self._verified_at = now
        if failure is not None:
            raise failure
        return self.num_written - before

    def _is_told(self, desired: DesiredNode) -> bool:
        told = self._told.get(desired.node_id)
        if told is None or not told.is_on_bus:
            return False
        return _content(told.desired) == _content(desired)

    async def _deliver(self, desired: DesiredNode, now: float) -> bool:
        delivery = await self._states.deliver(desired)
        passing("publish.delivered")
        self._note(desired, (delivery.epoch, delivery.generation), now)
        return delivery.written

    def _note(
        self, desired: DesiredNode, number: tuple[int, int], now: float, is_on_bus: bool = True
    ) -> None:
        told = self._told.get(desired.node_id)
        since = told.since if told and (told.epoch, told.generation) == number else now
        self._told[desired.node_id] = _Told(desired, *number, since, is_on_bus)

    def unacknowledged(self) -> dict[str, float]:
        """Seconds since which a node that is not lost was told something it has not accepted."""
        return {node_id: late.age_s for node_id, late in self.late().items()}

    def late(self) -> dict[str, Late]:
        """The same with both numbers."""
        now, found = self._clock.monotonic(), dict[str, Late]()
        for node_id, told in list(self._told.items()):
            node = self._state.nodes.get(node_id)
            if node is None or node.status == "lost":
                continue  # nobody waits for it: what it ran is placed elsewhere
            load = self._loads.latest(node_id)
            accepted = (load.acked_epoch, load.acked_generation) if load else (0, 0)
            if accepted != (told.epoch, told.generation):
                found[node_id] = Late((told.epoch, told.generation), accepted, now - told.since)
        return found


def _content(desired: DesiredNode) -> tuple[object, ...]:
    return desired.drain, desired.replicas
