"""One raw database connection, and the statements that both databases share.

Raw, since Django's cursors cost more than the statements they run here. The two subclasses differ
in how a group is locked and written: see ``sqlite`` and ``postgres``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from controlplane.application.chain import GENESIS
from controlplane.application.ports import Head, StoredResponse, StoreUnavailable
from controlplane.application.sequencer import Batch

COLUMNS = (
    "position, stream, version, type, schema_version, data,"
    " actor, correlation_id, causation_id, address, reason, recorded_at, hash"
)
HEAD = "SELECT position, hash FROM eventstore_head WHERE id = 1"
FIRST_HEAD = "INSERT INTO eventstore_head VALUES (1, 0, ?) ON CONFLICT DO NOTHING"
RESPONSE = (
    "SELECT body_hash, status, body, position FROM eventstore_idempotencykey"
    " WHERE key = ? AND used_at > ?"
)
PURGE_KEYS = "DELETE FROM eventstore_idempotencykey WHERE used_at <= ?"
LEASE = """
INSERT INTO eventstore_lease AS held VALUES (?, ?, 1, ?)
ON CONFLICT (name) DO UPDATE SET
    epoch = held.epoch + CASE WHEN held.holder = excluded.holder THEN 0 ELSE 1 END,
    holder = excluded.holder,
    expires_at = excluded.expires_at
WHERE held.holder = excluded.holder OR held.expires_at <= ?
RETURNING epoch
"""


class Session(ABC):
    """A connection that one caller uses at a time."""

    errors: ClassVar[tuple[type[Exception], ...]]  # everything the driver raises
    failures: ClassVar[type[Exception]]  # those that the statements are not to blame for

    @abstractmethod
    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement."""

    def records(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]] | None:
        """As ``fetch``, up to the first row that is no record at all; None if that is the first."""
        return self.fetch(sql, params)

    @abstractmethod
    def lock_head(self, known: Head | None) -> Head:
        """The head to write after. From here on no other writer can move it, or ``write`` and
        ``leave`` will say that one did: then this is called again."""

    @abstractmethod
    def versions(self, streams: Iterable[str]) -> dict[str, int]:
        """The last version of each stream, 0 if it is new."""

    @abstractmethod
    def responses(self, keys: Sequence[str], since: float) -> dict[str, StoredResponse]:
        """What was answered to those of ``keys`` that were used after ``since``."""

    @abstractmethod
    def write(self, batch: Batch, before: Head, now: float) -> bool:
        """Write and commit the batch; False if the head was no longer ``before``."""

    @abstractmethod
    def leave(self, before: Head) -> bool:
        """End the transaction with nothing written; False if the head was no longer ``before``."""

    @abstractmethod
    def rollback(self) -> None:
        """End the transaction, whatever state it is in."""

    @classmethod
    @abstractmethod
    def connect(cls, wrapper: Any) -> "Session":
        """Open one with the settings of Django's ``wrapper``; raises StoreUnavailable."""

    @staticmethod
    @abstractmethod
    def told(error: Exception) -> StoreUnavailable:
        """What a caller is told of a driver's error."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def head(self, suffix: str = "") -> Head:
        """The head row; made first if the table is empty."""
        rows = self.fetch(HEAD + suffix)
        if not rows:
            self.fetch(FIRST_HEAD, (GENESIS.hash,))
            rows = self.fetch(HEAD + suffix)
        return Head(*rows[0])

    def response(self, key: str, since: float) -> StoredResponse | None:
        rows = self.fetch(RESPONSE, (key, since))
        return StoredResponse(*rows[0]) if rows else None

    def lease_epoch(self, name: str, holder: str, expires_at: float, now: float) -> int | None:
        rows = self.fetch(LEASE, (name, holder, expires_at, now))
        return int(rows[0][0]) if rows else None
