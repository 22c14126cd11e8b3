"""``manage.py archive_requests``: the ledger's retention, for a timer to run once a day.

::

    manage.py archive_requests --older-than 400 --out s3://audit/ledger
"""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.export.destinations import destination_of
from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.application.archive import archive
from controlplane.application.exports import ExportError
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.proving import Damaged
from controlplane.application.records import REQUESTS
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.verify import verify_export

_DAY = 86_400.0


class Command(DatabaseCommand):
    rule = Rule(WRITE, "system")
    help = "Move sealed requests older than some days into a verified archive, then delete them."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than", type=float, required=True, metavar="DAYS")
        parser.add_argument("--out", required=True, metavar="DIR", help="A folder or s3://…")
        parser.add_argument("--format", choices=FORMATS, default="jsonl")

    def handle(self, *args: Any, **options: Any) -> None:
        keys = [bootstrap.signer().public]
        try:
            moved = archive(
                bootstrap.export_source(REQUESTS),
                bootstrap.seal_store(),
                format_of(options["format"], REQUESTS),
                lambda name: destination_of(f"{options['out'].rstrip('/')}/{name}"),
                lambda folder: verify_export(folder, keys),
                bootstrap.clock().now() - options["older_than"] * _DAY,
            )
        except (ExportError, IntegrityError, StoreUnavailable, Damaged) as error:
            raise CommandError(f"Nothing was removed: {error}") from error
        if moved is None:
            self.stdout.write("nothing is old enough")
            return
        self.stdout.write(f"{moved.rows} requests, {moved.first} to {moved.upto}: {moved.name}")
