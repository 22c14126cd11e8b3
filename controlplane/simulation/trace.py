"""Reading a trace of which model was asked for when: CSV, gzipped or not.

Columns ``time`` (ISO 8601, or seconds) and ``model``; others are ignored.
"""

import csv
import io
from collections.abc import Iterable
from datetime import UTC, datetime

from controlplane.simulation.residency import Request


class BadTrace(ValueError):
    """Says in which line what is wrong."""


def read(text: str) -> list[Request]:
    """In the order of time; raises BadTrace."""
    rows = csv.DictReader(io.StringIO(text))
    missing = {"time", "model"} - set(rows.fieldnames or ())
    if missing:
        raise BadTrace(f"The trace has no column {' and no column '.join(sorted(missing))}.")
    return sorted(_requests(rows))


def _requests(rows: Iterable[dict[str, str]]) -> Iterable[Request]:
    for number, row in enumerate(rows, start=2):
        try:
            yield Request(_seconds(row["time"]), row["model"])
        except (TypeError, ValueError) as error:
            raise BadTrace(f"Line {number} of the trace has no time: {row['time']!r}.") from error


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        told = datetime.fromisoformat(text)
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
