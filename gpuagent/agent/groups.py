"""A replica on several devices: a worker for each, which begin and end together.

To the rest of the agent it is one replica, and rank 0's worker is its home: it has the engine and
takes the generations. The others load their parts, then do what rank 0 says (``engine.ranks``) over
lines that the agent has laid between them; from the agent they only hear that it is over.

    Progress, StepOutputs, Stats, Unloaded   from rank 0; the others' are not passed on
    Loaded                                   from each; passed on when all have said it
    LoadFailed                               from any; the others are ended
    a death                                  of any ends all, and every request with a typed error

Example, three ranks, of which the second finds no memory::

    rank 0  Progress          shown
    rank 1  LoadFailed        shown, and all three are told to end
    rank 0  (meets nobody)    ends without having been waited for

Over several nodes the same is true of each node's part of the group, for which the first of its
ranks speaks to its agent; that the parts begin and end together is up to ``joint``.

Pure bookkeeping, and the sockets: ``EngineHost`` starts and ends the workers.
"""

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gpuagent.agent import ipc

FIRST = "rank 0"


@dataclass
class Group:
    """The workers of one replica on this node, by their names, and which of them have loaded;
    ``first`` speaks for them."""

    replica_id: str
    size: int
    first: str = FIRST
    _loaded: dict[str, ipc.Loaded] = field(default_factory=dict)

    def passed_on(self, name: str, message: ipc.FromWorker) -> ipc.FromWorker | None:
        """What the node is told of a worker's message."""
        match message:
            case ipc.Loaded():
                return self._all_loaded(name, message)
            case ipc.LoadFailed() | ipc.ReplicaFailed():
                return message
        return message if name == self.first else None

    def _all_loaded(self, name: str, message: ipc.Loaded) -> ipc.Loaded | None:
        """The replica's own, with the figures of the device that holds most."""
        self._loaded[name] = message
        if len(self._loaded) < self.size:
            return None
        parts = list(self._loaded.values())
        return msgspec.structs.replace(
            self._loaded[self.first],
            weights_bytes=max(part.weights_bytes for part in parts),
            kv_bytes=max(part.kv_bytes for part in parts),
            workspace_bytes=max(part.workspace_bytes for part in parts),
            peak_bytes=max(part.peak_bytes for part in parts),
            load_seconds=max(part.load_seconds for part in parts),
        )


@contextlib.contextmanager
def lines(
    ranks: Sequence[int],
    size: int,
    start_s: float,
    elsewhere: Mapping[int, socket.socket] | None = None,
    interface: str = "lo",
) -> Iterator[list[ipc.GroupConfig]]:
    """The places of this node's ranks, with their ends of the lines; all are closed here once the
    workers have theirs. ``elsewhere``: by rank, the lines to and from other nodes."""
    to_rank = dict(elsewhere or {})  # rank 0's ends of the lines, if it is here
    from_rank = {}
    for rank in ranks if 0 in ranks else ():
        if rank > 0:
            to_rank[rank], from_rank[rank] = socket.socketpair()
    if 0 not in ranks:
        to_rank, from_rank = {}, to_rank
    first = tuple(to_rank[rank].fileno() for rank in sorted(to_rank))
    try:
        yield [
            ipc.GroupConfig(
                rank, size, (from_rank[rank].fileno(),) if rank else first, start_s, interface
            )
            for rank in ranks
        ]
    finally:
        for end in (*to_rank.values(), *from_rank.values()):
            end.close()
