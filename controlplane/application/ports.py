"""What the application needs of the outside world, as protocols; adapters implement them.

Each port has one contract suite in ``tests/contracts`` that runs on every implementation, the
in-memory one (``adapters.memory``) included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from controlplane.application.capture import EncryptedText
from controlplane.dispatch.record import Dispatch
from controlplane.domain.budget import Budget, amount_in
from controlplane.domain.decider import Event
from controlplane.domain.money import Price


class Clock(Protocol):
    def now(self) -> float:
        """Unix seconds, UTC."""

    def monotonic(self) -> float:
        """Seconds that never go back; for leases and timeouts."""


# --- the event log ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventMeta:
    """Who caused an event and in which connection; ``address`` is the caller's network address."""

    actor: str
    correlation_id: str = ""
    causation_id: str = ""
    address: str = ""
    reason: str = ""


class RecordedEvent(msgspec.Struct, frozen=True, gc=False):
    """One stored event. ``hash`` chains: SHA-256(previous hash || canonical record).

    A Struct and not a dataclass: a follower makes 100,000 of these a second.
    """

    position: int
    stream: str
    version: int
    type: str
    schema_version: int
    data: bytes
    meta: EventMeta
    recorded_at: float
    hash: bytes
    event: Event

    @property
    def event_id(self) -> str:
        """``tenant-acme:7``: unique since a stream has each version once, and the same on a
        resend. A random id was rejected: its unique index is one more page per append."""
        return f"{self.stream}:{self.version}"


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A caller's key and the hash of the body it came with; kept 24 h with the response."""

    key: str
    body_hash: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body_hash: str
    status: int
    body: bytes
    position: int


@dataclass(frozen=True, slots=True)
class Append:
    """``expected_version`` None appends whatever the version is; 0 means the stream is new."""

    stream: str
    expected_version: int | None
    events: Sequence[Event]
    meta: EventMeta
    idempotency: Idempotency | None = None
    response_status: int = 200
    response_body: bytes = b""


@dataclass(frozen=True, slots=True)
class Appended:
    """Durable now. ``position`` is that of the last event (the head's, if none was appended)."""

    position: int
    version: int


class Head(NamedTuple):
    """The last position and its hash."""

    position: int
    hash: bytes


# Events that a follower of the log reads at once: about what a core's own cache holds. With 1,000
# each of them took a sixth longer.
READ_BATCH = 250

# position, stream, version, type, schema_version, data, actor, correlation_id,
# causation_id, address, reason, recorded_at
Columns = tuple[int, str, int, str, int, bytes, str, str, str, str, str, float]
StoredColumns = tuple[Columns, bytes]  # with the stored hash


@dataclass(frozen=True, slots=True)
class Lease:
    """``epoch`` grows with each change of holder and fences everything done under older ones."""

    name: str
    holder: str
    epoch: int
    expires_at: float


CONTROLLER_LEASE = "controller"  # whoever holds it leads: it alone plans and tells the nodes
CONTROLLER = EventMeta("system:controller")


class StoreUnavailable(Exception):
    """The log cannot be written now; ``code`` is store_busy, store_full or store_error."""

    def __init__(self, code: str, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class KeyUsed(Exception):
    """The append's idempotency key was used within 24 h; ``stored`` is what was answered then."""

    def __init__(self, stored: StoredResponse) -> None:
        super().__init__("this idempotency key was used before")
        self.stored = stored


class EventStore(Protocol):
    """Append-only, gap-free, commit-ordered. Blocking calls; safe from many threads."""

    def append(self, append: Append) -> Appended:
        """Durable when it returns. Raises domain VersionConflict, KeyUsed, StoreUnavailable."""

    def read_stream(self, stream: str, after_version: int = 0) -> list[RecordedEvent]: ...

    def replay(self, stream: str, after_version: int = 0) -> list[Event]:
        """The stream's events alone, for folding; versions are contiguous, so len counts them."""

    def read_all(self, after: int, limit: int, upto: int | None = None) -> list[RecordedEvent]:
        """Events with ``after < position`` in order, at most ``limit``; decoded, not verified."""

    def read_columns(self, after: int, upto: int, limit: int) -> list[StoredColumns]:
        """As ``read_all``, as stored: for whoever checks or copies, and need not understand."""

    def verify(self, after: int = 0) -> Head:
        """Recompute the chain; raises IntegrityError naming the first bad position."""

    def head(self) -> Head: ...

    def stored_response(self, key: str) -> StoredResponse | None: ...

    def acquire_lease(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:
        """Take, keep or (None) fail to get the lease. A ttl of 0 gives one's own lease back."""

    def close(self) -> None: ...


class IntegrityError(Exception):
    """The stored chain is broken at ``position``."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(f"position {position}: {message}")
        self.position = position


# --- the inference ledger ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intent:
    """Written, with its reservation, before anything is sent to a node. Tokens are counts.

    ``price`` is the one in effect now: what the request used is charged at it whenever it ends.
    """

    request_id: str
    tenant_id: str
    subject: str  # API key id, or "jwt:<sub>", or "user:<name>"
    end_user: str  # what the request itself named as its user
    endpoint: str
    requested_model: str
    route: str
    arm: str
    version_id: str
    latency_class: str
    num_prompt_tokens: int
    max_output_tokens: int
    price: Price
    at: float
    gateway: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one choice on one replica; ``outcome``: ok | cancelled | error."""

    choice: int
    attempt: int
    node_id: str
    replica_id: str
    outcome: str
    error_code: str
    num_cached_tokens: int
    num_output_tokens: int
    queue_ms: float | None
    started_at: float
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Terminal:
    """How a request ended. ``outcome``: ok | cancelled | error | timeout | unknown."""

    request_id: str
    outcome: str
    finish_reason: str
    error_code: str
    node_id: str
    replica_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: float | None
    queue_ms: float | None
    duration_ms: float
    at: float
    attempts: int = 1
    tries: tuple[Attempt, ...] = ()
    dispatches: tuple[Dispatch, ...] = ()  # of some requests, see ``explaining``
    text: EncryptedText | None = None  # of a tenant that opted in


class BudgetExceeded(Exception):
    """Spent plus live reservations plus this request would pass ``budget``; all in its unit."""

    def __init__(self, budget: Budget, spent: int, reserved: int, asked: int) -> None:
        limit, used, held, needed = (
            amount_in(budget.unit, value) for value in (budget.limit, spent, reserved, asked)
        )
        super().__init__(
            f"budget {limit}, spent {used}, reserved {held}, this request needs {needed}"
        )
        self.budget, self.spent, self.reserved, self.asked = budget, spent, reserved, asked


class AuditUnavailable(Exception):
    """The intent could not be made durable: no audit, no service."""


class Ledger(Protocol):
    """Reservation and intent in one transaction, group-committed; a terminal exactly once."""

    async def admit(self, intent: Intent) -> None:
        """Durable when it returns. Raises BudgetExceeded, AuditUnavailable."""

    async def settle(self, terminal: Terminal) -> bool:
        """Record the end, capture what was used, release the rest. False if already settled."""

    async def close(self) -> None: ...
