"""``manage.py run_controller``: the loops that keep the fleet as the log wants it."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.controller import ControllerSettings
from controlplane.entrypoints.processes.controller_server import run
from controlplane.entrypoints.processes.ruled_command import RuledCommand


class Command(RuledCommand):
    """Works until SIGTERM. Of several, one leads and the others stand by."""

    rule = Rule(WRITE, "system")
    help = "Project, ingest, reconcile, publish and seal."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="where /metrics is served")
        parser.add_argument("--port", type=int, default=settings.ENV.metrics_port)
        parser.add_argument("--port-file", type=Path, help="write the bound port here")

    def handle(self, *args: Any, **options: Any) -> None:
        controller = ControllerSettings(
            settings.NATS_URL,
            settings.NATS_CREDS,
            settings.CLUSTER_ID,
            group_key=settings.SECRET_KEY.encode(),
        )
        run(controller, options["host"], options["port"], options["port_file"])
