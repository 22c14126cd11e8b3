"""The end of a request on record: exactly once, and before the client is told that it is over.

A settlement that the store refuses is tried again for ``patience_s`` with the client waiting. If
it still fails, the client is told ``audit_unavailable`` and the record stays here, tried again
every second: what was produced is known only to this process, so giving up would let the reaper
close the request with a guess. A captured text is not kept that long, nor are the explanations of
its dispatches: thousands of records are a few megabytes, and their texts would be gigabytes.
"""

import asyncio
from dataclasses import replace

from controlplane.application.ports import AuditUnavailable, Ledger, Terminal

FIRST_PAUSE_S = 0.05
MAX_UNSETTLED = 10_000


class Settler:
    """``unsettled`` holds the records that the store has not taken yet, by request id."""

    def __init__(self, ledger: Ledger, patience_s: float = 5.0) -> None:
        self._ledger, self._patience_s = ledger, patience_s
        self.unsettled: dict[str, Terminal] = {}

    async def settle(self, terminal: Terminal) -> bool:
        """Durable when it returns; False if somebody else had settled it. AuditUnavailable."""
        try:
            return await self._ledger.settle(terminal)
        except AuditUnavailable:
            self._keep(terminal)
        return await self._insist(terminal)

    async def _insist(self, terminal: Terminal) -> bool:
        pause = FIRST_PAUSE_S
        waited = 0.0
        while True:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, pause * 2
            try:
                return await self._retry(terminal)
            except AuditUnavailable:
                if waited + pause > self._patience_s:
                    raise

    async def _retry(self, terminal: Terminal) -> bool:
        first = await self._ledger.settle(terminal)
        self.unsettled.pop(terminal.request_id, None)
        return first

    def _keep(self, terminal: Terminal) -> None:
        if len(self.unsettled) < MAX_UNSETTLED:
            self.unsettled[terminal.request_id] = replace(terminal, text=None, dispatches=())

    async def retry_unsettled(self) -> int:
        """Call every second: try what is left once more; how many are still left."""
        for terminal in list(self.unsettled.values()):
            try:
                await self._retry(terminal)
            except AuditUnavailable:
                break
        return len(self.unsettled)
