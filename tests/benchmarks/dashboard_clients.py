"""Fifty listeners and the node they watch, apart from whoever measures beside them::

    python -m tests.benchmarks.dashboard_clients WEB_PORT KEY NUM NATS_URL NATS_CREDS

The node reports four times a second, two kilobytes each. Prints ``ready`` when all are subscribed
and, once its standard input ends, how many messages a second each of them got.
"""

import asyncio
import json
import sys
import time

import nats
import websockets

from gpuagent.wire import codec, subjects
from gpuagent.wire.messages import DeviceLoad, ReplicaLoad, Telemetry

TELEMETRY_HZ = 4
NODE = "watched"


def _report(seq: int) -> bytes:
    """A node with eight busy devices, two kilobytes as JSON."""
    devices = tuple(DeviceLoad(index=i, utilization=0.5, memory_used_bytes=1 << 30,
                               memory_total_bytes=2 << 30) for i in range(8))  # fmt: skip
    replicas = tuple(ReplicaLoad(replica_id=f"m.v1.g1.{i}", version_id="m@v1", device_index=i,
                                 state="ready", num_running=9) for i in range(4))  # fmt: skip
    said = Telemetry(node_id=NODE, boot_id="b", seq=seq, at=time.time(), devices=devices,
                     replicas=replicas)  # fmt: skip
    return codec.encode(said)


async def _listen(port: str, key: str, counts: list[int], opened: asyncio.Semaphore) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"ws://127.0.0.1:{port}/ws/live"
    async with websockets.connect(url, additional_headers=headers, compression=None) as one:
        await one.send(json.dumps({"type": "subscribe", "after": None}))
        await one.recv()
        opened.release()
        async for _ in one:
            counts[0] += 1


async def _report_for_ever(url: str, creds: str) -> None:
    client = await nats.connect(url, user_credentials=creds)
    seq = 0
    while True:
        seq += 1
        await client.publish(subjects.telemetry(NODE), _report(seq))
        await asyncio.sleep(1 / TELEMETRY_HZ)


async def main(port: str, key: str, count: int, url: str, creds: str) -> None:
    counts, opened = [0], asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_listen(port, key, counts, opened)) for _ in range(count)]
    for _ in range(count):
        await asyncio.wait_for(opened.acquire(), 30)
    tasks.append(asyncio.create_task(_report_for_ever(url, creds)))
    print("ready", flush=True)
    began = time.monotonic()
    await asyncio.to_thread(sys.stdin.read)
    print(counts[0] / count / (time.monotonic() - began), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(main(arguments[0], arguments[1], int(arguments[2]), arguments[3], arguments[4]))
