"""Old shapes of events, lifted one version at a time when read; what is stored never changes.

An upcaster maps ``(type, from_version)`` to a pure function on the decoded JSON object::

    UPCASTERS["RouteCreated", 1] = lambda data: {**data, "sticky": True}   # version 1 -> 2
"""

from collections.abc import Callable
from typing import Any

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: dict[tuple[str, int], Upcaster] = {}


def lift(name: str, version: int, newest: int, data: dict[str, Any]) -> dict[str, Any]:
    """``data`` of schema ``version`` in the shape of ``newest``."""
    for step in range(version, newest):
        data = UPCASTERS[name, step](data)
    return data
