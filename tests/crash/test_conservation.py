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
    """Eight hundred requests, four kills: no token apart, before the kills or after them, and one
    ended record for each, some of them closed for a gateway that was killed."""
    arguments = ["--requests", "800", "--kills", "4", "--seed", SEED]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.conservation", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("billed - generated = 0") == 2 and "violations: 0" in done.stdout
    assert done.stdout.count("billed - embedded = 0") == 2
    assert "'gateway_lost':" in done.stdout
