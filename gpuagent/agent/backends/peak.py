"""How much memory loading a model has taken at its worst: measured, not estimated.

On a GPU torch's allocator knows. On a CPU a thread looks at the process's own memory (anonymous
pages: mapped weight files are the page cache's) every 5 ms and keeps the largest growth::

    with PeakMemory("cpu") as peak:
        engine = TorchEngine.load(...)
    peak.num_bytes          # 542 MB for SmolLM2-135M in float32

Loads come one after the other. What neighbours in the same process touch of their KV pools in the
meantime is counted too, so the figure may be too large, never too small.
"""

import threading
from pathlib import Path
from types import TracebackType

import torch

STATUS = Path("/proc/self/status")
INTERVAL_S = 0.005


class PeakMemory:
    """A context in which memory is watched; ``num_bytes`` afterwards."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._largest = 0
        self.num_bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = int(torch.cuda.memory_allocated())
        else:
            self._before = self._largest = anonymous_bytes()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device == "cuda":
            self._largest = int(torch.cuda.max_memory_allocated())
        else:
            self._done.set()
            self._thread.join()
            self._largest = max(self._largest, anonymous_bytes())
        self.num_bytes = self._largest - self._before

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._largest = max(self._largest, anonymous_bytes())


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's; 0 where the kernel does not say."""
    for line in STATUS.read_text().splitlines() if STATUS.exists() else ():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
