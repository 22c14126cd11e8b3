"""Desired state onto the bus: one whole value per node, never replaced by an older one.

Two controllers may both believe that they lead for a moment. Each write therefore names the
revision it replaces (compare-and-set in the server), after comparing ``(epoch, generation)``::

    bus holds (epoch 2, generation 9)
    old leader writes (1, 8)   -> StaleDesired, nothing written
    new leader writes (2, 10)  -> replaces revision r; had somebody else written, read again

A value that cannot be read, names another node or belongs to another cluster is overwritten: it is
no decision of ours, and what a node should run must not depend on it.
"""

from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from controlplane.adapters.natsbus.connection import Bus, ensure_buckets
from controlplane.adapters.natsbus.translate import desired_to_wire
from controlplane.application.failpoints import passing
from controlplane.application.fleet import (
    BusUnavailable,
    Delivery,
    DesiredNode,
    DesiredTooLarge,
    StaleDesired,
)
from gpuagent.wire import subjects
from gpuagent.wire.codec import WireError, decode, encode
from gpuagent.wire.messages import DesiredState

NUM_ATTEMPTS = 5


class DesiredPublisher:
    """``application.fleet.DesiredStates`` on a JetStream key-value bucket."""

    def __init__(self, bus: Bus, cluster_id: str) -> None:
        self._bus, self._cluster_id = bus, cluster_id

    async def deliver(self, node: DesiredNode) -> Delivery:
        return await self.publish_desired(desired_to_wire(node, self._cluster_id))

    async def publish_desired(self, state: DesiredState) -> Delivery:
        """Write ``state`` unless the same content stands there under this epoch."""
        try:
            return await self._publish(state)
        except MaxPayloadError as error:
            raise DesiredTooLarge(f"Desired state of {state.node_id} is too large.") from error
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"Desired state of {state.node_id}: {error!r}") from error

    async def _publish(self, state: DesiredState) -> Delivery:
        bucket = await self._bucket()
        for _ in range(NUM_ATTEMPTS):
            current, revision = await self._current(bucket, state.node_id)
            if current and _number(current) > _number(state):
                raise StaleDesired(f"{state.node_id} is told {_number(current)} already")
            if current and current.epoch == state.epoch and _content(current) == _content(state):
                return Delivery(current.epoch, current.generation, written=False)
            passing("publish.compared")
            try:
                await bucket.update(state.node_id, encode(state), last=revision)
            except KeyWrongLastSequenceError:
                continue  # somebody wrote in between: compare with theirs
            passing("publish.written")
            return Delivery(state.epoch, state.generation, written=True)
        raise BusUnavailable(f"{state.node_id}'s desired state is being written by others.")

    async def _bucket(self) -> KeyValue:
        """The bucket, made again if the server lost its store."""
        jetstream = self._bus.jetstream()
        try:
            return await jetstream.key_value(subjects.DESIRED_BUCKET)
        except NotFoundError:
            await ensure_buckets(self._bus)
            return await jetstream.key_value(subjects.DESIRED_BUCKET)

    async def _current(self, bucket: KeyValue, node_id: str) -> tuple[DesiredState | None, int]:
        """What stands there, if it is ours, and the revision to replace (0: none)."""
        try:
            entry = await bucket.get(node_id)
        except KeyNotFoundError as missing:
            return None, (missing.entry and missing.entry.revision) or 0
        try:
            state = decode(entry.value or b"", DesiredState)
        except WireError:
            return None, entry.revision or 0
        ours = (state.node_id, state.cluster_id) == (node_id, self._cluster_id)
        return state if ours else None, entry.revision or 0


def _number(state: DesiredState) -> tuple[int, int]:
    return state.epoch, state.generation


def _content(state: DesiredState) -> tuple[object, ...]:
    return state.drain, state.replicas
