"""``ports.Ledger`` on SQLite and PostgreSQL: one instance in each gateway process."""

from collections.abc import Mapping
from typing import Any

import msgspec
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from controlplane.adapters.ledger.budgets import Cursor
from controlplane.adapters.ledger.statements import Statements, statements
from controlplane.adapters.ledger.writer import GroupWriter
from controlplane.application.ports import Intent, Terminal


class LedgerStore:
    """Durable admissions and settlements; see ``batch`` for the rule and ``writer`` for the how.

    ``alias`` names a Django database; the writer thread opens its own connection to it.
    """

    def __init__(self, alias: str = "default") -> None:
        wrapper: Any = connections[alias]  # stubs know no `Database`, the driver module
        self.sql = statements(wrapper.vendor)
        self.writer = GroupWriter(
            lambda: open_raw(alias), self.sql, wrapper.Database.IntegrityError
        )

    async def admit(self, intent: Intent) -> None:
        await self.writer.submit(intent)

    async def settle(self, terminal: Terminal) -> bool:
        return bool(await self.writer.submit(terminal))

    async def progress(self, produced: Mapping[str, int]) -> None:
        """Note how many tokens each live request has produced, for whoever may have to reap it."""
        if produced:
            payload = msgspec.json.encode(list(produced.items())).decode()
            await self.writer.submit(lambda cursor, sql: cursor.execute(sql.progress, (payload,)))

    async def close(self) -> None:
        self.writer.close()


def open_raw(alias: str) -> Any:
    """A raw DB-API connection in autocommit mode with the settings of ``alias``."""
    wrapper: BaseDatabaseWrapper = connections.create_connection(alias)
    wrapper.inc_thread_sharing()
    wrapper.connect()
    raw = wrapper.connection
    if wrapper.vendor == "postgresql":
        raw.prepare_threshold = 2
    return raw


def run(cursor: Cursor, sql: Statements, statement: str, *parameters: Any) -> list[Any]:
    """Execute the named statement and return all its rows."""
    cursor.execute(getattr(sql, statement), parameters)
    return cursor.fetchall()
