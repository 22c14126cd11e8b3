"""``manage.py export_audit``: the log or the ledger in parts, with a signed manifest.

The same command again continues where the last run ended, or was killed::

    manage.py export_audit --what requests --format parquet --out s3://audit/2026
    manage.py export_audit --format ocsf --out https://siem/ingest --state .run/siem --follow
    python -m controlplane.verify audit/ --key sealing.pub
"""

import math
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.export.destinations import destination_of
from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.application.export_job import ExportJob
from controlplane.application.exports import PART_ROWS, ExportError, Filters
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.records import LOGS
from controlplane.application.seal import SealingRefused
from controlplane.domain.event_types import EVENT_TYPES
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(READ, "export")
    help = "Export events or requests in parts, with a signed manifest; again, to continue."

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--what", choices=sorted(LOGS), default="events")
        add("--format", choices=FORMATS, default="jsonl")
        add("--out", required=True, metavar="DIR", help="A folder, s3://… or an http(s) URL.")
        add("--state", type=Path, metavar="DIR", help="Where the cursor of a URL is kept.")
        add("--after", type=at_least(0), default=0, help="Positions beyond this one.")
        add("--upto", type=at_least(0), help="Up to and with this one; default: the last.")
        add("--tenant", help="Only what belongs to this tenant.")
        add("--type", action="append", default=[], help="Event type, or endpoint; repeatable.")
        add("--since", type=moment, help="ISO 8601 or Unix seconds, inclusive.")
        add("--until", type=moment, help="ISO 8601 or Unix seconds, exclusive.")
        add("--part-rows", type=at_least(1), default=PART_ROWS, help="Records in a part, at most.")
        add("--no-formula-guard", action="store_true", help="CSV cells exactly as they are.")
        add("--follow", action="store_true", help="Go on with what comes, until stopped.")
        add("--interval", type=float, default=10.0, help="Seconds between two looks.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            job = self._job(options)
            self._run(job, options["upto"])
            while options["follow"]:
                time.sleep(options["interval"])
                self._run(job, None)
        except KeyboardInterrupt:
            self.stderr.write("stopped; the same command continues")
        except (ExportError, IntegrityError, StoreUnavailable, SealingRefused) as error:
            raise CommandError(f"Not exported: {error}") from error

    def _job(self, options: dict[str, Any]) -> ExportJob:
        what, kinds = options["what"], options["type"]
        if not options["out"]:
            raise CommandError("Give --out a folder, s3://… or an http(s) URL.")
        if options["tenant"] and not bootstrap.event_store().replay(f"tenant-{options['tenant']}"):
            raise CommandError(f"There is no tenant {options['tenant']!r}.")
        unknown = sorted(set(kinds) - EVENT_TYPES.keys()) if what == "events" else []
        if unknown:
            raise CommandError(f"There is no event type {', '.join(unknown)}.")
        filters = Filters(
            options["after"], options["tenant"], tuple(kinds), options["since"], options["until"]
        )
        safe = not options["no_formula_guard"]
        bootstrap.sealer().step(bootstrap.sealed_logs(), now=True)
        return ExportJob(
            bootstrap.export_source(what),
            format_of(options["format"], what, safe),
            filters,
            destination_of(options["out"], options["state"]),
            options["part_rows"],
            safe,
        )

    def _run(self, job: ExportJob, upto: int | None) -> None:
        for part in job.run(upto):
            self.stdout.write(f"{part.name}: {part.rows} records, up to {part.last_position}")
        done = job.manifest
        self.stdout.write(f"{done.rows} records, {done.log} up to {done.upto}, root {done.root}")


def moment(text: str) -> float:
    """Unix seconds of an ISO 8601 date or time (UTC where it says nothing else), or as given."""
    try:
        seconds = float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def at_least(least: int) -> Callable[[str], int]:
    """How ``argparse`` reads a whole number that is not below ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"{text} is below {least}")
        return value

    return number
