"""``manage.py apply models.yaml``: make the configuration what a file says."""

import getpass
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.application.ports import EventMeta, StoreUnavailable
from controlplane.domain.errors import DomainError
from controlplane.domain.event_types import type_of
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.applying import apply_locally, exported
from controlplane.entrypoints.rest.sources import DatabaseSource


class Command(DatabaseCommand):
    rule = Rule(WRITE, "catalog")
    help = "Apply a configuration file (- is standard input), or print it whole with --export."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", nargs="?", default="-")
        parser.add_argument("--dry-run", action="store_true", help="Only say what would happen.")
        parser.add_argument(
            "--export", action="store_true", help="Print the whole configuration as YAML."
        )
        parser.add_argument("--reason", default="", help="Kept in the audit.")

    def handle(self, *args: Any, **options: Any) -> None:
        bootstrap.projector().catch_up_all()  # names are looked up in the read model
        if options["export"]:
            found = exported(DatabaseSource())
            self.stdout.write(found.text(reading.position()), ending="")
            return
        meta = EventMeta(actor=f"cli:{getpass.getuser()}", reason=options["reason"])
        try:
            applied = apply_locally(_text(options["file"]), meta, options["dry_run"])
        except DomainError as error:
            raise CommandError(f"{error.code}: {error.message}") from None
        except StoreUnavailable as error:
            raise CommandError(f"{error.code}: {error}") from None
        for stream, events in applied:
            for event in events:
                self.stdout.write(f"{stream}: {type_of(event)}")
        if not any(events for _, events in applied):
            self.stdout.write("nothing to change")
        if not options["dry_run"]:
            bootstrap.projector().catch_up_all()
            self.stdout.write(f"configuration sha256 {exported(DatabaseSource()).digest()}")


def _text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{file}: {error}") from None
