"""The worker's loop: what a failure inside the engine leaves behind."""

import pytest
from structlog.testing import capture_logs

from gpuagent.agent import ipc
from gpuagent.agent.backends.base import LoadError
from gpuagent.agent.worker import _Load, _load, _LoadDone, _ThreadMessage
from gpuagent.wire.messages import Device
from tests.agent.harness import GIB, spec
from tests.agent.one_worker import one_generation
from tests.engine.tiny_model import tiny_model


def _broken(*_: object) -> None:
    raise IndexError("of 'my prompt'")


async def test_a_request_that_the_engine_fails_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line has everything; the client learns the exception's class, not what it quotes."""
    monkeypatch.setattr("gpuagent.engine.engine.sample", _broken)
    with capture_logs() as lines:
        (delta,) = await one_generation(f"file://{tiny_model()}")
    assert (delta.finish_reason, delta.error_code) == ("error", "engine_error")
    assert delta.error_message == "The engine failed: IndexError."
    (line,) = [line for line in lines if line["event"] == "request_failed"]
    assert (line["request"], line["replica"], line["code"]) == ("req-7", "r", "engine_error")
    assert line["exception"].startswith("Traceback") and "in _broken" in line["exception"]
    assert line["exception"].endswith("IndexError: of 'my prompt'\n")


def test_a_load_that_is_unwanted_ends_at_its_next_sign_of_progress() -> None:
    """Minutes of a download are not spent on a replica that has been unloaded."""
    asked = spec("r", source="simulated://m?load_ms=600000")
    load = _Load(asked, ipc.Progress("r", "loading", "", 0.0), unwanted=True)
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB)
    said: list[_ThreadMessage] = []
    _load(load, ipc.WorkerConfig(device, 1, ""), said.append)
    (done,) = said
    assert isinstance(done, _LoadDone) and isinstance(done.result, LoadError)
    assert done.result.code == "unwanted"
