"""No budget is passed and nothing stays reserved, whatever two gateways do and how one dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
def test_200_at_once_on_a_budget_for_10_over_two_gateways(database: str, tmp_path: Path) -> None:
    """Ten are admitted, in tokens and in money; after a kill -9 all is free within a minute."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.benchmarks.budgets", "--database", database]
    done = subprocess.run(
        [*command, "--json", str(report)], cwd=ROOT, env=os.environ, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text())["figures"]
    for unit in ("tokens", "money"):
        assert figures[f"rush_{unit}_admitted"] == 10
        assert figures[f"rush_{unit}_refused"] == 190
    assert figures["drip_admitted"] > 5
    assert figures["raise_changes"] == 20 and figures["raise_stale"] == 0
    assert figures["kill_orphans"] == 10 and figures["kill_released_s"] < 60
