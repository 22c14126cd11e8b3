"""A gateway gets every token once and in order, or a clear end; over a real server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from controlplane.adapters.natsbus.connection import Bus
from controlplane.adapters.natsbus.transport import (
    BusUnavailable,
    Delta,
    Generate,
    RequestTooLarge,
    Sampling,
    Transport,
)
from gpuagent.wire import subjects
from gpuagent.wire.codec import decode, encode
from gpuagent.wire.messages import Cancel, Frame, Resend, TokenizerBundle
from tests.application.bus import control, node, until
from tests.natsserver import NatsServer, nats  # noqa: F401


def request(request_id: str = "req-1", num_prompt: int = 3) -> Generate:
    return Generate(
        request_id=request_id,
        gateway="gw",
        replica_id="m.v1.g1.0",
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=Sampling(max_tokens=8),
    )


def delta(index: int, *tokens: int, request_id: str = "req-1", finish: str = "") -> Delta:
    return Delta(request_id, index, tokens, "".join(f"<{t}>" for t in tokens), finish)


class Node:
    """The far end, scripted: records orders, sends what the test says."""

    def __init__(self, bus: Bus, node_id: str) -> None:
        self.bus, self.node_id, self.seq = bus, node_id, 0
        self.generates: list[Generate] = []
        self.cancels: list[Cancel] = []
        self.resends: list[Resend] = []
        self.is_heard = False

    async def start(self, control_plane: Bus) -> None:
        """Returns once what the control plane sends arrives. The server has the subscriptions
        when it has answered a flush, and carries them to the other account a moment later."""
        await self._subscribe()
        hello = encode(Cancel(gateway="gw", request_ids=()))
        while not self.is_heard:
            await control_plane.client.publish(subjects.cancel(self.node_id), hello)
            await asyncio.sleep(0.02)

    async def _subscribe(self) -> None:
        async def generate(message: Msg) -> None:
            self.generates.append(decode(message.data, Generate))

        async def cancel(message: Msg) -> None:
            order = decode(message.data, Cancel)
            self.is_heard = True
            if order.request_ids:
                self.cancels.append(order)

        async def resend(message: Msg) -> None:
            self.resends.append(decode(message.data, Resend))

        client = self.bus.client
        await client.subscribe(subjects.generate(self.node_id), cb=generate)
        await client.subscribe(subjects.cancel(self.node_id), cb=cancel)
        await client.subscribe(subjects.resend(self.node_id), cb=resend)
        await client.flush()

    async def frame(self, *deltas: Delta, lose: bool = False, boot: str = "b1") -> None:
        """Send one frame; ``lose`` numbers it and drops it."""
        self.seq += 1
        if not lose:
            payload = encode(Frame(self.node_id, boot, self.seq, deltas))
            await self.bus.client.publish(subjects.frames("gw", self.node_id), payload)
            await self.bus.client.flush()


@asynccontextmanager
async def pair(server: NatsServer) -> AsyncIterator[tuple[Transport, Node, Bus]]:
    async with control(server) as bus, node(server, "n1") as far:
        transport = Transport(bus, "gw", time.monotonic)
        await transport.start()
        agent = Node(far, "n1")
        await agent.start(bus)
        yield transport, agent, bus


async def test_tokens_arrive_in_order_and_end(nats: NatsServer) -> None:  # noqa: F811
    """One frame carries two requests' deltas; each sink gets its own, up to the terminal one."""
    async with pair(nats) as (transport, agent, _):
        one: list[Delta] = []
        two: list[Delta] = []
        await transport.generate("n1", request("req-1"), one.append)
        await transport.generate("n1", request("req-2"), two.append)
        await until(lambda: len(agent.generates) == 2)
        assert agent.generates[0] == request("req-1")
        await agent.frame(delta(0, 10), delta(0, 20, 21, request_id="req-2"))
        await agent.frame(
            delta(1, 11, finish="stop"), delta(2, request_id="req-2", finish="length")
        )
        await until(lambda: two and two[-1].finish_reason)
        assert [d.token_ids for d in one] == [(10,), (11,)]
        assert [d.token_ids for d in two] == [(20, 21), ()]
        assert transport.num_in_flight("n1") == 0


async def test_a_lost_frame_is_sent_again(nats: NatsServer) -> None:  # noqa: F811
    """The gap is seen by the index, asked for from the first missing token, nothing twice."""
    async with pair(nats) as (transport, agent, _):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        await agent.frame(delta(0, 1))
        await agent.frame(delta(1, 2), lose=True)
        await agent.frame(delta(2, 3))
        await until(lambda: agent.resends)
        assert agent.resends == [Resend(gateway="gw", requests={"req-1": 1})]
        await agent.frame(delta(1, 2, 3))
        await agent.frame(delta(2, 3))
        await agent.frame(delta(3, 4, finish="stop"))
        await until(lambda: got[-1].finish_reason)
        assert [t for d in got for t in d.token_ids] == [1, 2, 3, 4]


async def test_a_lost_last_frame_is_found_by_the_frame_number(nats: NatsServer) -> None:  # noqa: F811
    """Another request's frame shows the jump, and the silent request is asked for."""
    async with pair(nats) as (transport, agent, _):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        await transport.generate("n1", request("req-2"), lambda d: None)
        await agent.frame(delta(0, 1))
        await agent.frame(delta(1, 2, finish="stop"), lose=True)
        await agent.frame(delta(0, 9, request_id="req-2"))
        await until(lambda: agent.resends)
        assert agent.resends[0].requests["req-1"] == 1
        await agent.frame(delta(1, 2, finish="stop"))
        await until(lambda: got[-1].finish_reason == "stop")


async def test_silence_is_asked_about(nats: NatsServer) -> None:  # noqa: F811
    """With no later frame at all, ``tick`` asks after three seconds without a delta."""
    async with control(nats) as bus, node(nats, "n1") as far:
        clock = [100.0]
        transport = Transport(bus, "gw", lambda: clock[0])
        await transport.start()
        agent = Node(far, "n1")
        await agent.start(bus)
        await transport.generate("n1", request(), lambda d: None)
        await transport.tick()
        assert transport.counts["resend"] == 0
        clock[0] += 4
        await transport.tick()
        await until(lambda: agent.resends)
        assert agent.resends[0].requests == {"req-1": 0}


async def test_a_gap_that_is_never_filled_fails_the_stream(nats: NatsServer) -> None:  # noqa: F811
    async with control(nats) as bus, node(nats, "n1") as far:
        clock = [100.0]
        transport = Transport(bus, "gw", lambda: clock[0])
        await transport.start()
        agent = Node(far, "n1")
        await agent.start(bus)
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        while not got:
            await agent.frame(delta(5, 1))
            await asyncio.sleep(0.01)
            clock[0] += 0.3
        assert (got[0].finish_reason, got[0].error_code) == ("error", "stream_corrupt")
        assert transport.counts["resend"] == 5


async def test_overlapping_tokens_fail_the_stream(nats: NatsServer) -> None:  # noqa: F811
    """Half of it was delivered: cutting the text would guess, so the stream ends."""
    async with pair(nats) as (transport, agent, _):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        await agent.frame(delta(0, 1, 2))
        await agent.frame(delta(1, 2, 3))
        await until(lambda: len(got) == 2)
        assert got[1].error_code == "stream_corrupt"


async def test_nothing_comes_after_the_end_or_from_another_node(nats: NatsServer) -> None:  # noqa: F811
    """n2 may publish frames, but not as n1 and not for a request that n1 runs."""
    async with pair(nats) as (transport, agent, _), node(nats, "n2") as other:
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        intruder = Node(other, "n2")
        await intruder.frame(delta(0, 666))
        forged = encode(Frame("n1", "b1", 1, (delta(0, 666),)))
        await other.client.publish(subjects.frames("gw", "n2"), forged)
        await other.client.publish(subjects.frames("gw", "n2"), b"\xc1 no message")
        await other.client.flush()
        await agent.frame(delta(0, 1, finish="stop"))
        await agent.frame(delta(1, 2))
        await until(lambda: transport.counts["delta_unknown"] == 2)
        assert [d.token_ids for d in got] == [(1,)]
        assert transport.counts["frame_rejected"] == 2


async def test_a_node_nobody_runs_is_told_at_once(nats: NatsServer) -> None:  # noqa: F811
    async with pair(nats) as (transport, _, _):
        got: list[Delta] = []
        await transport.generate("n9", request(), got.append)
        await until(lambda: got, 2)
        assert got[0].error_code == "node_unreachable"


async def test_a_restarted_node_ends_its_streams(nats: NatsServer) -> None:  # noqa: F811
    """The first frame of a new boot ends what the old one ran; new requests are not touched."""
    async with pair(nats) as (transport, agent, _):
        old: list[Delta] = []
        new: list[Delta] = []
        await transport.generate("n1", request(), old.append)
        await agent.frame(delta(0, 1))
        await until(lambda: old)
        transport.saw_boot("n1", "b2")
        assert old[-1].error_code == "node_restarted"
        await transport.generate("n1", request("req-2"), new.append)
        agent.seq = 0
        await agent.frame(delta(0, 5, request_id="req-2"), boot="b2")
        await until(lambda: new)
        assert new[0].token_ids == (5,)


async def test_a_lost_node_ends_its_streams(nats: NatsServer) -> None:  # noqa: F811
    async with pair(nats) as (transport, _, _):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        transport.fail_node("n1")
        assert got[-1].error_code == "node_lost"


async def test_cancel_reaches_the_node_and_the_end_still_comes(nats: NatsServer) -> None:  # noqa: F811
    async with pair(nats) as (transport, agent, _):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        await transport.cancel("req-1")
        await until(lambda: agent.cancels)
        assert agent.cancels == [Cancel(gateway="gw", request_ids=("req-1",))]
        await agent.frame(delta(0, finish="cancelled"))
        await until(lambda: got)
        assert got[0].finish_reason == "cancelled"


async def test_without_a_server_requests_are_refused_at_once(nats: NatsServer) -> None:  # noqa: F811
    """Disconnected: BusUnavailable in milliseconds, nothing queued, and all well after return."""
    async with pair(nats) as (transport, agent, bus):
        nats.stop(kill=True)
        await until(lambda: not bus.connected, 2)
        before = time.monotonic()
        with pytest.raises(BusUnavailable):
            await transport.generate("n1", request(), lambda d: None)
        assert time.monotonic() - before < 0.1
        assert transport.num_in_flight("n1") == 0
        nats.start()
        await until(lambda: bus.connected and agent.bus.connected, 20)
        assert agent.generates == []
        got: list[Delta] = []
        await transport.generate("n1", request("req-2"), got.append)
        await agent.frame(delta(0, 1, request_id="req-2", finish="stop"))
        await until(lambda: got)


async def test_after_a_reconnection_running_streams_go_on(nats: NatsServer) -> None:  # noqa: F811
    """What was sent while nobody listened is asked for when the connection is back."""
    async with pair(nats) as (transport, agent, bus):
        got: list[Delta] = []
        await transport.generate("n1", request(), got.append)
        await agent.frame(delta(0, 1))
        await until(lambda: got)
        nats.stop(kill=True)
        nats.start()
        await until(lambda: bus.connected and agent.bus.connected, 20)
        await until(lambda: transport.counts["resend"], 20)
        await transport.tick()
        await agent.frame(delta(1, 2, finish="stop"))
        await until(lambda: got[-1].finish_reason, 20)
        assert [t for d in got for t in d.token_ids] == [1, 2]


async def test_a_hung_server_is_noticed(nats: NatsServer) -> None:  # noqa: F811
    """SIGSTOP keeps the socket open; pings notice within about six seconds."""
    async with pair(nats) as (transport, _, bus):
        nats.pause()
        started = time.monotonic()
        await until(lambda: not bus.connected, 9)
        assert time.monotonic() - started < 8
        with pytest.raises(BusUnavailable):
            await transport.generate("n1", request(), lambda d: None)
        nats.resume()
        await until(lambda: bus.connected, 5)


async def test_a_prompt_beyond_one_message_is_refused(nats: NatsServer) -> None:  # noqa: F811
    async with pair(nats) as (transport, _, _):
        with pytest.raises(RequestTooLarge):
            await transport.generate("n1", request(num_prompt=700_000), lambda d: None)
        assert transport.num_in_flight("n1") == 0


async def test_a_tokenizer_is_fetched_whole(nats: NatsServer) -> None:  # noqa: F811
    """Several megabytes in chunks; absent until a node has put it."""
    async with pair(nats) as (transport, agent, _):
        assert await transport.tokenizer("m@v1") is None
        bundle = TokenizerBundle(version_id="m@v1", tokenizer_json=b"{}" * 1_500_000)
        store = await agent.bus.jetstream().object_store("tokenizers")
        await store.put("m@v1", encode(bundle))
        assert await transport.tokenizer("m@v1") == bundle


async def test_the_frame_path_carries_the_target_rate(nats: NatsServer) -> None:  # noqa: F811
    """256 streams, 200 steps: far above 13,400 tokens a second through a real server."""
    async with pair(nats) as (transport, agent, _):
        num_tokens = 0

        def count(got: Delta) -> None:
            nonlocal num_tokens
            num_tokens += len(got.token_ids)

        ids = [f"req-{n}" for n in range(256)]
        for request_id in ids:
            await transport.generate("n1", request(request_id), count)
        started = time.monotonic()
        for step in range(200):
            await agent.frame(*(delta(step, step, request_id=request_id) for request_id in ids))
        await until(lambda: num_tokens == 256 * 200, 30)
        assert num_tokens / (time.monotonic() - started) > 13_400
