"""The event log on SQLite or PostgreSQL: ``application.ports.EventStore``.

Commands that queued up while the last commit ran go into one transaction (``group``). Under the
lock of the head row they are given positions, versions and hashes (``application.sequencer``),
which needs the versions of their streams: remembered from the last group as long as the head is
where it was left, read anew when another process wrote. So positions have no gaps, become visible
in order, and of two appends with one expected version exactly one wins, without a failed insert.

Several processes may write one database; each has its own ``DjangoEventStore``.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from controlplane.adapters import failed_sync
from controlplane.adapters.eventstore.connect import open_session
from controlplane.adapters.eventstore.group import GroupCommit
from controlplane.adapters.eventstore.session import COLUMNS, PURGE_KEYS, Session
from controlplane.adapters.store_writes import store_writes
from controlplane.application.chain import GENESIS, follow_columns
from controlplane.application.failpoints import passing
from controlplane.application.ports import (
    Append,
    Appended,
    Clock,
    Head,
    IntegrityError,
    Lease,
    RecordedEvent,
    StoredColumns,
    StoredResponse,
    StoreUnavailable,
)
from controlplane.application.sequencer import (
    KEY_SECONDS,
    Batch,
    Outcome,
    Prepared,
    prepare,
    recorded_events,
    sequence,
)
from controlplane.domain.decider import Event
from controlplane.domain.event_types import decode

GROUP_LIMIT = 64
VERIFY_BATCH = 5_000
_PURGE_SECONDS = 60.0
_MAX_REMEMBERED_STREAMS = 50_000
_MAX_SESSIONS = 8

_STREAM = (
    f"SELECT {COLUMNS} FROM eventstore_event WHERE stream = ? AND version > ? ORDER BY version"
)
_REPLAY = (
    "SELECT type, schema_version, data FROM eventstore_event"
    " WHERE stream = ? AND version > ? ORDER BY version"
)
_ALL = (
    f"SELECT {COLUMNS} FROM eventstore_event"
    " WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
)
_HASH = "SELECT hash FROM eventstore_event WHERE position = ?"
_END = 2**62


class DjangoEventStore:
    """``alias`` names a database of Django's settings; connections are opened when needed."""

    def __init__(self, clock: Clock, alias: str = "default") -> None:
        self._clock = clock
        self._readers = SessionPool(partial(open_session, alias))
        self._writer = Writer(partial(open_session, alias), clock)
        self._group = GroupCommit[Prepared, Appended](self._writer.write, GROUP_LIMIT)

    def append(self, append: Append) -> Appended:
        appended = self._group.submit(prepare(append))
        passing("append.answered")
        return appended

    def read_stream(self, stream: str, after_version: int = 0) -> list[RecordedEvent]:
        with self._readers.session() as session:
            return recorded_events(session.fetch(_STREAM, (stream, after_version)))

    def replay(self, stream: str, after_version: int = 0) -> list[Event]:
        with self._readers.session() as session:
            rows = session.fetch(_REPLAY, (stream, after_version))
        try:
            return [decode(*row) for row in rows]
        except (TypeError, ValueError) as error:
            raise self._damage(stream, after_version) from error

    def read_all(self, after: int, limit: int, upto: int | None = None) -> list[RecordedEvent]:
        return recorded_events(self._rows(after, limit, _END if upto is None else upto))

    def read_columns(self, after: int, upto: int, limit: int) -> list[StoredColumns]:
        return [(row[:12], row[12]) for row in self._rows(after, limit, upto)]

    def verify(self, after: int = 0) -> Head:
        """Recompute the chain from ``after`` (whose own hash is believed) to the head."""
        last = self.head()
        seen = self._believed(after)
        while rows := self.read_columns(seen.position, last.position, VERIFY_BATCH):
            seen = follow_columns(seen, rows)
        if seen.position != last.position:
            raise IntegrityError(seen.position + 1, f"missing: the head is at {last.position}")
        if seen.hash != last.hash:
            raise IntegrityError(seen.position, "the head row holds another hash")
        return seen

    def _rows(self, after: int, limit: int, upto: int) -> list[Any]:
        with self._readers.session() as session:
            rows = session.records(_ALL, (after, upto, limit))
        if rows is None:
            raise IntegrityError(after + 1, "the stored text is not UTF-8")
        return rows

    def _damage(self, stream: str, after_version: int) -> IntegrityError:
        """Where the stream cannot be decoded."""
        with self._readers.session() as session:
            rows = session.fetch(_STREAM, (stream, after_version))
        for row in rows:
            try:
                recorded_events([row])
            except IntegrityError as error:
                return error
        return IntegrityError(0, f"{stream} could not be decoded")

    def _believed(self, position: int) -> Head:
        if position == 0:
            return GENESIS
        with self._readers.session() as session:
            rows = session.fetch(_HASH, (position,))
        if not rows:
            raise IntegrityError(position, "missing")
        return Head(position, rows[0][0])

    def head(self) -> Head:
        with self._readers.session() as session:
            return session.head()

    def stored_response(self, key: str) -> StoredResponse | None:
        with self._readers.session() as session:
            return session.response(key, self._clock.now() - KEY_SECONDS)

    def acquire_lease(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:
        with self._readers.session() as session:
            epoch = session.lease_epoch(name, holder, now + ttl, now)
        passing("lease.acquired")
        return None if epoch is None else Lease(name, holder, epoch, now + ttl)

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._writer.close()
        self._readers.close()


class Writer:
    """Writes one group at a time; remembers the head it left and the versions below it."""

    def __init__(self, connect: Callable[[], Session], clock: Clock) -> None:
        self._connect, self._clock = connect, clock
        self._session: Session | None = None
        self._known: Head | None = None
        self._versions: dict[str, int] = {}
        self._purge_at = 0.0

    def write(self, take: Callable[[], list[Prepared]]) -> list[Outcome]:
        """Lock, take a group, write it. Raises StoreUnavailable for the whole group."""
        if failed_sync.has_failed():
            raise StoreUnavailable("store_error", "The disk failed; this process is ending.", 5.0)
        session = self._session = self._session or self._connect()
        try:
            outcomes = self._write_locked(session, take)
        except session.errors as error:
            self._forget()
            store_writes.note_failed(error)
            failed_sync.leave_if_failed(error)
            told = session.told(error)
            self._recover(session, told)
            raise told from error
        store_writes.note_written()
        return outcomes

    def _write_locked(self, session: Session, take: Callable[[], list[Prepared]]) -> list[Outcome]:
        group: list[Prepared] = []
        while True:
            head = self._lock(session)
            passing("append.locked")
            group = group or take()
            try:
                outcomes = self._write(session, head, group)
            except session.errors as error:
                if isinstance(error, session.failures):
                    raise
                outcomes = self._singly(session, group, error)
            if outcomes is not None:
                return outcomes

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _recover(self, session: Session, told: StoreUnavailable) -> None:
        """After any failure but a busy database the connection is thrown away.

        A file that failed to sync must not be synced again by the same handle: the kernel may
        report success for pages that it has already dropped. Then this process ends, and the
        handle is not even closed: see ``failed_sync``.
        """
        if failed_sync.has_failed():
            return
        try:
            if told.code == "store_busy":
                session.rollback()
                return
            self._session = None
            session.close()
        except session.errors:
            self._session = None

    def _lock(self, session: Session) -> Head:
        head = session.lock_head(self._known)
        if head != self._known or len(self._versions) > _MAX_REMEMBERED_STREAMS:
            self._versions.clear()
        self._known = head
        return head

    def _forget(self) -> None:
        self._known, self._purge_at = None, 0.0
        self._versions.clear()

    def _write(self, session: Session, head: Head, group: list[Prepared]) -> list[Outcome] | None:
        """The outcomes, or None if the head had moved and the group must be placed again.

        Refusals too hold only if the head had not moved: they may rest on remembered versions.
        """
        now = self._clock.now()
        batch = self._sequence(session, head, group, now)
        if not batch.rows and not batch.keys:
            return batch.outcomes if session.leave(head) else None
        passing("append.placed")
        if not session.write(batch, head, now):
            return None
        passing("append.committed")
        self._known = batch.head
        self._versions.update(batch.versions)
        return batch.outcomes

    def _sequence(self, session: Session, head: Head, group: list[Prepared], now: float) -> Batch:
        known = self._versions
        unknown = {one.append.stream for one in group if one.append.stream not in known}
        if unknown:
            known.update(session.versions(unknown))
        versions = {one.append.stream: known[one.append.stream] for one in group}
        return sequence(group, head, versions, self._used(session, group, now), now)

    def _used(
        self, session: Session, group: list[Prepared], now: float
    ) -> dict[str, StoredResponse]:
        """The keys of the group that are taken."""
        keys = [one.append.idempotency.key for one in group if one.append.idempotency]
        if not keys:
            return {}
        if now >= self._purge_at:
            session.fetch(PURGE_KEYS, (now - KEY_SECONDS,))
            self._purge_at = now + _PURGE_SECONDS
        return session.responses(keys, now - KEY_SECONDS)

    def _singly(self, session: Session, group: list[Prepared], error: Exception) -> list[Outcome]:
        """A statement failed that no check foresaw: find the append that is to blame."""
        session.rollback()
        self._forget()
        if len(group) == 1:
            return [session.told(error)]
        outcomes: list[Outcome] = []
        for one in group:
            outcomes += self.write(lambda one=one: [one])  # type: ignore[misc]
        return outcomes


class SessionPool:
    """Connections for reading: at most ``_MAX_SESSIONS`` at once, others wait for their turn.

    The one used last is used next. One that failed is not used again, nor are the idle ones then:
    a server that restarted has broken those too.
    """

    def __init__(self, connect: Callable[[], Session]) -> None:
        self._connect = connect
        self._idle: deque[Session] = deque()
        self._free = threading.BoundedSemaphore(_MAX_SESSIONS)

    @contextmanager
    def session(self) -> Iterator[Session]:
        with self._free:
            session = self._take()
            try:
                yield session
            except session.errors as error:
                session.close()
                self.close()
                raise session.told(error) from error
            else:
                self._idle.append(session)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Session:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()
