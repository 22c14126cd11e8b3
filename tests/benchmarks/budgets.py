"""A budget under fire: ``python -m tests.benchmarks.budgets [--database postgresql]``.

Two real gateways on one database (SQLite, or a scratch database of the PostgreSQL on
127.0.0.1:5432), one agent, one simulated model. Three things are done, and counted from the
records as an auditor would:

``rush``   200 requests at once, half to each gateway, on a budget for ten; for a budget of tokens
           and for one of money. Ten must be admitted: ``overshoot`` is what the records sum to
           beyond the budget, ``phantom`` the requests refused although they would have fitted.
``drip``   one after another until the budget is used up, each ending before its maximum: what was
           not used must be free again. ``phantom`` counts refusals with room for the request.
``raise``  a budget that changes between 0 and plenty: each gateway is asked right after. ``stale``
           counts the answers by the budget of before.
``kill``   ten requests in flight on each gateway, then ``kill -9`` of one: ``leaked`` is what is
           still reserved after 60 s, ``released_s`` the time until nothing was.

Exits 1 unless every overshoot, phantom, stale answer and leak is 0.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import psycopg

DIRECTORY = Path(tempfile.mkdtemp(prefix="engine-budgets-"))
SERVER = {"host": "127.0.0.1", "port": 5432, "user": "postgres", "dbname": "postgres"}
NUM_REQUESTS, NUM_FITTING, MAX_TOKENS = 200, 10, 40
PATIENCE_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = f"engine_budgets_{uuid.uuid4().hex[:12]}"
    postgres = options.database == "postgresql"
    os.environ["ENGINE_DATA_DIR"] = str(DIRECTORY)
    os.environ["ENGINE_DATABASE_URL"] = f"postgres://postgres@127.0.0.1/{name}" if postgres else ""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    try:
        if postgres:
            _administer(f"CREATE DATABASE {name}")
        figures = _measure()
    finally:
        if postgres:
            _administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    report = {"name": "budgets", "machine": options.database, "ratios": {}, "figures": figures}
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report))
    faults = ("overshoot", "phantom", "stale", "leaked")
    return int(any(value for key, value in figures.items() if key.endswith(faults)))


def _administer(statement: str) -> None:
    with psycopg.connect(**SERVER, autocommit=True) as connection:
        connection.execute(statement)


def _measure() -> dict[str, float]:
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    fire = _Fire()
    try:
        fire.start()
        return {
            **fire.rush("tokens"),
            **fire.rush("money"),
            **fire.drip(),
            **fire.change(),
            **fire.kill(),
        }
    finally:
        fire.stop()


class _Fire:
    """The stack with a second gateway. Imports wait for Django's settings."""

    def __init__(self) -> None:
        from django.conf import settings

        from controlplane.domain.version_spec import VersionSpec
        from tests.openai.stack import GIB, GatewayProcess, Stack

        extra = {"ENGINE_DATABASE_URL": os.environ["ENGINE_DATABASE_URL"]}
        self.stack = Stack(DIRECTORY, settings.SECRET_KEY, extra)
        (DIRECTORY / "second").mkdir()
        self.second = GatewayProcess(DIRECTORY / "second", self.stack.environment)
        self.slow, self.ends = (
            VersionSpec(
                version="v1",
                source=f"simulated://{name}?step_ms=50&prefill_tps=1000000{stop}",
                gpu_memory=GIB // 16,
                max_batch=256,
                max_prompt_tokens=512,
                max_output_tokens=4096,
            )
            for name, stop in (("slow", ""), ("ends", "&stop_after=5"))
        )

    def start(self) -> None:
        from controlplane.domain import model, money

        self.stack.start()
        self.second.start()
        self.stack.add_agent("n1")
        self.key = self.stack.add_tenant("operators")
        price = money.parse_prices("0.15", "0.075", "0.60")
        for name, spec in (("slow", self.slow), ("ends", self.ends)):
            self.stack.add_version(name, spec)
            command = model.SetModelPrice(name, "v1", price, time.time())
            self.stack.order(model.DECIDER, f"model-{name}", command)
            self.stack.place(name, spec, "n1")
            self.stack.wait_for(name, self.key)
        answer = self._ask(self.stack.gateway.url, self.key, "slow", 1)
        self.prompt = answer.json()["usage"]["prompt_tokens"]
        self._ask(self.second.url, self.key, "slow", 1).raise_for_status()

    def stop(self) -> None:
        self.second.stop()
        self.stack.stop()

    # --- the parts ------------------------------------------------------------------------------
    def rush(self, unit: str) -> dict[str, float]:
        """The model is slow enough that nobody ends before the last one has asked."""
        tenant = f"rush-{unit}"
        limit = NUM_FITTING * self._most(unit)
        key = self._tenant(tenant, unit, limit)
        codes = asyncio.run(self._at_once(key, NUM_REQUESTS, "slow", MAX_TOKENS * 4))
        used = sum(getattr(row, "price" if unit == "money" else "tokens") for row in _ended(tenant))
        assert set(codes) == {200, 429}, codes
        return {
            f"rush_{unit}_admitted": codes.count(200),
            f"rush_{unit}_refused": codes.count(429),
            f"rush_{unit}_overshoot": max(0, used - limit),
            f"rush_{unit}_phantom": max(0, NUM_FITTING - codes.count(200)),
        }

    def drip(self) -> dict[str, float]:
        asked = self.prompt + MAX_TOKENS
        limit = 5 * asked
        key = self._tenant("drip", "tokens", limit)
        urls, admitted = (self.stack.gateway.url, self.second.url), 0
        while self._ask(urls[admitted % 2], key, "ends", MAX_TOKENS).status_code == 200:
            admitted += 1
        used = sum(row.tokens for row in _ended("drip"))
        return {
            "drip_admitted": admitted,
            "drip_overshoot": max(0, used - limit),
            "drip_phantom": int(used + asked <= limit),
        }

    def change(self) -> dict[str, float]:
        key, stale = self._tenant("raised", "tokens", 0), 0
        for _ in range(10):
            for limit, expected in ((0, 429), (10**6, 200)):
                self._set_budget("raised", "tokens", limit)
                urls = (self.stack.gateway.url, self.second.url)
                codes = [self._ask(url, key, "ends", 1).status_code for url in urls]
                stale += sum(code != expected for code in codes)
        return {"raise_changes": 20, "raise_stale": stale}

    def kill(self) -> dict[str, float]:
        from controlplane.adapters.ledger.models import InferenceRequest

        key = self._tenant("killed", "tokens", 10**9)
        live = InferenceRequest.objects.filter(tenant_id="killed", outcome="")
        began = asyncio.run(self._cut_down(key, live))
        while live.exists() and time.monotonic() - began < PATIENCE_S:
            time.sleep(0.25)
        released = time.monotonic() - began
        leaked = sum(live.values_list("reserved_tokens", flat=True))
        unknown = InferenceRequest.objects.filter(tenant_id="killed", outcome="unknown").count()
        return {"kill_orphans": unknown, "kill_released_s": released, "kill_leaked": leaked}

    async def _cut_down(self, key: str, live: Any) -> float:
        """Twenty in flight; the second gateway dies, at the time returned; the first goes on."""
        asking = asyncio.create_task(self._at_once(key, 20, "slow", 200))
        while await asyncio.to_thread(live.count) < 20:
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.5)  # some progress is noted
        self.second.send(signal.SIGKILL)
        killed_at = time.monotonic()
        codes = await asking
        assert codes.count(200) == 10, codes
        return killed_at

    # --- what they need -------------------------------------------------------------------------
    def _most(self, unit: str) -> int:
        output = MAX_TOKENS * 4
        if unit == "tokens":
            return self.prompt + output
        return self.prompt * 150_000 + output * 600_000

    def _tenant(self, name: str, unit: str, limit: int) -> str:
        key = self.stack.add_tenant(name)
        self._set_budget(name, unit, limit)
        for gateway in (self.stack.gateway, self.second):
            self._known(gateway.url, key)
        return key

    def _set_budget(self, name: str, unit: str, limit: int) -> None:
        from controlplane.domain.budget import Budget

        self.stack.set_budget(name, Budget("all", "tenant", "", unit, limit, "total"))

    def _known(self, url: str, key: str) -> None:
        """Until the gateway has read of the key."""
        while httpx.get(f"{url}/v1/models", headers=_bearer(key)).status_code != 200:
            time.sleep(0.05)

    def _ask(self, url: str, key: str, model: str, max_tokens: int) -> httpx.Response:
        body = _body(model, max_tokens)
        return httpx.post(f"{url}/v1/completions", json=body, headers=_bearer(key), timeout=60)

    async def _at_once(self, key: str, count: int, model: str, max_tokens: int) -> list[int]:
        """Status of each; 0 where the connection was lost."""
        urls = (self.stack.gateway.url, self.second.url)
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(limits=limits, timeout=120, headers=_bearer(key)) as client:
            posts = [
                client.post(f"{urls[i % 2]}/v1/completions", json=_body(model, max_tokens))
                for i in range(count)
            ]
            answers = await asyncio.gather(*posts, return_exceptions=True)
        return [one.status_code if isinstance(one, httpx.Response) else 0 for one in answers]


def _body(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "How much?", "max_tokens": max_tokens}


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _ended(tenant: str) -> list[Any]:
    from django.db.models import F

    from controlplane.adapters.ledger.models import InferenceRequest

    rows = InferenceRequest.objects.filter(tenant_id=tenant).exclude(outcome="")
    return list(rows.annotate(tokens=F("num_prompt_tokens") + F("num_output_tokens")))


if __name__ == "__main__":
    sys.exit(main())
