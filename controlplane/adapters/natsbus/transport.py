"""A gateway's side of inference: start, cancel, and every token exactly once and in order.

A node sends one frame per engine step and gateway, so one message may carry tokens of hundreds of
requests. Nothing on the bus is acknowledged, so every delta carries the index of its first token,
and this module checks it against the next index it expects of that request::

    expected 5, got index 5 with 2 tokens   -> delivered, 7 expected next
    expected 7, got index 5                 -> seen before (a resend overlapped): dropped
    expected 7, got index 9                 -> two tokens are missing: dropped, and the node is
                                               asked to send again from 7 on; frames keep the
                                               order, so what follows the resend fits again

A lost *last* delta leaves no later index to betray it. Frames are therefore numbered per (boot,
gateway): a jump in ``seq`` asks for all of that node's requests again, so does a reconnection, and
``tick`` asks for those that have been silent for a while.

A stream that cannot be completed ends with a terminal delta whose ``error_code`` is one of:

====================  =========================================================================
``node_unreachable``  nobody listened on the node's subject when the request was sent
``node_restarted``    the node came back with another boot id: what it ran is gone
``node_lost``         ``fail_node`` said so (the caller heard no telemetry for too long)
``stream_corrupt``    an index that cannot be: overlapping, or a gap not filled in five tries
====================  =========================================================================

The other way round a node must learn when its gateway is gone: ``beat`` renews the lease that each
order carries, so that a node stops what nobody waits for.

What a node says of a request that was sent to another node is never delivered. Nor is what it says
of an attempt that was given up, each of which has an id of its own: a node that was silent for too
long and then goes on with one is told to stop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.errors import NotFoundError, ObjectNotFoundError

from controlplane.adapters.natsbus.connection import API_TIMEOUT_S, Bus
from controlplane.application.fleet import BusUnavailable
from gpuagent.wire import subjects
from gpuagent.wire.codec import WireError, decode, encode
from gpuagent.wire.messages import (
    WIRE_VERSION,
    Cancel,
    Delta,
    Frame,
    Generate,
    Resend,
    Sampling,
    TokenizerBundle,
    TokenLogprob,
)

__all__ = [
    "BusUnavailable",
    "Delta",
    "Generate",
    "RequestTooLarge",
    "Sampling",
    "TokenLogprob",
    "TokenizerBundle",
    "Transport",
]

PENDING_MESSAGES = 8192
PENDING_BYTES = 32 * 1024 * 1024
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_RESENDS = 5
RESEND_EVERY_S = 0.25
SILENT_S = 3.0
STRAY_S = 5.0
MAX_STRAYS = 10_000

Sink = Callable[[Delta], None]


class RequestTooLarge(ValueError):
    """The prompt does not fit into one message."""


@dataclass(slots=True)
class _Stream:
    """One request in flight: the next index expected of it, and the gap that is being filled."""

    node_id: str
    sink: Sink
    heard_at: float
    boot_id: str = ""
    next_index: int = 0
    num_resends: int = 0
    asked_at: float = 0.0


@dataclass(slots=True)
class _Node:
    """The frames of one node: its boot, the last ``seq``, and its requests in flight."""

    boot_id: str = ""
    seq: int = 0
    request_ids: set[str] = field(default_factory=set)


class Transport:
    """All inference of one gateway. Runs in one event loop; ``monotonic`` gives seconds.

    ``counts``: frames, deltas, frame_rejected, frame_gap, delta_unknown, delta_repeated,
    delta_gap, stray_cancel, resend, untold, undelivered, and the ``error_code`` of every stream
    ended here.
    """

    def __init__(self, bus: Bus, gateway_id: str, monotonic: Callable[[], float]) -> None:
        self._bus, self._gateway_id, self._monotonic = bus, gateway_id, monotonic
        self._streams: dict[str, _Stream] = {}
        self._nodes: dict[str, _Node] = {}
        self._inbox = ""
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._asked: set[str] = set()
        self._strays: dict[str, float] = {}  # requests of nobody: when its node was told to stop
        self._frames: Subscription | None = None
        self.is_behind = False  # more frames have come than the one whose deltas are delivered
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Subscribe to this gateway's frames; raises BusUnavailable."""
        client = self._bus.require_connected()
        self._inbox = client.new_inbox()
        self._frames = await client.subscribe(
            subjects.frames_of(self._gateway_id),
            cb=self._receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )
        await client.subscribe(f"{self._inbox}.*", cb=self._receive_undelivered)
        await self._bus.flush()
        self._bus.on_reconnect(self._resend_all)

    # --- orders ---------------------------------------------------------------------------------
    async def generate(self, node_id: str, request: Generate, sink: Sink) -> None:
        """Send ``request`` to the node; ``sink`` gets its deltas, the last one terminal.

        Raises BusUnavailable at once when disconnected (nothing is queued), RequestTooLarge. The
        sink is called in the event loop and must not block. A request id sent again belongs to the
        new node alone from then on. Of a generation that is continued, the first delta's index is
        the number of tokens sent before.
        """
        client = self._bus.require_connected()
        payload = encode(request)
        self._open(node_id, request.request_id, sink)
        self._streams[request.request_id].next_index = len(request.sent_token_ids)
        try:
            reply = f"{self._inbox}.{request.request_id}"
            await client.publish(subjects.generate(node_id), payload, reply)
        except MaxPayloadError as error:
            self.release(request.request_id)
            raise RequestTooLarge(f"{len(payload)} bytes") from error
        except (NatsError, OSError) as error:
            self.release(request.request_id)
            raise BusUnavailable() from error

    async def cancel(self, request_id: str) -> None:
        """Tell the node to stop; its terminal delta, with the final counts, still comes."""
        stream = self._streams.get(request_id)
        if stream is not None:
            message = Cancel(gateway=self._gateway_id, request_ids=(request_id,))
            await self._tell(subjects.cancel(stream.node_id), encode(message))

    def release(self, request_id: str) -> None:
        """Forget the request: no delta of it is delivered from now on."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._nodes[stream.node_id].request_ids.discard(request_id)

    def num_in_flight(self, node_id: str) -> int:
        node = self._nodes.get(node_id)
        return len(node.request_ids) if node else 0

    def _open(self, node_id: str, request_id: str, sink: Sink) -> None:
        self.release(request_id)
        node = self._nodes.setdefault(node_id, _Node())
        node.request_ids.add(request_id)
        self._streams[request_id] = _Stream(node_id, sink, self._monotonic(), node.boot_id)

    async def _tell(self, subject: str, payload: bytes) -> None:
        """Publish if connected; a cancel or resend that is lost is asked for again."""
        if self._bus.connected:
            try:
                await self._bus.client.publish(subject, payload)
            except (NatsError, OSError):
                self.counts["untold"] += 1

    # --- frames ---------------------------------------------------------------------------------
    async def _receive(self, message: Msg) -> None:
        node_id = message.subject.rpartition(".")[2]
        try:
            frame = self._decoder.decode(message.data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            frame = None
        if frame is None or frame.node_id != node_id or frame.v > WIRE_VERSION:
            self.counts["frame_rejected"] += 1
            return
        self.counts["frames"] += 1
        self.is_behind = self._frames is not None and self._frames.pending_msgs > 0
        missed = self._follow(node_id, frame)
        strays = [d for d in frame.deltas if not self._accept(node_id, frame.boot_id, d)]
        if strays:
            await self._stop(node_id, strays)
        if missed:
            self._asked |= missed & self._nodes[node_id].request_ids
        if self._asked:
            await self._resend(self._asked)

    def _follow(self, node_id: str, frame: Frame) -> set[str]:
        """Note the frame's number; the requests that may have lost deltas by a jump in it."""
        node = self._nodes.setdefault(node_id, _Node())
        if frame.boot_id != node.boot_id:
            self.saw_boot(node_id, frame.boot_id)
        jumped = frame.seq > node.seq + 1 and node.seq > 0
        node.seq = max(node.seq, frame.seq)
        if not jumped:
            return set()
        self.counts["frame_gap"] += 1
        return set(node.request_ids)

    async def _stop(self, node_id: str, strays: list[Delta]) -> None:
        """Nobody waits for these any more: tell the node, once in a while."""
        now = self._monotonic()
        running = {delta.request_id for delta in strays if not delta.finish_reason}
        told = {one for one in running if now - self._strays.get(one, -STRAY_S) >= STRAY_S}
        if told and len(self._strays) < MAX_STRAYS:
            self._strays |= dict.fromkeys(told, now)
            self.counts["stray_cancel"] += len(told)
            message = Cancel(gateway=self._gateway_id, request_ids=tuple(sorted(told)))
            await self._tell(subjects.cancel(node_id), encode(message))

    def _accept(self, node_id: str, boot_id: str, delta: Delta) -> bool:
        """Deliver what fits; False if nobody waits for it."""
        stream = self._streams.get(delta.request_id)
        if stream is None or stream.node_id != node_id:
            self.counts["delta_unknown"] += 1  # released meanwhile, or not this node's to answer
            return False
        stream.boot_id = boot_id
        end = delta.index + len(delta.token_ids)
        if delta.index == stream.next_index:
            self._deliver(stream, delta, end)
        elif delta.index > stream.next_index:
            self.counts["delta_gap"] += 1
            self._asked.add(delta.request_id)
        elif end <= stream.next_index:
            self.counts["delta_repeated"] += 1
        else:
            self._fail(delta.request_id, "stream_corrupt", "Tokens overlap those sent before.")
        return True

    def _deliver(self, stream: _Stream, delta: Delta, end: int) -> None:
        self.counts["deltas"] += 1
        stream.next_index = end
        stream.heard_at = self._monotonic()
        stream.num_resends = 0
        self._asked.discard(delta.request_id)
        if delta.finish_reason:
            self.release(delta.request_id)
        stream.sink(delta)

    def _fail(self, request_id: str, code: str, text: str) -> None:
        """End the stream here with a terminal delta of our own."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self.counts[code] += 1
        self.release(request_id)
        stream.sink(
            Delta(
                request_id=request_id,
                index=stream.next_index,
                token_ids=(),
                text="",
                finish_reason="error",
                error_code=code,
                error_message=text,
                num_output_tokens=stream.next_index,
            )
        )

    # --- what went missing ----------------------------------------------------------------------
    async def _resend(self, request_ids: Iterable[str]) -> None:
        """Ask for everything from the next expected index on, each request at most 4 times/s."""
        now = self._monotonic()
        wanted: dict[str, dict[str, int]] = {}
        for request_id in list(request_ids):
            stream = self._streams.get(request_id)
            if stream is not None and now - stream.asked_at < RESEND_EVERY_S:
                continue  # stays in _asked: the next frame or tick asks
            self._asked.discard(request_id)
            if stream is None:
                continue
            if stream.num_resends >= MAX_RESENDS:
                self._fail(request_id, "stream_corrupt", "Missing tokens were not sent again.")
                continue
            stream.asked_at, stream.num_resends = now, stream.num_resends + 1
            wanted.setdefault(stream.node_id, {})[request_id] = stream.next_index
        for node_id, requests in wanted.items():
            self.counts["resend"] += 1
            message = Resend(gateway=self._gateway_id, requests=requests)
            await self._tell(subjects.resend(node_id), encode(message))

    async def tick(self) -> None:
        """Call about once a second: ask again for gaps and for streams that fell silent.

        Silence is no fault by itself (a request may wait in a queue), so it fails no stream.
        """
        now = self._monotonic()
        self._strays = {one: at for one, at in self._strays.items() if now - at < STRAY_S}
        silent: list[str] = []
        for request_id, stream in self._streams.items():
            if now - max(stream.heard_at, stream.asked_at) > SILENT_S:
                stream.num_resends = 0
                silent.append(request_id)
        await self._resend([*self._asked, *silent])

    async def beat(self) -> None:
        """Call every few seconds: tell the nodes that work for this gateway that it lives."""
        message = encode(Resend(gateway=self._gateway_id, requests={}))
        for node_id, node in list(self._nodes.items()):
            if node.request_ids:
                await self._tell(subjects.resend(node_id), message)

    async def _resend_all(self) -> None:
        for stream in self._streams.values():
            stream.num_resends, stream.asked_at = 0, 0.0
        await self._resend(list(self._streams))

    def saw_boot(self, node_id: str, boot_id: str) -> None:
        """A frame or telemetry names the node's boot; requests of an earlier one are gone."""
        node = self._nodes.setdefault(node_id, _Node())
        if boot_id == node.boot_id:
            return
        node.boot_id, node.seq = boot_id, 0
        for request_id in list(node.request_ids):
            stream = self._streams[request_id]
            if stream.boot_id and stream.boot_id != boot_id:
                self._fail(request_id, "node_restarted", f"Node {node_id} restarted.")

    def fail_node(self, node_id: str, text: str = "The node is not heard any more.") -> None:
        """End every stream of a node that is lost."""
        node = self._nodes.get(node_id)
        for request_id in list(node.request_ids) if node else ():
            self._fail(request_id, "node_lost", text)

    async def _receive_undelivered(self, message: Msg) -> None:
        """The server answers 503 on the reply subject when the node is not subscribed."""
        if message.headers and message.headers.get("Status") == "503":
            self.counts["undelivered"] += 1
            request_id = message.subject.rpartition(".")[2]
            self._fail(request_id, "node_unreachable", "The node is not connected.")

    # --- tokenizers -----------------------------------------------------------------------------
    async def tokenizer(self, version_id: str) -> TokenizerBundle | None:
        """The bundle of a version; None until a node has loaded it. Raises BusUnavailable.

        A damaged bundle raises WireError.
        """
        jetstream = self._bus.jetstream()
        try:
            store = await jetstream.object_store(subjects.TOKENIZER_BUCKET)
            found = await asyncio.wait_for(store.get(version_id), 4 * API_TIMEOUT_S)
        except (ObjectNotFoundError, NotFoundError):
            return None
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"Tokenizer of {version_id}: {error!r}") from error
        bundle = decode(found.data or b"", TokenizerBundle, MAX_BUNDLE_BYTES)
        if bundle.version_id != version_id:
            raise WireError(f"{version_id} holds the tokenizer of {bundle.version_id}")
        return bundle
