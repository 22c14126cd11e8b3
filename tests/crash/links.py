"""The lines between agents and the bus, each of which can be cut without a word.

An agent reaches the bus through a port of its own here, on which its bytes are passed on. A cut is
silent, as that of a cable is: no connection is closed or refused, and what was on its way comes
late or never::

    agent n2  --127.0.1.2:P-->  link 2  -->  bus        up: what the agent says is lost
                                                        down: what the bus says is lost

Where nftables may be used (root, the ``nft`` program, a kernel that has it), the packets between
agent and link are dropped, so retransmissions, connections that are never made and ends that are
never heard are the kernel's own. Elsewhere the link keeps the bytes to itself until it is healed:
the same to the agent, but that its connections seem to be made. ``means`` says which it is.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Coroutine
from typing import Any

DIRECTIONS = ("up", "down", "both")
CHUNK_BYTES = 64 * 1024


class Drops:
    """Packets that nftables drops, in a table of this process alone."""

    def __init__(self) -> None:
        self._table = ("inet", f"chaos_{os.getpid()}")

    def open(self) -> bool:
        """Whether packets can be dropped on this machine."""
        if os.geteuid() != 0 or shutil.which("nft") is None:
            return False
        hook = "{ type filter hook input priority 0 ; policy accept ; }"
        try:
            self._nft("add", "table", *self._table)
            self._nft("add", "chain", *self._table, "cuts", hook)
        except subprocess.CalledProcessError:
            return False
        return True

    def close(self) -> None:
        self._nft("delete", "table", *self._table)

    def cut(self, host: str, port: int, direction: str) -> None:
        """Drop what comes to (up) or from (down) that address."""
        rule = ("add", "rule", *self._table, "cuts", "ip")
        if direction in ("up", "both"):
            self._nft(*rule, "daddr", host, "tcp", "dport", str(port), "drop")
        if direction in ("down", "both"):
            self._nft(*rule, "saddr", host, "tcp", "sport", str(port), "drop")

    def heal(self) -> None:
        self._nft("flush", "chain", *self._table, "cuts")

    def _nft(self, *words: str) -> None:
        subprocess.run(["nft", *words], check=True, capture_output=True, timeout=10)


class Links:
    """As many as there are agents, on one port; ``bus_port`` is asked at each connection.

    One link is cut at a time. A context manager.
    """

    def __init__(self, count: int, bus_port: Callable[[], int], may_drop: bool = True) -> None:
        self._hosts = [f"127.0.1.{number}" for number in range(1, count + 1)]
        self._bus_port = bus_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")
        self._open: dict[tuple[str, str], asyncio.Event] = {}  # (host, direction): not cut
        self._pairs: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._may_drop = may_drop
        self._drops: Drops | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where agent ``{number}`` finds the bus."""
        return f"nats://127.0.1.{{number}}:{self.port}"

    @property
    def means(self) -> str:
        return "packets dropped by nftables" if self._drops else "bytes held back"

    def __enter__(self) -> "Links":
        drops = Drops()
        self._drops = drops if self._may_drop and drops.open() else None
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *failure: object) -> None:
        if self._drops:
            self._drops.close()
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, number: int, direction: str) -> None:
        """Cut the link of agent ``number`` (from 1)."""
        host = self._hosts[number - 1]
        if self._drops:
            self._drops.cut(host, self.port, direction)
            return
        for way in ("up", "down") if direction == "both" else (direction,):
            self._loop.call_soon_threadsafe(self._open[host, way].clear)

    def heal(self) -> None:
        if self._drops:
            self._drops.heal()
        for way in self._open.values():
            self._loop.call_soon_threadsafe(way.set)

    # --- in the loop ------------------------------------------------------------------------
    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        for host in self._hosts:
            for way in ("up", "down"):
                self._open[host, way] = asyncio.Event()
                self._open[host, way].set()
            server = await asyncio.start_server(self._accept, host, self.port)
            self.port = server.sockets[0].getsockname()[1]
            self._servers.append(server)

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for pair in self._pairs:
            pair.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _accept(self, agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
        host = to_agent.get_extra_info("sockname")[0]
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        try:
            with contextlib.suppress(OSError):
                bus, to_bus = await asyncio.open_connection("127.0.0.1", self._bus_port())
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pass_on(agent, to_bus, self._open[host, "up"]))
                    both.create_task(_pass_on(bus, to_agent, self._open[host, "down"]))
        finally:
            to_agent.close()
            self._pairs.discard(task)


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, is_open: asyncio.Event
) -> None:
    """Until ``source`` ends, whose end is passed on too; nothing while it is not open."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            await is_open.wait()
            target.write(data)
            await target.drain()
    await is_open.wait()
    target.close()
