"""The share of the power cuts that every change has to pass; see ``powercut`` for the method."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import skip_without
from tests.contracts.stores import _server
from tests.crash import images

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("ENGINE_CRASH_SEED", "11")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def power_can_be_cut() -> None:
    if reason := images.why_not():
        skip_without(f"a disk whose power can be cut; {reason}")


def powercut(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.crash.powercut", "--seed", SEED, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.parametrize(
    ("store", "cuts"),
    [("sqlite", 5), ("jetstream", 4), pytest.param("postgres", 2, marks=pytest.mark.postgres)],
)
def test_a_power_cut_loses_nothing_that_was_acknowledged(store: str, cuts: int) -> None:
    if store == "postgres":
        _server().close()  # skips where PostgreSQL is not installed
    done = powercut("--store", store, "--cuts", str(cuts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations: 0" in done.stdout


@pytest.mark.parametrize("store", ["sqlite", "jetstream"])
def test_a_power_cut_without_fsync_is_seen_to_lose(store: str) -> None:
    """The method bites: with fsync taken away, acknowledged work is gone."""
    done = powercut("--store", store, "--cuts", "1", "--unsynced")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION" in done.stdout
