"""What every backend gives the worker: a loaded engine and what the fleet must know of it."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuagent.engine.request import Engine
from gpuagent.wire.messages import TokenizerBundle

# (state, stage, fraction): state is downloading or loading
Progress = Callable[[str, str, float], None]


def _nothing() -> None:
    """Memory of this process needs no closing."""


@dataclass(frozen=True)
class LoadedModel:
    """An engine ready to step. ``sha256`` is the digest of the weights as measured.

    ``peak_bytes`` is what it takes of the device, measured where that can be done:
    weights, workspace, the KV pool (or what is guaranteed of a shared one) and swap space.

    ``warning``: code and text of why it serves less well than it could; empty if it does not.

    Of an engine in another process, ``close`` ends it, ``pidfd`` can be read once it has ended
    (-1: there is none), and ``describe_end`` then says how.
    """

    engine: Engine
    bundle: TokenizerBundle
    sha256: str
    max_model_len: int
    peak_bytes: int
    workspace_bytes: int = 0
    warning: tuple[str, str] = ("", "")
    close: Callable[[], None] = _nothing
    pidfd: int = -1
    describe_end: Callable[[], str] = str


class LoadError(Exception):
    """The model cannot be served; ``code`` is stable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
