"""The hash chain over the log: change, drop, add or swap one row and every later hash differs.

The canonical record of an event is one line of JSON, a newline, and its stored bytes::

    ["position",...]        header: an array, in the order of ``RecordedEvent``'s columns
    {"at":1.0,"type":...}   data, exactly as stored

    [7,"tenant-acme",1,"TenantCreated",1,"user:ada","req-1","","10.0.0.1","",1700000000.5]

JSON escapes newlines, so the first newline ends the header and no two records share their bytes.
The hash of position n is SHA-256(hash of n-1 || record of n); position 1 follows 32 zero bytes.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Any, cast

import msgspec

from controlplane.application.ports import Columns, Head, IntegrityError, RecordedEvent

GENESIS = Head(0, bytes(32))

Header = tuple[int, *tuple[Any, ...]]

_encode = msgspec.json.Encoder().encode
_header = itemgetter(0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11)


def link(previous: bytes, columns: Columns) -> bytes:
    """The hash (32 bytes) of one record after ``previous``; raises IntegrityError if it is none."""
    return _link(previous, _header(columns), columns[5])


def _link(previous: bytes, header: Header, data: bytes) -> bytes:
    try:
        return sha256(b"".join((previous, _encode(header), b"\n", data))).digest()
    except (TypeError, ValueError) as error:  # a damaged file may hold a number for a text
        raise IntegrityError(header[0], "the record is not of its columns' types") from error


def follow(head: Head, events: Iterable[RecordedEvent]) -> Head:
    """The head after ``events``; raises IntegrityError at the first that does not continue it."""
    position, digest = head
    for event in events:
        position += 1
        if event.position != position:
            raise _gap(position, event.position)
        digest = _link(digest, _header_of(event), event.data)
        if digest != event.hash:
            raise _changed(position)
    return Head(position, digest)


def follow_columns(head: Head, records: Iterable[tuple[Columns, bytes]]) -> Head:
    """As ``follow``, on stored columns, which need not be decodable."""
    position, digest = head
    for columns, stored in records:
        position += 1
        if columns[0] != position:
            raise _gap(position, columns[0])
        if b"" in columns[6:11]:  # the same JSON as an empty text; any other blob gives another
            raise IntegrityError(position, "a text is stored as bytes")
        digest = link(digest, columns)
        if digest != stored:
            raise _changed(position)
    return Head(position, digest)


def _gap(expected: int, found: int) -> IntegrityError:
    return IntegrityError(expected, f"missing: the next one stored is {found}")


def _changed(position: int) -> IntegrityError:
    return IntegrityError(position, "the stored hash does not match the record")


def good_part(head: Head, events: Sequence[RecordedEvent]) -> tuple[Sequence[RecordedEvent], Head]:
    """The events before the first broken link, and the head after them; raises if none are."""
    try:
        return events, follow(head, events)
    except IntegrityError as error:
        good = events[: error.position - head.position - 1]
        if not good:
            raise
        return good, follow(head, good)


def columns_of(event: RecordedEvent) -> Columns:
    header = _header_of(event)
    return cast(Columns, (*header[:5], event.data, *header[5:]))


def _header_of(event: RecordedEvent) -> Header:
    meta = event.meta
    return (
        event.position,
        event.stream,
        event.version,
        event.type,
        event.schema_version,
        meta.actor,
        meta.correlation_id,
        meta.causation_id,
        meta.address,
        meta.reason,
        event.recorded_at,
    )
