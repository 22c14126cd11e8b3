"""The log on SQLite: WAL, synchronous=FULL, BEGIN IMMEDIATE.

A writer that left the head at 7 does not read it again: it moves the head *from 7*, and if that
moves nothing, another process wrote in between; then it rolls back, reads and places anew::

    BEGIN IMMEDIATE
    UPDATE head SET position = 8 … WHERE position = 7      1 row: ours to write
    INSERT event 8
    COMMIT
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from controlplane.adapters.eventstore.session import COLUMNS, Session
from controlplane.application.failpoints import passing
from controlplane.application.ports import Head, StoredResponse, StoreUnavailable
from controlplane.application.sequencer import Batch

_INSERT = f"INSERT INTO eventstore_event ({COLUMNS}) VALUES ({', '.join('?' * 13)})"
_MOVE_HEAD = (
    "UPDATE eventstore_head SET position = ?, hash = ? WHERE id = 1 AND position = ? AND hash = ?"
)
_VERSION = "SELECT max(version) FROM eventstore_event WHERE stream = ?"
# In one statement, however many: a group of 64 would need as many.
_RESPONSES = (
    "SELECT key, body_hash, status, body, position FROM eventstore_idempotencykey"
    " WHERE key IN (SELECT value FROM json_each(?)) AND used_at > ?"
)
_KEEP_KEY = "INSERT INTO eventstore_idempotencykey VALUES (?, ?, ?, ?, ?, ?)"


class SqliteSession(Session):
    errors = (sqlite3.Error, UnicodeDecodeError)  # the latter for a message with damage in it
    failures = sqlite3.OperationalError

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw
        self._contended = False

    @classmethod
    def connect(cls, wrapper: Any) -> "SqliteSession":
        """With Django's settings, but without the converters it registers for its own fields."""
        params = {**wrapper.get_connection_params(), "detect_types": 0, "isolation_level": None}
        try:
            raw = sqlite3.connect(**params)
            for command in filter(None, map(str.strip, wrapper.init_commands)):
                raw.execute(command)
        except cls.errors as error:
            raise cls.told(error) from error
        return cls(raw)

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._raw.execute(sql, params).fetchall()

    def records(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]] | None:
        """A text that is not UTF-8 ends them: SQLite keeps what it is given, and bits flip."""
        try:
            return self.fetch(sql, params)
        except sqlite3.OperationalError as error:
            if "decode" not in str(error):
                raise
        rows: list[tuple[Any, ...]] = []
        with contextlib.suppress(sqlite3.OperationalError):
            for row in self._raw.execute(sql, params):
                rows.append(row)
        return rows or None

    def lock_head(self, known: Head | None) -> Head:
        self._raw.execute("BEGIN IMMEDIATE")
        if known is not None and not self._contended:
            return known
        head = self.head()
        self._contended = head != known
        return head

    def versions(self, streams: Iterable[str]) -> dict[str, int]:
        execute = self._raw.execute
        return {stream: execute(_VERSION, (stream,)).fetchone()[0] or 0 for stream in streams}

    def responses(self, keys: Sequence[str], since: float) -> dict[str, StoredResponse]:
        rows = self.fetch(_RESPONSES, (msgspec.json.encode(keys).decode(), since))
        return {key: StoredResponse(*stored) for key, *stored in rows}

    def write(self, batch: Batch, before: Head, now: float) -> bool:
        execute = self._raw.execute
        if not execute(_MOVE_HEAD, (*batch.head, *before)).rowcount:
            return self._moved()
        passing("append.head")
        if len(batch.rows) == 1:
            execute(_INSERT, batch.rows[0])
        elif batch.rows:
            self._raw.executemany(_INSERT, batch.rows)
        passing("append.events")
        if batch.keys:
            kept = batch.keys.items()
            answers = [(key, a.body_hash, a.status, a.body, a.position, now) for key, a in kept]
            self._raw.executemany(_KEEP_KEY, answers)
        passing("append.keys")
        execute("COMMIT")
        return True

    def leave(self, before: Head) -> bool:
        if self.head() != before:
            return self._moved()
        self.rollback()
        return True

    def _moved(self) -> bool:
        """Another process wrote; the head is read at the next try."""
        self.rollback()
        self._contended = True
        return False

    def rollback(self) -> None:
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        self._raw.close()

    @staticmethod
    def told(error: Exception) -> StoreUnavailable:
        """By SQLite's primary result code, the low byte of the extended one."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable("store_busy", "Another writer held the log for too long.")
        if code == sqlite3.SQLITE_FULL:
            return StoreUnavailable("store_full", "There is no space left for the log.", 30.0)
        return StoreUnavailable("store_error", "The log cannot be written now.", 5.0)
