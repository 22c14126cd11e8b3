"""The read model folded anew from the log, compared row by row with what is stored, and put right.

What grows with the log is compared stretch by stretch and written only where it differs, so a
rebuild of a million events holds no more in memory than one of a thousand, and locks nothing for
long. The rest, which is of a fleet's size, is exchanged in one transaction under the checkpoint's
lock. A worked example, after somebody changed one old audit entry and one node's row::

    1 … 1,000      rows of history as stored
    … 7,000        differs: the stretch is deleted and written again
    … 812,000      as stored
    lock           fold what was projected meanwhile; nodes, models, … deleted and written
    live 5f0c…     rebuilt 9a31…    they differ: the read model was wrong
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from controlplane.adapters.readmodel.codec import Codec
from controlplane.adapters.readmodel.timeline import RowsFolding, Snapshots
from controlplane.application.chain import GENESIS, follow
from controlplane.application.failpoints import passing
from controlplane.application.ports import READ_BATCH, EventStore
from controlplane.projections.base import Row
from controlplane.projections.fold import ALL, Folder, StateHash, in_order, line_of, tables
from controlplane.projections.memory import MemoryRows

CODECS = {table: Codec(table) for table in tables()}
_BEYOND = 2**62


@dataclass(frozen=True)
class Rebuilt:
    """The read model's state hash (hex) at ``position`` as it was and as folded anew.

    ``live`` is empty if the rows were of other versions of the projections, not to be compared.
    """

    position: int
    live: str
    rebuilt: str


class Rebuild:
    """``fold`` as often as there is more of the log, then ``exchange`` in a transaction."""

    def __init__(self, store: EventStore, alias: str) -> None:
        self._store, self._alias = store, alias
        self._rows = MemoryRows()
        self._folder = Folder(self._rows, ALL)
        self._snapshots = Snapshots(RowsFolding(), alias, last=0)
        self._live, self._rebuilt = StateHash(), StateHash()
        self.head = GENESIS

    def fold(self, upto: int) -> None:
        """Raises IntegrityError at a broken link of the chain."""
        while events := self._store.read_all(self.head.position, READ_BATCH, upto):
            reached = follow(self.head, events)
            for recorded in events:
                self._folder.apply(recorded)
            self._put_history_right(self.head.position, reached.position)
            self.head = reached
            self._snapshots.offer(reached, self._folder)

    def exchange(self) -> tuple[str, str]:
        """The hashes ``(live, rebuilt)``."""
        self._put_history_right(self.head.position, _BEYOND)  # what no event made
        for table, codec in CODECS.items():
            if not table.history:
                self._exchange_table(table, codec)
        passing("rebuild.rows")
        return self._live.hexdigest(), self._rebuilt.hexdigest()

    def _exchange_table(self, table: type[Row], codec: Codec[Any]) -> None:
        self._live.add(table, map(line_of, in_order(table, self._fetch(codec, codec.select))))
        with connections[self._alias].cursor() as cursor:
            cursor.execute(codec.delete_all)
            passing("rebuild.deleted")
            codec.write(cursor, [], self._rows.all(table), cursor.db.vendor)
        self._rebuilt.add(table, map(line_of, in_order(table, self._fetch(codec, codec.select))))

    def _put_history_right(self, after: int, upto: int) -> None:
        made: dict[type[Row], list[Row]] = {table: [] for table in CODECS if table.history}
        for table, _, row in self._rows.take_changes():
            if row is not None and table in made:
                made[table].append(row)
        self._rows.forget_history()
        for table, rows in made.items():
            self._compare(table, in_order(table, rows), (after, upto))

    def _compare(self, table: type[Row], made: list[Row], stretch: tuple[int, int]) -> None:
        codec = CODECS[table]
        lines = self._stored_lines(table, stretch)
        self._live.add(table, lines)
        if lines != list(map(line_of, made)):  # as lines: a stored row has lists for tuples
            with transaction.atomic(self._alias), connections[self._alias].cursor() as cursor:
                cursor.execute(codec.delete_stretch, stretch)
                codec.write(cursor, [], made, cursor.db.vendor)
            lines = self._stored_lines(table, stretch)
        self._rebuilt.add(table, lines)

    def _stored_lines(self, table: type[Row], stretch: tuple[int, int]) -> list[bytes]:
        codec = CODECS[table]
        return list(
            map(line_of, in_order(table, self._fetch(codec, codec.select_stretch, stretch)))
        )

    def _fetch(self, codec: Codec[Any], sql: str, params: Sequence[Any] = ()) -> list[Any]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, params)
            decode: Callable[[Any], Any] = codec.decode
            return [decode(values) for values in cursor.fetchall()]
