"""What relaying tokens costs: one frame per step and gateway, against one message per token.

    python -m tests.benchmarks.agent_relay [--json FILE]

The ratio compares like with like: this process encodes and publishes the same tokens in frames of
256 and in frames of one, over equal connections to a real nats-server; its CPU time and the
server's are counted. The figures show what a real agent spends on the whole relay (reading from
the worker, keeping for resends, counting latencies, publishing) at 256 streams and 20 ms steps.
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from controlplane.adapters.natsbus.connection import connect
from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import Delta, Frame
from tests.agent.harness import Agent, Control, control, spec
from tests.natsserver import NatsServer, nats_server

NUM_STREAMS = 256
STEP_MS = 20
SECONDS = 4.0
REPEATS = 3
NUM_PUBLISHED = 256 * 400
GATEWAY = "gw-bench"


async def relay(plane: Control, agent: Agent) -> tuple[float, float]:
    """(CPU seconds per token, share of one core) of the agent under full load."""
    num_tokens = [0]
    decoder = msgspec.msgpack.Decoder(Frame)

    async def count(message: object) -> None:
        frame = decoder.decode(message.data)  # type: ignore[attr-defined]
        num_tokens[0] += sum(len(delta.token_ids) for delta in frame.deltas)

    subscription = await plane.bus.client.subscribe(subjects.frames_of(GATEWAY), cb=count)
    request_ids = [
        await plane.generate("n1", max_tokens=2000, gateway=GATEWAY) for _ in range(NUM_STREAMS)
    ]
    await asyncio.sleep(2.0)
    process = psutil.Process(agent.pid)
    spent, tokens, started = sum(process.cpu_times()[:2]), num_tokens[0], time.monotonic()
    await asyncio.sleep(SECONDS)
    seconds = time.monotonic() - started
    spent = sum(process.cpu_times()[:2]) - spent
    tokens = num_tokens[0] - tokens
    gateway, plane.gateway = plane.gateway, GATEWAY
    await plane.cancel("n1", *request_ids)
    plane.gateway = gateway
    await asyncio.sleep(0.5)
    await subscription.unsubscribe()
    return spent / tokens, spent / seconds


async def publish(server: NatsServer, group: int) -> float:
    """CPU seconds per token of publishing tokens ``group`` to a frame, the server's included."""
    bus = await connect(server.url, server.control_creds, "bench", timeout_s=5)
    subject = subjects.frames("gw-other", "n1")
    spent, of_server = time.process_time(), sum(psutil.Process(server.pid).cpu_times()[:2])
    for n in range(0, NUM_PUBLISHED, group):
        deltas = tuple(
            Delta(f"req-{k}", n, (n,), "tok17 ", num_output_tokens=n) for k in range(group)
        )
        await bus.client.publish(subject, codec.encode(Frame("n1", "boot", n, deltas)))
        if n % NUM_STREAMS == 0:
            await bus.client.flush()
    await bus.client.flush()
    spent = time.process_time() - spent
    spent += sum(psutil.Process(server.pid).cpu_times()[:2]) - of_server
    await bus.close()
    return spent / NUM_PUBLISHED


async def measure() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        agent = Agent(server, Path(folder), "n1")
        agent.start()
        try:
            async with control(server) as plane:
                source = f"simulated://m?step_ms={STEP_MS}&prefill_tps=1000000"
                replica = spec(source=source, max_batch=NUM_STREAMS, max_batch_tokens=8192)
                await plane.place("n1", replica)
                await plane.replica("n1", "ready")
                relayed, single, framed = [], [], []
                for _ in range(REPEATS):
                    relayed.append(await relay(plane, agent))
                    single.append(await publish(server, group=1))
                    framed.append(await publish(server, group=NUM_STREAMS))
        finally:
            agent.stop()
    per_token = statistics.median(cost for cost, _ in relayed)
    share = statistics.median(share for _, share in relayed)
    one, many = statistics.median(single), statistics.median(framed)
    return {
        "name": "agent_relay",
        "machine": f"{psutil.cpu_count()} x {platform.processor() or platform.machine()}",
        "ratios": {"publish: one message per token / one frame per step, CPU": one / many},
        "figures": {
            "agent, tokens per second": share / per_token,
            "agent, share of one core": share,
            "agent, microseconds per token": per_token * 1e6,
            "publish in frames, microseconds per token": many * 1e6,
            "publish singly, microseconds per token": one * 1e6,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure())
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
