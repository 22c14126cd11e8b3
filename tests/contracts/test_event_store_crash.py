"""kill -9 at any moment loses nothing that was acknowledged, and breaks nothing."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from django.db import connections

from controlplane.application.ports import EventStore
from tests.contracts.stores import Stores

ROUNDS = 4


def test_what_was_acknowledged_survives_kill_9(durable: Stores, database: Path) -> None:
    """Each round kills two writing processes; then every acknowledged append is there once.

    What was not acknowledged may be there or not. The chain is whole, and writing goes on.
    """
    choose = random.Random(4)
    acknowledged: list[str] = []
    for number in range(ROUNDS):
        writers = [_start(durable, database, f"r{number}w{which}") for which in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            acknowledged.append(writer.stdout.readline().decode().strip())
        time.sleep(choose.uniform(0.02, 0.3))
        for writer in writers:
            writer.kill()
        for writer in writers:
            acknowledged += writer.communicate(timeout=20)[0].decode().split()
    _check(durable.open(), acknowledged)


def _check(store: EventStore, acknowledged: list[str]) -> None:
    head = store.verify()
    stored = [event.event.name for event in store.read_all(0, head.position)]  # type: ignore[attr-defined]
    assert len(acknowledged) > 10 * ROUNDS
    assert set(acknowledged) <= set(stored)
    assert len(set(stored)) == len(stored) == head.position
    for name in acknowledged:
        assert store.stored_response(f"{name}") is not None


def _start(stores: Stores, database: Path, tag: str) -> "subprocess.Popen[bytes]":
    where = {"ENGINE_DATA_DIR": str(database.parent)}
    if stores.name == "postgres":
        name = connections["default"].settings_dict["NAME"]
        where["ENGINE_DATABASE_URL"] = f"postgres://postgres@127.0.0.1:5432/{name}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.contracts.appender", tag],
        stdout=subprocess.PIPE,
        bufsize=0,  # communicate reads past a buffer, and would lose what readline left in it
        env={**os.environ, **where, "DJANGO_SETTINGS_MODULE": "controlplane.config.settings"},
        cwd=Path(__file__).parents[2],
    )
