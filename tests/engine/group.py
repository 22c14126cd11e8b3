"""A tensor-parallel group for tests: rank 0 in this process, the others in processes of their own.

    with Group(folder, 2, num_blocks=40) as engine: ...

Beneath it is what the agent's workers use: a line to each rank, `Rank`, `Follower`.
"""

import ctypes
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.lines import Line
from gpuagent.engine.ranks import Follower, Rank

START_S = 120.0
PR_SET_PDEATHSIG = 1


class Group:
    """A context: the engine of `size` ranks over a model's folder."""

    def __init__(self, folder: Path, size: int, **options: Any) -> None:
        self._arguments = str(folder), size, options
        self.processes: list[subprocess.Popen[bytes]] = []
        self.is_broken = False  # its ranks are not expected to end by themselves
        self.own_options: dict[str, Any] = {}  # of rank 0, instead of the others'

    def __enter__(self) -> TorchEngine:
        folder, size, options = self._arguments
        lines = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            told = msgspec.json.encode([folder, rank, size, theirs.fileno(), options]).decode()
            command = [sys.executable, "-m", "tests.engine.group", told]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            self.processes.append(process)
            lines.append(Line(ours))
        self.rank = Rank(0, size, lines)
        own = {**options, **self.own_options}
        engine = TorchEngine.load(Path(folder), rank=self.rank, **own)
        self.rank.connect(START_S)
        return engine

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rank.collective.close()
        for line in self.rank.lines:
            line.close()
        for process in self.processes:
            try:
                code = process.wait(20)
            finally:
                process.kill()
            assert code == 0 or error or self.is_broken, f"a rank ended with {code}"


def main() -> None:
    """A rank's process: until rank 0 closes its line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, rank, size, descriptor, options = msgspec.json.decode(sys.argv[1])
    torch.set_num_threads(1)
    line = Line(socket.socket(fileno=descriptor))
    place = Rank(rank, size, [line])
    engine = TorchEngine.load(Path(folder), rank=place, **options)
    place.connect(START_S)
    follower = Follower(engine.executor, line)
    try:
        while True:
            follower.obey(None)
    except EOFError:
        pass


if __name__ == "__main__":
    main()
