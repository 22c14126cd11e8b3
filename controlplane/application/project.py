"""Follows the log: every event once, in order, its place in the chain checked.

Gateways, planners and dashboards keep what they need in memory by following; ``LiveRows`` does it
for the read model's rows. Following is by polling, since a poll of an idle log costs some 50 µs
and needs nothing but the database; a wake-up only shortens the wait.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from controlplane.application.chain import GENESIS, good_part
from controlplane.application.ports import (
    READ_BATCH,
    EventStore,
    Head,
    RecordedEvent,
    StoreUnavailable,
)
from controlplane.projections.fold import STATE, Folder
from controlplane.projections.memory import MemoryRows

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0


class LogFollower:
    """Calls ``on_event`` for each event after ``after``, in a thread of its own once started.

    It stops for good at a broken chain or an event of an unknown type, rather than guess; then
    ``failure`` says why and ``position`` is the last good one. A store that cannot be reached is
    tried again.
    """

    def __init__(
        self,
        store: EventStore,
        after: int,
        on_event: Callable[[RecordedEvent], None],
        poll_seconds: float = 0.05,
    ) -> None:
        self._store, self._on_event, self._poll = store, on_event, poll_seconds
        self._seen = GENESIS if after == 0 else Head(after, b"")
        self._wake = threading.Event()
        self._moved = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None

    @property
    def position(self) -> int:
        return self._seen.position

    def start(self) -> None:
        """Catch up now, so that the caller starts with what there is; then follow in a thread."""
        self.catch_up()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """There may be something new: look at once."""
        self._wake.set()

    def wait_for(self, position: int, timeout: float) -> bool:
        """Whether ``position`` was reached within ``timeout`` seconds."""
        self.wake()
        with self._moved:
            return self._moved.wait_for(lambda: self.position >= position, timeout)

    def catch_up(self) -> int:
        """Read to the end of the log in the calling thread; the position reached."""
        while events := self._store.read_all(self.position, READ_BATCH):
            good, reached = self._checked(events)
            for recorded in good:
                self._on_event(recorded)
            with self._moved:
                self._seen = reached
                self._moved.notify_all()
        return self.position

    def _checked(self, events: Sequence[RecordedEvent]) -> tuple[Sequence[RecordedEvent], Head]:
        """What is good of them, and where that ends; raises IntegrityError if the first is not.

        After a start in the middle the first hash is believed.
        """
        if self._seen.hash:
            return good_part(self._seen, events)
        first = Head(events[0].position, events[0].hash)
        if len(events) == 1:
            return events, first
        good, reached = good_part(first, events[1:])
        return [events[0], *good], reached

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._poll)
            self._wake.clear()
            try:
                self.catch_up()
            except StoreUnavailable as error:
                _log.warning("the log cannot be read: %s", error)
                self._wake.wait(_RETRY_SECONDS)
            except Exception as error:
                _log.exception("following the log stopped after position %d", self.position)
                self.failure = error
                return


class LiveRows:
    """The read model's rows in memory, kept up to date from the log.

    ``rows`` may be read from any thread. ``on_event`` is called after each event was applied.
    """

    def __init__(
        self,
        store: EventStore,
        on_event: Callable[[RecordedEvent], None] | None = None,
        poll_seconds: float = 0.05,
    ) -> None:
        self.rows = MemoryRows()
        self._folder = Folder(self.rows, STATE)
        self._on_event = on_event
        self.follower = LogFollower(store, 0, self._apply, poll_seconds)

    def start(self) -> None:
        self.follower.start()

    def stop(self) -> None:
        self.follower.stop()

    @property
    def position(self) -> int:
        return self.follower.position

    def _apply(self, recorded: RecordedEvent) -> None:
        self._folder.apply(recorded)
        self.rows.take_changes()
        if self._on_event is not None:
            self._on_event(recorded)
