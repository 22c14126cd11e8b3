"""One thread that owns one connection and commits together whatever has queued up.

No timer: while a commit waits for the disk, the next batch gathers by itself. Measured here, a
5 ms timer costs 5 ms at every load and a tenth of the throughput. What one turn of the event loop
submits is handed over together at its end (a busy loop would otherwise feed the thread one by
one, and each commit would carry one request), and the results of a batch come back together::

    loop:    admit(a) admit(b) ............ settle(a) ... (a, b resolve)
    thread:  take [a] BEGIN..COMMIT, take [b, settle a] BEGIN..COMMIT, ...

A database error fails the batch and drops the connection, so that the next batch starts on a new
one; a failed fsync ends the process (``failed_sync``). A row the database refuses must not
fail its neighbours: a batch with an integrity error is repeated one operation at a time.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.adapters import failed_sync
from controlplane.adapters.ledger.batch import admit_all, settle_all
from controlplane.adapters.ledger.budgets import Cursor
from controlplane.adapters.ledger.statements import Statements
from controlplane.adapters.store_writes import store_writes
from controlplane.application.failpoints import passing
from controlplane.application.ports import AuditUnavailable, Intent, Terminal

MAX_BATCH = 256

Work = Callable[[Cursor, Statements], Any]


@dataclass(slots=True, eq=False)
class Operation:
    """One thing to do in the next transaction; ``what`` is an Intent, a Terminal or a Work."""

    what: Intent | Terminal | Work
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop
    result: Any = field(default=None)


class GroupWriter:
    """``submit`` from one event loop; the future resolves once the transaction is durable."""

    def __init__(
        self, connect: Callable[[], Any], sql: Statements, integrity: type[Exception]
    ) -> None:
        self._connect, self._sql, self._integrity = connect, sql, integrity
        self._queue: queue.SimpleQueue[list[Operation] | None] = queue.SimpleQueue()
        self._outbox: list[Operation] = []
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, what: Intent | Terminal | Work) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        operation = Operation(what, loop.create_future(), loop)
        if not self._outbox:
            loop.call_soon(self._hand_over)
        self._outbox.append(operation)
        return operation.future

    def _hand_over(self) -> None:
        operations, self._outbox = self._outbox, []
        self._queue.put(operations)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued and stop."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            operations, ended = self._gather(first)
            for start in range(0, len(operations), MAX_BATCH):
                batch = operations[start : start + MAX_BATCH]
                self._commit(batch)
                _resolve_all(batch)
                passing("ledger.answered")
            if ended:
                break
        self._drop_connection()

    def _gather(self, first: list[Operation]) -> tuple[list[Operation], bool]:
        """Everything that has queued up, and whether the end is asked for."""
        operations = list(first)
        with contextlib.suppress(queue.Empty):
            while len(operations) < MAX_BATCH:
                more = self._queue.get_nowait()
                if more is None:
                    return operations, True
                operations += more
        return operations, False

    def _commit(self, batch: Sequence[Operation]) -> None:
        try:
            self._transact(batch)
        except self._integrity as error:
            self._drop_connection()
            if len(batch) == 1:
                batch[0].result = AuditUnavailable(str(error))
                return
            for operation in batch:
                self._commit([operation])
        except Exception as error:
            store_writes.note_failed(error)
            failed_sync.leave_if_failed(error)
            self._drop_connection()
            for operation in batch:
                operation.result = AuditUnavailable(f"{type(error).__name__}: {error}")

    def _transact(self, batch: Sequence[Operation]) -> None:
        if failed_sync.has_failed():
            raise AuditUnavailable("the disk failed; this process is ending")
        if self._connection is None:
            self._connection = self._connect()
        cursor = self._connection.cursor()
        cursor.execute(self._sql.begin)
        passing("ledger.begun")
        _apply(cursor, self._sql, batch)
        passing("ledger.applied")
        cursor.execute("COMMIT")
        store_writes.note_written()
        passing("ledger.committed")

    def _drop_connection(self) -> None:
        if self._connection is None or failed_sync.has_failed():
            return  # after a failed sync nothing is closed: that would sync again
        connection, self._connection = self._connection, None
        with contextlib.suppress(Exception):  # it is being thrown away because it failed
            connection.rollback()  # a cursor in a traceback would keep SQLite's lock otherwise
        with contextlib.suppress(Exception):
            connection.close()


def _apply(cursor: Cursor, sql: Statements, batch: Sequence[Operation]) -> None:
    settles = [op for op in batch if isinstance(op.what, Terminal)]
    admits = [op for op in batch if isinstance(op.what, Intent)]
    if settles:
        done = settle_all(cursor, sql, [op.what for op in settles])  # type: ignore[misc]
        for op in settles:
            op.result = op.what.request_id in done  # type: ignore[union-attr]
    if admits:
        outcomes = admit_all(cursor, sql, [op.what for op in admits])  # type: ignore[misc]
        for op, outcome in zip(admits, outcomes, strict=True):
            op.result = outcome
    for op in batch:
        if callable(op.what):
            op.result = op.what(cursor, sql)


def _resolve_all(batch: Sequence[Operation]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
        batch[0].loop.call_soon_threadsafe(_resolve, batch)


def _resolve(batch: Sequence[Operation]) -> None:
    for op in batch:
        if op.future.done():
            continue
        if isinstance(op.result, Exception):
            op.future.set_exception(op.result)
        else:
            op.future.set_result(op.result)
