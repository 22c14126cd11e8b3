"""The controller's part in sealing: seal what is due, then copy the checkpoints to the bus.

Level-triggered like its other loops: each round looks at what is unsealed, and at what the bus
lacks, so a round that failed, or a bus that was away, costs nothing but time.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from controlplane.adapters.natsbus.checkpoints import CheckpointStream
from controlplane.adapters.natsbus.connection import Bus
from controlplane.application.checkpoint import Checkpoint
from controlplane.application.seal import Records, Sealed, Sealer, SealStore

_BATCH = 100

Blocking = Callable[[Callable[[], list[Sealed]]], Awaitable[list[Sealed]]]


@dataclass
class Sealing:
    """``last`` has each log's newest checkpoint, for /metrics."""

    sealer: Sealer
    store: SealStore
    logs: Sequence[Records]
    last: dict[str, Checkpoint] = field(default_factory=dict)
    _on_bus: dict[str, int] = field(default_factory=dict)  # size of the newest copy
    _stream: CheckpointStream | None = None

    def step(self) -> list[Sealed]:
        """Seal what is due; the newest checkpoint of each log. Blocking."""
        self.sealer.step(self.logs)
        newest = [one for records in self.logs if (one := self.store.last(records.log))]
        self.last = {one.checkpoint.log: one.checkpoint for one in newest}
        return newest

    def forget_bus(self) -> None:
        """Look there again before the next copy."""
        self._stream = None

    async def copy_to(self, bus: Bus, blocking: Blocking) -> int:
        """Publish the checkpoints that the bus lacks; how many. ``blocking`` runs store reads."""
        if self._stream is None:
            stream = CheckpointStream(bus)
            await stream.ensure()
            for records in self.logs:
                note = await stream.last(records.log)
                self._on_bus[records.log] = Sealed.read(note).checkpoint.size if note else 0
            self._stream = stream
        return sum([await self._copy(self._stream, log, blocking) for log in self._on_bus])

    async def _copy(self, stream: CheckpointStream, log: str, blocking: Blocking) -> int:
        """Up to a batch; the next round goes on."""
        after = self._on_bus[log]
        if log not in self.last or self.last[log].size <= after:
            return 0
        missing = await blocking(lambda: self.store.checkpoints(log, after, _BATCH))
        for one in missing:
            await stream.publish(log, one.checkpoint.size, one.note)
            self._on_bus[log] = one.checkpoint.size
        return len(missing)
