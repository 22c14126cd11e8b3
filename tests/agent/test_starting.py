"""Starting an agent as the README says, and on a bus that is not the system's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.conftest import StartAgent
from tests.agent.harness import Agent, control, eventually
from tests.natsserver import NatsServer

ROOT = Path(__file__).parents[2]


def readme_script() -> str:
    """The commands of "Start one", the last as the shell's own process."""
    section = (ROOT / "gpuagent" / "README.md").read_text().partition("## Start one")[2]
    block = section.partition("```console\n")[2].partition("```")[0].replace("\\\n", "")
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    return "\n".join([*lines[:-1], f"exec {lines[-1]}"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout beside which ``make run`` has written ``.run``."""
    for name in ("manage.py", "controlplane", "gpuagent"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


async def test_the_commands_of_the_readme_start_an_agent(folder: Path) -> None:
    server = NatsServer(folder / ".run")
    (folder / ".run" / "ports.json").write_text(json.dumps({"nats": server.port, "web": 1}))
    server.start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGINE_")}
    environment["PYTHONPATH"] = str(folder)
    try:
        async with control(server) as plane:
            with (folder / "log").open("w") as log:
                shell = ["bash", "-euc", readme_script()]
                agent = subprocess.Popen(shell, cwd=folder, env=environment, stderr=log)
            try:
                await eventually(lambda: "n1" in plane.telemetry, 60)
                assert (await plane.observed("n1")) is not None
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(15)
    finally:
        server.stop()


async def test_a_bus_without_the_systems_buckets_is_named_once(
    nats: NatsServer, start_agent: StartAgent
) -> None:
    """Not every second; and the agent joins as soon as a control plane makes them."""
    agent = start_agent()
    await eventually(lambda: "has none of the system's buckets" in agent.log)
    assert "wrong bus (--nats-url), or the control plane has not started yet" in agent.log
    await eventually(lambda: _num_unwritten(agent) >= 3)
    async with control(nats) as plane:
        await eventually(lambda: "n1" in plane.telemetry)
        while await plane.observed("n1") is None:
            await asyncio.sleep(0.05)
    assert agent.log.count("observed_unwritten") == 1
    assert "no response from stream" not in agent.log


def _num_unwritten(agent: Agent) -> int:
    text = agent.get("/metrics")[1]
    lines = [line for line in text.splitlines() if 'kind="observed_unwritten"' in line]
    return int(float(lines[0].split()[-1])) if lines else 0
