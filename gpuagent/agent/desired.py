"""Which desired states this node accepts: never an older one, never another cluster's.

The order is ``(epoch, generation)``: the epoch grows with each leader of the control plane, the
generation with each decision. What was accepted is written and fsynced before it is applied, so a
node that restarts still refuses what it refused before::

    applied (3, 17)   offered (3, 16) -> stale      offered (2, 40) -> stale
                      offered (3, 17) -> accepted   (the same again changes nothing)
                      offered (4, 17) -> accepted   (a new leader repeats the plan)

A lease says how long the node may act on what it read: 15 s, less a fifth, counted from before
the question was sent, on a clock that also runs while the process or the machine sleeps. Whoever
wakes up later first reads again and only then admits new work.
"""

import os
import time
from pathlib import Path

import msgspec

from gpuagent.wire.messages import DesiredState

SAFETY = 0.8  # expire a fifth earlier than the control plane counts


class Mark(msgspec.Struct, frozen=True):
    """The newest desired state that this node ever accepted."""

    cluster_id: str = ""
    epoch: int = 0
    generation: int = 0


class StaleDecision(Exception):
    """The desired state is older than one applied, or not for this node or cluster."""


class DesiredKeeper:
    """The accepted desired state and its persisted mark."""

    def __init__(self, node_id: str, state_dir: Path) -> None:
        self._node_id = node_id
        self._path = state_dir / f"desired-{node_id}.json"  # several nodes may share the folder
        state_dir.mkdir(parents=True, exist_ok=True)
        self.mark = _read_mark(self._path)
        self.state: DesiredState | None = None
        self.refusal = ""  # why the last one offered was not accepted

    def offer(self, offered: DesiredState) -> bool:
        """Accept a desired state; True if it differs from the one applied.

        Raises StaleDecision, and nothing has changed, for one that must not be applied.
        """
        try:
            self._check(offered)
        except StaleDecision as error:
            self.refusal = str(error)
            raise
        self.refusal = ""
        mark = Mark(offered.cluster_id, offered.epoch, offered.generation)
        if mark != self.mark:
            _write_durably(self._path, msgspec.json.encode(mark))
            self.mark = mark
        changed = offered != self.state
        self.state = offered
        return changed

    def _check(self, offered: DesiredState) -> None:
        if offered.node_id != self._node_id:
            raise StaleDecision(f"it is for node {offered.node_id!r}")
        if self.mark.cluster_id and offered.cluster_id != self.mark.cluster_id:
            raise StaleDecision(f"cluster {offered.cluster_id!r} is not {self.mark.cluster_id!r}")
        if (offered.epoch, offered.generation) < (self.mark.epoch, self.mark.generation):
            raise StaleDecision(
                f"({offered.epoch}, {offered.generation}) is older than "
                f"({self.mark.epoch}, {self.mark.generation})"
            )


def _read_mark(path: Path) -> Mark:
    """The persisted mark; a damaged file raises, since starting over could apply an old plan."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Mark)
    except FileNotFoundError:
        return Mark()


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def boot_clock() -> float:
    """Seconds since boot, suspended time included; unlike wall time it never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Permission to admit, renewed by each answer from the bus."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds * SAFETY
        self._expires = 0.0

    def renew(self, asked_at: float) -> None:
        """Extend: the bus has answered a question asked at ``asked_at``."""
        self._expires = max(self._expires, asked_at + self._seconds)

    def is_valid(self, now: float) -> bool:
        return now < self._expires
