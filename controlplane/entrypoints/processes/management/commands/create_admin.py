"""``manage.py create_admin``: the first dashboard user, with a random password."""

import os
import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser

from controlplane.adapters.access.users import save_user
from controlplane.adapters.private_files import write_private
from controlplane.application.ports import EventMeta
from controlplane.domain.policy import ROLES, WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.processes.ruled_command import cli_principal
from controlplane.entrypoints.rest.auditing import user_saved

PASSWORD_FILE = "initial_admin_password"


class Command(DatabaseCommand):
    rule = Rule(WRITE, "user")
    help = "Create a dashboard user, or give an existing one a new password; prints it once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--username", default="admin")
        parser.add_argument("--role", default="admin", choices=ROLES)
        parser.add_argument("--tenant", default="", help="Confine the user to one tenant.")

    def handle(self, *args: Any, **options: Any) -> None:
        password = os.environ.get("ENGINE_BOOTSTRAP_PASSWORD") or secrets.token_urlsafe(12)
        meta = EventMeta(cli_principal().actor)
        user_saved(meta, options["username"], options["role"], options["tenant"])
        save_user(options["username"], password, options["role"], options["tenant"])
        path = write_private(Path(settings.DATA_DIR) / PASSWORD_FILE, f"{password}\n")
        self.stdout.write(f"{options['username']}: {password}   (also in {path}; delete it)")
