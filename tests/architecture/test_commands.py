"""What a person reads who asks ``manage.py`` for help."""

import shlex
import subprocess
import sys

import pytest
from django.core.management import get_commands, load_command_class

from controlplane.entrypoints.processes.command_help import (
    APPLICATION,
    EXAMPLES,
    example_of,
    help_lines,
)
from tests.e2e.product import ROOT

OURS = sorted(name for name, app in get_commands().items() if app == APPLICATION)


def test_every_command_of_the_product_is_told_of_once_and_before_djangos() -> None:
    assert sorted(name for lines in EXAMPLES.values() for name in lines) == OURS
    lines = list(help_lines())
    also = lines.index("Also")
    for name in OURS:
        told = [at for at, line in enumerate(lines) if line.split()[:1] == [name]]
        assert len(told) == 1 and told[0] < also, name
    assert "migrate" in lines[-1] and "apply" not in lines[-1].split()


@pytest.mark.parametrize("name", OURS)
def test_a_commands_help_ends_with_an_example_that_it_understands(name: str) -> None:
    """Its arguments are those of the command; nothing is run."""
    parser = load_command_class(APPLICATION, name).create_parser("manage.py", name)
    assert parser.format_help().endswith(f"Example:\n  {example_of(name)}\n")
    program, command, *arguments = shlex.split(example_of(name))
    assert (program, command) == ("manage.py", name)
    parser.parse_args(arguments)


def test_the_command_line_shows_it() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.index("Run\n  demo ") < done.stdout.index("Django's own")


@pytest.mark.parametrize("name", ["runbook.md", "proof.md"])
def test_what_writes_manage_py_says_first_how_it_is_called(name: str) -> None:
    """In a checkout, in a container, and beside the units, with their user and environment."""
    paragraph = (ROOT / "deploy" / name).read_text().split("\n\n")[1]
    unit = (ROOT / "deploy" / "systemd" / "engine-web.service").read_text()
    given = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert "`.venv/bin/python manage.py …`" in paragraph
    assert "exec web python manage.py …" in paragraph
    assert f"--uid={given['User']} " in paragraph
    for option in ("WorkingDirectory", "EnvironmentFile"):
        assert f"-p {option}={given[option]} " in paragraph
    assert given["ExecStart"].replace("run_web", "…") in paragraph
