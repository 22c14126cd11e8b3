"""What the demo keeps in its folder, without starting anything."""

import io
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
    message_of,
)
from controlplane.entrypoints.processes.demo_seed import Secrets
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


def test_the_curl_line_is_a_whole_command():
    """It can be pasted: address, key, model and a streamed question."""
    line = curl_line({"api_url": "http://h:1", "api_key": "sk_a.b", "model": "m"})
    assert "http://h:1/v1/chat/completions" in line
    assert "Bearer sk_a.b" in line
    assert '"stream": true' in line
