"""Where the ranks of a group leave their addresses for each other before their first sum.

torch.distributed asks for a store: a table that all ranks see. Rank 0 has it, and a thread for each
other rank, which asks over its line; torch's own TCPStore would listen on the network and let in
whoever comes. The threads end when all have met, and the lines carry orders from then on. Two
ranks::

    rank 0   set 0/a          get 1/a (waits)         found: connects
    rank 1   Put(1/a) ->      Await(0/a) ->   <- Found(...)  connects   Met ->
"""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from gpuagent.engine.lines import Add, Await, Found, Line, Met, Order, Put, framed


class Board(dist.Store):
    """Rank 0's table. What is not found in time is a RuntimeError, torch's own kind."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure = ""

    # --- what torch calls, here or on behalf of another rank ----------------------------------
    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch: bytes
        """Keep a value."""
        with self._changed:
            self._entries[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """A value, waited for."""
        return self.values([key])[0]

    def add(self, key: str, amount: int) -> int:
        """The sum so far."""
        with self._changed:
            total = int(self._entries.get(key, b"0")) + amount
            self._entries[key] = str(total).encode()
            self._changed.notify_all()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there."""
        self.values(keys)

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """All of them, waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.check(keys), self._timeout_s)
            if self._failure or not self.check(keys):
                raise RuntimeError(self._failure or f"not in {self._timeout_s:g} s: {list(keys)}")
            return [self._entries[key] for key in keys]

    # --- the other ranks ----------------------------------------------------------------------
    def serve(self, line: Line) -> None:
        """Answer one rank until it has met the others; its loss is that of the group."""
        try:
            while not isinstance(order := line.next(self._timeout_s), Met):
                if answer := self._answered(order):
                    line.send(framed(answer))
        except (EOFError, OSError, RuntimeError) as error:
            self.fail(f"another rank was not ready: {error}")

    def _answered(self, order: Order | None) -> Found | None:
        match order:
            case Put(key=key, value=value):
                self.set(key, value)
                return None
            case Add(key=key, amount=amount):
                return Found([str(self.add(key, amount)).encode()])
            case Await(keys=keys):
                return Found(self.values(keys))
        raise RuntimeError(f"it said nothing for {self._timeout_s:g} s")

    def fail(self, reason: str) -> None:
        """Whoever waits, waits in vain."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()


class BoardElsewhere(dist.Store):
    """The same table for another rank, over its line; once `over`, nothing is asked any more."""

    def __init__(self, line: Line, timeout_s: float) -> None:
        super().__init__()
        self._line = line
        self._timeout_s = timeout_s
        self.is_over = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch: bytes
        """Keep a value."""
        self._line.send(framed(Put(key, bytes(value))))

    def get(self, key: str) -> bytes:
        """A value, waited for."""
        return self._asked(Await([key]))[0]

    def add(self, key: str, amount: int) -> int:
        """The sum so far."""
        return int(self._asked(Add(key, amount))[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Asked by nothing before the first sum; nothing that is put later is seen here."""
        return False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there."""
        self._asked(Await(list(keys)))

    def over(self) -> None:
        """All have met."""
        self.is_over = True
        self._line.send(framed(Met()))

    def _asked(self, order: Order) -> list[bytes]:
        if self.is_over:
            raise RuntimeError("the ranks have met, and the line is for orders")
        self._line.send(framed(order))
        answer = self._line.next(self._timeout_s)
        if not isinstance(answer, Found):
            raise RuntimeError(f"rank 0 was not ready within {self._timeout_s:g} s")
        return answer.values
