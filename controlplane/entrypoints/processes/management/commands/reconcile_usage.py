"""``manage.py reconcile_usage``: recount every total from the records."""

import time
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane.adapters.ledger import reconcile, rollup
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(WRITE, "verification")
    help = "Recount every usage total from the request records; fails if one differs."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--rebuild", action="store_true", help="Make the roll-ups anew from the records first."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            (rollup.rebuild if options["rebuild"] else rollup.catch_up_all)()
        except rollup.RecordsArchived as error:
            raise CommandError(str(error)) from error
        result = reconcile.check()
        reconcile.keep(result, time.time())
        self.stdout.write(
            f"{result.num_totals} totals of {result.num_records} records, up to position "
            f"{result.position}, in {result.seconds:.2f} s"
        )
        for difference in result.differences:
            self.stdout.write(difference)
        if result.differences:
            raise CommandError(f"{len(result.differences)} figures differ.")
        self.stdout.write("all equal the sum of their records")
