"""``seal.SealStore`` and the ledger as ``seal.Records``, on SQLite and PostgreSQL."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from django.db import IntegrityError as RowConflict
from django.db import connections, transaction
from django.db.models import Q

from controlplane.adapters.ledger import rollup
from controlplane.adapters.ledger.models import (
    Attempt,
    Dispatch,
    InferenceRequest,
    SealingKey,
    Tile,
    Verification,
)
from controlplane.adapters.ledger.models import Checkpoint as CheckpointRow
from controlplane.adapters.ledger.models import Head as HeadRow
from controlplane.application.check import Checked
from controlplane.application.checkpoint import Checkpoint
from controlplane.application.failpoints import passing
from controlplane.application.notes import parse_note
from controlplane.application.ports import Head, IntegrityError
from controlplane.application.proving import mark_text
from controlplane.application.records import (
    ATTEMPT_FIELDS,
    NEWEST,
    REQUESTS,
    attempts_hashes,
    leaves_function,
    names,
)
from controlplane.application.seal import Sealed
from controlplane.application.tiles import Tile as Place

_BESIDE = "attempts_hash"  # the column of a leaf that is no column of the table


class DjangoSealStore:
    """``alias`` names a database of Django's settings."""

    def __init__(self, alias: str = "default") -> None:
        self._alias = alias

    def last(self, log: str) -> Sealed | None:
        row = self._rows(log).order_by("-size").first()
        return None if row is None else Sealed.read(row.note)

    def checkpoints(self, log: str, after: int, limit: int) -> list[Sealed]:
        rows = self._rows(log).filter(size__gt=after).order_by("size")[:limit]
        return [Sealed.read(row.note) for row in rows]

    def notes(self, log: str) -> Iterator[tuple[int, str, str]]:
        """(size, note, archive) of every checkpoint as it is stored, readable or not."""
        rows = self._rows(log).order_by("size", "id")
        return rows.values_list("size", "note", "archive").iterator(chunk_size=2000)

    def public_keys(self) -> list[str]:
        """Every public key that has signed here, the oldest first."""
        every = SealingKey.objects.using(self._alias).order_by("at", "line")
        return list(every.values_list("line", flat=True))

    def checkpoint(self, log: str, size: int) -> Sealed | None:
        """That of exactly this size."""
        row = self._rows(log).filter(size=size).first()
        return None if row is None else Sealed.read(row.note)

    def oldest(self, log: str) -> list[Sealed]:
        """Segments whose rows are still here, in order."""
        rows = self._rows(log).filter(archive="").order_by("size")[:1000]
        return [Sealed.read(row.note) for row in rows]

    def move_out(self, sealed: Sealed, mark: str) -> int:
        """Requests alone: the event log's own triggers keep its rows."""
        one = sealed.checkpoint
        assert one.log == REQUESTS
        rollup.catch_up_all(self._alias)  # what is gone from here cannot be added up any more
        span = {"position__gte": one.first, "position__lte": one.size}
        with transaction.atomic(using=self._alias):
            self._rows(one.log).filter(size=one.size).update(archive=mark)
            passing("retain.marked")
            Attempt.objects.using(self._alias).filter(**span).delete()
            Dispatch.objects.using(self._alias).filter(**span).delete()
            moved, _ = InferenceRequest.objects.using(self._alias).filter(**span).delete()
        passing("retain.moved")
        return moved

    def marked(self, log: str, after: int, limit: int) -> list[tuple[int, int, str]]:
        """(first, size, archive's name) of segments whose rows are in an archive, in order."""
        rows = self._rows(log).filter(size__gt=after).exclude(archive="").order_by("size")[:limit]
        return [(row.first, row.size, _archive_of(row)) for row in rows]

    def covering(self, log: str, position: int) -> Sealed | None:
        """The first one that covers ``position``."""
        row = self._rows(log).filter(size__gte=position).order_by("size").first()
        return None if row is None else Sealed.read(row.note)

    def page(
        self, log: str | None, after: int | None, limit: int, descending: bool
    ) -> list[Sealed]:
        """By size, of one log or of all. Where two logs were sealed at one size they stand on one
        page, which then is one longer: the next page begins beyond that size."""
        rows = CheckpointRow.objects.using(self._alias).all()
        if log is not None:
            rows = rows.filter(log=log)
        if after is not None:
            rows = rows.filter(**{"size__lt" if descending else "size__gt": after})
        order = "-size" if descending else "size"
        found = list(rows.order_by(order, "log")[: limit + 1])
        if len(found) > limit and found[-1].size != found[-2].size:
            found.pop()
        return [Sealed.read(row.note) for row in found]

    def keep_verification(self, at: float, actor: str, checked: Checked) -> None:
        report = {
            "logs": checked.logs,
            "finding": checked.finding,
            "seconds": round(checked.seconds, 3),
            "records_per_second": round(checked.records_per_second),
        }
        Verification.objects.using(self._alias).create(
            at=at,
            actor=actor,
            intact=checked.finding is None,
            report=msgspec.json.encode(report).decode(),
        )

    def last_verification(self) -> dict[str, Any] | None:
        """``{at, actor, intact, logs, finding, seconds, records_per_second}`` of the newest."""
        row = Verification.objects.using(self._alias).order_by("-id").first()
        if row is None:
            return None
        report = msgspec.json.decode(row.report)
        return {"at": row.at, "actor": row.actor, "intact": row.intact, **report}

    def tile(self, log: str, level: int, index: int) -> bytes:
        found = Tile.objects.using(self._alias).filter(log=log, level=level, index=index)
        hashes = found.values_list("hashes", flat=True).first()
        return b"" if hashes is None else bytes(hashes)

    def add(self, sealed: Sealed, tiles: dict[Place, bytes], keys: Sequence[str]) -> bool:
        one = sealed.checkpoint
        try:
            with transaction.atomic(using=self._alias):
                self._insert(one, sealed.note)
                passing("seal.inserted")
                SealingKey.objects.using(self._alias).bulk_create(
                    [SealingKey(line=key, at=one.at) for key in keys], ignore_conflicts=True
                )
                Tile.objects.using(self._alias).bulk_create(
                    [
                        Tile(log=one.log, level=at, index=i, hashes=h)
                        for (at, i), h in tiles.items()
                    ],
                    update_conflicts=True,
                    unique_fields=["log", "level", "index"],
                    update_fields=["hashes"],
                )
        except RowConflict:
            return False
        return True

    def _insert(self, one: Checkpoint, note: str) -> None:
        CheckpointRow.objects.using(self._alias).create(
            log=one.log,
            first=one.first,
            size=one.size,
            note=note,
        )

    def _rows(self, log: str) -> Any:
        return CheckpointRow.objects.using(self._alias).filter(log=log)


class RequestRecords:
    """The ledger's ended requests as ``seal.Records``."""

    log = REQUESTS

    def __init__(self, alias: str = "default") -> None:
        self._alias = alias

    def head(self) -> Head:
        row = HeadRow.objects.using(self._alias).values_list("position", flat=True).first()
        return Head(row or 0, b"")

    def strays(self, head: int) -> list[tuple[int, str]]:
        """Ended requests without a position, or with one that the head does not cover."""
        names_it = ("position", "request_id")
        outside_of_log = Q(position__lt=1) | Q(position__gt=head)
        outside = outside_of_log | (Q(position=None) & ~Q(outcome=""))
        found = InferenceRequest.objects.using(self._alias).filter(outside)
        beside = Attempt.objects.using(self._alias).filter(outside_of_log)
        rows = [*found.values_list(*names_it)[:3], *beside.values_list(*names_it)[:3]]
        return [(row or 0, name) for row, name in rows]

    def read(self, after: int, upto: int, limit: int, shape: str) -> Sequence[Any]:
        stored = [name for name in names(shape) if name != _BESIDE]
        columns = ", ".join(f'"{name}"' for name in stored)
        with connections[self._alias].cursor() as cursor:
            cursor.execute(
                f"SELECT {columns} FROM ledger_request WHERE position > %s AND position <= %s"
                " ORDER BY position LIMIT %s",
                (after, upto, limit),
            )
            rows = cursor.fetchall()
        if not rows or len(stored) == len(names(shape)):
            return rows
        hashes = attempts_hashes(self._attempts(after, rows[-1][0]))
        return [(*row, hashes.get(row[0], "")) for row in rows]

    def attempts(self, after: int, upto: int) -> dict[int, list[Any]]:
        """The attempts of the requests in ``(after, upto]`` by position, as a hash covers them."""
        found: defaultdict[int, list[Any]] = defaultdict(list)
        for position, *row in self._attempts(after, upto):
            found[position].append(row)
        return found

    def _attempts(self, after: int, upto: int) -> list[Any]:
        """Each with its request's position before it, in order."""
        columns = ", ".join(name for name, _ in ATTEMPT_FIELDS)
        with connections[self._alias].cursor() as cursor:
            cursor.execute(
                f"SELECT position, {columns} FROM ledger_attempt"
                " WHERE position > %s AND position <= %s ORDER BY position, choice, attempt, id",
                (after, upto),
            )
            return list(cursor.fetchall())

    def leaves(self, previous: Checkpoint | None, rows: Sequence[Any]) -> tuple[list[bytes], bytes]:
        first = (previous.size if previous else 0) + 1
        for position, row in enumerate(rows, first):
            if row[0] != position:
                raise IntegrityError(position, f"missing: the next one stored is {row[0]}")
        return leaves_function(NEWEST[REQUESTS])(rows), b""


def _archive_of(row: CheckpointRow) -> str:
    """Who signed the mark is for a verification to judge."""
    mark = parse_note(row.archive).text
    return mark.removeprefix(mark_text(Sealed.read(row.note).checkpoint)).strip()
