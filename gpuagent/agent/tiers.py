"""Generations that wait for their replica to be resident, and what that makes the node do.

    add(request for b, which is in host)   held; b asks for the device
    decide                                 a is idle: swap a out           (``residency``)
    Swapped(a, host)                       b comes in
    Swapped(b, resident)                   what was held goes to b's worker, in order of arrival

Any number of requests for one cold replica load it once: they are held in one list, and a replica
that is on its way is not asked for again. A replica that has left in the middle of its work asks
for the device like one whose requests are held here.
"""

import time
from collections.abc import Callable, Mapping

from gpuagent.agent.engine_host import EngineHost
from gpuagent.agent.reconcile import devices_of
from gpuagent.agent.replicas import Replica, ReplicaTable
from gpuagent.agent.residency import HOST, RESIDENT, STORAGE, Candidate, Moves, decide
from gpuagent.wire.messages import BUILTIN, DesiredState, Generate

INTENDED = {"warm": 1, "storage": 2}
GUESSED_S = {HOST: 0.05, STORAGE: 10.0}  # until a replica's own way in has been measured


class Tiers:
    """What is held, and the decisions about who is resident."""

    def __init__(
        self,
        table: ReplicaTable,
        host: EngineHost,
        num_active: Callable[[str], int],
        turn_s: float,
        host_bytes: int,
    ) -> None:
        self._table = table
        self._host = host
        self._num_active = num_active
        self._turn_s = turn_s
        self.host_bytes = host_bytes
        self._warm: dict[str, int] = {}
        self._intended: Mapping[str, str] = {}
        self._held: dict[str, dict[str, Generate]] = {}
        self._since: dict[str, float] = {}  # replica -> when somebody began to wait for it
        self._blocked: tuple[str, ...] = ()
        self._cancelled: list[str] = []

    # --- requests ---------------------------------------------------------------------------
    def hold(self, request: Generate) -> bool:
        """Keep a request whose replica is not resident; False if it is."""
        replica = self._table.get(request.replica_id)
        if replica is None or (replica.tier == RESIDENT and not replica.moving):
            return False
        self._held.setdefault(request.replica_id, {})[request.request_id] = request
        self._since.setdefault(request.replica_id, time.monotonic())
        return True

    def cancel(self, replica_id: str, request_id: str) -> bool:
        """Forget a held request; False if it is not held. Its end is told by ``take_cancelled``."""
        held = self._held.get(replica_id, {})
        if held.pop(request_id, None) is None:
            return False
        if not held:
            self.forget(replica_id)
        self._cancelled.append(request_id)
        return True

    def take_cancelled(self) -> list[str]:
        """Requests that were cancelled while held, once."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def release(self, replica_id: str) -> list[Generate]:
        """What was held for a replica that is resident now, in order of arrival."""
        replica = self._table.get(replica_id)
        if replica is None or replica.tier != RESIDENT or replica.moving:
            return []
        self._since.pop(replica_id, None)
        return list(self._held.pop(replica_id, {}).values())

    def forget(self, replica_id: str) -> None:
        """The replica has failed or is gone, and its requests are ended elsewhere."""
        self._held.pop(replica_id, None)
        self._since.pop(replica_id, None)

    def num_held(self, replica_id: str) -> int:
        """Requests that wait for the replica to be resident."""
        return len(self._held.get(replica_id, {}))

    def is_anyone_waiting(self) -> bool:
        return bool(self._held or self._since)

    def expected_wait(self, replica: Replica) -> float:
        """Seconds until a request that is held now would reach its engine; 0 if resident."""
        if replica.state == "failed" or (replica.tier == RESIDENT and not replica.moving):
            return 0.0
        tier = replica.tier if replica.tier in GUESSED_S else HOST
        seconds = replica.seconds_from.get(tier, GUESSED_S[tier])
        if replica.moving == "in":
            return max(seconds - (time.monotonic() - replica.asked_at), 0.0)
        return seconds + self._blocked_s(replica)

    def _blocked_s(self, replica: Replica) -> float:
        """What is left at most of the turn of those before it."""
        if replica.spec.replica_id not in self._blocked:
            return 0.0
        since = self._since.get(replica.spec.replica_id, time.monotonic())
        return max(since + self._turn_s - time.monotonic(), 0.0)

    # --- residency --------------------------------------------------------------------------
    def decide(self, wanted: DesiredState, rooms: dict[int, int], now: float) -> Moves:
        """Who is to move now."""
        self._warm = {name: rank for rank, name in enumerate(wanted.warm)}
        self._intended = wanted.tiers
        specs = {spec.replica_id: spec for spec in wanted.replicas}
        for each in self._table:
            each.is_tiered |= wanted.tiers.get(each.spec.replica_id) in INTENDED
            each.is_ending = each.state == "stopping" or each.spec != specs.get(
                each.spec.replica_id
            )
        candidates = [self._candidate(each, rooms, now) for each in self._table if _counts(each)]
        moves = decide(candidates, rooms, self.host_bytes, self._turn_s, now)
        self._blocked = moves.blocked
        return moves

    def next_turn(self) -> float | None:
        """When somebody's turn ends for whom others wait; on the monotonic clock."""
        if not self._blocked:
            return None
        now = time.monotonic()
        starts = [r.resident_since for r in self._table if r.tier == RESIDENT]
        starts += [self._since[each] for each in self._blocked if each in self._since]
        ends = [start + self._turn_s for start in starts]
        return min((end for end in ends if end > now), default=now + self._turn_s)

    @property
    def host_used_bytes(self) -> int:
        """What the host tier holds."""
        return sum(each.host_bytes for each in self._table if each.tier == HOST)

    def host_used_on(self, device_index: int) -> int:
        """The same of the replicas that one device has put out."""
        away = (each for each in self._table if each.tier == HOST)
        return sum(each.host_bytes for each in away if each.spec.device_index == device_index)

    def _candidate(self, replica: Replica, rooms: dict[int, int], now: float) -> Candidate:
        """What was measured may be more than the device offers, after foreign memory has grown or a
        load took more than its budget: then it fits alone, or nobody would ever get an answer."""
        replica_id, devices = replica.spec.replica_id, devices_of(replica.spec)
        room = min(rooms.get(index, 0) for index in devices)
        is_busy = self._num_active(replica_id) > self.num_held(replica_id)
        is_busy |= not replica.spec.leads  # as far as this node can tell
        is_suspended = is_busy and replica.tier == HOST and replica.state == "ready"
        if is_suspended:
            self._since.setdefault(replica_id, now)
        is_leaving = replica.is_ending or replica.moving in ("out", "drop")
        waits = not replica.is_ending and (is_suspended or self.num_held(replica_id))
        if not waits:
            self._since.pop(replica_id, None)
        return Candidate(
            replica_id=replica_id,
            device_index=replica.spec.device_index,
            num_bytes=min(replica.charged_bytes, room) if replica.loaded else replica.charged_bytes,
            tier=RESIDENT if replica.is_ending else replica.tier,
            priority=replica.spec.priority,
            host_bytes=replica.host_bytes or replica.charged_bytes,
            moving="out" if is_leaving else replica.moving,
            is_busy=is_busy,
            waits_since=self._since.get(replica_id, now) if waits else None,
            used_at=replica.used_at,
            resident_since=replica.resident_since,
            warm_rank=self._warm.get(replica_id),
            can_park=replica.spec.engine == BUILTIN and not self._host.is_on_several(replica_id),
            stays=self._intended.get(replica_id) == "resident" or replica.spec.tensor_parallel > 1,
            prepares=self._intended.get(replica_id) == "warm" and replica.loaded is None,
            also_on=tuple(index for index in devices if index != replica.spec.device_index),
            intended=INTENDED.get(self._intended.get(replica_id, ""), 0),
        )


def _counts(replica: Replica) -> bool:
    """Whether it takes part: not what has failed, is not loaded yet, or leaves from elsewhere."""
    if replica.is_ending:
        return not replica.is_away and replica.state not in ("pending", "failed")
    is_held = replica.state == "pending" and replica.code == "not_resident"
    return is_held or replica.state not in ("pending", "failed")
