"""The event store next to pyeventsourcing: ``python -m tests.benchmarks.store [--json FILE]``.

Both write to the same kind of database with the same durability (SQLite in WAL mode with
synchronous=FULL, PostgreSQL with synchronous_commit=on), in turn, in one process; figures are
medians of ``--repeats`` interleaved repeats. What is compared is an aggregate's event made
durable: by ``Application.save`` there, by ``EventStore.append`` here, which also moves the head
row and extends the hash chain; and an aggregate read back: ``repository.get`` there, ``replay``
and ``fold`` here. Of ours alone, in events/s over a whole log read and decoded: ``verify`` follows
the chain, ``read_verify_fold`` also folds into the rows that gateways keep, ``read_verify_replay``
instead into the state of every aggregate by its decider, ``into_read_model`` into the tables.
``recorder`` is pyeventsourcing's lowest layer alone, given bytes and returning
no aggregate. PostgreSQL is left out if there is none on 127.0.0.1:5432.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

DATA_DIR = tempfile.mkdtemp(prefix="bench-store-")
os.environ.update(ENGINE_DATA_DIR=DATA_DIR, DJANGO_SETTINGS_MODULE="controlplane.config.settings")

import django  # noqa: E402

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connections  # noqa: E402
from eventsourcing.application import Application  # noqa: E402
from eventsourcing.domain import Aggregate, event  # noqa: E402
from eventsourcing.persistence import StoredEvent  # noqa: E402

from controlplane.adapters.clock import SystemClock  # noqa: E402
from controlplane.adapters.eventstore.store import DjangoEventStore  # noqa: E402
from controlplane.adapters.readmodel.projector import Projector  # noqa: E402
from controlplane.application.chain import GENESIS, follow  # noqa: E402
from controlplane.application.handle import CommandHandler  # noqa: E402
from controlplane.application.ports import READ_BATCH, Append, EventMeta, EventStore, Idempotency  # noqa: E402
from controlplane.domain import tenant  # noqa: E402
from controlplane.domain.decider import Decider, fold  # noqa: E402
from controlplane.domain.ids import TenantId  # noqa: E402
from controlplane.projections.fold import STATE, Folder  # noqa: E402
from controlplane.projections.memory import MemoryRows  # noqa: E402
from tests.contracts.stores import postgres_settings, scratch_postgres  # noqa: E402
from tests.domain.test_deciders import EVENTS as AGGREGATES  # noqa: E402
from tests.projections.history import random_history  # noqa: E402

META = EventMeta("user:ada", "req-0123456789", "", "10.0.0.1", "")
NUM_APPENDS = 60
NUM_TENS = 20
NUM_WRITERS, NUM_COMMANDS = 64, 40
NUM_REPLAYED = 2_000
NUM_PROJECTED = 10_000

DECIDERS: dict[str, Decider[Any]] = {
    module.DECIDER.category: module.DECIDER for module in AGGREGATES
}

# They take long.
RARE = (
    "commands_64_writers",
    "verify",
    "read_verify_fold",
    "read_verify_replay",
    "into_read_model",
)

Measure = Callable[[], float]
Seen = dict[str, list[float]]


# --- pyeventsourcing --------------------------------------------------------------------------
class Account(Aggregate):
    """As much of a tenant as is replayed."""

    def __init__(self, name: str, tier: str) -> None:
        self.name, self.tier = name, tier

    @event("TierChanged")
    def change_tier(self, tier: str, at: float) -> None:
        self.tier = tier


class Theirs:
    def __init__(self, **env: str) -> None:
        self.app: Application[Any] = Application(env=env)
        self.account = Account("acme", "free")
        self.app.save(self.account)

    def append(self, num: int, size: int) -> float:
        def one(index: int) -> None:
            for _ in range(size):
                self.account.change_tier("free", float(index))
            self.app.save(self.account)

        return size * rate(num, one)

    def record(self, num: int, size: int) -> float:
        recorder, originator = self.app.recorder, uuid.uuid4()
        state = b'{"at":1.0,"tenant_id":"acme","tier":"free","type":"TenantTierChanged"}'

        def one(index: int) -> None:
            first = index * size + 1
            versions = range(first, first + size)
            recorder.insert_events(
                [StoredEvent(originator, version, "m:TierChanged", state) for version in versions]
            )

        return size * rate(num, one)

    def fill(self) -> uuid.UUID:
        account = Account("acme", "free")
        for index in range(NUM_REPLAYED):
            account.change_tier("free", float(index))
        self.app.save(account)
        return account.id

    def replay(self, account_id: uuid.UUID) -> float:
        return NUM_REPLAYED * rate(3, lambda _: self.app.repository.get(account_id))


# --- ours -------------------------------------------------------------------------------------
class Ours:
    def __init__(self) -> None:
        self.store = DjangoEventStore(SystemClock(), "ours")
        self.num_streams = 0

    def stream(self) -> str:
        self.num_streams += 1
        return f"tenant-bench{self.num_streams}"

    def append(self, num: int, size: int) -> float:
        stream, events = self.stream(), [tenant.TenantTierChanged(TenantId("acme"), "free", 1.0)]

        def one(index: int) -> None:
            self.store.append(Append(stream, index * size, events * size, META))

        return size * rate(num, one)

    def commands(self) -> float:
        """Acknowledged commands/s from 64 writers, each with an idempotency key of its own."""
        handler, first = CommandHandler(self.store, SystemClock()), self.num_streams
        for index in range(NUM_WRITERS):
            create = tenant.CreateTenant(TenantId("acme"), "acme", "free", 1.0)
            handler.handle(tenant.DECIDER, f"tenant-w{first}-{index}", create, META)
        self.num_streams += 1

        def write(writer: int) -> None:
            for number in range(NUM_COMMANDS):
                order = tenant.ChangeTier(TenantId("acme"), tenant.TIERS[1 + number % 2], 1.0)
                key = Idempotency(f"{first}-{writer}-{number}", "0" * 64)
                stream = f"tenant-w{first}-{writer}"
                handler.handle(tenant.DECIDER, stream, order, META, idempotency=key)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(NUM_WRITERS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return NUM_WRITERS * NUM_COMMANDS / (time.perf_counter() - started)

    def fill(self) -> str:
        stream = self.stream()
        events = [tenant.TenantTierChanged(TenantId("acme"), "free", 1.0)] * NUM_REPLAYED
        self.store.append(Append(stream, 0, events, META))
        return stream

    def replay(self, stream: str) -> float:
        return NUM_REPLAYED * rate(3, lambda _: fold(tenant.DECIDER, self.store.replay(stream)))


def fill_history(store: EventStore) -> None:
    """A fleet's life, appended in transactions of a hundred."""
    history = list(random_history(1, NUM_PROJECTED))
    for start in range(0, len(history), 100):
        for stream in sorted({stream for stream, _ in history[start : start + 100]}):
            events = [event for to, event in history[start : start + 100] if to == stream]
            store.append(Append(stream, None, events, META))


def follow_and_fold(store: EventStore) -> float:
    """Events/s read, decoded, verified and folded into the rows that gateways keep."""
    started, head, folder = time.perf_counter(), GENESIS, Folder(MemoryRows(), STATE)
    while events := store.read_all(head.position, READ_BATCH):
        head = follow(head, events)
        for recorded in events:
            folder.apply(recorded)
    return head.position / (time.perf_counter() - started)


def follow_and_replay(store: EventStore) -> float:
    """Events/s read, decoded, verified and folded into the state of every aggregate."""
    started, head = time.perf_counter(), GENESIS
    states: dict[str, Any] = {}
    while events := store.read_all(head.position, READ_BATCH):
        head = follow(head, events)
        for recorded in events:
            stream = recorded.stream
            decider = DECIDERS.get(stream.partition("-")[0])
            if decider is not None:  # a refusal is of no aggregate
                states[stream] = decider.evolve(states.get(stream, decider.initial), recorded.event)
    return head.position / (time.perf_counter() - started)


def verify(store: EventStore) -> float:
    started = time.perf_counter()
    return store.verify().position / (time.perf_counter() - started)


def project(store: EventStore) -> float:
    """Events/s into the tables, from the beginning of the log."""
    with connections["history"].cursor() as cursor:
        cursor.execute("DELETE FROM readmodel_checkpoint")
    projector, started = Projector(store, "history"), time.perf_counter()
    return projector.catch_up_all() / (time.perf_counter() - started)


# --- measuring --------------------------------------------------------------------------------
def rate(num: int, action: Callable[[int], object]) -> float:
    started = time.perf_counter()
    for index in range(num):
        action(index)
    return num / (time.perf_counter() - started)


def interleaved(measures: dict[str, Measure], repeats: int) -> Seen:
    """Each figure of each round, after one that is not counted. A round is short, so that what
    else the machine does falls on all of its figures alike, and in an order of its own, so that
    what one leaves behind (pages to be written, cold caches) does not always meet the same."""
    seen: Seen = {name: [] for name in measures}
    for repeat in range(repeats + 1):
        names = [name for name in measures if name not in RARE or repeat % 5 == 0]
        for name in random.Random(repeat).sample(names, len(names)):
            figure = measures[name]()
            if repeat:
                seen[name].append(figure)
    return seen


def measures(ours: Ours, theirs: Theirs, history: EventStore) -> dict[str, Measure]:
    stream, account_id = ours.fill(), theirs.fill()
    return {
        "append_1_ours": lambda: ours.append(NUM_APPENDS, 1),
        "append_1_theirs": lambda: theirs.append(NUM_APPENDS, 1),
        "append_1_recorder": lambda: theirs.record(NUM_APPENDS, 1),
        "append_10_ours": lambda: ours.append(NUM_TENS, 10),
        "append_10_theirs": lambda: theirs.append(NUM_TENS, 10),
        "append_10_recorder": lambda: theirs.record(NUM_TENS, 10),
        "commands_64_writers": ours.commands,
        "replay_ours": lambda: ours.replay(stream),
        "replay_theirs": lambda: theirs.replay(account_id),
        "verify": lambda: verify(history),
        "read_verify_fold": lambda: follow_and_fold(history),
        "read_verify_replay": lambda: follow_and_replay(history),
        "into_read_model": lambda: project(history),
    }


@contextmanager
def sqlite() -> Iterator[tuple[Theirs, dict[str, Any], dict[str, Any]]]:
    """Theirs, and the settings of two databases for ours."""
    theirs = Theirs(
        PERSISTENCE_MODULE="eventsourcing.sqlite", SQLITE_DBNAME=f"{DATA_DIR}/theirs.sqlite3"
    )
    with theirs.app.recorder.datastore.transaction(commit=False) as cursor:  # type: ignore[attr-defined]
        cursor.execute("PRAGMA synchronous")
        assert cursor.fetchone()[0] == 2, "pyeventsourcing must be as durable: FULL"
    settings = connections["default"].settings_dict
    ours, history = (
        {**settings, "NAME": f"{DATA_DIR}/{name}.sqlite3"} for name in ("ours", "history")
    )
    yield theirs, ours, history


@contextmanager
def postgres() -> Iterator[tuple[Theirs, dict[str, Any], dict[str, Any]]]:
    names = [f"bench_{uuid.uuid4().hex[:12]}" for _ in range(3)]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(scratch_postgres(name))
        theirs = Theirs(
            PERSISTENCE_MODULE="eventsourcing.postgres",
            POSTGRES_DBNAME=names[0],
            POSTGRES_HOST="127.0.0.1",
            POSTGRES_PORT="5432",
            POSTGRES_USER="postgres",
            POSTGRES_PASSWORD="unused",
        )
        defaults = connections["default"].settings_dict
        yield (
            theirs,
            {**defaults, **postgres_settings(names[1])},
            {**defaults, **postgres_settings(names[2])},
        )


def run_on(
    theirs: Theirs, ours_at: dict[str, Any], history_at: dict[str, Any], repeats: int
) -> Seen:
    for alias, settings in (("ours", ours_at), ("history", history_at)):
        connections.settings[alias] = settings
        call_command("migrate", "eventstore", database=alias, verbosity=0)
        call_command("migrate", "readmodel", database=alias, verbosity=0)
    ours, history = Ours(), DjangoEventStore(SystemClock(), "history")
    fill_history(history)
    figures = interleaved(measures(ours, theirs, history), repeats)
    ours.store.close()
    history.close()
    theirs.app.close()
    for alias in ("ours", "history"):
        connections[alias].close()
        del connections[alias], connections.settings[alias]
    return figures


def report(database: str, seen: Seen) -> tuple[dict[str, float], dict[str, float]]:
    """Print the median figures; they, and the median of each round's ratio."""
    figures = {name: statistics.median(rounds) for name, rounds in seen.items()}
    for name, figure in figures.items():
        print(f"{database:9} {name:20} {figure:12,.0f} /s")
    pairs = {
        "append_vs_eventsourcing": ("append_1_ours", "append_1_theirs"),
        "append_vs_recorder": ("append_1_ours", "append_1_recorder"),
        "append_10_vs_eventsourcing": ("append_10_ours", "append_10_theirs"),
        "append_10_vs_recorder": ("append_10_ours", "append_10_recorder"),
        "replay_vs_eventsourcing": ("replay_ours", "replay_theirs"),
    }
    ratios = {
        f"{name}_{database}": statistics.median(
            ours / theirs for ours, theirs in zip(seen[one], seen[other], strict=True)
        )
        for name, (one, other) in pairs.items()
    }
    return {f"{name}_{database}": figure for name, figure in figures.items()}, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", choices=("sqlite", "postgres"))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for database, measured in (("sqlite", sqlite), ("postgres", postgres)):
        if options.only not in (None, database):
            continue
        with measured() as (theirs, ours_at, history_at):
            found = run_on(theirs, ours_at, history_at, options.repeats)
            more_figures, more_ratios = report(database, found)
            figures |= more_figures
            ratios |= more_ratios
    for name, ratio in ratios.items():
        print(f"{name:42} {ratio:6.2f} x")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    if options.json:
        result = {"name": "store", "machine": machine, "ratios": ratios, "figures": figures}
        options.json.write_text(json.dumps(result, indent=1))
    print(f"on {machine}; medians of {options.repeats} interleaved repeats")


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(DATA_DIR, ignore_errors=True)
