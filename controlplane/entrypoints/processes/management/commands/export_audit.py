"""``manage.py export_audit``: the log or the ledger as a file, with its manifest."""

from pathlib import Path
from typing import Any

import msgspec
from django.core.management.base import CommandParser

from controlplane.adapters.export.formats import FORMATS, Export
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.rest.exporting import COLUMNS, records
from controlplane.entrypoints.rest.ledger_reading import export_head


class Command(DatabaseCommand):
    rule = Rule(READ, "export")
    help = "Write events or requests to DIR, with a .manifest.json of count, positions and SHA-256."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--what", choices=sorted(COLUMNS), default="events")
        parser.add_argument("--format", choices=FORMATS, default="jsonl")
        parser.add_argument("--out", type=Path, required=True, metavar="DIR")
        parser.add_argument("--after", type=int, default=0, help="Positions beyond this one.")
        parser.add_argument("--upto", type=int, help="Up to and with this one; default: the last.")
        parser.add_argument("--tenant", help="Only what belongs to this tenant.")

    def handle(self, *args: Any, **options: Any) -> None:
        what, kind, after = options["what"], options["format"], options["after"]
        upto = export_head(what) if options["upto"] is None else options["upto"]
        folder: Path = options["out"]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{what}-{after}-{upto}.{kind}"
        export = Export(kind, COLUMNS[what])
        with path.open("wb") as file:
            for chunk in export.chunks(records(what, after, upto, options["tenant"])):
                file.write(chunk)
        document = {"file": path.name, "what": what, **msgspec.to_builtins(export.manifest)}
        path.with_suffix(".manifest.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(document)) + b"\n"
        )
        self.stdout.write(f"{path}: {export.manifest.count} records")
