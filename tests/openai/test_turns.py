"""A burst is taken a few at a time, and those as far as they go before the next are read."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from controlplane.entrypoints.openai.server import GuardedProtocol
from controlplane.entrypoints.openai.turns import Turns

TURNS_TO_ADMIT = 3  # of the event loop, as a commit takes
Seen = list[tuple[str, str]]


async def test_a_burst_is_begun_in_order_and_others_get_the_loop_in_between() -> None:
    turns = Turns(at_once=2)
    seen: list[int | str] = []

    def begin(number: int) -> None:
        seen.append(number)
        if number == 0:  # as a token of a running stream would
            asyncio.get_running_loop().call_soon(seen.append, "token")

    for number in range(6):
        turns.begin(lambda number=number: begin(number))  # type: ignore[misc]
    while 5 not in seen:
        await asyncio.sleep(0)
    assert [one for one in seen if one != "token"] == [0, 1, 2, 3, 4, 5]
    assert seen.index("token") < seen.index(4)


async def test_one_that_raises_keeps_nobody_from_a_turn() -> None:
    turns = Turns(at_once=1)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    begun = asyncio.Event()
    turns.begin(lambda: None)
    turns.begin(lambda: 1 / 0)
    turns.begin(begun.set)
    await asyncio.wait_for(begun.wait(), 1)


class Recorded(GuardedProtocol):
    """Notes when a head has been parsed."""

    seen: Seen

    def on_headers_complete(self) -> None:
        self.seen.append(("parsed", self.url.decode()))
        super().on_headers_complete()


def app(seen: Seen) -> Callable[..., Any]:
    """Admits after a few turns of the loop, as the gateway does, then answers with the body."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(TURNS_TO_ADMIT):
            await asyncio.sleep(0)
        seen.append(("sent", scope["path"]))
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return serve


@asynccontextmanager
async def served(seen: Seen, at_once: int) -> AsyncIterator[int]:
    """The gateway's protocol on a free port."""
    config = uvicorn.Config(app(seen), lifespan="off", log_config=None)
    config.load()
    state, turns = ServerState(), Turns(at_once)

    def connect() -> Recorded:
        protocol = Recorded(config=config, server_state=state, app_state={}, turns=turns)
        protocol.seen = seen
        return protocol

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def request(number: int, body: bytes = b"") -> bytes:
    return b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        number,
        len(body),
        body,
    )


async def test_the_first_of_a_burst_are_sent_on_while_the_last_are_still_unread() -> None:
    """Depth-first: what is sent early gets its tokens early."""
    seen: Seen = []
    async with served(seen, at_once=2) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(32)]
        for number, client in enumerate(clients):
            client.sendall(request(number))
        async with asyncio.timeout(5):
            while sum(kind == "sent" for kind, _ in seen) < len(clients):
                await asyncio.sleep(0)
        for client in clients:
            client.close()
    parsed = [place for place, (kind, _) in enumerate(seen) if kind == "parsed"]
    sent = [place for place, (kind, _) in enumerate(seen) if kind == "sent"]
    assert sent[0] < parsed[len(clients) // 2]
    assert sent[len(clients) // 2] < parsed[-1]


async def test_what_comes_in_pieces_while_it_waits_is_read_whole_and_in_order() -> None:
    seen: Seen = []
    async with served(seen, at_once=1) as port:
        first, second = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        body = bytes(range(256)) * 1024  # beyond what is held unread
        first.sendall(request(1))
        whole = request(2, body)
        second.sendall(whole[:60_000])
        reader, writer = await asyncio.open_connection(sock=second)
        writer.write(whole[60_000:])
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 200")
        chunks = b""
        while (size := int(await reader.readline(), 16)) > 0:
            chunks += (await reader.readexactly(size + 2))[:-2]
        assert chunks == body
        first.close()
        writer.close()


async def test_one_that_leaves_before_its_turn_is_never_begun() -> None:
    seen: Seen = []
    async with served(seen, at_once=1) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for number, client in enumerate(clients):
            client.sendall(request(number))
        clients[7].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        async with asyncio.timeout(5):
            while not seen:
                await asyncio.sleep(0)
            clients[7].close()  # with a reset
            while sum(kind == "sent" for kind, _ in seen) < 7:
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
        for client in clients[:7]:
            client.close()
    assert "/7" not in {path for _, path in seen}
