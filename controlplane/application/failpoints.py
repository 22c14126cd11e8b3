"""Named places at which a process can be made to die, to prove that dying there loses nothing.

``ENGINE_FAIL_AT=append.committed:3`` kills the process with SIGKILL when it comes past that place
for the third time: no handler runs, no buffer is flushed, no connection is closed. Without the
variable a place costs one call and one comparison, some 40 ns beside a commit of 100 µs and more.

A place lies between two lines whose order matters, and is named for what has just been done::

    cursor.execute("COMMIT")
    passing("ledger.committed")      # durable, and nobody was told
"""

import itertools
import os
import signal
from collections.abc import Iterator

FAILPOINTS = (
    # a command: decide, append, answer
    "handle.decided",
    "handle.refused",
    "handle.refusal_recorded",
    "handle.appended",
    # a group of appends: the head is locked, then one transaction
    "append.locked",
    "append.placed",
    "append.events",  # SQLite, where each step is a statement
    "append.keys",  # SQLite
    "append.head",  # PostgreSQL passes it only while several processes write
    "append.committed",
    "append.answered",
    "lease.acquired",
    # one batch of the read model, and its rebuilding
    "project.read",
    "project.checkpoint",
    "project.rows",
    "project.saved",
    "rebuild.folded",
    "rebuild.deleted",
    "rebuild.rows",
    "rebuild.checkpoint",
    "rebuild.saved",
    # desired state onto the bus
    "publish.compared",
    "publish.written",
    "publish.delivered",
    # a batch of admissions and settlements
    "ledger.begun",
    "settle.positions",
    "settle.rows",
    "settle.usage",
    "settle.text",
    "admit.checked",
    "admit.rows",
    "ledger.applied",
    "ledger.committed",
    "ledger.answered",
    "seal.signed",
    "seal.inserted",
    "seal.stored",
    "seal.copied",
    "reap.found",
    "reap.answered",
    "reap.forgotten",
    "reap.closed",
    # a tenant's text is erased: the event, then the key
    "erase.recorded",
    "erase.destroyed",
    # what is old enough: into an archive, read back, out of here, noted
    "retain.archived",
    "retain.verified",
    "retain.marked",
    "retain.moved",
    "retain.noted",
    "retain.text",
)

_armed: str | None = None
_passings: Iterator[int] = iter(())


def arm(fail_at: str) -> None:
    """``name:n`` arms that place, ``""`` none; raises ValueError for what names no place."""
    global _armed, _passings
    name, _, number = fail_at.partition(":")
    if fail_at and (name not in FAILPOINTS or not number.isdecimal() or int(number) < 1):
        raise ValueError(f"ENGINE_FAIL_AT is name:n, n from 1, name one of {', '.join(FAILPOINTS)}")
    _armed, _passings = name or None, itertools.count(1 - int(number or 1))


def passing(name: str) -> None:
    """Die here if this is the armed place and the armed number of times; else nothing."""
    if _armed is None:
        return
    if _armed == name and next(_passings) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
