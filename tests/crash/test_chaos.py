"""A share of the chaos run that is over in a minute; the whole is a command."""

from pathlib import Path

from tests.crash import chaos


def test_streams_survive_killed_workers_agents_and_buses_and_a_cut_line(tmp_path: Path) -> None:
    """Each kind at least once; see the module for what is checked."""
    assert chaos.run(tmp_path, 0.3, seed=7, kinds=("worker", "agent", "blip", "bus")) == 0
