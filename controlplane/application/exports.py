"""An export: records in parts, and one signed manifest that tells anyone whether all is there.

A part is a file of at most 20,000 records. After each one the manifest is written anew and signed,
so it always says how far the export has come; a run that was killed goes on after the last part it
names, and makes the same bytes. Worked example, killed while it wrote the third part::

    part-00001.jsonl   part-00002.jsonl   manifest.json: rows 40,000, complete false
    again              -> part-00003.jsonl …                  rows 54,321, complete true

A row is the stored record, all of it, with its number in the export and its leaf hash. The
manifest's note signs the Merkle root over those leaves; for an export without filters it also holds
the log's tree where the export starts, so the log's own checkpoints, which lie beside the parts,
are recomputed from the rows.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from controlplane.application.merkle import Frontier
from controlplane.application.notes import NoteError, PublicKey, parse_note
from controlplane.application.records import (
    EVENTS,
    FIELDS,
    LOGS,
    NEWEST,
    Field,
    attempts_hash,
    belongs,
    fields_of,
    leaf_function,
    leaves_function,
    names,
)

PART_ROWS = 20_000
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints.notes"
KEYS = "public_keys.txt"
VERSION = "export/1"

Row = tuple[Any, ...]


class ExportError(Exception):
    """The export cannot be made as asked; says why."""


class Filters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an export takes: ``after < position <= upto``, and of these only what matches.

    Times are Unix seconds, ``since`` inclusive and ``until`` exclusive: an event's time of record,
    a request's end. ``types`` are event types, or endpoints of requests.
    """

    after: int = 0
    tenant: str | None = None
    types: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None

    @property
    def whole(self) -> bool:
        """Nothing in between is left out."""
        return (self.tenant, self.types, self.since, self.until) == (None, (), None, None)

    def matcher(self, log: str) -> Callable[[Sequence[Any]], bool]:
        """A predicate over a record's newest columns."""
        column = names(NEWEST[log]).index
        owner, kind, at = (
            (column("stream"), column("type"), column("recorded_at"))
            if log == EVENTS
            else (column("tenant_id"), column("endpoint"), column("ended_at"))
        )
        tenant = f"tenant-{self.tenant}" if log == EVENTS and self.tenant else self.tenant
        since = float("-inf") if self.since is None else self.since
        until = float("inf") if self.until is None else self.until

        def matches(columns: Sequence[Any]) -> bool:
            return (
                (tenant is None or columns[owner] == tenant)
                and (not self.types or columns[kind] in self.types)
                and since <= (columns[at] or 0.0) < until
            )

        return matches


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log's tree and chain where an export without filters starts (hex)."""

    size: int
    peaks: tuple[str, ...] = ()
    chain: str = ""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of rows; ``rows`` of them, the first of which is number ``first_row``."""

    name: str
    rows: int
    first_row: int
    first_position: int
    last_position: int
    bytes: int
    sha256: str


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in an export. Hashes are hex; ``upto`` is how far the log was looked through."""

    version: str
    installation: str
    log: str
    format: str
    filters: Filters
    created_at: float
    upto: int
    target: int
    complete: bool
    rows: int
    first_position: int
    last_position: int
    root: str
    peaks: tuple[str, ...]
    start: Start | None
    formula_safe: bool
    parts: tuple[Part, ...]
    files: tuple[File, ...]

    @property
    def tree(self) -> Frontier:
        return Frontier(self.rows, map(bytes.fromhex, self.peaks))

    @property
    def text(self) -> str:
        """What is signed: the export as a tree of its own, and the hash of what is said here."""
        root = b64encode(bytes.fromhex(self.root)).decode()
        digest = b64encode(sha256(_canonical(self)).digest()).decode()
        origin = f"{self.installation}/export/{self.log}"
        return f"{origin}\n{self.rows}\n{root}\nmanifest {digest}\n"


class SignedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: Manifest
    note: str


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value)


def manifest_bytes(signed: SignedManifest) -> bytes:
    """Indented for people; the one form in which it is accepted."""
    return msgspec.json.format(_canonical(signed)) + b"\n"


def read_manifest(content: bytes, keys: Sequence[PublicKey]) -> Manifest:
    """Checked against its signature by one of ``keys``; raises NoteError."""
    try:
        signed = msgspec.json.decode(content, type=SignedManifest)
        note = parse_note(signed.note)
        exact = manifest_bytes(signed) == content and note.text == signed.manifest.text
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise NoteError(f"the manifest cannot be read: {error}") from error
    if not exact:
        raise NoteError("the manifest is not what was signed")
    if not note.signers(keys):
        raise NoteError(f"the manifest is signed by {note.key_names} alone")
    if signed.manifest.version != VERSION or signed.manifest.log not in LOGS:
        raise NoteError(f"a manifest of {signed.manifest.version} is not known here")
    return signed.manifest


# --- rows -------------------------------------------------------------------------------------
# A row's own columns, before the record's; of those the position is the first.
_OWN: tuple[Field, ...] = (("row", "int"), ("shape", "text"))
POSITION = len(_OWN)


def row_fields(log: str, newest: str = "") -> tuple[Field, ...]:
    """A row's columns: its number, its shape, every column of the newest shape, the chain's hash
    (events of a whole export; hex) and the leaf hash (hex). ``newest``: as it was written when
    that was the newest shape."""
    chained: tuple[Field, ...] = (("hash", "text?"),) if log == EVENTS else ()
    return (*_OWN, *fields_of(newest or NEWEST[log]), *chained, ("leaf", "text"))


def shapes_of(log: str) -> list[str]:
    """The log's shapes up to the newest, that one first: an export keeps the columns of its day."""
    newest = _number(NEWEST[log])
    known = [shape for shape in FIELDS if belongs(shape, log) and _number(shape) <= newest]
    return sorted(known, key=_number, reverse=True)


def _number(shape: str) -> int:
    return int(shape.partition("/")[2])


_BLANKS: Mapping[str, Any] = {"int": 0, "text": ""}


def widening(log: str, shape: str) -> Callable[[Row], Row]:
    """Gives a row that was written when ``shape`` was the newest the columns that came later."""
    later = tuple(_BLANKS[kind] for _, kind in fields_of(NEWEST[log])[len(fields_of(shape)) :])
    return (lambda row: (*row[:-1], *later, row[-1])) if later else (lambda row: row)


class RowMaker:
    """``row(number, shape, record)`` of a log, and back."""

    def __init__(self, log: str) -> None:
        self.log, self._newest = log, names(NEWEST[log])
        self._leaves: dict[str, Callable[[Any], bytes]] = {}
        self._all_leaves: dict[str, Callable[[Any], list[bytes]]] = {}
        self._picks: dict[str, Sequence[int]] = {}
        self._width = len(self._newest)

    def row(self, number: int, shape: str, columns: Sequence[Any], digest: bytes | None) -> Row:
        leaf = self.leaf(shape, columns).hex()
        chained = (digest.hex() if digest else None,) if self.log == EVENTS else ()
        return (number, shape, *columns, *chained, leaf)

    def leaf(self, shape: str, columns: Sequence[Any]) -> bytes:
        """Of a record given in the columns of the newest shape; raises UnknownShape."""
        if shape not in self._leaves:
            self._leaves[shape] = leaf_function(shape)
            self._picks[shape] = [self._newest.index(name) for name in names(shape)]
        if shape != NEWEST[self.log]:
            columns = [columns[at] for at in self._picks[shape]]
        return self._leaves[shape](tuple(columns))

    def leaves(self, shape: str, rows: Sequence[Row]) -> list[bytes]:
        """Of many rows, all of the newest ``shape``; what ``leaf`` raises, for one of them."""
        if shape not in self._all_leaves:
            self._all_leaves[shape] = leaves_function(shape)
        return self._all_leaves[shape]([row[POSITION : POSITION + self._width] for row in rows])

    def columns(self, row: Row) -> Row:
        return row[POSITION : POSITION + self._width]


# --- what lies beside a part ------------------------------------------------------------------
def attempts_name(part: int) -> str:
    return f"attempts-{part:05d}.jsonl"


def attempts_bytes(found: Mapping[int, Sequence[Any]]) -> bytes:
    """A request a line, with its position."""
    return msgspec.json.Encoder().encode_lines(sorted(found.items()))


def read_attempts(content: bytes) -> dict[int, str]:
    """The hash of each request's attempts by position; raises ValueError where it is no such file.

    Numbers are read as their fields have them: JSON writes the float 200.0 as such.
    """
    try:
        lines: list[tuple[int, list[list[Any]]]] = msgspec.json.Decoder(
            tuple[int, list[list[Any]]]
        ).decode_lines(content)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    return {position: attempts_hash(rows) for position, rows in lines}


class Format(Protocol):
    """How rows become bytes, and back; ``start``, any number of ``rows``, ``end``."""

    name: str
    content_type: str

    def start(self) -> bytes: ...

    def rows(self, rows: Sequence[Row]) -> bytes: ...

    def end(self) -> bytes: ...

    def read(self, content: Any) -> Iterator[Row]:
        """The rows in a seekable binary file; raises ValueError where one cannot be read."""


class Destination(Protocol):
    """Where an export goes; blocking."""

    def put(self, name: str, content: bytes) -> None:
        """There, whole, when it returns. Raises ExportError."""

    def get(self, name: str) -> bytes | None: ...
