"""What the management commands that read or write the database have in common."""

from pathlib import Path
from typing import Any, ClassVar

from django.core.management.base import CommandError
from django.db import connection

from controlplane.entrypoints.processes.read_only import (
    NeedsWriting,
    opened_for_reading,
    read_only_file,
)
from controlplane.entrypoints.processes.ruled_command import RuledCommand


def _is_absent() -> bool:
    """Whether it is a file that is not there: to look into it would make it, and an empty one."""
    name = str(connection.settings_dict["NAME"])
    return connection.vendor == "sqlite" and name.startswith("/") and not Path(name).exists()


class DatabaseCommand(RuledCommand):
    """Says so where there are no tables, which is mostly the wrong folder, not a broken one, and
    where the folder cannot be written, unless it ``only_reads``."""

    only_reads: ClassVar[bool] = False

    def execute(self, *args: Any, **options: Any) -> str | None:
        file = None if _is_absent() else read_only_file()
        if file is None:
            return self._execute(*args, **options)
        if not self.only_reads:
            raise CommandError(
                f"{file} is read-only, and this command writes there: mount it for writing, or "
                "copy its folder and name the copy with ENGINE_DATA_DIR."
            )
        try:
            with opened_for_reading(file):
                return self._execute(*args, **options)
        except NeedsWriting as error:
            raise CommandError(str(error)) from error

    def _execute(self, *args: Any, **options: Any) -> str | None:
        if _is_absent() or not connection.introspection.table_names():
            raise CommandError(
                f"The database {connection.settings_dict['NAME']} is empty. Is ENGINE_DATA_DIR or "
                "ENGINE_DATABASE_URL right? A new one is made by manage.py migrate."
            )
        return super().execute(*args, **options)
