"""``manage.py node_credentials NODE``: what a new node needs to join."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from controlplane.adapters.natsbus.credentials import Authority, InvalidNodeId
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.ruled_command import RuledCommand


class Command(RuledCommand):
    requires_system_checks = ()  # the whole URL tree is not needed here
    rule = Rule(WRITE, "system")
    help = "Write the bus credentials of one node, with its least privilege, and say where."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("node_id", help="1 to 63 of a-z, 0-9, '_' and '-'.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            path = Authority(Path(settings.DATA_DIR) / "nats").write_node_creds(options["node_id"])
        except InvalidNodeId as error:
            raise CommandError(str(error)) from error
        self.stdout.write(str(path))
