"""Keeps a handful of processes running: start, ready, restart, stop, and nothing left behind.

Each child is its own session and process group, so Ctrl-C at a terminal reaches only the
supervisor, and what a child left behind can be ended with it. On Linux the kernel also ends every
child if the supervisor itself is killed (PR_SET_PDEATHSIG), so not even ``kill -9`` leaves one.

Worked example, ``gateway`` dying twice soon after its start::

    gateway ended (signal 9); starting it again in 0.2 s
    gateway ended (exit 1); starting it again in 0.4 s        # doubles, to 10 s at most
                                                              # 0.2 s again after 5 s of health

``stop`` ends the waves in reverse: the processes first, then the bus that they say goodbye over.
Systemd or an existing supervisor would do this too, but neither is there on a fresh machine.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0
STEADY_AFTER = 5.0
SAY_EVERY_S = 30.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """What to run. ``ready_url`` answers 200 once it serves; ``env`` comes on top of ours."""

    name: str
    argv: Sequence[str]
    log: Path
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    wave: int = 1


class NotReady(Exception):
    """A child did not become ready in time; the message ends with the end of its log."""


class Supervisor:
    """``say`` gets each sentence worth a person's attention, ``changed`` the pids by name."""

    def __init__(
        self,
        say: Callable[[str], None],
        changed: Callable[[dict[str, int]], None] = lambda pids: None,
    ) -> None:
        self._say, self._changed = say, changed
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._children: dict[str, Child] = {}
        self._ended: set[str] = set()  # the names of those that were started again
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def start(self, child: Child) -> None:
        """Run ``child`` from now on, again whenever it ends, until ``stop``."""
        self._children[child.name] = child
        self._keepers[child.name] = asyncio.create_task(self._keep(child), name=child.name)

    async def ready(
        self,
        name: str,
        timeout: float,
        slow: float = 0.0,
        waiting: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Return once the child answers; raise NotReady after ``timeout`` seconds, or after
        ``slow`` ones if that is longer and it is still the process that was started first: it is
        at work then. ``waiting`` is told every ``SAY_EVERY_S``."""
        child, began, said = self._children[name], time.monotonic(), 0
        while (waited := time.monotonic() - began) < self._limit(name, timeout, slow):
            if name in self._running and await asyncio.to_thread(answers, child.ready_url):
                return
            if waited >= (said + 1) * SAY_EVERY_S:
                said += 1
                waiting(f"{name}: starting, for {waited:.0f} s so far")
            await asyncio.sleep(0.05)
        raise NotReady(f"{name} was not ready after {waited:.0f} s\n{tail(child.log)}")

    def _limit(self, name: str, timeout: float, slow: float) -> float:
        return timeout if name in self._ended else max(timeout, slow)

    async def stop(self, grace: float = 8.0) -> None:
        """SIGTERM, wave by wave, ``grace`` seconds in all; then SIGKILL for whatever is left."""
        self._stopping.set()
        deadline = time.monotonic() + grace
        waves = sorted({child.wave for child in self._children.values()}, reverse=True)
        for left, wave in zip(range(len(waves), 0, -1), waves, strict=True):
            # The last wave keeps at least a second for itself.
            seconds = max(1.0, deadline - time.monotonic() - (left - 1))
            await self._stop_wave(wave, seconds)

    async def _stop_wave(self, wave: int, seconds: float) -> None:
        names = [child.name for child in self._children.values() if child.wave == wave]
        for name in names:
            if name in self._running:
                with contextlib.suppress(ProcessLookupError):
                    self._running[name].terminate()
        keepers = [self._keepers[name] for name in names]
        _, late = await asyncio.wait(keepers, timeout=seconds)
        for keeper in late:
            self._say(f"{keeper.get_name()} did not stop in {seconds:.0f} s: killed")
            kill_group(self._running[keeper.get_name()].pid)
        await asyncio.gather(*keepers)

    async def _keep(self, child: Child) -> None:
        delay = FIRST_DELAY
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            self._ended.add(child.name)
            if time.monotonic() - started >= STEADY_AFTER:
                delay = FIRST_DELAY
            self._say(f"{child.name} ended ({how(code)}); starting it again in {delay:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(delay * 2, LONGEST_DELAY)

    async def _run_once(self, child: Child) -> int:
        process = await spawn(child)
        self._running[child.name] = process
        self._changed(self.pids)
        try:
            return await process.wait()
        finally:
            del self._running[child.name]
            kill_group(process.pid)  # what the child itself had started


async def spawn(child: Child) -> asyncio.subprocess.Process:
    """Start ``child``, its output appended to its log."""
    child.log.parent.mkdir(parents=True, exist_ok=True)
    with child.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *child.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **child.env},
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()) if sys.platform == "linux" else None,
        )


def die_with_parent(parent: int) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel kills this process when ``parent`` ends, however it ends."""
    libc = ctypes.CDLL(None)

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended between the fork and the line above
            os._exit(1)

    return arm


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str) -> bool:
    """Does ``url``, on this machine, answer 200 within a second?"""
    try:
        with _direct.open(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit {code}"


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for the person who has to find out why."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([f"--- {log}", *text.splitlines()[-lines:]])
