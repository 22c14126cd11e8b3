"""The state at any position of the log: the nearest snapshot before it, folded on.

A snapshot is a whole state as bytes, with the hash of the event it stands at and the hash of the
state. It is a mere shortcut: one that belongs to another log, to other code or to other bytes than
its hash says is deleted and the next older one taken; without any, the fold starts at the first
event. A worked example, with a snapshot every 5,000 events::

    at(12_345)    snapshot 10_000: hash of event 10_000 is the log's, hash of its state is right
                  fold 10_001 … 12_345, 2,345 events
    at(12_345)    again, of the same page: kept in memory
    DELETE FROM readmodel_snapshot
    at(12_345)    fold 1 … 12_345, and put back the snapshots at 5,000 and 10,000

Large states have fewer snapshots: folding as many events as there are rows costs about as much as
reading the rows. Rejected: a snapshot for each position asked for, which fills the table with what
nobody asks for twice.
"""

import threading
import zlib
from collections import OrderedDict
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from controlplane.adapters.readmodel.models import Snapshot
from controlplane.application.ports import READ_BATCH, EventStore, Head, RecordedEvent
from controlplane.projections.base import Row
from controlplane.projections.fold import STATE, Folder, fingerprint, state_hash, tables
from controlplane.projections.memory import MemoryRows

S = TypeVar("S")
INTERVAL = 5_000
_NUM_KEPT = 4


class Folding(Protocol[S]):
    """What is folded: ``kind`` names it in the table, ``made_by`` changes with its meaning."""

    kind: str
    made_by: str

    def start(self) -> S: ...
    def apply(self, state: S, recorded: RecordedEvent) -> None: ...
    def size(self, state: S) -> int: ...
    def encode(self, state: S) -> bytes: ...
    def decode(self, body: bytes) -> S: ...
    def digest(self, state: S) -> str: ...


class RowsFolding:
    """The read model's rows that do not grow with the log; the state is their folder."""

    kind = "rows"
    made_by = fingerprint(STATE)
    _tables: ClassVar[dict[str, type[Row]]] = {one.__name__: one for one in tables(STATE)}
    _decoders: ClassVar[dict[str, Any]] = {
        name: msgspec.msgpack.Decoder(list[table])  # type: ignore[valid-type]
        for name, table in _tables.items()
    }

    def start(self) -> Folder:
        return Folder(MemoryRows(), STATE)

    def apply(self, state: Folder, recorded: RecordedEvent) -> None:
        state.apply(recorded)

    def size(self, state: Folder) -> int:
        return sum(map(_rows_in(state).count, self._tables.values()))

    def encode(self, state: Folder) -> bytes:
        rows = {name: _rows_in(state).all(table) for name, table in self._tables.items()}
        return msgspec.msgpack.encode(rows)

    def decode(self, body: bytes) -> Folder:
        rows = MemoryRows()
        for name, raw in msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw]).items():
            rows.load(self._decoders[name].decode(raw))
        return Folder(rows, STATE)

    def digest(self, state: Folder) -> str:
        return state_hash(_rows_in(state), STATE)


def _rows_in(folder: Folder) -> MemoryRows:
    assert isinstance(folder.rows, MemoryRows)
    return folder.rows


class Snapshots(Generic[S]):
    """The table's rows of one folding."""

    def __init__(self, folding: Folding[S], alias: str, last: int | None = None) -> None:
        """``last``: where the one before lies; None: look it up."""
        self._folding, self._alias, self._last = folding, alias, last
        self._mine = Snapshot.objects.using(alias).filter(kind=folding.kind)

    def offer(self, head: Head, state: S) -> None:
        """Keep ``state``, which is that after ``head``, if the last one kept is far enough back."""
        if self._last is None:
            self._last = self._newest()
        since = head.position - self._last
        if since >= INTERVAL and since >= self._folding.size(state):
            self._save(head, state)
            self._last = head.position

    def _newest(self) -> int:
        self._mine.exclude(made_by=self._folding.made_by).delete()
        found = self._mine.order_by("-position").values_list("position", flat=True).first()
        return found or 0

    def _save(self, head: Head, state: S) -> None:
        folding = self._folding
        Snapshot.objects.using(self._alias).update_or_create(
            kind=folding.kind,
            position=head.position,
            defaults={
                "made_by": folding.made_by,
                "log_hash": head.hash,
                "state_hash": folding.digest(state),
                "body": zlib.compress(folding.encode(state), 1),
            },
        )

    def before(self, position: int, store: EventStore) -> tuple[int, S] | None:
        """The newest good one at or before ``position``; what is not good is deleted."""
        mine = self._mine.filter(position__lte=position).order_by("-position")
        while (found := mine.first()) is not None:
            state = self._checked(found, store)
            if state is not None:
                return found.position, state
            found.delete()
        return None

    def _checked(self, found: Snapshot, store: EventStore) -> S | None:
        if found.made_by != self._folding.made_by:
            return None
        stands_at = store.read_all(found.position - 1, 1, found.position)
        if not stands_at or stands_at[0].hash != bytes(found.log_hash):
            return None
        try:
            state = self._folding.decode(zlib.decompress(found.body))
        except (zlib.error, msgspec.DecodeError):
            return None
        return state if self._folding.digest(state) == found.state_hash else None


class Timeline(Generic[S]):
    """``at(position)``: the state after that event. It is shared: nobody may change it.

    One fold at a time: whoever asks for the same position meanwhile gets its result.
    """

    def __init__(self, store: EventStore, folding: Folding[S], alias: str = "default") -> None:
        self._store, self._folding = store, folding
        self._snapshots = Snapshots(folding, alias)
        self._alias = alias
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, S] = OrderedDict()

    def at(self, position: int) -> S:
        """Raises what the store's ``read_all`` raises."""
        with self._lock:
            state = self._kept.get(position)
            if state is None:
                state = self._kept[position] = self._fold(position)
            self._kept.move_to_end(position)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
            return state

    def _fold(self, position: int) -> S:
        after, state = self._snapshots.before(position, self._store) or (0, self._folding.start())
        filling = Snapshots(self._folding, self._alias, after)
        while after < position and (events := self._store.read_all(after, READ_BATCH, position)):
            for recorded in events:
                self._folding.apply(state, recorded)
            after = events[-1].position
            filling.offer(Head(after, events[-1].hash), state)
        return state
