"""What the demo keeps in its folder, without starting anything."""

import io
import itertools
import os
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from controlplane.entrypoints.processes.demo import (
    AlreadyRunning,
    Demo,
    Options,
    curl_line,
    kept_ports,
    locked,
)
from controlplane.entrypoints.processes.demo_seed import Secrets
from controlplane.entrypoints.processes.first_token import first_token, loading, message_of
from gpuagent.agent.config import read_settings
from tests.e2e.product import ROOT


def test_one_folder_serves_one_demo(tmp_path):
    """The second is refused and told who holds the folder; afterwards it is free again."""
    refused = pytest.raises(AlreadyRunning, match=r"process \d+.*ENGINE_DATA_DIR")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_what_it_keeps_is_for_its_user_only(tmp_path):
    """The database holds key hashes and sessions, the logs hold addresses: no one else reads them,
    also in a folder that was there before and is open to all."""
    before = os.umask(0o022)
    try:
        tmp_path.chmod(0o755)
        with locked(tmp_path):
            (tmp_path / "engine.sqlite3").touch()
            command = [sys.executable, "-c", "open('child.log', 'w')"]
            subprocess.run(command, cwd=tmp_path, check=True)
        for name in ("demo.lock", "engine.sqlite3", "child.log"):
            assert (tmp_path / name).stat().st_mode & 0o077 == 0, name
    finally:
        os.umask(before)


def test_ports_stay_while_they_are_free(tmp_path):
    """The same names get the same ports again; a taken one is replaced, a new one added."""
    file = tmp_path / "ports.json"
    first = kept_ports(file, ["web", "gateway"])
    assert len(set(first.values())) == 2
    assert kept_ports(file, ["web", "gateway"]) == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first["web"]))
        taken.listen()
        second = kept_ports(file, ["web", "gateway", "nats"])
    assert second["gateway"] == first["gateway"]
    assert second["web"] != first["web"]
    assert len(set(second.values())) == 3


def test_the_greeting_breaks_no_path_into_lines(tmp_path):
    written = io.StringIO()
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    demo = Demo(Options(folder, "smollm2"), Console(file=written, width=80))
    demo._greet(demo._ready_document(Secrets("key", "password", "token")), 1.0)
    assert f"{folder / 'logs'}, " in written.getvalue()
    assert f"{folder / 'ready.json'}." in written.getvalue()


@pytest.mark.parametrize(
    ("num", "devices", "shares"),
    [(1, "", [["auto", "1/1"]]), (2, "", [["auto", "1/2"], ["auto", "2/2"]]),
     (2, "cpu:1GiB", [["cpu:1GiB", "1/2"], ["cpu:1GiB", "2/2"]])],
)  # fmt: skip
def test_several_agents_divide_the_machine(tmp_path, num, devices, shares):
    """As each reads its own command line."""
    demo = Demo(Options(tmp_path, "smollm2", num, devices), Console(file=io.StringIO()))
    lines = [demo._agent(number).argv[3:] for number in range(1, num + 1)]
    read = [read_settings(line) for line in lines]
    assert [[one.devices, one.share] for one in read] == shares


def test_without_django_the_command_line_says_what_to_run():
    """As when somebody takes the system's Python: -S leaves out what is installed beside it."""
    command = [sys.executable, "-S", "manage.py", "apply"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and ".venv/bin/python manage.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_why_there_is_no_token_yet_is_said_in_a_sentence():
    """The message of an OpenAI error, or the body where it is none."""
    assert message_of(b'{"error": {"message": "loading"}}') == "loading"
    assert message_of(b"<html>") == "<html>"
    assert message_of(b'{"error": "x"}') == '{"error": "x"}'


def replica(state: str, reason: str = "", node: str = "node-1") -> dict[str, str]:
    return {"state": state, "reason": reason, "node_id": node}


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ([], "m: waiting for a place"),
        ([replica("pending")], "m: waiting for node-1 to begin"),
        ([replica("downloading")], "m: downloading and converting on node-1"),
        ([replica("failed", "no disk")], "m: failed on node-1: no disk"),
        (
            [replica("loading", node="node-2"), replica("loading")],
            "m: loading on node-1; loading on node-2",
        ),
        ([replica("failed"), replica("ready", node="node-2")], None),
    ],
)
def test_what_a_start_waits_for_is_said_in_words(replicas, said):
    assert loading("m", replicas) == said


async def test_a_start_has_time_as_long_as_it_says_something_new():
    """Ten times the limit in all, and each thing once; what only repeats itself is given up."""
    spoken: list[str] = []
    news = (f"step {number // 2}" for number in range(20))
    await first_token(lambda: next(news, None), spoken.append, stall_s=0.5)
    assert spoken == [f"step {number}" for number in range(10)]
    rounds = itertools.cycle(["loading", "failed: no disk"])
    with pytest.raises(TimeoutError, match="nothing new in 0 s"):
        await first_token(lambda: next(rounds), spoken.append, stall_s=0.5)


def test_the_curl_line_is_a_whole_command():
    """It can be pasted: address, key, model and a streamed question."""
    line = curl_line({"api_url": "http://h:1", "api_key": "sk_a.b", "model": "m"})
    assert "http://h:1/v1/chat/completions" in line
    assert "Bearer sk_a.b" in line
    assert '"stream": true' in line
