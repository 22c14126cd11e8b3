"""``manage.py archive_requests``: old requests into an archive now, whatever the policy says.

The controller does the same by the retention policy, where ``ENGINE_ARCHIVE`` is set.

::

    manage.py archive_requests --older-than 400 --out s3://audit/ledger
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.export.formats import FORMATS
from controlplane.application.exports import ExportError
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.proving import Damaged
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand

_DAY = 86_400.0


class Command(DatabaseCommand):
    rule = Rule(WRITE, "system")
    help = "Move sealed requests older than some days into a verified archive, then delete them."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than", type=float, required=True, metavar="DAYS")
        parser.add_argument("--out", required=True, metavar="DIR", help="A folder or s3://…")
        parser.add_argument("--format", choices=FORMATS, default="jsonl")

    def handle(self, *args: Any, **options: Any) -> None:
        before = bootstrap.clock().now() - options["older_than"] * _DAY
        try:
            moved = bootstrap.archive_into(options["out"], before, form=options["format"])
        except (ExportError, IntegrityError, StoreUnavailable, Damaged) as error:
            raise CommandError(f"Nothing was removed: {error}") from error
        if moved is None:
            self.stdout.write("nothing is old enough")
            return
        bootstrap.retention().note()
        self.stdout.write(f"{moved.rows} requests, {moved.first} to {moved.upto}: {moved.name}")
