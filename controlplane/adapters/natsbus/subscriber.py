"""What nodes say: telemetry as it comes, observed states as they change and when asked for.

Messages are hints, the bucket is the state: ``observed`` is also read whole at the start and after
every reconnection, so nothing depends on a message that was missed. What cannot be believed is
dropped and counted; a node that only sends such things is silent, and falls suspect by that.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, NotFoundError

from controlplane.adapters.natsbus.connection import Bus, ensure_buckets
from controlplane.adapters.natsbus.translate import Rejected, node_load, node_report
from controlplane.application.fleet import BusUnavailable, OnLoad, OnReport
from gpuagent.wire import subjects
from gpuagent.wire.codec import WireError

PENDING_MESSAGES = 4096
PENDING_BYTES = 16 * 1024 * 1024

T = TypeVar("T")


class NodeSubscriber:
    """Calls ``on_load`` and ``on_report`` in the event loop; ``rejected`` counts per node."""

    def __init__(self, bus: Bus, on_load: OnLoad, on_report: OnReport | None = None) -> None:
        self._bus, self._on_load, self._on_report = bus, on_load, on_report
        self.rejected: Counter[str] = Counter()

    async def start(self) -> None:
        """Subscribe, then read what was said before; raises BusUnavailable.

        The server has the subscriptions when this returns, so that nothing said from then on is
        missed.
        """
        await self._subscribe(subjects.TELEMETRY_ALL, node_load, self._on_load)
        if self._on_report is not None:
            observed = f"$KV.{subjects.OBSERVED_BUCKET}.*"
            await self._subscribe(observed, node_report, self._on_report)
            self._bus.on_reconnect(self._read_again)
            await self.read_observed()
        await self._bus.flush()

    async def _subscribe(
        self, subject: str, parse: Callable[[bytes, str], T], deliver: Callable[[T], None]
    ) -> None:
        async def receive(message: Msg) -> None:
            self._receive(message.subject.rpartition(".")[2], message.data, parse, deliver)

        await self._bus.require_connected().subscribe(
            subject,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )

    def _receive(
        self, node_id: str, payload: bytes, parse: Callable[[bytes, str], T],
        deliver: Callable[[T], None],
    ) -> None:  # fmt: skip
        try:
            said = parse(payload, node_id)
        except (WireError, Rejected):
            self.rejected[node_id] += 1
            return
        deliver(said)

    async def read_observed(self) -> None:
        """Read every node's observed state from the bucket; raises BusUnavailable."""
        assert self._on_report is not None
        try:
            await self._read_observed(self._on_report)
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"Observed states cannot be read: {error!r}") from error

    async def _read_observed(self, on_report: OnReport) -> None:
        jetstream = self._bus.jetstream()
        stream = f"KV_{subjects.OBSERVED_BUCKET}"
        try:
            info = await jetstream.stream_info(stream, subjects_filter=">")
        except NotFoundError:
            return await ensure_buckets(self._bus)
        bucket = await jetstream.key_value(subjects.OBSERVED_BUCKET)
        for subject in info.state.subjects or {}:
            node_id = subject.rpartition(".")[2]
            try:
                entry = await bucket.get(node_id)
            except KeyNotFoundError:
                continue
            self._receive(node_id, entry.value or b"", node_report, on_report)

    async def _read_again(self) -> None:
        try:
            await self.read_observed()
        except BusUnavailable:
            return  # the next reconnection, or the controller's next round, reads it
