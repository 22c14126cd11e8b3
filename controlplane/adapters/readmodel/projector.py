"""Projects the log into the read model's tables: changed rows and checkpoint in one transaction.

All rows that handlers read are kept in memory, so that a batch of a thousand events costs the
database one write for each row that is different in the end. Several projectors may run: each
moves the checkpoint from where it left it, and whoever finds it moved reads the rows again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from controlplane.adapters.readmodel.rebuild import CODECS, Rebuild, Rebuilt
from controlplane.adapters.readmodel.timeline import RowsFolding, Snapshots
from controlplane.application.chain import GENESIS, good_part
from controlplane.application.failpoints import passing
from controlplane.application.ports import EventStore, Head, RecordedEvent
from controlplane.projections.base import Row
from controlplane.projections.fold import ALL, Folder, fingerprint
from controlplane.projections.memory import MemoryRows

BATCH = 1_000

_READ_CHECKPOINT = "SELECT position, hash, rebuilds, projections FROM readmodel_checkpoint"
_FIRST_CHECKPOINT = (
    "INSERT INTO readmodel_checkpoint (id, position, hash, rebuilds, projections)"
    " VALUES (1, 0, %s, 0, %s) ON CONFLICT DO NOTHING"
)
_MOVE_CHECKPOINT = (
    "UPDATE readmodel_checkpoint SET position = %s, hash = %s"
    " WHERE id = 1 AND position = %s AND rebuilds = %s"
)
_RESET_CHECKPOINT = (
    "UPDATE readmodel_checkpoint SET position = %s, hash = %s, projections = %s,"
    " rebuilds = rebuilds + 1"
)
_LOCK_CHECKPOINT = "UPDATE readmodel_checkpoint SET position = position"


@dataclass(frozen=True)
class Checkpoint:
    head: Head
    rebuilds: int
    projections: str


class Superseded(Exception):
    """Another projector, or a rebuild, moved the checkpoint."""


class Projector:
    """For one thread at a time. ``alias`` names a database of Django's settings."""

    def __init__(self, store: EventStore, alias: str = "default") -> None:
        self._store, self._alias = store, alias
        self._rows: MemoryRows | None = None
        self._at = Checkpoint(GENESIS, 0, "")
        self._snapshots = Snapshots(RowsFolding(), alias)

    def catch_up(self, limit: int = BATCH) -> int:
        """Project at most ``limit`` events in one transaction; the position reached.

        Raises IntegrityError at a broken link of the chain, once all before it is projected, and
        UnknownEvent, StoreUnavailable or Django's DatabaseError; then the tables are unchanged.
        """
        rows = self._rows or self._load()
        events: Sequence[RecordedEvent] = self._store.read_all(self._at.head.position, limit)
        if not events:
            return self._at.head.position
        passing("project.read")
        self._rows = None  # until this batch is saved, what is in memory is ahead of the tables
        events, reached = good_part(self._at.head, events)
        folder = Folder(rows, ALL)
        for recorded in events:
            folder.apply(recorded)
        try:
            self._save(folder, rows, reached)
        except Superseded:
            return self.catch_up(limit)
        passing("project.saved")
        self._rows = rows
        return reached.position

    def catch_up_all(self) -> int:
        """Project to the end of the log."""
        before, reached = -1, self.catch_up()
        while reached != before:
            before, reached = reached, self.catch_up()
        return reached

    def rebuild(self) -> Rebuilt:
        """Fold the log from its beginning, put the result in place, compare it with what was there.

        Folding locks nothing; only the exchange of the rows is done under the checkpoint's lock.
        """
        made = Rebuild(self._store, self._alias)
        made.fold(self._read_checkpoint().head.position)
        with transaction.atomic(self._alias):
            self._execute(_LOCK_CHECKPOINT)
            at = self._read_checkpoint()
            made.fold(at.head.position)
            passing("rebuild.folded")
            live, rebuilt = made.exchange()
            self._execute(_RESET_CHECKPOINT, (made.head.position, made.head.hash, fingerprint()))
            passing("rebuild.checkpoint")
        passing("rebuild.saved")
        self._rows = None
        return Rebuilt(made.head.position, live if at.projections == fingerprint() else "", rebuilt)

    # --- tables -------------------------------------------------------------------------------
    def _load(self) -> MemoryRows:
        """The checkpoint and all rows that handlers read; rebuilt if other projections made them.

        In one transaction, so that the rows are those of the checkpoint.
        """
        if self._read_checkpoint().projections != fingerprint():
            self.rebuild()
        with transaction.atomic(self._alias):
            at = self._read_checkpoint()
            rows = MemoryRows()
            rows.load(self._stored_rows([table for table in CODECS if not table.history]))
        self._at = at
        return rows

    def _read_checkpoint(self) -> Checkpoint:
        found = self._fetch(_READ_CHECKPOINT)
        if not found:
            self._execute(_FIRST_CHECKPOINT, (GENESIS.hash, fingerprint()))
            found = self._fetch(_READ_CHECKPOINT)
        position, digest, rebuilds, projections = found[0]
        return Checkpoint(Head(position, bytes(digest)), rebuilds, projections)

    def _save(self, folder: Folder, rows: MemoryRows, reached: Head) -> None:
        before = self._at
        with transaction.atomic(self._alias), connections[self._alias].cursor() as cursor:
            move = (reached.position, reached.hash, before.head.position, before.rebuilds)
            cursor.execute(_MOVE_CHECKPOINT, move)
            if cursor.rowcount != 1:
                raise Superseded
            passing("project.checkpoint")
            _write(cursor, rows.take_changes())
            passing("project.rows")
            self._snapshots.offer(reached, folder)
        rows.forget_history()
        self._at = Checkpoint(reached, before.rebuilds, before.projections)

    def _stored_rows(self, wanted: Sequence[type[Row]]) -> Iterable[Row]:
        for table in wanted:
            codec = CODECS[table]
            yield from map(codec.decode, self._fetch(codec.select))

    def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def _execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, params)


def _write(cursor: Any, changes: Sequence[tuple[type[Row], Any, Row | None]]) -> None:
    """Bring the tables to the rows."""
    gone: dict[type[Row], list[Any]] = {table: [] for table in CODECS}
    put: dict[type[Row], list[Row]] = {table: [] for table in CODECS}
    for table, key, row in changes:
        if row is None:
            gone[table].append(key)
        else:
            put[table].append(row)
    for table, codec in CODECS.items():
        codec.write(cursor, gone[table], put[table], cursor.db.vendor)
