"""Few new requests at a time, so that a burst holds up neither itself nor the streams.

Everything runs in one event loop, which by itself works breadth-first: of a hundred requests that
come at once all would be parsed, then all checked and tokenised, then all admitted, before the
first is sent to a node and before any token of a running stream is passed on. So only ``at_once``
are begun in one turn of the loop. The bytes of the others wait, in order and unread, and between
two turns the loop looks at the bus, the ledger and its clients. With ``at_once`` = 2::

    five requests come     turn 1: a b      turn 2: c d, a b durable      turn 3: e, a b sent

The last of a burst is served no later for it (the work is the same), the median one much earlier.
Rejected: to parse all and wait after that. The parsing of 256 heads takes as long as two commits,
and each request that waits costs a future and a switch of tasks more.
"""

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 8


class Turns:
    """``begin`` calls back in this turn of the event loop, or in the first one that has room."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = self._num_left = at_once
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_renewing = False

    def begin(self, callback: Callable[[], object]) -> None:
        if not self._is_renewing:
            self._is_renewing = True
            self._loop.call_soon(self._renew)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            callback()
        else:
            self._waiting.append(callback)

    def _renew(self) -> None:
        self._is_renewing = bool(self._waiting) or self._num_left < self._at_once
        self._num_left = self._at_once
        if self._is_renewing:  # first, so that a callback that raises stops nobody
            self._loop.call_soon(self._renew)
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()
