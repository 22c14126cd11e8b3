"""What the management commands that read or write the database have in common."""

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db import connection

from controlplane.entrypoints.processes.ruled_command import RuledCommand


def _is_absent() -> bool:
    """Whether it is a file that is not there: to look into it would make it, and an empty one."""
    name = str(connection.settings_dict["NAME"])
    return connection.vendor == "sqlite" and name.startswith("/") and not Path(name).exists()


class DatabaseCommand(RuledCommand):
    """Says so where there are no tables, which is mostly the wrong folder, not a broken one."""

    def execute(self, *args: Any, **options: Any) -> str | None:
        if _is_absent() or not connection.introspection.table_names():
            raise CommandError(
                f"The database {connection.settings_dict['NAME']} is empty. Is ENGINE_DATA_DIR or "
                "ENGINE_DATABASE_URL right? A new one is made by manage.py migrate."
            )
        return super().execute(*args, **options)
