"""``manage.py repack``: what moving replicas together would gain; with ``--apply`` it is started.

::

    manage.py repack --moves 4
    manage.py repack --moves 4 --apply --reason "The 70B model fits nowhere"
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application import repack
from controlplane.application.ports import EventMeta, StoreUnavailable
from controlplane.domain.audit import redacted
from controlplane.domain.errors import DomainError
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.processes.ruled_command import cli_principal
from controlplane.entrypoints.rest.repacking import sentences


class Command(DatabaseCommand):
    rule = Rule(WRITE, "placement")
    help = "Say what moving replicas together would gain; with --apply, start it as a decision."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--moves", type=int, default=8, help="At most so many.")
        parser.add_argument("--seconds", type=float, default=10.0, help="For the search.")
        parser.add_argument("--apply", action="store_true")
        parser.add_argument("--reason", default="", help="Kept in the audit.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["moves"] <= 1000 or options["seconds"] <= 0:
            raise CommandError("--moves is from 1 to 1000, and --seconds more than 0.")
        bootstrap.projector().catch_up_all()
        made = bootstrap.repack_preview(options["moves"], options["seconds"])
        for line in sentences(made):
            self.stdout.write(line)
        if options["apply"]:
            self._start(made, options["reason"])

    def _start(self, made: repack.Preview, reason: str) -> None:
        meta = EventMeta(cli_principal().actor, reason=redacted(reason))
        try:
            found = repack.start(made, bootstrap.command_handler(), meta, bootstrap.clock().now())
        except (DomainError, StoreUnavailable) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"started as decision {found}" if found else "nothing to start")
