"""The ports in memory: for tests, simulations and what-if runs. Nothing is durable here."""

import threading

from controlplane.application.chain import GENESIS, columns_of, follow
from controlplane.application.ports import (
    Append,
    Appended,
    Clock,
    Head,
    IntegrityError,
    Lease,
    RecordedEvent,
    StoredColumns,
    StoredResponse,
)
from controlplane.application.sequencer import (
    KEY_SECONDS,
    Batch,
    prepare,
    recorded_events,
    sequence,
)
from controlplane.domain.decider import Event


class MemoryEventStore:
    """``ports.EventStore`` in a list. Times are its clock's, so that a run repeats exactly."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._log: list[RecordedEvent] = []
        self._streams: dict[str, list[RecordedEvent]] = {}
        self._keys: dict[str, tuple[StoredResponse, float]] = {}
        self._leases: dict[str, Lease] = {}

    def append(self, append: Append) -> Appended:
        prepared = prepare(append)
        with self._lock:
            now = self._clock.now()
            versions = {append.stream: len(self._streams.get(append.stream, ()))}
            batch = sequence([prepared], self._head(), versions, self._used(now), now)
            self._keep(batch, now)
        outcome = batch.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def read_stream(self, stream: str, after_version: int = 0) -> list[RecordedEvent]:
        return self._streams.get(stream, [])[after_version:]

    def replay(self, stream: str, after_version: int = 0) -> list[Event]:
        return [recorded.event for recorded in self.read_stream(stream, after_version)]

    def read_all(self, after: int, limit: int, upto: int | None = None) -> list[RecordedEvent]:
        end = after + limit if upto is None else min(after + limit, upto)
        return self._log[after : max(after, end)]

    def read_columns(self, after: int, upto: int, limit: int) -> list[StoredColumns]:
        return [(columns_of(one), one.hash) for one in self.read_all(after, limit, upto)]

    def verify(self, after: int = 0) -> Head:
        if after > len(self._log):
            raise IntegrityError(after, "missing: the log ends before it")
        start = Head(after, self._log[after - 1].hash) if after else GENESIS
        return follow(start, self._log[after:])

    def head(self) -> Head:
        with self._lock:
            return self._head()

    def stored_response(self, key: str) -> StoredResponse | None:
        return self._used(self._clock.now()).get(key)

    def acquire_lease(self, name: str, holder: str, ttl: float, now: float) -> Lease | None:
        with self._lock:
            held = self._leases.get(name) or Lease(name, "", 0, now)
            if held.holder != holder and held.expires_at > now:
                return None
            epoch = held.epoch + (held.holder != holder)
            self._leases[name] = Lease(name, holder, epoch, now + ttl)
            return self._leases[name]

    def close(self) -> None:
        """Nothing to release."""

    def _head(self) -> Head:
        return Head(len(self._log), self._log[-1].hash) if self._log else GENESIS

    def _used(self, now: float) -> dict[str, StoredResponse]:
        return {key: kept for key, (kept, at) in self._keys.items() if at > now - KEY_SECONDS}

    def _keep(self, batch: Batch, now: float) -> None:
        for recorded in recorded_events(batch.rows):
            self._log.append(recorded)
            self._streams.setdefault(recorded.stream, []).append(recorded)
        self._keys.update({key: (stored, now) for key, stored in batch.keys.items()})
