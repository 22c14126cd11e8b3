"""Closes the requests whose gateway is gone, so that every intent gets its terminal record.

A gateway proves that it lives by adding one to its ``beat`` every few seconds. The reaper of every
gateway remembers when it last saw each beat change, on its own monotonic clock: no wall clock is
compared with another, so a clock that jumps kills nobody. Then the nodes are asked to end what the
dead gateway had asked for, and what it came to (``application.orphans``). With a silence of 15 s::

    t=0   sees a at beat 7          t=5   a at 8: alive            t=10  a at 8
    t=20  a at 8, unchanged for 15 s: dead. n1 answers for a's r1 and r2, n2 not at all; r1 is
          closed with its 231 tokens, r2 had no token on n1 and may have run on n2
    t=45  n2 has said nothing for 25 s: r2 is closed with what a had noted of it. Nothing is left
          of a, so it is forgotten

Every gateway reaps. Any number of them may ask the same, at any time: a node answers the same, and
of two that close a request one finds it closed. So does a gateway that was only paused, or it
settles its request first and the reaper finds nothing; a beat that has moved again saves the rest.

At start-up a process of this host whose pid no longer exists is dead at once, and a request that
its own, living gateway has lost track of for a minute is closed in the same way.
"""

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from controlplane.adapters.ledger.batch import settle_all
from controlplane.adapters.ledger.budgets import Cursor
from controlplane.adapters.ledger.statements import Statements
from controlplane.adapters.ledger.store import LedgerStore, run
from controlplane.application.failpoints import passing
from controlplane.application.orphans import PATIENCE_S, Answers, Nodes, Orphan, end_of, is_certain
from controlplane.application.ports import Clock, Terminal

SILENCE_SECONDS = 15.0
FORGOTTEN_SECONDS = 60.0


@dataclass
class Reaper:
    """``live`` gives the request ids that this gateway is serving now."""

    store: LedgerStore
    gateway: str
    host: str
    clock: Clock
    live: Callable[[], Collection[str]]
    nodes: Nodes
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _dead: dict[str, int] = field(default_factory=dict)  # gateway -> the beat it died at
    _asked: dict[str, float] = field(default_factory=dict)  # gateway -> since when nodes are asked
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> int:
        """Register this gateway and close what dead processes of this host left; how many."""
        await self.register()
        return await self.reap_host()

    async def register(self) -> None:
        """Call every few seconds: the others know by it that this gateway lives."""
        row = (self.gateway, self.host, os.getpid())
        await self.store.writer.submit(lambda cursor, sql: cursor.execute(sql.beat, row))

    async def reap_host(self) -> int:
        """Close what dead processes of this host left; how many."""
        return await self._reap(lambda row, _: row[1] == self.host and not _alive(row[2]))

    async def beat(self) -> int:
        """``register`` and ``reap``, one after the other."""
        await self.register()
        return await self.reap()

    async def reap(self) -> int:
        """Call every few seconds: close what the silent and the forgotten left; how many. Beside
        ``register``, since slow nodes may hold this up for longer than a gateway may be silent."""
        closed = await self._reap(self._silent)
        async with self._lock:
            return closed + await self._reap_forgotten()

    async def stop(self) -> None:
        """Leave in good order."""
        await self.store.writer.submit(
            lambda cursor, sql: cursor.execute(sql.forget_gateway, (self.gateway,))
        )

    async def _reap(self, is_dead: Callable[[Any, float], bool]) -> int:
        async with self._lock:
            orphans = await self._find(is_dead)
            by_gateway: dict[str, list[Orphan]] = {}
            for one in orphans:
                by_gateway.setdefault(one.gateway, []).append(one)
            closed = sum(await asyncio.gather(*map(self._close, by_gateway.values())))
            theirs = {self.gateway, *(one.gateway for one in orphans)}
            self._asked = {name: at for name, at in self._asked.items() if name in theirs}
        passing("reap.closed")
        return closed

    async def _find(self, is_dead: Callable[[Any, float], bool]) -> list[Orphan]:
        """The live requests of the dead; the dead that have none are forgotten."""
        now = self.clock.monotonic()

        def work(cursor: Cursor, sql: Statements) -> list[Orphan]:
            gateways = [row for row in run(cursor, sql, "gateways") if row[0] != self.gateway]
            self._dead = {r[0]: r[3] for r in gateways if self._is_dead(r) or is_dead(r, now)}
            found = [Orphan(*row) for row in run(cursor, sql, "orphans_of_unknown")]
            for gateway in self._dead:
                found += (Orphan(*row) for row in run(cursor, sql, "orphans", gateway))
            passing("reap.found")
            for gateway in self._dead.keys() - {one.gateway for one in found}:
                cursor.execute(sql.forget_gateway, (gateway,))
            return found

        found: list[Orphan] = await self.store.writer.submit(work)
        return found

    def _is_dead(self, row: Any) -> bool:
        """Found dead before, and its beat has not moved since."""
        return bool(self._dead.get(row[0]) == row[3])

    def _silent(self, row: Any, now: float) -> bool:
        gateway, _, _, beat = row
        last, since = self.seen.get(gateway, (None, now))
        if last != beat:
            since = now
        self.seen[gateway] = (beat, since)
        return now - since >= SILENCE_SECONDS

    async def _close(self, orphans: list[Orphan]) -> int:
        """Close what the nodes can tell of, or whose time to be told of is over; all of one."""
        gateway = orphans[0].gateway
        since = self._asked.setdefault(gateway, self.clock.monotonic())
        answers = await self.nodes.close(gateway, [one.request_id for one in orphans])
        passing("reap.answered")
        is_late = self.clock.monotonic() - since >= PATIENCE_S
        ends = _ends(orphans, answers, is_late, self.clock.now())
        beat = self._dead.get(gateway)

        def work(cursor: Cursor, sql: Statements) -> int:
            beats = {row[0]: row[3] for row in run(cursor, sql, "gateways")}
            if gateway != self.gateway and beats.get(gateway) != beat:
                return 0  # it lives again, and settles what it had itself
            closed = len(settle_all(cursor, sql, ends)) if ends else 0
            if gateway in self._dead and not run(cursor, sql, "orphans", gateway):
                cursor.execute(sql.forget_gateway, (gateway,))
            passing("reap.forgotten")
            return closed

        closed: int = await self.store.writer.submit(work)
        return closed

    async def _reap_forgotten(self) -> int:
        """Own requests that nobody here serves: an admission that was given up while it waited."""
        at, live = self.clock.now(), frozenset(self.live())
        rows = await self.store.writer.submit(
            lambda cursor, sql: run(cursor, sql, "orphans", self.gateway)
        )
        own = [Orphan(*row) for row in rows]
        lost = [o for o in own if o.request_id not in live and at - o.began >= FORGOTTEN_SECONDS]
        if lost:
            return await self._close(lost)
        self._asked.pop(self.gateway, None)
        return 0


def _ends(orphans: list[Orphan], answers: Answers, is_late: bool, at: float) -> list[Terminal]:
    """Of those that need not be asked about again."""
    told = [(one, answers.produced.get(one.request_id, [])) for one in orphans]
    is_final = answers.is_complete or is_late
    return [
        end_of(one, produced, answers.is_complete, at)
        for one, produced in told
        if is_final or is_certain(produced)
    ]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
