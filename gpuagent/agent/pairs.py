"""A replica that runs on two workers: one computes prompts, the other continues them.

To the rest of the agent it is one replica. Here is kept what the two must be told apart for:

    Loaded, Unloaded, Stats    from each; passed on when both have said it, added up
    Generate                   to the prefill worker; kept until it is handed over
    HandOver                   from the prefill worker: the request goes to the decode worker
    Taken                      from the decode worker: the prefill worker may use the memory again
    Cancel                     to both; remembered if the request is just between them
    a death                    of either ends both, and every request with a typed error

Pure bookkeeping: ``EngineHost`` sends what these methods return.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from gpuagent.agent import ipc
from gpuagent.wire.messages import Generate

PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)
Orders = list[tuple[str, ipc.ToWorker]]  # (role, message)


@dataclass
class Pair:
    """The two workers of one replica and where its requests are."""

    replica_id: str
    prefilling: dict[str, Generate] = field(default_factory=dict)
    decoding: set[str] = field(default_factory=set)
    _cancelled: set[str] = field(default_factory=set)
    _loaded: dict[str, ipc.Loaded] = field(default_factory=dict)
    _unloaded: set[str] = field(default_factory=set)
    _stats: dict[str, ipc.ReplicaStats] = field(default_factory=dict)

    def is_busy(self, role: str) -> bool:
        """Whether that worker owes anybody something."""
        return bool(self.prefilling if role == PREFILL else self.decoding)

    def add(self, request: Generate) -> Orders:
        """A new request begins with its prompt."""
        self.prefilling[request.request_id] = request
        return [(PREFILL, ipc.Add(request))]

    def cancel(self, request_id: str) -> Orders:
        """It may be in either worker, or between them."""
        if request_id in self.prefilling:
            self._cancelled.add(request_id)
        return [(role, ipc.Cancel(self.replica_id, request_id)) for role in ROLES]

    def handed_over(self, message: ipc.HandOver) -> Orders:
        """The prompt is computed: let the decode worker continue, or end, the request."""
        name = message.request_id
        request = self.prefilling.pop(name, None)
        if request is None:  # it has ended here, by a token out of order; nobody waits for it
            return [(PREFILL, ipc.Free(message.state.start))]
        self.decoding.add(name)
        orders: Orders = [(DECODE, ipc.Adopt(request, message.state))]
        if name in self._cancelled:
            self._cancelled.discard(name)
            orders.append((DECODE, ipc.Cancel(self.replica_id, name)))
        return orders

    def ended(self, outputs: ipc.StepOutputs) -> None:
        """Forget requests that have got their last token."""
        for delta in outputs.deltas:
            if delta.finish_reason:
                self.prefilling.pop(delta.request_id, None)
                self.decoding.discard(delta.request_id)
                self._cancelled.discard(delta.request_id)

    def loaded(self, role: str, message: ipc.Loaded) -> ipc.Loaded | None:
        """The replica's own, when both have loaded."""
        self._loaded[role] = message
        if len(self._loaded) < len(ROLES):
            return None
        parts = [self._loaded[each] for each in ROLES]
        return msgspec.structs.replace(
            parts[1],
            weights_bytes=sum(part.weights_bytes for part in parts),
            kv_bytes=sum(part.kv_bytes for part in parts),
            workspace_bytes=sum(part.workspace_bytes for part in parts),
            peak_bytes=sum(part.peak_bytes for part in parts),
            load_seconds=max(part.load_seconds for part in parts),
            max_model_len=min(part.max_model_len for part in parts),
        )

    def unloaded(self, role: str) -> bool:
        """True when both are."""
        self._unloaded.add(role)
        return len(self._unloaded) == len(ROLES)

    def stats(self, role: str, message: ipc.Stats) -> ipc.Stats:
        """Both workers' newest counters added up."""
        self._stats[role] = message.replicas[0]  # a pair's worker has one replica
        added = _added(list(self._stats.values()))
        if PREFILL in self._stats:  # what it has cached is what a prompt need not compute
            cached = self._stats[PREFILL].prefix_filter
            added = msgspec.structs.replace(added, prefix_filter=cached)
        return ipc.Stats([added])


def _added(parts: list[ipc.ReplicaStats]) -> ipc.ReplicaStats:
    others = ("replica_id", "block_size", "waiting_by_class", "prefix_filter")
    fields = [name for name in ipc.ReplicaStats.__struct_fields__ if name not in others]
    sums = {name: sum(getattr(part, name) for part in parts) for name in fields}
    waiting: Counter[str] = Counter()
    for part in parts:
        waiting.update(part.waiting_by_class)
    return msgspec.structs.replace(parts[0], **sums, waiting_by_class=dict(waiting))
