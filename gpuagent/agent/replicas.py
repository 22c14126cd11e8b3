"""The replicas of this node: what state each is in, and how long until it is tried again.

    pending -> downloading -> loading -> ready -> stopping -> (gone)
        ^            \\________ | ________/
        |                     v
        +----- retry ----- failed

A ready replica is in one of three tiers (``residency``); one that is not resident takes generations
all the same, and the node holds them until it is::

    pending, not_resident (storage) -> loading -> ready (resident) <-> ready (host)
                                          ^                                |
                                          +-------- ready (storage) <------+

A table of facts and transitions without I/O: the node calls it when something has happened and
asks ``reconcile`` what to do next. A load that failed is tried again after 10 s, 20 s, ... 5 min.
A worker that died is started again after half a second first, for its clients wait; if it dies
again before a minute has passed, the wait doubles as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuagent.agent import ipc
from gpuagent.agent.joint import ENDED
from gpuagent.agent.reconcile import Running, share_bytes
from gpuagent.agent.residency import RESIDENT, STORAGE
from gpuagent.wire.messages import ReplicaSpec, ReplicaStatus, TokenizerBundle

LOAD_BACKOFF_S = 10.0
LOST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 300.0
STABLE_S = 60.0
MAX_REASON_CHARS = 500
STARTING = frozenset({"downloading", "loading"})
HOLDABLE = frozenset({"pending"}) | STARTING


def backoff(code: str, num_failures: int) -> float:
    """Seconds until the next try after the ``num_failures``-th failure in a row."""
    if code == ENDED:  # when it is tried again is for another node to say
        return LOST_BACKOFF_S
    first = LOST_BACKOFF_S if code == "engine_lost" else LOAD_BACKOFF_S
    return min(first * 2.0 ** min(num_failures - 1, 20), MAX_BACKOFF_S)


@dataclass
class Replica:
    """One replica; ``since`` is Unix time, the other times are monotonic."""

    spec: ReplicaSpec
    state: str = "pending"
    code: str = ""
    reason: str = ""
    since: float = 0.0
    loaded: ipc.Loaded | None = None
    num_failures: int = 0
    retry_at: float = 0.0
    ready_at: float = 0.0
    stop_by: float = 0.0
    is_unloading: bool = False
    tier: str = STORAGE
    tier_since: float = 0.0  # Unix time; 0: it was never in another
    moving: str = ""  # in | out | drop: a swap, or an unloading that keeps the replica
    is_tiered: bool = False  # it has been held or put out once: others are to wait, not refused
    host_bytes: int = 0
    used_at: float = 0.0
    resident_since: float = 0.0
    asked_at: float = 0.0  # when the present move began
    swap_in_s: float = 0.0
    seconds_from: dict[str, float] = field(default_factory=dict)  # tier -> what a way in took
    measured_bytes: int = 0
    is_ending: bool = False  # no longer desired, or not as it is

    @property
    def charged_bytes(self) -> int:
        """Of each of its devices while resident: measured, or what the specification says."""
        return self.measured_bytes or share_bytes(self.spec)

    @property
    def is_away(self) -> bool:
        """Loaded once, and not on the device now."""
        is_there = self.moving == "in" or self.tier == RESIDENT
        return self.state in ("ready", "stopping") and not is_there


class ReplicaTable:
    """All replicas, by id. ``on_change`` is called after every visible change."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._on_change = on_change
        self._replicas: dict[str, Replica] = {}
        self.bundles: dict[str, TokenizerBundle] = {}  # by version

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def running(self) -> dict[str, Running]:
        """What the reconciler looks at."""
        return {
            rid: Running(
                replica.spec,
                replica.state,
                replica.retry_at,
                replica.measured_bytes,
                replica.is_away,
            )
            for rid, replica in self._replicas.items()
        }

    def refusal(self, replica_id: str) -> str:
        """Why a replica takes no generation; "" if it does."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return "the replica is not on this node"
        if not replica.spec.leads:
            return "another node has the replica's first rank"
        if replica.state == "ready" or (replica.is_tiered and replica.state in HOLDABLE):
            return ""
        return f"the replica is {replica.state}"

    # --- decided by the reconciler ----------------------------------------------------------
    def wait(self, spec: ReplicaSpec, code: str, reason: str) -> None:
        """A desired replica that cannot start yet; one that failed keeps saying why."""
        replica = self._of(spec)
        if code != "backoff":
            replica.retry_at = 0.0
        if replica.state not in ("failed", "stopping"):
            self._set(replica, "pending", "waiting", reason)

    def hold(self, spec: ReplicaSpec, code: str, reason: str) -> None:
        """A desired replica without room on the device: loaded once somebody asks for it."""
        replica = self._of(spec)
        replica.spec, replica.retry_at, replica.is_tiered = spec, 0.0, True
        if replica.state != "stopping":
            self._set(replica, "pending", code, reason)

    def move(self, replica_id: str, moving: str) -> None:
        """A swap or a drop begins."""
        replica = self._replicas[replica_id]
        replica.moving, replica.asked_at, replica.is_tiered = moving, self._monotonic(), True
        self._on_change()

    def swapped(self, message: ipc.Swapped) -> None:
        """A swap has ended."""
        replica = self._replicas.get(message.replica_id)
        if replica is None or replica.state != "ready":
            return
        self._arrived(replica, message.tier)
        replica.host_bytes = message.host_bytes or replica.host_bytes
        self._on_change()

    def dropped(self, replica_id: str) -> None:
        """Unloaded, and still desired: it is ready to be loaded again when somebody asks."""
        replica = self._replicas[replica_id]
        replica.moving, replica.is_unloading = "", False
        self._to_tier(replica, STORAGE)
        self._on_change()

    def _arrived(self, replica: Replica, tier: str) -> None:
        now = self._monotonic()
        if tier == RESIDENT and replica.tier != RESIDENT:
            replica.swap_in_s = now - replica.asked_at
            replica.seconds_from[replica.tier] = replica.swap_in_s
            replica.resident_since = replica.used_at = now
        replica.moving = ""
        self._to_tier(replica, tier)

    def _to_tier(self, replica: Replica, tier: str) -> None:
        if replica.tier != tier:
            replica.tier, replica.tier_since = tier, self._wall()

    def refuse(self, spec: ReplicaSpec, code: str, reason: str) -> None:
        """A desired replica that cannot run here while things are as they are."""
        self._of(spec).retry_at = 0.0
        self._set(self._of(spec), "failed", code, reason)

    def start(self, spec: ReplicaSpec) -> None:
        replica = self._of(spec)
        replica.spec = spec
        replica.moving, replica.asked_at = "in", self._monotonic()
        self._to_tier(replica, STORAGE)
        self._set(replica, "loading")

    def stop(self, replica_id: str, drain_s: float) -> None:
        """Begin to stop; what never held memory is gone at once."""
        replica = self._replicas[replica_id]
        if replica.state in ("pending", "failed"):
            self.remove(replica_id)
            return
        busy = replica.state == "ready" or not replica.spec.leads  # only rank 0's node knows
        replica.stop_by = self._monotonic() + (drain_s if busy else 0.0)
        self._set(replica, "stopping")

    # --- happened ---------------------------------------------------------------------------
    def progressed(self, message: ipc.Progress) -> None:
        replica = self._replicas.get(message.replica_id)
        if replica and replica.state in STARTING:
            tenths = int(message.fraction * 10)  # coarse: each change is written to the bus
            self._set(replica, message.state, "", f"{message.stage} {tenths * 10} %")

    def became_ready(self, message: ipc.Loaded) -> None:
        replica = self._replicas.get(message.replica_id)
        if replica is None or replica.state == "stopping":
            return
        replica.loaded = message
        replica.measured_bytes = message.peak_bytes
        replica.host_bytes = message.weights_bytes + message.workspace_bytes
        self._arrived(replica, RESIDENT)
        replica.ready_at = self._monotonic()
        self.bundles[replica.spec.version_id] = message.bundle
        self._set(replica, "ready", message.warning_code, message.warning)

    def failed(self, replica_id: str, code: str, reason: str) -> None:
        """A load or a running engine failed; a stopping replica is simply gone."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state == "stopping":
            self.remove(replica_id)
            return
        if replica.state == "ready" and self._monotonic() - replica.ready_at > STABLE_S:
            replica.num_failures = 0
        replica.num_failures += 1
        replica.retry_at = self._monotonic() + backoff(code, replica.num_failures)
        replica.loaded = None
        replica.measured_bytes = min(replica.measured_bytes, share_bytes(replica.spec))
        replica.moving, replica.is_unloading = "", False
        self._to_tier(replica, STORAGE)
        self._set(replica, "failed", code, reason)

    def remove(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        if not any(r.spec.version_id == replica.spec.version_id for r in self):
            self.bundles.pop(replica.spec.version_id, None)
        self._on_change()

    # --- shown ------------------------------------------------------------------------------
    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Of groups over nodes, those whose first rank is here."""
        now = self._monotonic()
        return tuple(_status(replica, now) for replica in self if replica.spec.leads)

    def next_retry(self) -> float | None:
        """When the next failed replica is due, on the monotonic clock."""
        due = [r.retry_at for r in self if r.state == "failed" and r.retry_at > 0]
        return min(due, default=None)

    def _of(self, spec: ReplicaSpec) -> Replica:
        return self._replicas.setdefault(spec.replica_id, Replica(spec))

    def _set(self, replica: Replica, state: str, code: str = "", reason: str = "") -> None:
        reason = reason[:MAX_REASON_CHARS]
        if (replica.state, replica.code, replica.reason) == (state, code, reason) and replica.since:
            return
        if replica.state != state or not replica.since:
            replica.since = self._wall()
        replica.state, replica.code, replica.reason = state, code, reason
        self._on_change()


def _status(replica: Replica, now: float) -> ReplicaStatus:
    loaded, is_failed = replica.loaded, replica.state == "failed"
    return ReplicaStatus(
        replica_id=replica.spec.replica_id,
        version_id=replica.spec.version_id,
        device_index=replica.spec.device_index,
        state=replica.state,
        reason_code=replica.code,
        reason=replica.reason,
        since=replica.since,
        weights_bytes=loaded.weights_bytes if loaded else 0,
        kv_bytes=loaded.kv_bytes if loaded else 0,
        peak_bytes=loaded.peak_bytes if loaded else 0,
        load_seconds=loaded.load_seconds if loaded else 0.0,
        sha256=loaded.sha256 if loaded else "",
        max_model_len=loaded.max_model_len if loaded else 0,
        tier=replica.tier,
        estimate_bytes=share_bytes(replica.spec),
        charged_bytes=replica.charged_bytes,
        swap_in_s=round(replica.swap_in_s, 6),
        retry_s=round(max(replica.retry_at - now, 0.0), 3) if is_failed else 0.0,
    )
