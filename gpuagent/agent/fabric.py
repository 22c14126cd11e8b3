"""Where the agents of one fabric meet, for groups whose ranks are on several of them.

The agent that has rank 0 listens; the others come to it once for each of their ranks, with a
connection that will be that rank's line to rank 0, and once for themselves, with one that both
agents keep: the *tie*. Whoever's part ends closes its tie, with a word on why, and the other agent
ends its own part. A line has no such use: the workers have it, and one that is stopped or lost with
its machine closes nothing.

    n1 (rank 0)  gathers   "r agent 1"  "r rank 1"        n2 (rank 1)  joins as both
    n1           starts the worker of rank 0              n2           starts the worker of rank 1
    n2's worker is killed: n2 says so on the tie          n1 ends its part; both begin anew

A connection is nothing until it has shown the secret of the group, which both agents have from the
control plane, for one placement of one replica. 32 bytes each, compared in constant time, and
nothing of them is parsed::

    listener   a challenge
    caller     a challenge of its own, HMAC-SHA256(secret, "join", both, the place it takes)
    listener   HMAC-SHA256(secret, "welcome", both, the place): to the caller's worker it is rank 0

Of an earlier placement the secret is another one, so what is left of it cannot join. What follows
is not encrypted, as the sums between the ranks (gloo, NCCL) are not, nor can those be
authenticated: a fabric is a network of the cluster alone.
"""

import asyncio
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import structlog

from gpuagent.agent import ipc

log = structlog.get_logger("gpuagent.fabric")

NUM_BYTES = 32  # of a challenge and of a proof
GREETING_S = 5.0
MAX_STRANGERS = 64  # connections that have not shown a secret yet
KEEPALIVE_S = 5  # of silence, then three questions as far apart


class NotJoined(Exception):
    """The other agent does not gather this group now, or does not know its secret."""


def interface_of(address: str) -> str:
    """The network interface that has the address; raises ValueError if none has it."""
    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            with suppress(ValueError):
                if ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                    return name
    raise ValueError(f"no network interface of this machine has the address {address}")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``10.1.0.1:7001`` or ``[fd00::1]:7001``; raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def tie_of(replica_id: str, rank: int) -> str:
    """The place of the agent whose first rank it is."""
    return f"{replica_id} agent {rank}"


def line_of(replica_id: str, rank: int) -> str:
    """The place of a rank."""
    return f"{replica_id} rank {rank}"


def _proof(secret: bytes, word: bytes, challenges: bytes, place: str) -> bytes:
    return hmac.digest(secret, word + challenges + place.encode(), "sha256")


@dataclass(eq=False)
class Gathering:
    """Who is expected for a group, and the connections of those that came."""

    secret: bytes
    places: frozenset[str]
    came: "asyncio.Queue[tuple[str, socket.socket]]" = field(default_factory=asyncio.Queue)

    def place_of(self, challenges: bytes, proof: bytes) -> str | None:
        """The expected place that the proof is for."""
        found = None
        for place in self.places:  # all of them, however early one fits
            if hmac.compare_digest(_proof(self.secret, b"join", challenges, place), proof):
                found = place
        return found


class Fabric:
    """This agent's address on its fabric, and the groups that it gathers there."""

    def __init__(self, host: str, port: int = 0) -> None:
        self.host = host
        self.address = ""  # once it listens
        self.interface = interface_of(host)
        self._port = port
        self._gatherings: set[Gathering] = set()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_refused = 0

    async def start(self) -> None:
        """Listen; raises OSError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, self._port), family=family)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        self._keep(asyncio.create_task(self._listen(self._listener), name="fabric"))

    def close(self) -> None:
        """Listen no longer."""
        for task in self._tasks:
            task.cancel()
        if self._listener:
            self._listener.close()

    def gather(self, secret: bytes, places: Iterable[str]) -> Gathering:
        """Expect connections for these places, until ``dismiss``."""
        gathering = Gathering(secret, frozenset(places))
        self._gatherings.add(gathering)
        return gathering

    def dismiss(self, gathering: Gathering) -> None:
        """Expect them no longer; whoever came and was not taken is sent away."""
        self._gatherings.discard(gathering)
        while not gathering.came.empty():
            gathering.came.get_nowait()[1].close()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, or it was gone at once
                log.warning("fabric_accept_failed", reason=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > MAX_STRANGERS:
                end.close()
                continue
            self._keep(asyncio.create_task(self._greet(end)))

    async def _greet(self, end: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                is_known = await self._admitted(end)
        except (OSError, EOFError, TimeoutError):
            is_known = False
        if not is_known:
            self.num_refused += 1
            end.close()

    async def _admitted(self, end: socket.socket) -> bool:
        """Whether it has shown a secret, and so has been given to its group."""
        loop = asyncio.get_running_loop()
        end.setblocking(False)
        ours = secrets.token_bytes(NUM_BYTES)
        await loop.sock_sendall(end, ours)
        theirs, proof = await _exactly(end, NUM_BYTES), await _exactly(end, NUM_BYTES)
        for gathering in list(self._gatherings):
            place = gathering.place_of(ours + theirs, proof)
            if place is None:
                continue
            answer = _proof(gathering.secret, b"welcome", ours + theirs, place)
            await loop.sock_sendall(end, answer)
            if gathering not in self._gatherings:
                return False
            _prepare(end)
            gathering.came.put_nowait((place, end))
            return True
        return False


async def join(address: str, secret: bytes, place: str) -> socket.socket:
    """A connection to the agent at ``address``, as one of a group. Raises NotJoined or OSError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(GREETING_S):
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            end = socket.socket(family, socket.SOCK_STREAM)
            try:
                end.setblocking(False)
                await loop.sock_connect(end, (host, port))
                await _present(end, secret, place)
            except BaseException:
                end.close()
                raise
    except (TimeoutError, EOFError, ValueError) as error:
        raise NotJoined(f"{place} was not let in at {address}") from error
    _prepare(end)
    return end


async def _present(end: socket.socket, secret: bytes, place: str) -> None:
    challenge, ours = await _exactly(end, NUM_BYTES), secrets.token_bytes(NUM_BYTES)
    both = challenge + ours
    proof = _proof(secret, b"join", both, place)
    await asyncio.get_running_loop().sock_sendall(end, ours + proof)
    answer = await _exactly(end, NUM_BYTES)
    if not hmac.compare_digest(_proof(secret, b"welcome", both, place), answer):
        raise NotJoined("whoever listens there does not know the group's secret")


async def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        chunk = await asyncio.get_running_loop().sock_recv(end, num_bytes - len(found))
        if not chunk:
            raise EOFError("the other end has closed the connection")
        found += chunk
    return found


def _prepare(end: socket.socket) -> None:
    """Small orders go at once, and a machine that is gone is noticed within 20 s."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000 * KEEPALIVE_S)


class Tie:
    """Both agents' knowledge of each other's part: it lasts as long as the shorter of them."""

    def __init__(self, replica_id: str, end: ipc.AgentEnd) -> None:
        self._replica_id = replica_id
        self._end = end

    @classmethod
    async def over(cls, replica_id: str, connection: socket.socket) -> "Tie":
        """A tie over a connection that has been let in."""
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(replica_id, ipc.AgentEnd(reader, writer))

    async def ended(self) -> ipc.ReplicaFailed:
        """Wait for the end of the other part; why."""
        with suppress(EOFError, ipc.ProtocolError):
            said = await self._end.receive()
            if isinstance(said, ipc.ReplicaFailed):
                return said
        text = "another agent of the group is gone"
        return ipc.ReplicaFailed(self._replica_id, "engine_lost", text)

    def close(self, failure: ipc.ReplicaFailed | None) -> None:
        """This part is over, and why."""
        if failure is not None:
            self._end.send(failure)
        self._end.close()
