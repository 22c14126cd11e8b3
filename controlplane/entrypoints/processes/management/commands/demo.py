"""``manage.py demo``: the whole product on this machine."""

import asyncio
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser
from rich.console import Console

from controlplane import bootstrap
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes import demo, demo_seed
from controlplane.entrypoints.processes.ruled_command import RuledCommand
from controlplane.entrypoints.processes.supervisor import NotReady


class Command(RuledCommand):
    requires_system_checks = ()  # the whole URL tree is not needed here
    rule = Rule(WRITE, "system")
    help = "Start everything on this machine: bus, web, gateway, controller, agents, one model."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--agents", type=int, default=1, help="How many gpuagents.")
        parser.add_argument("--devices", default="", help="Per agent, e.g. cpu:4GiB,cpu:4GiB.")
        parser.add_argument("--simulated", action="store_true", help="No weights: made-up tokens.")
        parser.add_argument("--model-cache", type=Path, help="Default: models/ in the data folder.")
        parser.add_argument(
            "--bus-for-agents",
            default="",
            help="Where agent {number} reaches the bus, e.g. through a proxy; default: directly.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        data_dir = Path(settings.DATA_DIR)
        console = Console(highlight=False)
        try:
            with demo.locked(data_dir):
                self._run(data_dir, console, options)
        except (demo.AlreadyRunning, demo.Unwritable) as error:
            raise CommandError(str(error)) from error
        except (NotReady, TimeoutError, FileNotFoundError) as error:
            raise CommandError(str(error)) from error

    def _run(self, data_dir: Path, console: Console, options: dict[str, Any]) -> None:
        simulated = options["simulated"]
        chosen = demo.Options(
            data_dir=data_dir,
            model="simulated" if simulated else "smollm2",
            num_agents=options["agents"],
            devices=options["devices"],
            model_cache=options["model_cache"],
            bus_for_agents=options["bus_for_agents"],
        )
        console.print(f"[bold]Engine[/] on {data_dir}\n")
        run = demo.Demo(chosen, console)
        with run.phase("Database and first entries"):
            call_command("migrate", interactive=False, verbosity=0)
            seeder = demo_seed.Seeder(bootstrap.command_handler(), time.time, data_dir)
            spec = demo_seed.SIMULATED if simulated else demo_seed.SMOLLM2
            secrets = seeder.seed(chosen.model, spec)
        asyncio.run(run.run(secrets))
