"""A gateway whose disk is full says so to whoever asks whether it is ready, and recovers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings

from tests.crash.test_store_faults import fill, full_soon
from tests.openai.stack import Stack, until

MEGABYTES = 16


@pytest.fixture
def gateway(migrated_file: Path, tmp_path: Path, django_db_blocker: Any) -> Iterator[Stack]:
    """One whose data folder is a small file system of its own."""
    mount = tmp_path / "small"
    with full_soon(migrated_file, mount, django_db_blocker, MEGABYTES) as folder:
        stack = Stack(folder, settings.SECRET_KEY)
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()


def test_a_gateway_on_a_full_disk_is_not_ready_until_there_is_space(gateway: Stack) -> None:
    """Its own beats fail meanwhile, and show by themselves that the store takes writes again."""

    def readyz() -> httpx.Response:
        return httpx.get(f"{gateway.gateway.url}/readyz", verify=False)

    until(lambda: readyz().status_code == 200)
    ballast = fill(gateway.directory)
    answer = readyz()
    assert answer.status_code == 503, answer.text
    assert answer.json()["wrong"] == {"store": "cannot be written: no space is left"}
    ballast.unlink()
    until(lambda: readyz().status_code == 200, 40)
