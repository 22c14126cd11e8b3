"""``manage.py run_gateway``: the OpenAI-compatible API and the token websocket."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.openai.process import run
from controlplane.entrypoints.processes.ruled_command import RuledCommand


class Command(RuledCommand):
    """Serves until SIGTERM; then streams have a few seconds to end."""

    rule = Rule(WRITE, "system")
    help = "Serve inference: /v1 and /ws/v1/stream."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.ENV.gateway_host)
        parser.add_argument("--port", type=int, default=settings.ENV.gateway_port)
        parser.add_argument("--port-file", type=Path, help="write the bound port here")

    def handle(self, *args: Any, **options: Any) -> None:
        run(options["host"], options["port"], options["port_file"])
