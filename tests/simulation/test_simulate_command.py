"""``manage.py simulate`` as a person runs it, and the log that it leaves as it is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "deploy" / "scenarios" / "small.yaml"


def manage(data: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "ENGINE_DATA_DIR": str(data), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "manage.py", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100
    )


def test_every_line_says_simulated_and_the_log_opens(tmp_path: Path) -> None:
    """Figures are printed; the log is projected into rows that a rebuild from it finds the same,
    with the scenario's nodes and models in them."""
    log, told = tmp_path / "log", tmp_path / "told.json"
    made = manage(
        tmp_path / "none", "simulate", SMALL, "--mode", "coarse", "--events", log, "--json", told
    )
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert len(lines) > 15 and all(line.startswith("simulated ") for line in lines)
    figures = json.loads(told.read_text())
    assert 0.95 < figures["availability"] <= 1.0 and figures["node_losses"] == 1

    rebuilt = manage(log, "rebuild_readmodel")
    assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
    assert rebuilt.stdout.splitlines()[-1] == "the same"
    shown = manage(log, "apply", "--export")
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in ("chat", "code", "rare", "acme", "initech"))
    forked = manage(log, "whatif", "--lose-node", "a100-1")
    assert forked.returncode == 0, forked.stderr

    again = manage(tmp_path / "none", "simulate", SMALL, "--mode", "coarse", "--events", log)
    assert again.returncode == 1 and "exists and is not empty" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.yaml",), "cannot be read"),
        ((SMALL, "--seed", "-1"), "seed: not negative"),
        ((SMALL, "--seconds", "0"), "seconds: more than 0"),
        ((SMALL, "--trace", SMALL), "no column TIMESTAMP"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, words: tuple, said: str) -> None:
    made = manage(tmp_path, "simulate", *words)
    assert made.returncode == 1 and made.stdout == ""
    assert said in made.stderr and "Traceback" not in made.stderr
