"""What ``manage.py help`` shows: the product's commands first, by what they are for, then Django's.

A command is here with an example line, which its ``--help`` ends with. Django by itself lists
names alone, grouped by the application that they come from::

    $ manage.py help
    Run
      demo               Start everything on this machine: bus, web, gateway, …
    …
    Also
      Django's own: changepassword, check, …
"""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill, indent

from django.core.management import (
    ManagementUtility,
    get_commands,
    load_command_class,
)
from django.core.management.base import DjangoHelpFormatter

APPLICATION = "controlplane.entrypoints.processes"
WIDTH = 96

EXAMPLES = {
    "Run": {
        "demo": "demo --agents 2 --devices cpu:4GiB,cpu:4GiB",
        "run_web": "run_web",
        "run_gateway": "run_gateway --host 0.0.0.0 --port 8001",
        "run_controller": "run_controller",
    },
    "Set up": {
        "create_admin": "create_admin --username ann --role operator",
        "bus_config": "bus_config --host 0.0.0.0",
        "node_credentials": "node_credentials node-1",
    },
    "Configure": {
        "apply": "apply models.yaml --dry-run",
        "advance_epoch": "advance_epoch 5 --reason 'restored from Monday'",
        "repack": "repack --moves 4 --apply --reason 'room for a large model'",
    },
    "Understand": {
        "whatif": "whatif --lose-node node-2 --load 1.5",
        "replay_decision": "replay_decision --all",
        "recompute_decision": "recompute_decision --all",
        "recompute_dispatch": "recompute_dispatch --all",
        "simulate": "simulate deploy/scenarios/week.yaml --sample 24",
        "replay_traffic": "replay_traffic --trace trace.csv --room 4 8",
    },
    "Prove and keep": {
        "verify": "verify --bus",
        "seal": "seal --keys",
        "export_audit": "export_audit --out audit --format csv",
        "archive_requests": "archive_requests --older-than 90 --out s3://archive/requests",
        "erase_text": "erase_text acme --reason 'asked by the tenant'",
        "reconcile_usage": "reconcile_usage",
        "rebuild_readmodel": "rebuild_readmodel",
    },
}


class ExampleFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Leaves the example on the line that it is written on."""


def example_of(name: str) -> str:
    """The line that a command's ``--help`` ends with; empty for one that is not above."""
    lines = (f"manage.py {lines[name]}" for lines in EXAMPLES.values() if name in lines)
    return next(lines, "")


# What works on the data that there is, and what needs none: neither makes a data folder.
ON_DATA = {
    name for group in ("Configure", "Understand", "Prove and keep") for name in EXAMPLES[group]
}
WITHOUT_DATA = {"", "help", "version", "check", "spectacular", "collectstatic"}
ASKS_FOR_HELP = {"-h", "--help", "--version"}


def needs_no_new_folder(arguments: list[str]) -> bool:
    """Whether the command line asks for nothing that a new data folder is for."""
    name, *options = [*arguments[1:], ""]
    asks_for_help = bool(ASKS_FOR_HELP & {name, *options})
    return Path(arguments[0]).name == "manage.py" and (
        name in ON_DATA | WITHOUT_DATA or asks_for_help
    )


class Utility(ManagementUtility):
    """Django's command line, with a help of its own."""

    def main_help_text(self, commands_only: bool = False) -> str:
        if commands_only:
            return str(super().main_help_text(commands_only=True))
        return "\n".join(help_lines())


def help_lines() -> Iterator[str]:
    yield "manage.py COMMAND --help says how a command is used."
    for group, lines in EXAMPLES.items():
        yield from ("", group)
        for name in lines:
            told = str(load_command_class(APPLICATION, name).help)
            yield f"  {name:<20}{told}"
    others = sorted(name for name, app in get_commands().items() if app != APPLICATION)
    names = fill(f"Django's own: {', '.join(others)}", WIDTH)
    yield from ("", "Also", indent(names, "  "))
