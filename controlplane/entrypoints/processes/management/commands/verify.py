"""``manage.py verify``: every event and ended request against chain, seals and copies."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application.check import Checked
from controlplane.application.fleet import BusUnavailable
from controlplane.application.notes import NoteError, parse_keys
from controlplane.application.ports import StoreUnavailable
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.processes.read_only import is_opened_for_reading


@contextmanager
def _no_collector() -> Iterator[None]:
    """A check makes no cycles, and looking for them is a tenth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Command(DatabaseCommand):
    rule = Rule(READ, "verification")
    only_reads = True
    help = "Verify log, ledger and checkpoints; names the first changed, missing or inserted row."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--key", type=Path, help="Public keys to trust beside our own.")
        parser.add_argument("--bus", action="store_true", help="Compare with the bus's copies too.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            keys = parse_keys(options["key"].read_text()) if options["key"] else []
            on_bus = asyncio.run(bootstrap.checkpoints_on_bus()) if options["bus"] else {}
            elsewhere = {"the bus": on_bus.__getitem__} if on_bus else {}
            with _no_collector():
                checked = bootstrap.check_store(keys, elsewhere)
        except (NoteError, OSError) as error:
            raise CommandError(f"The keys cannot be read: {error}") from error
        except BusUnavailable as error:
            raise CommandError(str(error)) from error
        except StoreUnavailable as error:
            raise CommandError(f"The log cannot be read: {error.__cause__ or error}") from error
        self._keep(checked)
        self._say(checked)

    def _keep(self, checked: Checked) -> None:
        """For the status page; where nothing can be written there is none to read it."""
        if not is_opened_for_reading():
            at = bootstrap.clock().now()
            bootstrap.seal_store().keep_verification(at, "system:command", checked)

    def _say(self, checked: Checked) -> None:
        for log in checked.logs:
            self.stdout.write(
                f"{log.log}: intact up to position {log.head}, {log.sealed} of them under"
                f" {log.num_checkpoints} checkpoints, root {log.root or '-'}"
            )
            for archive in log.archives:
                self.stdout.write(f"{log.log}: some lie in the archive {archive}, which is apart")
        if checked.finding is not None:
            raise CommandError(f"Not intact: {checked.finding}")
        self.stdout.write(f"{checked.records_per_second:,.0f} records/s")
