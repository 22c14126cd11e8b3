"""Appends until it is killed; run as ``python -m tests.contracts.appender TAG``.

Eight threads write to streams of their own and to one they share. Each prints a line ``TAG-i-n``
once its append was acknowledged, and only then.
"""

import itertools
import os
import sys
import threading

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.application.ports import Append, EventMeta, Idempotency
from controlplane.domain.ids import TenantId
from controlplane.domain.tenant import TenantCreated


def main(tag: str) -> None:
    store = DjangoEventStore(SystemClock())
    threads = [threading.Thread(target=_write, args=(store, f"{tag}-{i}")) for i in range(8)]
    for thread in threads:
        thread.start()


def _write(store: DjangoEventStore, name: str) -> None:
    for number in itertools.count():
        mark = f"{name}-{number}"
        event = TenantCreated(TenantId(mark), mark, "free", 1.0)
        stream = f"s-{name}" if number % 3 else "shared"
        store.append(Append(stream, None, [event], EventMeta(name), Idempotency(mark, "body")))
        os.write(1, f"{mark}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
