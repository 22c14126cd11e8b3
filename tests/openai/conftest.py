"""One gateway for the whole folder: starting one takes seconds, and tests only talk to it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from django.conf import settings

from controlplane.domain import model
from controlplane.domain.model import Access, ChangeAccess
from controlplane.domain.version_spec import VersionSpec
from tests.access.issuer import CONFIG, Issuer
from tests.databases import pointed_at
from tests.openai.idlers import Idlers
from tests.openai.stack import GIB, Stack

FAST = VersionSpec(
    version="v1",
    source="simulated://fast?step_ms=2&prefill_tps=1000000",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=1024,
    max_output_tokens=1024,
)
SLOW = VersionSpec(
    version="v1",
    source="simulated://slow?step_ms=50&prefill_tps=1000000",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=1024,
    max_output_tokens=4096,
)
ENDS = VersionSpec(
    version="v1",
    source="simulated://ends?step_ms=2&prefill_tps=1000000&stop_after=5",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=1024,
    max_output_tokens=1024,
)

VECTORS = VersionSpec(
    version="v1",
    source="simulated://vectors?step_ms=2&prefill_tps=1000000&dims=16",
    gpu_memory=GIB // 16,
    max_batch=64,
    max_prompt_tokens=64,
    task="embed",
    max_inputs=100,
)

SLOW_VECTORS = VersionSpec(
    version="v1",
    source="simulated://slow-vectors?step_ms=100&prefill_tps=1000000&dims=16",
    gpu_memory=GIB // 16,
    max_batch=1,
    max_prompt_tokens=64,
    task="embed",
    max_inputs=100,
)

SPECS = (
    ("fast", FAST),
    ("slow", SLOW),
    ("ends", ENDS),
    ("vectors", VECTORS),
    ("slow-vectors", SLOW_VECTORS),
)


@pytest.fixture(scope="session")
def issuer() -> Iterator[Issuer]:
    """One whose keys come over HTTP, beside that of ``tests.access.issuer.CONFIG``."""
    with Issuer().serving() as running:
        yield running


@pytest.fixture(scope="session")
def stack(
    migrated_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: Any,
    issuer: Issuer,
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("gateway")
    path = directory / "engine.sqlite3"
    shutil.copy(migrated_file, path)
    with django_db_blocker.unblock(), pointed_at(path):
        trusted = directory / "issuers.json"
        trusted.write_text(json.dumps([CONFIG, issuer.config()]))
        extra = {
            "ENGINE_JWT_ISSUERS": str(trusted),
            "ENGINE_HOLD_SECONDS": '{"realtime": 0.5, "standard": 8, "batch": 30}',
        }
        running = Stack(directory, settings.SECRET_KEY, extra)
        try:
            running.start()
            _seed(running)
            running.idlers = Idlers(running.gateway.port)
            yield running
        finally:
            running.stop()


def _seed(stack: Stack) -> None:
    stack.add_agent("n1")
    for name, spec in SPECS:
        stack.add_version(name, spec)
        stack.place(name, spec, "n1")
    stack.add_version("cold", FAST)
    stack.add_version("cold-vectors", VECTORS)
    stack.add_version("private", FAST)
    access = ChangeAccess("private", Access(public=False, tenants=("other",)), 0.0)
    stack.order(model.DECIDER, "model-private", access)
    alias = model.AddAlias("fast", "quick", 0.0)
    stack.order(model.DECIDER, "model-fast", alias)
    key = stack.add_tenant("acme")
    stack.keys = {"acme": key, "other": stack.add_tenant("other")}
    for name, spec in SPECS:
        path = "/v1/embeddings" if spec.task == "embed" else "/v1/completions"
        stack.wait_for(name, key, path=path)


@pytest.fixture(scope="session")
def key(stack: Stack) -> str:
    return stack.keys["acme"]


@pytest.fixture
def client(stack: Stack, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateway.url}/v1", api_key=key, max_retries=0) as client:
        yield client
