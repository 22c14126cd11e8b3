"""``manage.py simulate FILE``: a fleet in simulated time, by the product's own planner and router.

::

    manage.py simulate deploy/scenarios/small.yaml
    manage.py simulate deploy/scenarios/small.yaml --batching static --seed 7
    manage.py simulate deploy/scenarios/week.yaml --trace PATH --sample 100
    manage.py simulate deploy/scenarios/small.yaml --events DIR
    ENGINE_DATA_DIR=DIR manage.py create_admin; ENGINE_DATA_DIR=DIR manage.py run_web
"""

import gzip
import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from msgspec.structs import replace

from controlplane import bootstrap
from controlplane.adapters.simulated import FolderInUse
from controlplane.application import scenario_file
from controlplane.domain.errors import DomainError
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.ruled_command import RuledCommand
from controlplane.simulation.arrivals import Lengths, read_lengths
from controlplane.simulation.fleet import Fleet
from controlplane.simulation.scenario import BATCHING, MODES, SHARING, Scenario
from controlplane.simulation.trace import BadTrace

_GZIP = b"\x1f\x8b"
_OVERRIDES = ("batching", "sharing", "mode", "sample", "seed", "seconds")


class Command(RuledCommand):
    rule = Rule(READ, "placement")
    help = "Simulate a scenario; prints availability, latencies and use. Every line is simulated."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("scenario", type=Path, help="YAML; examples: deploy/scenarios")
        parser.add_argument("--trace", type=Path, help="CSV: TIMESTAMP, ContextTokens, Generated…")
        parser.add_argument("--batching", choices=BATCHING)
        parser.add_argument("--sharing", choices=SHARING)
        parser.add_argument("--mode", choices=MODES)
        parser.add_argument("--sample", type=int, help="Simulate one of so many stretches of time.")
        parser.add_argument("--seed", type=int)
        parser.add_argument("--seconds", type=float)
        parser.add_argument("--events", type=Path, metavar="DIR", help="A new folder for the log.")
        parser.add_argument("--json", type=Path, metavar="FILE")

    def handle(self, *args: Any, **options: Any) -> None:
        trace = _trace(options["trace"]) if options["trace"] else None
        try:
            fleet = Fleet(_scenario(options), trace)
            outcome = fleet.run()
            if options["events"]:
                head = bootstrap.write_simulation(options["events"], fleet.control.events)
        except (DomainError, FolderInUse) as error:
            raise CommandError(str(error)) from error
        for line in outcome.lines():
            self.stdout.write(line)
        if options["events"]:
            self.stdout.write(f"simulated  log up to {head} in {options['events']}")
        if options["json"]:
            options["json"].write_text(json.dumps(outcome.figures(), indent=2) + "\n")


def _scenario(options: dict[str, Any]) -> Scenario:
    try:
        text = options["scenario"].read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{options['scenario']} cannot be read: {error}") from error
    given = {name: options[name] for name in _OVERRIDES if options[name] is not None}
    return replace(scenario_file.parse(text), **given)


def _trace(path: Path) -> Lengths:
    try:
        data = path.read_bytes()
        return read_lengths((gzip.decompress(data) if data.startswith(_GZIP) else data).decode())
    except (OSError, EOFError, UnicodeDecodeError, BadTrace) as error:
        raise CommandError(f"{path} cannot be read as a trace: {error}") from error
