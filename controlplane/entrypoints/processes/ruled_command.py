"""What all management commands have in common: a rule of the access policy, asked before anything.

Whoever starts a command on a control-plane machine has the role ``ENGINE_CLI_ROLE``, an
administrator's unless it says otherwise. That keeps a service account to what it is for; it is no
wall against somebody who may read the database and its key.
"""

import getpass
from typing import Any, ClassVar

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.domain.policy import Principal, Rule, allowed
from controlplane.entrypoints.processes.command_help import ExampleFormatter, example_of


def cli_principal() -> Principal:
    """The user of this machine who started the command."""
    return Principal(f"cli:{getpass.getuser()}", settings.CLI_ROLE)


class RuledCommand(BaseCommand):
    """A command without a ``rule`` is not run."""

    rule: ClassVar[Rule | None] = None

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        options.setdefault("epilog", f"Example:\n  {example_of(subcommand)}")
        options.setdefault("formatter_class", ExampleFormatter)
        return super().create_parser(prog_name, subcommand, **options)

    def execute(self, *args: Any, **options: Any) -> str | None:
        principal = cli_principal()
        if self.rule is None or not allowed(principal, *self.rule):
            action, resource = self.rule or ("run", "this command")
            raise CommandError(f"forbidden: role '{principal.role}' may not {action} {resource}.")
        return super().execute(*args, **options)
