"""Few new requests at a time, so that a burst holds up neither itself nor the streams.

Everything runs in one event loop. A hundred requests that come at once would all be parsed and
tokenised before the first of them is admitted, and before any token of a running stream is passed
on. So only ``at_once`` are begun in one turn of the loop; the others wait in order, and between
two turns the loop looks at the bus, the ledger and its clients. With ``at_once`` = 2::

    five requests come     turn 1: a b      turn 2: c d, and a b are durable      turn 3: e, ...

The last of a burst is served no later for it (the work is the same), the median one much earlier.
"""

import asyncio
from collections import deque

AT_ONCE = 16


class Turns:
    """``await take()`` before beginning something; belongs to the running event loop."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = self._num_left = at_once
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_renewing = False

    async def take(self) -> None:
        """Return in this turn of the loop, or in the first one that has room."""
        if not self._is_renewing:
            self._is_renewing = True
            self._loop.call_soon(self._renew)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self) -> None:
        self._num_left = self._at_once
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # given up meanwhile
                turn.set_result(None)
                self._num_left -= 1
        self._is_renewing = self._num_left < self._at_once
        if self._is_renewing:
            self._loop.call_soon(self._renew)
