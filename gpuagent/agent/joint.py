"""A node's part of a group that is on several nodes: the parts begin and end together.

The agent of rank 0 gathers the others (``fabric``) before it starts a worker, and gives up after a
time. The others wait to be let in for as long as it takes, since it is rank 0's agent that says
when the group is tried again; if both waited for a time of their own they might never meet::

    n1  meet                  n2  meet                  rank 1's line and tie are there
    n1  worker of rank 0      n2  worker of rank 1      they load, meet, and n1 reports it ready
                              n2  its worker dies       over, engine_lost: n2 closes the tie
    n1  over: "on another node: the engine worker was ended by signal 9"; ends rank 0
    n1  meet                  n2  meet                  both begin anew

A node that has no room for its part, or refuses it, declines: each time that rank 0's agent gathers
it is told why, and says so of the replica.
"""

import asyncio
import contextlib
import socket
import time
from typing import Any

from gpuagent.agent import fabric, ipc
from gpuagent.agent.fabric import Fabric, Tie
from gpuagent.wire.messages import GroupPart, ReplicaSpec

ENDED = "group_ended"  # of a part whose group was ended elsewhere
ELSEWHERE = "on another node: "
REJOIN_S, DECLINE_S = 0.5, 5.0


class Joint:
    """This node's part of a group over several, from the meeting to the end of any part.

    ``over`` is done once any part has ended, with why; ``is_told``: this node knows already.
    ``declined``: the code with which it declines, if it does.
    """

    def __init__(self, network: Fabric, spec: ReplicaSpec, start_s: float) -> None:
        assert spec.group is not None
        self.spec = spec
        self.is_told = False
        self.declined = ""
        self.over: asyncio.Future[ipc.ReplicaFailed] = asyncio.get_running_loop().create_future()
        self._part: GroupPart = spec.group
        self._fabric = network
        self._start_s = start_s
        self._ties: list[Tie] = []
        self._watches: list[asyncio.Task[None]] = []

    @property
    def is_led(self) -> bool:
        """Whether it works for a rank 0 elsewhere, and must until that says it is over."""
        return bool(self._ties) and not self.spec.leads and not self.over.done()

    def end(self, code: str, reason: str) -> None:
        """The part of this node is over."""
        if not self.over.done():
            self.over.set_result(ipc.ReplicaFailed(self.spec.replica_id, code, reason))

    async def meet(self) -> dict[int, socket.socket]:
        """The lines to ranks of other nodes, or of this node's ranks to rank 0; none of them if it
        was over before."""
        return await (self._gather() if self.spec.leads else self._join())

    def close(self) -> None:
        """Let the others know that it is over, and why."""
        for watch in self._watches:
            watch.cancel()
        for tie in self._ties:
            tie.close(self.over.result() if self.over.done() else None)

    # --- rank 0's node ------------------------------------------------------------------------
    async def _gather(self) -> dict[int, socket.socket]:
        """Wait for a line and a tie from each of the other ranks."""
        name = self.spec.replica_id
        ranks = [r for r in range(self.spec.tensor_parallel) if r not in self._part.ranks]
        rank_of = {fabric.line_of(name, rank): rank for rank in ranks}
        ties = {fabric.tie_of(name, rank) for rank in ranks}
        gathering = self._fabric.gather(self._part.secret, {*rank_of, *ties})
        found: dict[str, socket.socket | None] = {}
        give_up = time.monotonic() + self._start_s
        while len(found) < len(gathering.places):
            came = await self._before_the_end(gathering, give_up - time.monotonic())
            if came is None:
                missing = sorted(rank for name, rank in rank_of.items() if name not in found)
                text = f"of the ranks on other nodes {missing} did not come"
                self.end("group_incomplete", f"{text} within {self._start_s:g} s")
                break
            place, connection = came
            if place in ties:
                await self._tied(connection)
            elif former := found.get(place):
                former.close()
            found[place] = None if place in ties else connection
        self._fabric.dismiss(gathering)
        held = {rank_of[place]: end for place, end in found.items() if end}
        return self._blocking(held)

    async def _before_the_end(
        self, gathering: fabric.Gathering, timeout_s: float
    ) -> tuple[str, socket.socket] | None:
        """The next connection; None if none comes in time, or it is over."""
        coming = asyncio.ensure_future(gathering.came.get())
        waits: set[asyncio.Future[Any]] = {coming, self.over}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if coming.done() and not self.over.done():
            return coming.result()
        coming.cancel()
        return None

    # --- the other nodes ----------------------------------------------------------------------
    async def _join(self) -> dict[int, socket.socket]:
        """Ask to be let in until it is so."""
        while not self.over.done():
            try:
                return self._blocking(await self._joined())
            except (fabric.NotJoined, OSError):
                await asyncio.wait({self.over}, timeout=REJOIN_S)
        return {}

    async def _joined(self) -> dict[int, socket.socket]:
        """A line for each rank, and the ties; raises NotJoined or OSError, with none of them."""
        lines: dict[int, socket.socket] = {}
        ties: list[socket.socket] = []
        try:
            for rank in self._part.ranks:
                lines[rank] = await self._connected(fabric.line_of(self.spec.replica_id, rank))
                ties.append(await self._connected(fabric.tie_of(self.spec.replica_id, rank)))
        except (fabric.NotJoined, OSError):
            for end in (*lines.values(), *ties):
                end.close()
            raise
        for tie in ties:
            await self._tied(tie)
        return lines

    async def decline(self, code: str, reason: str) -> None:
        """There is no part here now: tell rank 0's agent, whenever it gathers, until it is over."""
        place = fabric.tie_of(self.spec.replica_id, self._part.ranks[0])
        failure = ipc.ReplicaFailed(self.spec.replica_id, code, reason)
        while not self.over.done():
            with contextlib.suppress(fabric.NotJoined, OSError):
                connection = await self._connected(place)
                (await Tie.over(self.spec.replica_id, connection)).close(failure)
            await asyncio.wait({self.over}, timeout=DECLINE_S)

    async def _connected(self, place: str) -> socket.socket:
        return await fabric.join(self._part.address, self._part.secret, place)

    # --- both ---------------------------------------------------------------------------------
    async def _tied(self, connection: socket.socket) -> None:
        tie = await Tie.over(self.spec.replica_id, connection)
        self._ties.append(tie)
        self._watches.append(asyncio.create_task(self._watch(tie)))

    async def _watch(self, tie: Tie) -> None:
        failure = await tie.ended()
        reason = ELSEWHERE + failure.message.removeprefix(ELSEWHERE)  # rank 0's node passes it on
        self.end(failure.code if self.spec.leads else ENDED, reason)

    def _blocking(self, lines: dict[int, socket.socket]) -> dict[int, socket.socket]:
        """As workers use them; none is left open if it is over."""
        for end in lines.values():
            end.setblocking(True)
            if self.over.done():
                end.close()
        return {} if self.over.done() else lines
