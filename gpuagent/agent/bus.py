"""This node's connection to NATS, within the permissions of its credentials.

The node never makes a JetStream consumer: a consumer's filter travels in the request's body, where
no permission can see it. It subscribes to its own key of the desired bucket as to any subject (a
hint to look) and reads the value with a direct get, whose subject ends in the key.

Everything that the client library raises when the bus cannot be used becomes ``BusDown``.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.errors import NoStreamResponseError, NotFoundError
from nats.js.object_store import ObjectStore

from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import DesiredState, ObservedState, TokenizerBundle

log = structlog.get_logger("gpuagent.bus")

API_TIMEOUT_S = 3.0
PENDING_BYTES = 1024 * 1024
MAX_QUEUED_MESSAGES = 8192
MAX_QUEUED_BYTES = 64 << 20
RECONNECT_S = (0.1, 1.0)


class BusDown(ConnectionError):
    """The bus did not take or answer this; it may or may not have arrived."""


class NotOurBus(BusDown):
    """The server answers, and has nothing of the system's."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} answers but has none of the system's buckets: "
            "this is the wrong bus (--nats-url), or the control plane has not started yet"
        )


class Bus:
    """One connection, its reconnections, and counts of what went wrong."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._client = Client()
        self._url = ""
        self._has_connected = False
        self.errors: Counter[str] = Counter()
        self.on_reconnect: Callable[[], None] = lambda: None

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    async def connect(self, url: str, creds: Path | None) -> None:
        """Connect, however long that takes; a wrong credential is retried and counted too."""
        self._url = url
        await self._client.connect(
            servers=url.split(","),
            name=f"gpuagent-{self._node_id}",
            user_credentials=str(creds) if creds else None,
            inbox_prefix=f"_INBOX_{self._node_id}",
            ping_interval=2,
            max_outstanding_pings=2,
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.3,  # type: ignore[arg-type]  # seconds; first connect only
            reconnect_to_server_handler=_any_server_soon,
            pending_size=PENDING_BYTES,
            flush_timeout=2.0,
            drain_timeout=2,
            error_cb=self._errored,
            reconnected_cb=self._reconnected,
        )
        self._has_connected = True
        self._jetstream = self._client.jetstream(
            prefix=subjects.NODE_JETSTREAM, timeout=API_TIMEOUT_S
        )

    async def close(self) -> None:
        """Send what is queued, for two seconds at most, and close.

        Draining is left, not cancelled: the client library's reader fails at the server's answer
        to a flush that was.
        """
        drain = asyncio.ensure_future(self._client.drain())
        drain.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait_for(asyncio.shield(drain), 2.0)
        except (TimeoutError, NatsError):
            await self._client.close()

    async def subscribe(self, subject: str, handler: Callable[[bytes], Awaitable[None]]) -> None:
        """Call ``handler`` with each payload; what exceeds the limits is dropped and counted."""

        async def relay(message: Msg) -> None:
            await handler(message.data)

        await self._client.subscribe(
            subject,
            cb=relay,
            pending_msgs_limit=MAX_QUEUED_MESSAGES,
            pending_bytes_limit=MAX_QUEUED_BYTES,
        )

    async def publish(self, subject: str, payload: bytes) -> None:
        """Core publish; while disconnected a little is buffered. Raises BusDown."""
        if not self._has_connected:
            raise BusDown("not connected yet")
        try:
            await self._client.publish(subject, payload)
        except NatsError as error:
            raise BusDown(str(error)) from error

    async def read_desired(self) -> DesiredState | None:
        """This node's desired state; None if there is none.

        Raises BusDown if nobody answered and codec.WireError if the value is malformed.
        """
        subject = f"$KV.{subjects.DESIRED_BUCKET}.{self._node_id}"
        stream = f"KV_{subjects.DESIRED_BUCKET}"
        try:
            message = await self._jetstream.get_msg(stream, subject=subject, direct=True)
        except (NotFoundError, NoRespondersError):
            return None  # the server answered: there is no such key, or no bucket yet
        except (TimeoutError, NatsError) as error:
            raise BusDown(f"desired state: {error}") from error
        return codec.decode(message.data, DesiredState) if message.data else None

    async def write_observed(self, state: ObservedState) -> None:
        """Replace this node's observed state; raises BusDown."""
        subject = f"$KV.{subjects.OBSERVED_BUCKET}.{self._node_id}"
        if not self._has_connected:
            raise BusDown("not connected yet")
        try:
            await self._jetstream.publish(subject, codec.encode(state), timeout=API_TIMEOUT_S)
        except NoStreamResponseError as error:
            raise NotOurBus(self._url) from error
        except (TimeoutError, NatsError) as error:
            raise BusDown(f"observed state: {error}") from error

    async def publish_tokenizer(self, bundle: TokenizerBundle) -> bool:
        """Store a version's tokenizer unless it is there; True if stored. Raises BusDown."""
        bucket = subjects.TOKENIZER_BUCKET
        store = ObjectStore(bucket, f"OBJ_{bucket}", self._jetstream)
        try:
            await store.get_info(bundle.version_id)
            return False
        except NotFoundError:
            pass
        except (TimeoutError, NatsError) as error:
            raise BusDown(f"tokenizers: {error}") from error
        try:
            await store.put(bundle.version_id, codec.encode(bundle))
        except (TimeoutError, NatsError) as error:
            raise BusDown(f"tokenizers: {error}") from error
        return True

    async def _errored(self, error: Exception) -> None:
        name = f"bus_{type(error).__name__}"
        self.errors[name] += 1
        if self.errors[name].bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
            log.warning("bus_error", error=str(error) or name, times=self.errors[name])

    async def _reconnected(self) -> None:
        self.on_reconnect()


def _any_server_soon(servers: list[Any], info: dict[str, Any]) -> tuple[None, float]:
    """Any server after a random wait, so that a fleet does not return in one instant."""
    return None, random.uniform(*RECONNECT_S)
