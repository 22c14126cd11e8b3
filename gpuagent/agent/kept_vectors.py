"""How many vectors of ended requests a node keeps, to send them again should a frame be lost.

Tokens are few bytes and are kept for a minute whatever they are. Vectors are not: ten thousand a
second of 4 KB each would be 2.4 GB by then. So the oldest give way, and whoever still asks for one
of those is told that it is lost, upon which its gateway has it computed anew::

    limit 3 KB    a ends with 2 KB   b with 1 KB   c with 1 KB: a's are dropped
    resend a      error engine_lost      resend c      the vectors
"""

from collections import deque

from gpuagent.agent.generation import Generation

LIMIT_BYTES = 256 << 20


class KeptVectors:
    """Ended generations with vectors, the oldest first."""

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._kept: deque[Generation] = deque()
        self.num_bytes = 0

    def keep(self, generation: Generation) -> None:
        """It has ended; older ones may lose their vectors for it, never it itself."""
        if size := _size(generation):
            self._kept.append(generation)
            self.num_bytes += size
        while self.num_bytes > self._limit and len(self._kept) > 1:
            oldest = self._kept.popleft()
            self.num_bytes -= _size(oldest)
            text = "its vectors are no longer kept"
            oldest.terminal = oldest.ending("error", "engine_lost", text)

    def forget(self, generation: Generation) -> None:
        """It is kept no longer; they are forgotten in the order in which they ended."""
        if self._kept and self._kept[0] is generation:
            self.num_bytes -= _size(self._kept.popleft())


def _size(generation: Generation) -> int:
    terminal = generation.terminal
    return sum(map(len, terminal.embeddings)) if terminal else 0
