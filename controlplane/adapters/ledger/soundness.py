"""What else must be true of a sound store: sums equal their records, and SQLite's file is whole."""

from collections.abc import Iterator
from typing import Any

from django.db import DatabaseError, connections

from controlplane.adapters.ledger import reconcile
from controlplane.application.proving import Finding
from controlplane.application.records import REQUESTS


def usage_findings(alias: str = "default") -> Iterator[Finding]:
    """The first total that is not the sum of its ended requests, as the standing check says it."""
    driver: Any = connections[alias]
    try:
        differences = reconcile.check(alias).differences[:1]
    except driver.Database.Error as error:  # its connection is the driver's own
        yield Finding("database", 0, "", "file", str(error))
        return
    for difference in differences:
        row, _, detail = difference.rpartition(": ")
        yield Finding(REQUESTS, 0, row, "usage", detail)


def file_findings(alias: str = "default") -> Iterator[Finding]:
    """SQLite's own check of its file; PostgreSQL has checksums of its own.

    The whole one and not ``quick_check``, which does not compare an index with its table: what is
    read by an index is read from it, so a position that was changed in the row alone would pass.
    """
    if connections[alias].vendor != "sqlite":
        return
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("PRAGMA integrity_check(1)")
            said = str(cursor.fetchone()[0])
    except DatabaseError as error:
        said = str(error)
    if said != "ok":
        yield Finding("database", 0, "", "file", said)
