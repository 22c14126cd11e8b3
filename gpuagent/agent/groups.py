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

Pure bookkeeping, and the sockets: ``EngineHost`` starts and ends the workers.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from gpuagent.agent import ipc

FIRST = "rank 0"


@dataclass
class Group:
    """The workers of one replica, by their names, and which of them have loaded."""

    replica_id: str
    size: int
    _loaded: dict[str, ipc.Loaded] = field(default_factory=dict)

    def passed_on(self, name: str, message: ipc.FromWorker) -> ipc.FromWorker | None:
        """What the node is told of a worker's message."""
        match message:
            case ipc.Loaded():
                return self._all_loaded(name, message)
            case ipc.LoadFailed() | ipc.ReplicaFailed():
                return message
        return message if name == FIRST else None

    def _all_loaded(self, name: str, message: ipc.Loaded) -> ipc.Loaded | None:
        """The replica's own, with the figures of the device that holds most."""
        self._loaded[name] = message
        if len(self._loaded) < self.size:
            return None
        parts = list(self._loaded.values())
        return msgspec.structs.replace(
            self._loaded[FIRST],
            weights_bytes=max(part.weights_bytes for part in parts),
            kv_bytes=max(part.kv_bytes for part in parts),
            workspace_bytes=max(part.workspace_bytes for part in parts),
            peak_bytes=max(part.peak_bytes for part in parts),
            load_seconds=max(part.load_seconds for part in parts),
        )


@contextmanager
def lines(size: int, start_s: float) -> Iterator[list[ipc.GroupConfig]]:
    """Each rank's place, with its ends of the lines; they are closed here once all have theirs."""
    pairs = [socket.socketpair() for _ in range(size - 1)]
    try:
        first = tuple(ours.fileno() for ours, _ in pairs)
        places = [ipc.GroupConfig(0, size, first, start_s)]
        for rank, (_, theirs) in enumerate(pairs, 1):
            places.append(ipc.GroupConfig(rank, size, (theirs.fileno(),), start_s))
        yield places
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
