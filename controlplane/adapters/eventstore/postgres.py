"""The log on PostgreSQL: a group is one statement, which compares and moves the head row.

While one process writes, the head it remembers is right and a group costs one round trip::

    WITH moved AS (UPDATE head ... WHERE position = 6 AND hash = ... RETURNING 1), ...
    INSERT ... SELECT ... FROM moved, unnest(...)        -- the head was 6: all of it, committed

If another process wrote meanwhile, the UPDATE (having waited for the row) matches nothing and
nothing is written. The group is then placed anew under ``SELECT ... FOR UPDATE``, and so are the
next ones until the head is again where this process left it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import errors as pg

from controlplane.adapters.eventstore.session import COLUMNS, Session
from controlplane.application.failpoints import passing
from controlplane.application.ports import Head, StoredResponse, StoreUnavailable
from controlplane.application.sequencer import Batch

_TYPES = ["int8", "text", "int8", "text", "int4", "bytea", *["text"] * 5, "float8", "bytea"]
_ARRAYS = ", ".join(f"%b::{kind}[]" for kind in _TYPES)
_WRITE = f"""
WITH moved AS (
    UPDATE eventstore_head SET position = %b, hash = %b
    WHERE id = 1 AND position = %b AND hash = %b RETURNING id
), events AS (
    INSERT INTO eventstore_event ({COLUMNS})
    SELECT written.* FROM moved, unnest({_ARRAYS}) AS written
)
SELECT count(*) FROM moved
"""
_WRITE_WITH_KEYS = _WRITE.replace(
    "SELECT count",
    """, keys AS (
    INSERT INTO eventstore_idempotencykey
    SELECT kept.*, %b::float8
    FROM moved, unnest(%b::text[], %b::text[], %b::int4[], %b::bytea[], %b::int8[]) AS kept
)
SELECT count""",
)
_VERSIONS = """
SELECT stream, (SELECT max(version) FROM eventstore_event AS e WHERE e.stream = s.stream)
FROM unnest(%b::text[]) AS s (stream)
"""
_RESPONSES = """
SELECT key, body_hash, status, body, position FROM eventstore_idempotencykey
WHERE key = ANY(%b::text[]) AND used_at > %b
"""
_BUSY = (
    pg.LockNotAvailable,
    pg.QueryCanceled,
    pg.SerializationFailure,
    pg.DeadlockDetected,
    pg.TooManyConnections,
)


class PostgresSession(Session):
    errors = (psycopg.Error,)
    failures = psycopg.OperationalError

    def __init__(self, raw: "psycopg.Connection[tuple[Any, ...]]") -> None:
        self._raw = raw
        self._contended = False

    @classmethod
    def connect(cls, wrapper: Any) -> "PostgresSession":
        """With Django's settings, but server-side parameters and prepared statements."""
        params = wrapper.get_connection_params()
        for unwanted in ("cursor_factory", "context", "prepare_threshold"):
            params.pop(unwanted, None)
        try:
            return cls(psycopg.connect(**params, autocommit=True, prepare_threshold=1))
        except psycopg.Error as error:
            raise cls.told(error) from error

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor = self._raw.execute(sql.replace("?", "%b"), params or None, binary=True)
        return cursor.fetchall() if cursor.description else []

    def lock_head(self, known: Head | None) -> Head:
        if known is not None and not self._contended:
            return known
        self._raw.execute("BEGIN")
        head = self.head(" FOR UPDATE")
        self._contended = head != known
        return head

    def versions(self, streams: Iterable[str]) -> dict[str, int]:
        rows = self.fetch(_VERSIONS, (list(streams),))
        return {stream: version or 0 for stream, version in rows}

    def responses(self, keys: Sequence[str], since: float) -> dict[str, StoredResponse]:
        rows = self.fetch(_RESPONSES, (list(keys), since))
        return {key: StoredResponse(*stored) for key, *stored in rows}

    def write(self, batch: Batch, before: Head, now: float) -> bool:
        columns = list(zip(*batch.rows, strict=True)) or [()] * 13
        params = [batch.head.position, batch.head.hash, before.position, before.hash]
        params.extend(map(list, columns))
        if batch.keys:
            params.extend(_key_params(batch, now))
        statement = _WRITE_WITH_KEYS if batch.keys else _WRITE
        moved = bool(self.fetch(statement, params)[0][0])
        if self._locked():
            passing("append.head")
            self._raw.execute("COMMIT")
        self._contended |= not moved
        return moved

    def leave(self, before: Head) -> bool:
        if self._locked():
            self.rollback()
            return True
        self._contended = self.head() != before
        return not self._contended

    def _locked(self) -> bool:
        return self._raw.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def rollback(self) -> None:
        self._raw.rollback()

    def close(self) -> None:
        self._raw.close()

    @staticmethod
    def told(error: Exception) -> StoreUnavailable:
        if isinstance(error, _BUSY):
            return StoreUnavailable("store_busy", "Another writer held the log for too long.")
        if isinstance(error, pg.DiskFull):
            return StoreUnavailable("store_full", "There is no space left for the log.", 30.0)
        return StoreUnavailable("store_error", "The log cannot be reached or written now.", 5.0)


def _key_params(batch: Batch, now: float) -> list[Any]:
    kept = list(batch.keys.values())
    return [
        now,
        list(batch.keys),
        [one.body_hash for one in kept],
        [one.status for one in kept],
        [one.body for one in kept],
        [one.position for one in kept],
    ]
