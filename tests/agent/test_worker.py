"""The worker's loop: what a failure inside the engine leaves behind."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from gpuagent.agent import ipc
from gpuagent.agent.worker import Worker
from gpuagent.wire.messages import Device, Generate, Sampling
from tests.agent.harness import GIB, spec
from tests.engine.tiny_model import tiny_model


def _broken(*_: object) -> None:
    raise IndexError("of 'my prompt'")


async def _one_generation() -> ipc.StepOutputs:
    """What a worker with a small real model says to one request."""
    ours, theirs = socket.socketpair()
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB)
    config = ipc.WorkerConfig(device, 1, "", file_roots=(str(tiny_model().parent),))
    worker = asyncio.to_thread(Worker(ipc.WorkerEnd(theirs), config).run)
    running = asyncio.create_task(worker)
    end = ipc.AgentEnd(*await asyncio.open_unix_connection(sock=ours))
    end.send(ipc.Load(spec("r", source=f"file://{tiny_model()}", max_model_len=64)))
    said = await end.receive()
    while not isinstance(said, ipc.StepOutputs):
        assert not isinstance(said, ipc.LoadFailed), said
        if isinstance(said, ipc.Loaded):
            request = {"request_id": "req-7", "gateway": "g", "replica_id": "r"}
            asked = Generate(**request, prompt_token_ids=(1, 2, 3), sampling=Sampling(max_tokens=2))
            end.send(ipc.Add(asked))
        said = await end.receive()
    end.send(ipc.Shutdown())
    await running
    theirs.close()
    end.close()
    return said


async def test_a_request_that_the_engine_fails_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line has everything; the client learns the exception's class, not what it quotes."""
    monkeypatch.setattr("gpuagent.engine.engine.sample", _broken)
    with capture_logs() as lines:
        said = await _one_generation()
    (delta,) = said.deltas
    assert (delta.finish_reason, delta.error_code) == ("error", "engine_error")
    assert delta.error_message == "The engine failed: IndexError."
    (line,) = [line for line in lines if line["event"] == "request_failed"]
    assert (line["request"], line["replica"], line["code"]) == ("req-7", "r", "engine_error")
    assert line["exception"].startswith("Traceback") and "in _broken" in line["exception"]
    assert line["exception"].endswith("IndexError: of 'my prompt'\n")
