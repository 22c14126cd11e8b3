"""Gives waiting appends their places in the log: positions, versions, hashes, or a refusal.

Pure, so that every store decides alike. A worked example, with the head at position 6::

    appends      a: stream s, expected 2, one event      s is at version 2
                 b: stream s, expected 2, one event
                 c: stream t, expected 0, two events     t is new
    rows         (7, s, 3) (8, t, 1) (9, t, 2)
    outcomes     a: Appended(7, 3)   b: VersionConflict(s, 2, 3)   c: Appended(9, 2)

A refused append leaves no trace: its neighbours in the group are unaffected, and no gap opens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from controlplane.application.chain import link
from controlplane.application.ports import (
    Append,
    Appended,
    EventMeta,
    Head,
    IntegrityError,
    KeyUsed,
    RecordedEvent,
    StoredResponse,
)
from controlplane.domain.decider import Event
from controlplane.domain.errors import VersionConflict
from controlplane.domain.event_types import (
    UnknownEvent,
    decode,
    encode,
    schema_version,
    type_of,
)

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # an escape, not an escaped backslash
_encodable = msgspec.json.Encoder().encode
KEY_SECONDS = 24 * 3600.0

# ``chain.Columns`` and the hash
Row = tuple[int, str, int, str, int, bytes, str, str, str, str, str, float, bytes]
Outcome = Appended | Exception


@dataclass(frozen=True, slots=True)
class Prepared:
    """An append with its events encoded, which needs no place and is done by the caller."""

    append: Append
    bodies: tuple[tuple[str, int, bytes], ...]


def prepare(append: Append) -> Prepared:
    """Encode; raises ValueError here, in the caller, for what could not be stored or read again.

    A lone surrogate cannot be stored, NUL not by PostgreSQL. NaN can, as null, and would stop
    every reader for ever.
    """
    _refuse_nul(_encodable((append.stream, append.meta, append.idempotency)))
    return Prepared(append, tuple([_body(event) for event in append.events]))


def _body(event: Event) -> tuple[str, int, bytes]:
    kind = type_of(event)
    schema, data = schema_version(kind), encode(event)
    _refuse_nul(data)
    decode(kind, schema, data)
    return kind, schema, data


def _refuse_nul(encoded: bytes) -> None:
    if b"\\u0000" in encoded and _NUL.search(encoded):
        raise ValueError("text in the log cannot contain NUL")


@dataclass(slots=True)
class Batch:
    """What one transaction writes, and what each append is told after it."""

    head: Head
    rows: list[Row] = field(default_factory=list)
    keys: dict[str, StoredResponse] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)


def sequence(
    group: Sequence[Prepared],
    head: Head,
    versions: Mapping[str, int],
    used: Mapping[str, StoredResponse],
    now: float,
) -> Batch:
    """Place ``group`` after ``head``.

    ``versions`` holds every stream of the group (0: new), ``used`` the keys that are taken.
    """
    batch = Batch(head, versions=dict(versions))
    for prepared in group:
        refusal = _refusal(prepared.append, batch, used)
        batch.outcomes.append(refusal or _place(prepared, batch, now))
    return batch


def _refusal(append: Append, batch: Batch, used: Mapping[str, StoredResponse]) -> Exception | None:
    """A used key before a version conflict: the answer to a resend is the first answer."""
    if append.idempotency is not None:
        key = append.idempotency.key
        stored = used.get(key) or batch.keys.get(key)
        if stored is not None:
            return KeyUsed(stored)
    actual = batch.versions[append.stream]
    if append.expected_version is not None and append.expected_version != actual:
        return VersionConflict(append.stream, append.expected_version, actual)
    return None


def _place(prepared: Prepared, batch: Batch, now: float) -> Appended:
    append, meta = prepared.append, prepared.append.meta
    position, digest = batch.head.position, batch.head.hash
    version = batch.versions[append.stream]
    about = (meta.actor, meta.correlation_id, meta.causation_id, meta.address, meta.reason, now)
    for body in prepared.bodies:
        position, version = position + 1, version + 1
        columns = (position, append.stream, version, *body, *about)
        digest = link(digest, columns)
        batch.rows.append((*columns, digest))
    batch.head, batch.versions[append.stream] = Head(position, digest), version
    _keep_response(append, batch, position)
    return Appended(position, version)


def _keep_response(append: Append, batch: Batch, position: int) -> None:
    if append.idempotency is not None:
        batch.keys[append.idempotency.key] = StoredResponse(
            append.idempotency.body_hash, append.response_status, append.response_body, position
        )


def recorded_events(rows: Iterable[Row]) -> list[RecordedEvent]:
    """Stored rows as readers see them, up to the first that cannot be read.

    If that is the very first, its error is raised: IntegrityError for damage, UnknownEvent for a
    type of the future. So a reader gets all that is good before it has to stop.
    """
    read: list[RecordedEvent] = []
    try:
        read.extend(map(_recorded_event, rows))  # keeps what came before an error
    except (IntegrityError, UnknownEvent):
        if not read:
            raise
    return read


def _recorded_event(row: Row) -> RecordedEvent:
    (position, stream, version, kind, schema, data,
     actor, correlation, causation, address, reason, recorded_at, digest) = row  # fmt: skip
    try:
        event = decode(kind, schema, data)
        meta = _meta(actor, correlation, causation, address, reason)
    except (TypeError, ValueError) as error:  # not JSON, not UTF-8, or not of this type
        raise IntegrityError(position, "the stored data cannot be decoded") from error
    return RecordedEvent(
        position, stream, version, kind, schema, data, meta, recorded_at, digest, event
    )


@lru_cache(maxsize=4096)
def _meta(*fields: str) -> EventMeta:
    """Neighbouring events mostly share theirs."""
    if b"" in fields:  # the same JSON as an empty text; any other blob changes the hash
        raise TypeError("a text is stored as bytes")
    return EventMeta(*fields)
