"""Checkpoints on the bus: a stream that takes no deletion, for whoever keeps an eye on the logs.

Stream ``CHECKPOINTS``, one subject a log, one signed note a message::

    checkpoint.events      engine/events\\n2048\\n…      Nats-Msg-Id: events-2048

What is missing there is found by the size of a subject's last message, so a bus that lost its
store, or was away, is filled again. It is a copy for comparing with; the store stays the record.
"""

from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from controlplane.adapters.natsbus.connection import Bus

STREAM = "CHECKPOINTS"


CONFIG = StreamConfig(
    name=STREAM,
    subjects=["checkpoint.>"],
    max_bytes=128 * 1024 * 1024,
    discard=DiscardPolicy.OLD,
    storage=StorageType.FILE,
    num_replicas=1,
    deny_delete=True,
    deny_purge=True,
)


class CheckpointStream:
    """The notes of each log, oldest first."""

    def __init__(self, bus: Bus) -> None:
        self._jetstream = bus.jetstream()

    async def ensure(self) -> None:
        try:
            await self._jetstream.stream_info(STREAM)
        except NotFoundError:
            await self._jetstream.add_stream(CONFIG)

    async def last(self, log: str) -> str | None:
        """The newest note there."""
        try:
            message = await self._jetstream.get_last_msg(STREAM, f"checkpoint.{log}")
        except NotFoundError:
            return None
        return (message.data or b"").decode()

    async def publish(self, log: str, size: int, note: str) -> None:
        """Stored when it returns; a second time does nothing."""
        headers = {"Nats-Msg-Id": f"{log}-{size}"}
        await self._jetstream.publish(
            f"checkpoint.{log}", note.encode(), stream=STREAM, headers=headers
        )
