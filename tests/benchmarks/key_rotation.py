"""A real gateway under load while the issuer of its callers' tokens rotates its keys.

``python -m tests.benchmarks.key_rotation [--seconds 80] [--rps 200] [--rotations 2]``

Every token is valid: signed by a key that the issuer publishes at that moment. The ratio is of
valid requests refused to all; it must be 0. Beside it: latencies in the second after a rotation
and otherwise, and how often the keys were fetched.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

REFETCH_S = 31.0  # a gateway looks for unknown keys at most this often


def setup(folder: Path) -> None:
    os.environ |= {
        "ENGINE_DATA_DIR": str(folder), "ENGINE_DATABASE_URL": "", "ENGINE_SECRET_KEY": "bench",
        "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
    }  # fmt: skip
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


class Load:
    """Requests at a steady rate, each with a token of its own."""

    def __init__(self, url: str, issuer: Any) -> None:
        self.url, self.issuer = url, issuer
        self.done: list[tuple[float, float, int]] = []  # when, how long, status

    async def ask(self, client: Any, number: int) -> None:
        headers = {"Authorization": f"Bearer {self.issuer.sign(sub=f'user-{number}')}"}
        began = time.monotonic()
        answer = await client.get(f"{self.url}/v1/models", headers=headers)
        self.done.append((began, time.monotonic() - began, answer.status_code))

    async def run(self, seconds: float, rps: int) -> None:
        import httpx

        limits = httpx.Limits(max_connections=100)
        tasks = []
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            began = time.monotonic()
            for number in range(int(seconds * rps)):
                await asyncio.sleep(max(0.0, began + number / rps - time.monotonic()))
                tasks.append(asyncio.create_task(self.ask(client, number)))
            await asyncio.gather(*tasks)


async def rotating(issuer: Any, times: list[float]) -> list[float]:
    """Rotates at those seconds from now; when it did."""
    began, done = time.monotonic(), []
    for at in times:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        issuer.rotate()
        done.append(time.monotonic())
    return done


async def measured(load: Load, seconds: float, rps: int, times: list[float]) -> list[float]:
    _, rotated = await asyncio.gather(load.run(seconds, rps), rotating(load.issuer, times))
    return rotated


def figures(load: Load, rotated: list[float]) -> tuple[dict[str, float], dict[str, float]]:
    refused = sum(status != 200 for _, _, status in load.done)
    near = [took for at, took, _ in load.done if any(0 <= at - when < 1 for when in rotated)]
    far = [took for at, took, _ in load.done if not any(0 <= at - when < 1 for when in rotated)]
    shown = {
        "requests": len(load.done),
        "refused": refused,
        "rotations": len(rotated),
        "key_fetches": load.issuer.num_fetches,
        "p50_ms": median(far) * 1e3,
        "p99_ms": quantiles(far, n=100)[98] * 1e3,
        "p99_ms_after_rotation": quantiles(near, n=100)[98] * 1e3 if len(near) > 1 else 0.0,
    }
    return {"refused/valid": refused / len(load.done)}, shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--rps", type=int, default=200)
    parser.add_argument("--rotations", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = [5 + number * REFETCH_S for number in range(options.rotations)]
    with tempfile.TemporaryDirectory(prefix="engine-rotation-") as name:
        setup(Path(name))
        load, rotated = run(Path(name), options.seconds, options.rps, times)
    ratios, shown = figures(load, rotated)
    result = {"name": "key_rotation", "machine": platform.platform(), "ratios": ratios,
              "figures": {name: round(value, 3) for name, value in shown.items()}}  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if ratios["refused/valid"] > 0:
        raise SystemExit("valid requests were refused")


def run(folder: Path, seconds: float, rps: int, times: list[float]) -> tuple[Load, list[float]]:
    from tests.access.issuer import Issuer
    from tests.openai.stack import Stack

    with Issuer().serving() as issuer, contextlib.ExitStack() as after:
        (folder / "issuers.json").write_text(json.dumps([issuer.config()]))
        stack = Stack(folder, "bench", {"ENGINE_JWT_ISSUERS": str(folder / "issuers.json")})
        after.callback(stack.stop)
        stack.start()
        stack.add_tenant("acme")
        load = Load(stack.gateway.url, issuer)
        return load, asyncio.run(measured(load, seconds, rps, times))


if __name__ == "__main__":
    main()
