"""One running product, with the real model, shared by all end-to-end tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.product import ROOT, Product, until

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
