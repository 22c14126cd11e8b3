"""``manage.py replay_traffic --trace PATH``: what each way of choosing resident models would do."""

import gzip
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane.adapters.forecasting import History
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.ruled_command import RuledCommand
from controlplane.simulation.policies import compare, table
from controlplane.simulation.residency import Request
from controlplane.simulation.trace import BadTrace, read

_GZIP = b"\x1f\x8b"


class Command(RuledCommand):
    rule = Rule(READ, "placement")
    help = "Replay a trace of requests on a simulated node; prints warm hits and waits by policy."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--trace", type=Path, required=True, help="CSV with time and model")
        parser.add_argument("--room", type=int, nargs="+", default=[4, 8, 16], metavar="K")
        parser.add_argument("--load-seconds", type=float, default=2.7)

    def handle(self, *args: Any, **options: Any) -> None:
        if min(options["room"]) < 1 or options["load_seconds"] < 0:
            raise CommandError("A room holds at least one model, and no load takes less than 0 s.")
        requests = _read(options["trace"])
        outcomes = compare(requests, History(requests), options["room"], options["load_seconds"])
        self.stdout.write(f"{len(requests)} requests")
        for line in table(outcomes):
            self.stdout.write(line)


def _read(path: Path) -> list[Request]:
    try:
        data = path.read_bytes()
        requests = read((gzip.decompress(data) if data.startswith(_GZIP) else data).decode())
    except (OSError, EOFError, UnicodeDecodeError, BadTrace) as error:
        raise CommandError(f"{path} cannot be read as a trace: {error}") from error
    if not requests:
        raise CommandError(f"{path} holds no request.")
    return requests
