"""``manage.py verify``: recompute the hash chain of the whole log."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(READ, "event")
    help = "Verify the log's hash chain; names the first bad position."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--after", type=int, default=0, help="Believe the log up to here.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            head = bootstrap.event_store().verify(options["after"])
        except IntegrityError as error:
            raise CommandError(f"Not intact: {error}") from error
        except StoreUnavailable as error:
            raise CommandError(f"The log cannot be read: {error.__cause__ or error}") from error
        self.stdout.write(f"Intact up to position {head.position}, hash {head.hash.hex()}")
