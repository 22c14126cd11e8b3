"""A connection outlives waits for the server that were given up."""

import asyncio

import pytest
from nats.aio.msg import Msg

from controlplane.adapters.natsbus import connection
from controlplane.application.fleet import BusUnavailable
from tests.application.bus import control, until
from tests.natsserver import NatsServer, nats  # noqa: F401


def test_a_flush_given_up_does_not_leave_the_connection_deaf(
    nats: NatsServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer that comes too late is the library's to read, and it must go on reading."""

    async def scenario() -> None:
        async with control(nats) as bus:
            heard: list[bytes] = []

            async def hear(message: Msg) -> None:
                heard.append(message.data)

            await bus.client.subscribe("cp.test", cb=hear)
            await bus.flush()
            monkeypatch.setattr(connection, "FLUSH_TIMEOUT_S", 0.2)
            nats.pause()
            with pytest.raises(BusUnavailable):
                await bus.flush()
            nats.resume()
            monkeypatch.undo()
            await bus.client.publish("cp.test", b"still here")
            await until(lambda: heard, 5, "what was published is not heard")
            assert bus.num_reconnects == 0 and heard == [b"still here"]

    asyncio.run(scenario())
