"""``manage.py erase_text``: destroy a tenant's text key, so that no captured text of it is read.

::

    manage.py erase_text acme --reason "Asked for by the customer, ticket 4711"
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application.ports import EventMeta, StoreUnavailable
from controlplane.domain import capture, tenant
from controlplane.domain.audit import redacted
from controlplane.domain.errors import DomainError
from controlplane.domain.ids import TenantId
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.processes.ruled_command import cli_principal


class Command(DatabaseCommand):
    rule = Rule(WRITE, "text")
    help = "Destroy the key of a tenant's captured text. Seals go on to hold; the text is gone."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant")
        parser.add_argument("--reason", required=True, help="Kept in the audit.")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["tenant"]
        if not options["reason"].strip():
            raise CommandError("Give a --reason: it is kept in the audit.")
        command = capture.EraseText(TenantId(name), bootstrap.clock().now())
        meta = EventMeta(cli_principal().actor, reason=redacted(options["reason"]))
        try:
            done = bootstrap.command_handler().handle(
                tenant.DECIDER, tenant.DECIDER.stream(name), command, meta
            )
            destroyed = bootstrap.finish_erasure(name)
        except (DomainError, StoreUnavailable) as error:
            raise CommandError(str(error)) from error
        if not done.events:
            self.stdout.write("no text was captured since the last time")
        self.stdout.write(f"{destroyed} keys destroyed")
