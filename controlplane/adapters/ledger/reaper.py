"""Closes the requests whose gateway is gone, so that every intent gets its terminal record.

A gateway proves that it lives by adding one to its ``beat`` every few seconds. The reaper of every
gateway remembers when it last saw each beat change, on its own monotonic clock: no wall clock is
compared with another, so a clock that jumps kills nobody. Worked example, silence 15 s::

    t=0   sees a at beat 7          t=5   a at 8: alive            t=10  a at 8
    t=20  a at 8, unchanged for 15 s: a's live requests end as "unknown" with the tokens that
          were last noted for them, their reservations are gone with that, and a is forgotten

At start-up a process of this host whose pid no longer exists is reaped at once, and so is a
request that its own, living gateway has lost track of for a minute.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from controlplane.adapters.ledger.batch import settle_all
from controlplane.adapters.ledger.budgets import Cursor
from controlplane.adapters.ledger.statements import Statements
from controlplane.adapters.ledger.store import LedgerStore, run
from controlplane.application.failpoints import passing
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
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    async def start(self) -> int:
        """Register this gateway and close what dead processes of this host left; how many."""
        await self._beat()
        return await self._reap(lambda row, _: row[1] == self.host and not _alive(row[2]))

    async def beat(self) -> int:
        """Call every few seconds: prove life, and reap who has been silent; how many closed."""
        await self._beat()
        return await self._reap(self._silent) + await self._reap_forgotten()

    async def _beat(self) -> None:
        row = (self.gateway, self.host, os.getpid())
        await self.store.writer.submit(lambda cursor, sql: cursor.execute(sql.beat, row))

    async def stop(self) -> None:
        """Leave in good order."""
        await self.store.writer.submit(
            lambda cursor, sql: cursor.execute(sql.forget_gateway, (self.gateway,))
        )

    async def _reap(self, is_dead: Callable[[Any, float], bool]) -> int:
        now, at = self.clock.monotonic(), self.clock.now()

        def work(cursor: Cursor, sql: Statements) -> int:
            gateways = run(cursor, sql, "gateways")
            dead = [r[0] for r in gateways if r[0] != self.gateway and is_dead(r, now)]
            rows = run(cursor, sql, "orphans_of_unknown")
            passing("reap.found")
            for gateway in dead:
                rows += run(cursor, sql, "orphans", gateway)
                cursor.execute(sql.forget_gateway, (gateway,))
            passing("reap.forgotten")
            return _close(cursor, sql, rows, at)

        closed: int = await self.store.writer.submit(work)
        passing("reap.closed")
        return closed

    def _silent(self, row: Any, now: float) -> bool:
        gateway, _, _, beat = row
        last, since = self.seen.get(gateway, (None, now))
        if last != beat:
            since = now
        self.seen[gateway] = (beat, since)
        return now - since >= SILENCE_SECONDS

    async def _reap_forgotten(self) -> int:
        """Own requests that nobody here serves: an admission that was given up while it waited."""
        at, live = self.clock.now(), frozenset(self.live())

        def work(cursor: Cursor, sql: Statements) -> int:
            rows = run(cursor, sql, "orphans", self.gateway)
            lost = [r for r in rows if r[0] not in live and at - r[3] >= FORGOTTEN_SECONDS]
            return _close(cursor, sql, lost, at)

        closed: int = await self.store.writer.submit(work)
        return closed


def _close(cursor: Cursor, sql: Statements, rows: list[Any], at: float) -> int:
    terminals = [_unknown(row, at) for row in rows]
    return len(settle_all(cursor, sql, terminals)) if terminals else 0


def _unknown(row: Any, at: float) -> Terminal:
    """Billed for what is known: the noted tokens, and the prompt once there was one of them."""
    request_id, produced, num_prompt_tokens, began = row
    return Terminal(
        request_id=request_id,
        outcome="unknown",
        finish_reason="",
        error_code="gateway_lost",
        node_id="",
        replica_id="",
        num_prompt_tokens=num_prompt_tokens if produced else 0,
        num_cached_tokens=0,
        num_output_tokens=produced,
        ttft_ms=None,
        queue_ms=None,
        duration_ms=max(0.0, at - began) * 1000,
        at=at,
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
