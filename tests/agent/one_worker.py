"""A worker without its agent: one small model, one request."""

import asyncio
import socket

from gpuagent.agent import ipc
from gpuagent.agent.worker import Worker
from gpuagent.wire.messages import Delta, Device, Generate, Sampling
from tests.agent.harness import GIB, spec
from tests.engine.tiny_model import tiny_model


async def one_generation(source: str, cache: str = "", num_tokens: int = 2) -> list[Delta]:
    """All that a worker says to a request, to a model that it has loaded from ``source``."""
    ours, theirs = socket.socketpair()
    device = Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB)
    config = ipc.WorkerConfig(device, 1, cache, file_roots=(str(tiny_model().parent),))
    worker = asyncio.to_thread(Worker(ipc.WorkerEnd(theirs), config).run)
    running = asyncio.create_task(worker)
    end = ipc.AgentEnd(*await asyncio.open_unix_connection(sock=ours))
    end.send(ipc.Load(spec("r", source=source, max_model_len=64)))
    deltas: list[Delta] = []
    while not deltas or not deltas[-1].finish_reason:
        said = await end.receive()
        assert not isinstance(said, ipc.LoadFailed), said
        if isinstance(said, ipc.Loaded):
            sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
            request = {"request_id": "req-7", "gateway": "g", "replica_id": "r"}
            asked = Generate(**request, prompt_token_ids=(1, 2, 3), sampling=sampling)
            end.send(ipc.Add(asked))
        if isinstance(said, ipc.StepOutputs):
            deltas += said.deltas
    end.send(ipc.Shutdown())
    await running
    theirs.close()
    end.close()
    return deltas
