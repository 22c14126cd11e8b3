"""The demo's supervisor, on small real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.entrypoints.processes import supervisor as supervising
from controlplane.entrypoints.processes.supervisor import Child, NotReady, Supervisor

# Serves 200 on the port in argv[1]; with "deaf" it ignores SIGTERM; prints its grandchild's pid.
SERVER = """
import http.server, signal, subprocess, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def server(tmp_path: Path, name: str = "server", *extra: str, wave: int = 1) -> Child:
    port = free_port()
    argv = (sys.executable, "-c", SERVER, str(port), *extra)
    return Child(name, argv, tmp_path / f"{name}.log", f"http://127.0.0.1:{port}/", wave=wave)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def grandchildren(child: Child) -> list[int]:
    return [int(line) for line in child.log.read_text().split()]


async def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.02)


async def test_a_killed_child_is_started_again_and_said_so(tmp_path):
    """kill -9 brings a new pid, a sentence that says why, and ends what the child had started."""
    said: list[str] = []
    supervisor = Supervisor(said.append)
    child = server(tmp_path)
    supervisor.start(child)
    await supervisor.ready("server", 10)
    first = supervisor.pids["server"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pids.get("server", first) != first)
    await supervisor.ready("server", 10)
    assert said == ["server ended (signal 9); starting it again in 0.2 s"]
    assert not alive(grandchildren(child)[0])
    await supervisor.stop()


async def test_the_delay_doubles_while_a_child_keeps_failing(tmp_path):
    """A child that cannot start is tried at growing intervals, and its log is shown."""
    said: list[str] = []
    supervisor = Supervisor(said.append)
    argv = (sys.executable, "-c", "import sys; sys.exit('no disk')")
    supervisor.start(Child("broken", argv, tmp_path / "broken.log", "http://127.0.0.1:1/"))
    with pytest.raises(NotReady, match="no disk"):
        await supervisor.ready("broken", 1.2)
    await supervisor.stop()
    assert [line.rsplit(" in ")[1] for line in said[:3]] == ["0.2 s", "0.4 s", "0.8 s"]
    assert "exit 1" in said[0]


async def test_a_slow_child_has_time_while_it_lives_and_a_dying_one_has_not(tmp_path, monkeypatch):
    """The first is ready after the limit for those that end, and is spoken of meanwhile."""
    monkeypatch.setattr(supervising, "SAY_EVERY_S", 0.3)
    said: list[str] = []
    supervisor = Supervisor(said.append)
    slow = server(tmp_path, "slow")
    program = f"import time; time.sleep(1.5)\n{SERVER}"
    supervisor.start(replace(slow, argv=(slow.argv[0], "-c", program, *slow.argv[3:])))
    await supervisor.ready("slow", 0.5, 60, said.append)
    assert said and all(line.startswith("slow: starting, for ") for line in said)
    argv = (sys.executable, "-c", "import sys; sys.exit('no disk')")
    supervisor.start(Child("broken", argv, tmp_path / "broken.log", "http://127.0.0.1:1/"))
    with pytest.raises(NotReady, match="no disk"):
        await supervisor.ready("broken", 1.0, 60)
    await supervisor.stop()


async def test_stop_ends_the_later_wave_first_and_leaves_nothing(tmp_path):
    """Wave 1 is gone before wave 0 hears of it; grandchildren go too; nothing is restarted."""
    said: list[str] = []
    supervisor = Supervisor(said.append)
    bus, web = server(tmp_path, "bus", wave=0), server(tmp_path, "web")
    for child in (bus, web):
        supervisor.start(child)
        await supervisor.ready(child.name, 10)
    pids = [*supervisor.pids.values(), *grandchildren(bus), *grandchildren(web)]
    assert len(pids) == 4
    await supervisor.stop()
    assert supervisor.pids == {}
    assert said == []
    await until(lambda: not any(alive(pid) for pid in pids), 2)


async def test_a_deaf_child_is_killed_within_the_grace(tmp_path):
    """SIGTERM ignored: SIGKILL after the grace, and that is said."""
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.start(server(tmp_path, "deaf", "deaf"))
    await supervisor.ready("deaf", 10)
    started = time.monotonic()
    await supervisor.stop(grace=1.0)
    assert time.monotonic() - started < 2.5
    assert said == ["deaf did not stop in 1 s: killed"]


def test_children_die_with_a_killed_supervisor(tmp_path):
    """kill -9 of the supervisor itself leaves no child behind (Linux)."""
    program = f"""
import asyncio, sys
from pathlib import Path
from controlplane.entrypoints.processes.supervisor import Child, Supervisor
async def main():
    supervisor = Supervisor(print)
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    supervisor.start(Child("c", argv, Path({str(tmp_path / "c.log")!r}), "http://127.0.0.1:1/"))
    while not supervisor.pids: await asyncio.sleep(0.01)
    print(supervisor.pids["c"], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
