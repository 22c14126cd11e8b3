"""``manage.py run_web``: dashboard, admin API and live websocket on one port."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.utils.module_loading import import_string

from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.live.hub import process_hub
from controlplane.entrypoints.logs import configure_logs
from controlplane.entrypoints.processes.ruled_command import RuledCommand


class Command(RuledCommand):
    rule = Rule(WRITE, "system")
    help = "Serve the dashboard, /api/v1 and /ws/live on ENGINE_WEB_HOST:ENGINE_WEB_PORT."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port-file", type=Path, help="Write the bound port here.")

    def handle(self, *args: Any, **options: Any) -> None:
        # Daphne installs Twisted's reactor when imported, which no other command needs.
        from controlplane.entrypoints.processes.web_server import WebServer, log_through_structlog

        application = import_string(settings.ASGI_APPLICATION)
        configure_logs()
        log_through_structlog()

        def listening(port: int) -> None:
            if options["port_file"]:
                options["port_file"].write_text(f"{port}\n")
            self.stdout.write(f"http://{settings.WEB_HOST}:{port}")

        stop = process_hub().stop
        server = WebServer(application, settings.WEB_HOST, settings.WEB_PORT, listening, stop)
        server.run()
        if server.failed:
            raise CommandError(f"{settings.WEB_HOST}:{settings.WEB_PORT} cannot be bound")
