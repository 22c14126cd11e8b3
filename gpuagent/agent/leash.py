"""Runs a command that must not outlive whoever started it: ``python -I leash.py FOLDER COMMAND...``

The starter holds the other end of this process's standard input. Whether it closes it, or dies in
whatever way (SIGKILL included), the kernel closes the pipe, and everything that the command has
started is killed; the folder named first is removed::

    worker  --stdin-->  leash FOLDER COMMAND...          a session of its own
                          COMMAND                        the same again
                            its processes, theirs, ...   adopted here when their parents die

``PR_SET_CHILD_SUBREAPER`` makes orphans this process's children, so none is missed that has left
the command's process group. Should the leash itself be killed, the kernel kills the command. It
exits with the command's code, or 128 plus the number of the signal that ended it.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_leash() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def _end_all() -> None:
    """Kill children until there are none; those of the dead become ours."""
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def run(folder: str, command: list[str]) -> int:
    """Run ``command`` until it ends or standard input does; its exit code."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_leash
    )
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(os.pidfd_open(child.pid), select.POLLIN)
    poll.poll()
    code = child.poll()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    if code is None:
        code = -signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    sys.exit(run(sys.argv[1], sys.argv[2:]))
