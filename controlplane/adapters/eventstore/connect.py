"""Which session speaks to which of Django's databases."""

from django.db import connections

from controlplane.adapters.eventstore.session import Session


def open_session(alias: str) -> Session:
    """Connect to Django's database ``alias``; raises StoreUnavailable."""
    wrapper = connections[alias].copy()
    if wrapper.vendor == "postgresql":
        from controlplane.adapters.eventstore.postgres import PostgresSession

        return PostgresSession.connect(wrapper)
    from controlplane.adapters.eventstore.sqlite import SqliteSession

    return SqliteSession.connect(wrapper)
