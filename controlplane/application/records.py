"""The bytes that a leaf hashes: every stored field of a record, in one fixed order, for good.

A record is a line that names its shape, then JSON whose order of fields never changes::

    event/1                                  request/1
    [7,"tenant-acme",1,"TenantCreated",…]    [12,31,"req-9f…","acme",…,"ok",…]
    {"at":1.0,"type":"TenantCreated",…}

An event's two lines are those of the hash chain (``chain``). A request is its ledger row, written
once it has ended. A column that is added later makes a new shape, ``request/2``; what was sealed
as ``request/1`` keeps that shape, since the checkpoint of its segment names it. The golden files
in ``tests/proof`` hold one record of each shape. Prices are picodollars (``domain.money``).

Since ``request/3`` a leaf also covers what lies beside the row: ``text_hash`` is the hash of the
request's encrypted text, empty where none was captured (``capture``); ``attempts_hash`` is that of
its attempts, computed from their rows whenever the record is read, so it costs a request nothing::

    attempts/1
    [["req-9f…",0,1,"n1","r1","error","node_lost",0,0,null,1700000000.1,200.0],["req-9f…",0,2,…]]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from types import NoneType
from typing import Any, ClassVar

import msgspec

from controlplane.application.ports import Columns

EVENTS, REQUESTS = "events", "requests"
LOGS = (EVENTS, REQUESTS)

# kinds: int, float, float? (may be absent), text, text?, json (bytes of JSON)
Field = tuple[str, str]
EVENT_FIELDS: tuple[Field, ...] = (
    ("position", "int"),
    ("stream", "text"),
    ("version", "int"),
    ("type", "text"),
    ("schema_version", "int"),
    ("data", "json"),
    ("actor", "text"),
    ("correlation_id", "text"),
    ("causation_id", "text"),
    ("address", "text"),
    ("reason", "text"),
    ("recorded_at", "float"),
)
_REQUEST_1: tuple[Field, ...] = (
    ("position", "int"),
    ("id", "int"),
    ("request_id", "text"),
    ("tenant_id", "text"),
    ("subject", "text"),
    ("endpoint", "text"),
    ("requested_model", "text"),
    ("route", "text"),
    ("arm", "text"),
    ("version_id", "text"),
    ("latency_class", "text"),
    ("num_prompt_tokens", "int"),
    ("max_output_tokens", "int"),
    ("reserved_tokens", "int"),
    ("at", "float"),
    ("day", "text"),
    ("gateway", "text"),
    ("price_input", "int"),
    ("price_cached_input", "int"),
    ("price_output", "int"),
    ("progress_tokens", "int"),
    ("outcome", "text"),
    ("finish_reason", "text"),
    ("error_code", "text"),
    ("node_id", "text"),
    ("replica_id", "text"),
    ("num_cached_tokens", "int"),
    ("num_output_tokens", "int"),
    ("price", "int"),
    ("ttft_ms", "float?"),
    ("queue_ms", "float?"),
    ("duration_ms", "float?"),
    ("ended_at", "float?"),
    ("attempts", "int"),
)
# A price is reserved too, and the user is kept whom the request named.
_REQUEST_2 = (*_REQUEST_1, ("reserved_price", "int"), ("end_user", "text"))
# What lies beside it is covered too: its encrypted text and its attempts, by their hashes.
_REQUEST_3 = (*_REQUEST_2, ("text_hash", "text"), ("attempts_hash", "text"))
FIELDS: Mapping[str, tuple[Field, ...]] = {
    "event/1": EVENT_FIELDS,
    "request/1": _REQUEST_1,
    "request/2": _REQUEST_2,
    "request/3": _REQUEST_3,
}
ATTEMPT_FIELDS: tuple[Field, ...] = (
    ("request_id", "text"),
    ("choice", "int"),
    ("attempt", "int"),
    ("node_id", "text"),
    ("replica_id", "text"),
    ("outcome", "text"),
    ("error_code", "text"),
    ("num_cached_tokens", "int"),
    ("num_output_tokens", "int"),
    ("queue_ms", "float?"),
    ("started_at", "float"),
    ("duration_ms", "float"),
)
NEWEST: Mapping[str, str] = {EVENTS: "event/1", REQUESTS: "request/3"}
_SHAPES = {EVENTS: "event/", REQUESTS: "request/"}

_encode, _encode_lines = msgspec.json.Encoder().encode, msgspec.json.Encoder().encode_lines


class UnknownShape(Exception):
    """A record of a shape that this build does not know."""


def names(shape: str) -> tuple[str, ...]:
    return tuple(name for name, _ in fields_of(shape))


def fields_of(shape: str) -> tuple[Field, ...]:
    try:
        return FIELDS[shape]
    except KeyError:
        raise UnknownShape(f"records of shape {shape!r} are not known here") from None


def belongs(shape: str, log: str) -> bool:
    """Whether records of ``shape`` are those of ``log``."""
    return shape in FIELDS and shape.startswith(_SHAPES[log])


class _Kinds:
    """Refuses a record whose fields are not of their kinds, at the cost of one look-up.

    SQLite keeps whatever type it is given, and JSON writes bytes as text: the empty text and an
    empty blob would share a leaf, and so would ``"YWJj"`` and the blob ``abc``.
    """

    _TYPES: ClassVar[dict[str, tuple[type, ...]]] = {
        "int": (int,),
        "float": (float,),
        "float?": (float, NoneType),
        "text": (str,),
        "json": (bytes,),
    }

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._fields = fields
        self._good: set[tuple[type, ...]] = set()

    def check(self, columns: Sequence[Any]) -> None:
        """Raises TypeError naming the field."""
        types = tuple(map(type, columns))
        if types not in self._good:
            self._refuse(types)
            self._good.add(types)

    def check_all(self, rows: Iterable[Sequence[Any]]) -> None:
        """Raises TypeError naming a field of one of them."""
        for types in {tuple(map(type, row)) for row in rows} - self._good:
            self._refuse(types)
            self._good.add(types)

    def _refuse(self, types: tuple[type, ...]) -> None:
        for (name, kind), found in zip(self._fields, types, strict=True):
            if found not in self._TYPES[kind]:
                raise TypeError(f"{name} is {found.__name__}, not {kind}")


_event_kinds = _Kinds(EVENT_FIELDS)


def event_header(columns: Columns) -> bytes:
    """The first line of an event's record, without its newline."""
    return _encode(columns[:5] + columns[6:12])


def event_leaf(columns: Columns) -> bytes:
    """Leaf hash (32 bytes) of an event of shape ``event/1``; TypeError as ``_Kinds`` has it."""
    _event_kinds.check(columns)
    return sha256(b"\x00event/1\n%b\n%b" % (event_header(columns), columns[5])).digest()


def request_leaf(shape: str) -> Callable[[Sequence[Any]], bytes]:
    """What gives the leaf hash (32 bytes) of a request's columns of ``shape``; TypeError too."""
    prefix, check = b"\x00" + shape.encode() + b"\n", _Kinds(fields_of(shape)).check

    def leaf(columns: Sequence[Any]) -> bytes:
        check(columns)
        return sha256(prefix + _encode(columns)).digest()

    return leaf


def leaves_function(shape: str) -> Callable[[Sequence[Any]], list[bytes]]:
    """As ``leaf_function``, of many records at once, which costs each of them half as much."""
    if shape.startswith("event/"):
        return event_leaves
    prefix, check = b"\x00" + shape.encode() + b"\n", _Kinds(fields_of(shape)).check_all

    def leaves(rows: Sequence[Any]) -> list[bytes]:
        check(rows)
        return [sha256(prefix + line).digest() for line in _lines(rows)]

    return leaves


def event_leaves(rows: Sequence[Columns]) -> list[bytes]:
    """Leaf hashes of events of shape ``event/1``."""
    _event_kinds.check_all(rows)
    headers = _lines([columns[:5] + columns[6:12] for columns in rows])
    pairs = zip(headers, rows, strict=True)
    return [sha256(b"\x00event/1\n%b\n%b" % (head, row[5])).digest() for head, row in pairs]


def _lines(rows: Sequence[Any]) -> list[bytes]:
    """Each row's JSON. JSON escapes newlines, so that none lies within a row."""
    return _encode_lines(rows).split(b"\n")[:-1]


_attempt_kinds = _Kinds(ATTEMPT_FIELDS)


def attempts_hash(rows: Sequence[Sequence[Any]]) -> str:
    """SHA-256 (hex) over a request's attempts, by choice and attempt; empty if it has none.

    A field of a wrong kind gives what is no hash, so that the request's leaf is not the sealed one.
    """
    if not rows:
        return ""
    try:
        for row in rows:
            _attempt_kinds.check(row)
    except TypeError as error:
        return f"an attempt's {error}"
    return sha256(b"attempts/1\n" + _encode(rows)).hexdigest()


def attempts_hashes(rows: Sequence[Sequence[Any]]) -> dict[Any, str]:
    """``attempts_hash`` of each request by position, from rows in order that begin with it."""
    found: dict[Any, list[Any]] = {}
    try:
        attempts = [row[1:] for row in rows]
        _attempt_kinds.check_all(attempts)
        for row, line in zip(rows, _lines(attempts), strict=True):
            found.setdefault(row[0], []).append(line)
    except TypeError:  # of one of them; which one is found out one by one
        found.clear()
        for row in rows:
            found.setdefault(row[0], []).append(row[1:])
        return {position: attempts_hash(tries) for position, tries in found.items()}
    return {
        position: sha256(b"attempts/1\n[%b]" % b",".join(lines)).hexdigest()
        for position, lines in found.items()
    }


def leaf_function(shape: str) -> Callable[[Any], bytes]:
    """Columns in the order of ``names(shape)`` -> leaf hash."""
    fields_of(shape)
    return event_leaf if shape.startswith("event/") else request_leaf(shape)


def record_bytes(shape: str, columns: Sequence[Any]) -> bytes:
    """What the leaf hashes after its 0x00: for golden files and for reading by hand."""
    if shape.startswith("event/"):
        body = b"%b\n%b" % (event_header(tuple(columns)), columns[5])
    else:
        body = _encode(columns)
    return shape.encode() + b"\n" + body


def record_id(log: str, columns: Sequence[Any]) -> str:
    """How a person calls the record: ``tenant-acme:7``, or the request's id."""
    return f"{columns[1]}:{columns[2]}" if log == EVENTS else str(columns[2])
