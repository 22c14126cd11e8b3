"""Which session speaks to which of Django's databases."""

from django.db import Error, connections

from controlplane.adapters.eventstore.session import Session
from controlplane.application.ports import StoreUnavailable


def open_session(alias: str) -> Session:
    """Connect to Django's database ``alias``; raises StoreUnavailable."""
    return _session_type(alias).connect(connections[alias].copy())


def unavailable(error: Error, alias: str = "default") -> StoreUnavailable:
    """What a caller is told when Django's cursors fail (a session, a key, a row that is not in
    the log) as when the log's own do: a disk that is full for one is full for both."""
    cause = error.__cause__
    return _session_type(alias).told(cause if isinstance(cause, Exception) else error)


def _session_type(alias: str) -> type[Session]:
    if connections[alias].vendor == "postgresql":
        from controlplane.adapters.eventstore.postgres import PostgresSession

        return PostgresSession
    from controlplane.adapters.eventstore.sqlite import SqliteSession

    return SqliteSession
