"""Asking the nodes what a lost gateway's requests produced, and ending what still runs of them.

A request goes to every node, since only the lost gateway knew where it ran, and each answers on
the asking gateway's own subject. A generation ends a step after it is cancelled, so a node with one
that still runs is asked again, after growing pauses::

    t=0     Close(3, gw-a, [r1, r2]) -> n1, n2      n2: Closed(3, [])            it knows neither
                                                    n1: r1 running 412, r2 ended 96
    t=0.1   Close(4, gw-a, [r1, r2]) -> n1          n1: r1 ended 413, r2 ended 96   complete

A node that is lost in the log is asked too, but not waited for.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from controlplane.adapters.natsbus.connection import Bus
from controlplane.application.orphans import Answers, Produced
from gpuagent.wire import messages, subjects
from gpuagent.wire.codec import WireError, decode, encode

RECORDS_AT_ONCE = 1000
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
PENDING_BYTES = 32 * 1024 * 1024


class Counted(NamedTuple):
    """What a node said of one generation."""

    one: messages.Produced
    num_sent: int  # of its tokens, another replica's
    num_computed: int  # of the inputs that it embeds


class NodeClosing:
    """``orphans.Nodes`` over the bus. ``nodes`` names all of them, and who is expected to answer.

    Runs in one event loop.
    """

    def __init__(self, bus: Bus, gateway: str, nodes: Callable[[], Mapping[str, bool]]) -> None:
        self._bus, self._name, self._nodes = bus, gateway, nodes
        self._number = 0
        self._answers: dict[tuple[str, int], list[Counted]] = {}
        self._whole: dict[tuple[str, int], asyncio.Event] = {}  # what is waited for just now
        self.num_rejected = 0

    async def start(self) -> None:
        """Subscribe to the answers; raises BusUnavailable."""
        await self._bus.require_connected().subscribe(
            subjects.closed_of(self._name), cb=self._receive, pending_bytes_limit=PENDING_BYTES
        )

    async def close(self, gateway: str, request_ids: Sequence[str]) -> Answers:
        """See ``orphans.Nodes``. Takes about three seconds when a node does not answer."""
        produced: dict[str, list[Produced]] = defaultdict(list)
        is_complete = True
        for start in range(0, len(request_ids), RECORDS_AT_ONCE):
            some = tuple(request_ids[start : start + RECORDS_AT_ONCE])
            nodes, some_ids = self._nodes(), frozenset(some)
            said = await asyncio.gather(*(self._ask(node, gateway, some) for node in nodes))
            for (node_id, is_expected), counts in zip(nodes.items(), said, strict=True):
                has_ended = counts is not None and not _running(counts)
                is_complete &= has_ended or (counts is None and not is_expected)
                for said_of in counts or ():
                    if (record_id := said_of.one.record_id) in some_ids:
                        produced[record_id].append(_produced(node_id, *said_of))
        return Answers(dict(produced), is_complete)

    async def _ask(
        self, node_id: str, gateway: str, request_ids: tuple[str, ...]
    ) -> list[Counted] | None:
        """What the node said last, all of it ended if there was time; None: nothing."""
        said = None
        for pause in PAUSES_S:
            answer = await self._ask_once(node_id, gateway, request_ids, pause)
            said = said if answer is None else answer
            if answer is not None and not _running(answer):
                break
            if answer is not None:
                await asyncio.sleep(pause)
        return said

    async def _ask_once(
        self, node_id: str, gateway: str, request_ids: tuple[str, ...], patience_s: float
    ) -> list[Counted] | None:
        self._number += 1
        key = (node_id, self._number)
        message = messages.Close(
            asker=self._name, number=self._number, gateway=gateway, record_ids=request_ids
        )
        self._answers[key], self._whole[key] = [], asyncio.Event()
        try:
            async with asyncio.timeout(patience_s):
                if self._bus.connected:
                    await self._bus.client.publish(subjects.close(node_id), encode(message))
                await self._whole[key].wait()
            return self._answers[key]
        except (TimeoutError, NatsError, OSError):
            return None
        finally:
            del self._answers[key], self._whole[key]

    async def _receive(self, message: Msg) -> None:
        node_id = message.subject.rpartition(".")[2]
        try:
            answer = decode(message.data, messages.Closed)
        except WireError:
            self.num_rejected += 1
            return
        key = (node_id, answer.number)
        counts = [_counted(one, answer) for one in answer.generations]
        is_sound = answer.node_id == node_id and all(_is_plausible(*each) for each in counts)
        if not is_sound or key not in self._answers:
            self.num_rejected += 1  # forged, or too late
            return
        self._answers[key].extend(counts)
        if not answer.more:
            self._whole[key].set()


def _running(counts: Iterable[Counted]) -> bool:
    return any(not each.one.finish_reason for each in counts)


def _counted(one: messages.Produced, answer: messages.Closed) -> Counted:
    request_id = one.request_id
    return Counted(one, answer.sent.get(request_id, 0), answer.computed.get(request_id, 0))


def _is_plausible(one: messages.Produced, num_sent: int, num_computed: int) -> bool:
    """Whether it can be put on record: a node may say what it likes."""
    counts = (one.attempt, one.num_output_tokens, one.num_cached_tokens, num_sent, num_computed)
    seconds = (one.queue_ms or 0.0, one.age_s, one.ran_s)
    names = one.replica_id + one.error_code
    return (
        all(0 <= count < 2**31 for count in counts)
        and all(map(math.isfinite, seconds))
        and len(one.replica_id) <= 255
        and len(one.error_code) <= 64
        and (names.isprintable() or not names)
    )


def _produced(node_id: str, one: messages.Produced, num_sent: int, num_computed: int) -> Produced:
    base = one.request_id.partition("_")[0]  # each later attempt has an id of its own
    choice = base.removeprefix(f"{one.record_id}-")[:6]
    return Produced(
        node_id=node_id,
        choice=int(choice) if choice.isdecimal() and base != one.record_id else -1,
        attempt=one.attempt,
        replica_id=one.replica_id,
        num_output_tokens=one.num_output_tokens,
        num_cached_tokens=one.num_cached_tokens,
        finish_reason=one.finish_reason,
        error_code=one.error_code,
        queue_ms=one.queue_ms,
        age_s=one.age_s,
        ran_s=one.ran_s,
        num_sent_tokens=num_sent,
        num_computed_tokens=num_computed,
    )
