"""The share of the conservation run that every change has to pass; see ``conservation``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("ENGINE_CRASH_SEED", "11")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_what_is_billed_is_what_was_generated() -> None:
    """Six hundred requests, four kills: no token apart, one ended record for each."""
    arguments = ["--requests", "600", "--kills", "4", "--seed", SEED]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.conservation", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "billed - generated = 0" in done.stdout and "violations: 0" in done.stdout
