"""Django's default database as another file, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def pointed_at(path: Path) -> Iterator[None]:
    """Django's default database is the SQLite file at ``path`` for this thread and later ones."""
    from django.db import connections

    wrapper = connections["default"]
    before = wrapper.settings_dict["NAME"]
    wrapper.close()
    wrapper.settings_dict["NAME"] = str(path)
    try:
        yield
    finally:
        wrapper.close()
        wrapper.settings_dict["NAME"] = before
