"""What a projection is: rows, and pure functions that change them event by event.

A row is a frozen struct whose first field is its key; its class is its table. Handlers never
raise for what the log may hold: an event about something unknown is passed over, since the log is
a fact and the reader has to cope. Worked example::

    def _renamed(rows, event, recorded):
        tenant = rows.get(Tenant, event.tenant_id)
        if tenant:
            rows.put(replace(tenant, tier=event.tier, version=recorded.version))

    PROJECTION = Projection("tenants", 1, (Tenant,), {TenantTierChanged: _renamed})

Change a row's fields or a handler's meaning and raise the projection's version: the stored read
model is then rebuilt at the next start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from controlplane.domain.decider import Event

Key = str | int


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row of a read model. ``indexed`` fields can be searched by; ``history`` rows have the
    ``position`` of their event, are only ever added, and no handler reads them, so a projector
    need not keep them in memory."""

    indexed: ClassVar[tuple[str, ...]] = ()
    history: ClassVar[bool] = False


R = TypeVar("R", bound=Row)


def key_of(row: Row) -> Key:
    key: Key = getattr(row, row.__struct_fields__[0])
    return key


class Rows(Protocol):
    """Where rows are kept: in memory, or in memory with the database behind it."""

    def get(self, table: type[R], key: Key) -> R | None: ...

    def put(self, row: Row) -> None:
        """Insert, or replace the row with the same key."""

    def delete(self, table: type[R], key: Key) -> None: ...

    def find(self, table: type[R], field: str, value: Any) -> tuple[R, ...]:
        """The rows whose ``field``, which must be ``indexed``, has this value."""

    def all(self, table: type[R]) -> tuple[R, ...]: ...


class Recorded(Protocol):
    """What a handler may know about an event besides its content."""

    @property
    def position(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def stream(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def meta(self) -> Any: ...
    @property
    def event(self) -> Event: ...


Handler = Callable[[Rows, Any, Recorded], None]


@dataclass(frozen=True)
class Projection:
    """``tables`` are written by this projection alone, but for the standing of versions."""

    name: str
    version: int
    tables: tuple[type[Row], ...]
    handlers: Mapping[type[Event], Handler]
