"""One connection to the bus, with options under which failures are short and visible.

A hung server is noticed within three pings (two may be outstanding), reconnecting never ends
and is jittered so that a fleet does not return in one instant, and little is buffered: what cannot
be sent now is refused now. Errors that the client library only reports to a callback (dropped
messages of a slow subscription, permission violations) are counted.

Nothing that waits for the server's PONG is cancelled, only left: the client library's reader sets
the result of the future that waited, fails if that was cancelled, and then reads no more, without
a reconnection.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, ObjectStoreConfig, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from controlplane.application.fleet import BusUnavailable
from gpuagent.wire import subjects

PENDING_BYTES = 256 * 1024
API_TIMEOUT_S = 3.0
FLUSH_TIMEOUT_S = 5.0
PING_S = 2.0


class Bus:
    """An open connection, its JetStream context, and counts of everything that went wrong."""

    def __init__(self, api_prefix: str = "$JS.API") -> None:
        self.client = Client()
        self._api_prefix = api_prefix
        self.errors: Counter[str] = Counter()
        self.num_reconnects = 0
        self._on_reconnect: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_received, self._received_at = -1, 0.0

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    def away_s(self, now: float) -> float:
        """Seconds since the last message, while there is no connection; 0.0 while there is one.

        To be asked often: that is when the messages are counted. ``now``: monotonic.
        """
        num_received = self.client.stats["in_msgs"]
        if num_received != self._num_received:
            self._num_received, self._received_at = num_received, now
        return 0.0 if self.connected else now - self._received_at

    def require_connected(self) -> Client:
        """The client; raises BusUnavailable rather than let a publish wait in a buffer."""
        if not self.client.is_connected:
            raise BusUnavailable()
        return self.client

    def jetstream(self) -> JetStreamContext:
        client = self.require_connected()
        return client.jetstream(prefix=self._api_prefix, timeout=API_TIMEOUT_S)

    def on_reconnect(self, callback: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call after each reconnection: whatever was missed meanwhile must be looked up."""
        self._on_reconnect.append(callback)

    async def flush(self) -> None:
        """The server has all that was sent before; raises BusUnavailable."""
        try:
            await _left_after(FLUSH_TIMEOUT_S, self.require_connected().flush())
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"The bus does not answer: {error!r}") from error

    async def close(self, deadline_s: float = 3.0) -> None:
        """Drain for at most ``deadline_s`` seconds, then close."""
        try:
            await _left_after(deadline_s, self.client.drain())
        except (TimeoutError, NatsError):
            await self.client.close()

    async def _errored(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1

    async def _reconnected(self) -> None:
        self.num_reconnects += 1
        for callback in self._on_reconnect:  # as tasks: the client waits for this very method
            task = asyncio.create_task(callback())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _left_after(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; raises TimeoutError and leaves it to itself when it takes longer."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait_for(asyncio.shield(task), seconds)


def _jittered(servers: list[Any], info: dict[str, Any]) -> tuple[None, float]:
    """Any server, after 0.1 to 1 s."""
    return None, random.uniform(0.1, 1.0)


async def connect(
    url: str,
    creds: Path | None,
    name: str,
    inbox_prefix: str = "_INBOX",
    timeout_s: float | None = None,
    api_prefix: str = "$JS.API",
    ping_s: float = PING_S,
) -> Bus:
    """Connect, retrying for ``timeout_s`` seconds (None: for ever); raises BusUnavailable."""
    bus = Bus(api_prefix)
    attempt = bus.client.connect(
        servers=url.split(","),
        name=name,
        user_credentials=str(creds) if creds else None,
        inbox_prefix=inbox_prefix,
        ping_interval=ping_s,  # type: ignore[arg-type]  # may be a fraction
        max_outstanding_pings=2,
        connect_timeout=2,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.3,  # type: ignore[arg-type]  # seconds; used at first connect only
        reconnect_to_server_handler=_jittered,
        pending_size=PENDING_BYTES,
        flush_timeout=2.0,
        drain_timeout=2,
        error_cb=bus._errored,
        reconnected_cb=bus._reconnected,
    )
    try:
        await asyncio.wait_for(attempt, timeout_s)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        raise BusUnavailable(f"No connection to {url}: {error or 'timed out'}") from error
    return bus


# --- what the control plane keeps on the bus ------------------------------------------------
def bucket_config(bucket: str, replicas: int = 1) -> StreamConfig:
    """A key-value bucket of last values.

    Unlike the client library's own: no rollup header, with which one node could erase the keys of
    all others, no purge and no delete. ``allow_direct`` puts the key into the read's subject,
    where a permission can see it.
    """
    return StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        max_msgs_per_subject=1,
        max_bytes=256 * 1024 * 1024,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=replicas,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        deny_purge=True,
    )


async def ensure_buckets(bus: Bus, replicas: int = 1) -> None:
    """Create what is missing: buckets desired and observed, object store tokenizers."""
    jetstream = bus.jetstream()
    for bucket in (subjects.DESIRED_BUCKET, subjects.OBSERVED_BUCKET):
        try:
            await jetstream.stream_info(f"KV_{bucket}")
        except NotFoundError:
            await jetstream.add_stream(bucket_config(bucket, replicas))
    try:
        await jetstream.stream_info(f"OBJ_{subjects.TOKENIZER_BUCKET}")
    except NotFoundError:
        config = ObjectStoreConfig(max_bytes=1024**3, replicas=replicas)
        await jetstream.create_object_store(subjects.TOKENIZER_BUCKET, config)
