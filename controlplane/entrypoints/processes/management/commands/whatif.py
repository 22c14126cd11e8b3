"""``manage.py whatif``: what a lost or added node, other replicas or more load would change.

::

    manage.py whatif --lose-node n1
    manage.py whatif --add-node n9=n1 --replicas chat@v2=4 --load 1.5 --at 812
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application.whatif import change_of, sentences
from controlplane.domain.errors import DomainError
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.simulation.whatif import Change


class Command(DatabaseCommand):
    rule = Rule(READ, "placement")
    help = (
        "Say what a lost or added node, other replicas or more load would change; writes nothing."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        many: dict[str, Any] = {"action": "append", "default": []}
        parser.add_argument("--lose-node", metavar="NODE", **many)
        parser.add_argument("--add-node", metavar="NEW=LIKE", help="Devices as LIKE has.", **many)
        parser.add_argument("--replicas", metavar="VERSION=NUMBER", **many)
        parser.add_argument("--load", type=float, default=1.0, help="Times the present requests.")
        parser.add_argument("--at", type=int, metavar="POSITION", help="Of the log.")

    def handle(self, *args: Any, **options: Any) -> None:
        bootstrap.projector().catch_up_all()  # the newest decision is looked up in the read model
        try:
            made = bootstrap.what_if(_change(options), options["at"])
        except DomainError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"Forked at position {made.position}.")
        for line in sentences(made):
            self.stdout.write(line)


def _change(options: dict[str, Any]) -> Change:
    asked = (options[name] for name in ("lose_node", "add_node", "replicas", "load"))
    return change_of(*asked)
