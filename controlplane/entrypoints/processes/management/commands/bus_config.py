"""``manage.py bus_config``: the configuration of a NATS server that trusts this installation."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from controlplane.adapters.natsbus.credentials import Authority
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.ruled_command import RuledCommand


class Command(RuledCommand):
    requires_system_checks = ()  # the whole URL tree is not needed here
    rule = Rule(WRITE, "system")
    help = "Write nats.conf and the control plane's bus credentials, and say where."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=4222)
        parser.add_argument("--monitor-port", type=int, default=8222, help="On loopback only.")

    def handle(self, *args: Any, **options: Any) -> None:
        authority = Authority(Path(settings.DATA_DIR) / "nats")
        config = authority.write_server_config(
            options["port"], options["host"], options["monitor_port"]
        )
        self.stdout.write(f"{config}\n{authority.write_control_creds()}")
