"""More models than the device holds, one that embeds among them, under load over the gateway."""

from pathlib import Path

import pytest

from tests.benchmarks import residency_fleet
from tests.e2e.conftest import MODEL_CACHE

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]


def test_models_that_take_turns_answer_alike_and_leave_nothing_behind(tmp_path: Path) -> None:
    """No error, every answer the model's first, no worker lost, no KV block held, memory as before:
    what `python -m tests.benchmarks.residency --fleet` measures for minutes, for 20 seconds."""
    with residency_fleet.start(tmp_path, MODEL_CACHE) as product:
        residency_fleet.check(residency_fleet.measure(product, 20.0))
