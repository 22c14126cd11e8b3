"""Carries out one command: fetch the state, decide, append; decide again if somebody was faster.

The state of a stream is remembered as last folded and may be behind the log. That is safe: events
decided on an old state carry its version and cannot be appended, and a refusal or an "already so"
is only believed once the log has nothing newer. So a command that succeeds reads nothing::

    remembered: model-smollm2 at version 3
    decide -> [ModelAliasAdded]      append(expected 3) -> done, version 4
                                     append(expected 3) -> VersionConflict: fold on to 5, decide
    decide -> Conflict or []         nothing newer than 3 in the log? then it stands, else decide

The same holds for a command sent again: if it decides anything, the store refuses its used key;
if it is refused (it is done already, or its If-Match is old by now), its key is looked up before
the refusal is believed. A refused order is a fact of its own: ``CommandRefused`` on the stream
``refusals``.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.application.failpoints import passing
from controlplane.application.ports import (
    Append,
    Appended,
    Clock,
    EventMeta,
    EventStore,
    Idempotency,
    KeyUsed,
    StoredResponse,
)
from controlplane.domain.audit import REFUSALS, CommandRefused, asked_of, redacted
from controlplane.domain.decider import Decider, Event, fold
from controlplane.domain.errors import Conflict, DomainError, VersionConflict

_MAX_ATTEMPTS = 256
_MAX_STATES = 4096  # of streams, remembered


@dataclass(frozen=True, slots=True)
class Handled:
    """What a command did; ``stored`` is the first answer if it was ``replayed`` by its key.

    ``version`` is the stream's afterwards, ``position`` that of the last event (of the head if
    there was none). While ``response`` renders it for storage, ``position`` is still 0: it is
    known only in the commit, and stored beside the response.
    """

    events: tuple[Event, ...]
    version: int
    position: int
    replayed: bool = False
    stored: StoredResponse | None = None


Response = Callable[[Handled], tuple[int, bytes]]


class _Order(msgspec.Struct, frozen=True):
    """One call of ``handle``."""

    decider: Decider[Any]
    stream: str
    command: Any
    meta: EventMeta
    expected_version: int | None
    idempotency: Idempotency | None
    response: Response | None
    dry_run: bool


class CommandHandler:
    """Safe from many threads; one per process, beside the process's store."""

    def __init__(self, store: EventStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._states = _States(store)

    def handle(
        self,
        decider: Decider[Any],
        stream: str,
        command: Any,
        meta: EventMeta,
        *,
        expected_version: int | None = None,
        idempotency: Idempotency | None = None,
        response: Response | None = None,
        dry_run: bool = False,
    ) -> Handled:
        """Durable when it returns. Raises DomainError (recorded as refused), StoreUnavailable.

        With ``expected_version`` a stream at any other version is a VersionConflict. A key that
        was used with the same body gives the stored answer, with another body it is a Conflict
        ``idempotency_mismatch``. Keys of different actors never meet.
        """
        key = scoped(idempotency, meta)
        order = _Order(decider, stream, command, meta, expected_version, key, response, dry_run)
        try:
            return self._decide_and_append(order)
        except KeyUsed as used:
            return _replayed(used.stored, key)
        except DomainError as error:
            first = self._replay(key)
            if first is not None:
                return first
            passing("handle.refused")
            self._record_refusal(order, error)
            passing("handle.refusal_recorded")
            raise

    def state(self, decider: Decider[Any], stream: str) -> tuple[int, Any]:
        """The stream's version and state, as the log has it now."""
        return self._states.advance(decider, stream)

    def _replay(self, key: Idempotency | None) -> Handled | None:
        stored = self._store.stored_response(key.key) if key else None
        return _replayed(stored, key) if stored else None

    def _decide_and_append(self, order: _Order) -> Handled:
        version, state = self._states.get(order.decider, order.stream)
        for _ in range(_MAX_ATTEMPTS):
            if order.expected_version in (None, version):
                handled = self._attempt(order, version, state)
                if handled is not None:
                    return handled
            newest, state = self._states.advance(order.decider, order.stream)
            if newest == version and order.expected_version is not None:
                raise VersionConflict(order.stream, order.expected_version, version)
            version = newest
        raise VersionConflict(order.stream, version, version)

    def _attempt(self, order: _Order, version: int, state: Any) -> Handled | None:
        """None if ``version`` was not the stream's newest, so that this must be tried again."""
        try:
            events = order.decider.decide(state, order.command)
        except DomainError:
            if self._is_newest(order, version):
                raise
            return None
        if (order.dry_run or not events) and not self._is_newest(order, version):
            return None
        passing("handle.decided")
        done = Handled(tuple(events), version + len(events), 0)
        if order.dry_run:
            return Handled(done.events, done.version, self._store.head().position)
        try:
            appended = self._append(order, done, version)
        except VersionConflict:
            return None
        passing("handle.appended")
        if events:
            state = fold(order.decider, events, state)
            self._states.put(order.stream, done.version, state)
        return Handled(done.events, done.version, appended.position)

    def _is_newest(self, order: _Order, version: int) -> bool:
        return self._states.advance(order.decider, order.stream)[0] == version

    def _append(self, order: _Order, done: Handled, version: int) -> Appended:
        if not done.events and order.idempotency is None:
            return Appended(self._store.head().position, version)
        status, body = order.response(done) if order.response else (200, b"")
        return self._store.append(
            Append(order.stream, version, done.events, order.meta, order.idempotency, status, body)
        )

    def _record_refusal(self, order: _Order, error: DomainError) -> None:
        if order.dry_run:
            return
        refused = CommandRefused(
            type(order.command).__name__,
            redacted(order.stream),
            error.code,
            redacted(error.message),
            self._clock.now(),
            asked_of(order.command),
        )
        self._store.append(Append(REFUSALS, None, [refused], order.meta))
        error.recorded = True


def scoped(idempotency: Idempotency | None, meta: EventMeta) -> Idempotency | None:
    """The key as stored: within its actor, so that nobody is answered with another's response."""
    if idempotency is None:
        return None
    return Idempotency(f"{meta.actor} {idempotency.key}", idempotency.body_hash)


def _replayed(stored: StoredResponse, key: Idempotency | None) -> Handled:
    if key is None or stored.body_hash != key.body_hash:
        raise Conflict(
            "idempotency_mismatch",
            "This Idempotency-Key was used with another request.",
            "Idempotency-Key",
        )
    return Handled((), 0, stored.position, replayed=True, stored=stored)


class _States:
    """The last folded state of recently used streams."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, Any]] = OrderedDict()

    def get(self, decider: Decider[Any], stream: str) -> tuple[int, Any]:
        """As remembered, perhaps behind the log; read from the log the first time."""
        kept = self._kept.get(stream)
        return kept or self.advance(decider, stream)

    def advance(self, decider: Decider[Any], stream: str) -> tuple[int, Any]:
        """As the log has it now."""
        version, state = self._kept.get(stream) or (0, decider.initial)
        newer: Sequence[Event] = self._store.replay(stream, version)
        version, state = version + len(newer), fold(decider, newer, state)
        self.put(stream, version, state)
        return version, state

    def put(self, stream: str, version: int, state: Any) -> None:
        with self._lock:
            kept = self._kept.get(stream)
            if kept is None or kept[0] < version:
                self._kept[stream] = (version, state)
            self._kept.move_to_end(stream)
            if len(self._kept) > _MAX_STATES:
                self._kept.popitem(last=False)
