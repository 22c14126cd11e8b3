"""One running product, with the real model, shared by all end-to-end tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.product import ROOT, Product, environment, until

# Two virtual devices of one machine; each can hold two replicas of the model.
DEVICES = "cpu:3GiB,cpu:3GiB"
MODEL_CACHE = Path(os.environ.get("ENGINE_TEST_MODELS", ROOT / ".run" / "models"))


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    data_dir = tmp_path_factory.mktemp("product")
    with Product(data_dir, "--devices", DEVICES, "--model-cache", str(MODEL_CACHE)) as running:
        yield running
        family = running.family()
        seconds = running.stop()
        # Whatever the last test was: SIGTERM ends all of it in time and leaves nothing behind.
        assert seconds <= 10.0
        until(lambda: not any(process.is_running() for process in family), 2)
        assert not running.ready_file.exists()


@pytest.fixture
def second_node(product: Product) -> Iterator[subprocess.Popen[bytes]]:
    with joining(product, "node-2") as agent:
        yield agent


@contextmanager
def joining(product: Product, node_id: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that joins by hand, as on another machine: issued credentials and one command."""
    issued = subprocess.run(
        [sys.executable, "manage.py", "node_credentials", node_id],
        cwd=ROOT,
        env=environment(product.data_dir),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    nats_url = f"nats://127.0.0.1:{product.port('nats')}"
    options = {
        "--node-id": node_id,
        "--nats-url": nats_url,
        "--creds": issued.stdout.strip(),
        "--devices": DEVICES,
        "--state-dir": str(product.data_dir / "agents" / node_id),
        "--model-cache": str(MODEL_CACHE),
        **{f"--{name.replace('_', '-')}": value for name, value in more.items()},
    }
    with (product.data_dir / "logs" / f"{node_id}.log").open("ab") as log:
        agent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpuagent",
                *(word for pair in options.items() for word in pair),
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield agent
    if agent.poll() is None:
        agent.terminate()
        agent.wait(15)
