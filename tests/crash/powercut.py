"""The power goes while everything writes: ``python -m tests.crash.powercut``.

Each cut has a new disk (``images``) with the store and JetStream's files on it. A forked process
follows a seeded plan (``workload``) until a random moment; then everybody is stopped, the disk is
copied as it was flushed, the copy is mounted, and from it the machine starts again. What had been
acknowledged until then must be there: the same checks as after kill -9 (``recovery``)::

    python -m tests.crash.powercut --cuts 50 --store sqlite      SQLite and JetStream
    python -m tests.crash.powercut --cuts 50 --store postgres    PostgreSQL and JetStream
    python -m tests.crash.powercut --cuts 50 --store jetstream   16 publishers at once
    python -m tests.crash.powercut --cuts 5 --unsynced           must find losses

``--unsynced`` takes the stores' fsync away (SQLite ``synchronous=OFF``, PostgreSQL ``fsync=off``,
JetStream ``sync_interval 2m``), which shows that a loss would be seen.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.crash import images

STORES = ("sqlite", "postgres", "jetstream")
DISK_MB = {"sqlite": 48, "postgres": 160, "jetstream": 48}
NUM_PUBLISHERS = 16
LONGEST_S = 60.0


@dataclass(frozen=True)
class Cut:
    seed: int
    number: int
    store: str
    after_s: float
    unsynced: bool

    @property
    def plan_seed(self) -> int:
        return self.seed * 1_000_000 + self.number * 10 + 5


def play(cut: Cut, folder: Path, prepared: "Prepared") -> list[str]:
    """One cut; the violations found."""
    from tests.crash.places import Place, fork

    folder.mkdir()
    disk = images.Disk(folder, DISK_MB[cut.store])
    server = Bus(folder, cut.unsynced)
    place = Place({}, folder / "journal", server.url, server.control_creds, time.time(),
                  f"s{cut.seed}c{cut.number}")  # fmt: skip
    with disk.mounted() as before:
        prepared.install(before)
        server.put_on(before)
        server.start()
        with prepared.running(before, cut.unsynced) as (database, store_pids):
            place = replace(place, database=database)
            worker = fork(lambda: WORK[cut.store](place, cut), folder / "worker.log")
            _wait_for_journal(place.journal)
            time.sleep(cut.after_s)
            everybody = [worker, server.pid, *store_pids()]
            images.stand_still(everybody)
            copy = disk.cut()
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            server.stop(kill=True)
    with images.mounted(copy, folder / "after") as after:
        server.put_on(after)
        server.start()
        try:
            with prepared.running(after, unsynced=False) as (database, _):
                return _recovered(cut, replace(place, database=database))
        finally:
            server.stop(kill=True)


def _wait_for_journal(journal: Path) -> None:
    """Until the worker has begun."""
    deadline = time.monotonic() + LONGEST_S
    while not journal.exists() or not journal.stat().st_size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happens: {journal}")
        time.sleep(0.002)


def _recovered(cut: Cut, place: Any) -> list[str]:
    from tests.crash.places import fork, wait

    log = place.journal.with_name("recovery.log")
    check = CHECK[cut.store]
    status = wait(fork(lambda: _write_found(check(place, cut), place), log), LONGEST_S)
    if status:
        return [f"recovery ended with {status}: {log.read_text()[-3000:]}"]
    found: list[str] = json.loads(place.journal.with_name("found").read_text())
    return found


def _write_found(found: list[str], place: Any) -> None:
    place.journal.with_name("found").write_text(json.dumps(found))


# --- the bus on the disk ------------------------------------------------------------------------
def Bus(folder: Path, unsynced: bool) -> Any:
    """The product's nats-server, its keys beside the disk and its files on it."""
    from tests.natsserver import NatsServer

    class OnDisk(NatsServer):
        def put_on(self, where: Path) -> None:
            (where / "jetstream").mkdir(exist_ok=True)
            self.store_dir.unlink(missing_ok=True)
            self.store_dir.symlink_to(where / "jetstream")

    server = OnDisk(folder)
    if unsynced:
        config = server._config.read_text()
        assert "sync_interval: always" in config
        server._config.write_text(config.replace("sync_interval: always", "sync_interval: 2m"))
    return server


# --- stores on the disk -------------------------------------------------------------------------
Running = tuple[dict[str, Any], Callable[[], list[int]]]


class Prepared:
    """The store that each disk begins with. ``running`` starts its server, if it has one."""

    def install(self, where: Path) -> None:
        """Put it there."""

    @contextmanager
    def running(self, where: Path, unsynced: bool) -> Iterator[Running]:
        yield {}, list


class PreparedSqlite(Prepared):
    def __init__(self, template: Path) -> None:
        self._template = template

    def install(self, where: Path) -> None:
        shutil.copy(self._template, where / "engine.sqlite3")
        images.flush(where)

    @contextmanager
    def running(self, where: Path, unsynced: bool) -> Iterator[Running]:
        from tests.crash.places import sqlite

        database = sqlite(where / "engine.sqlite3")
        if unsynced:
            options = database["OPTIONS"]
            off = options["init_command"].replace("synchronous=FULL", "synchronous=OFF")
            database["OPTIONS"] = {**options, "init_command": off}
        yield database, list


class PreparedPostgres(Prepared):
    """A cluster of its own, made once and copied; small WAL files, so that copying is cheap."""

    def __init__(self, folder: Path) -> None:
        from tests.crash.places import migrate, postgres
        from tests.natsserver import free_port

        self.binaries = postgres_binaries()
        self._template = folder / "cluster"
        folder.chmod(0o755)
        self._template.mkdir()
        shutil.chown(self._template, "postgres", "postgres")
        self._as_postgres("initdb", "-D", self._template, "-U", "postgres", "--auth=trust",
                          "--wal-segsize=1", "--no-sync")  # fmt: skip
        self.port = free_port()
        with self._server(self._template, unsynced=True):
            migrate(postgres("postgres", self.port))

    def install(self, where: Path) -> None:
        shutil.chown(where, "postgres", "postgres")
        where.chmod(0o755)
        images.call("cp", "-a", self._template, where / "cluster")
        images.flush(where)

    @contextmanager
    def running(self, where: Path, unsynced: bool) -> Iterator[Running]:
        from tests.crash.places import postgres

        with self._server(where / "cluster", unsynced) as process:
            yield postgres("postgres", self.port), lambda: _family(process.pid)

    @contextmanager
    def _server(self, cluster: Path, unsynced: bool) -> Iterator["subprocess.Popen[bytes]"]:
        (cluster / "postmaster.pid").unlink(missing_ok=True)  # no boot finds such a process
        settings = (
            f"fsync={'off' if unsynced else 'on'}",
            "shared_buffers=16MB",
            "unix_socket_directories=",
            "listen_addresses=127.0.0.1",
        )
        options = [word for setting in settings for word in ("-c", setting)]
        log = cluster.parent / "postgres.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [self.binaries / "postgres", "-D", cluster, "-p", str(self.port), *options],
                user="postgres", group="postgres", stdout=output, stderr=output, cwd="/",
            )  # fmt: skip
        try:
            self._wait_until_ready(process, log)
            yield process
        finally:
            for pid in _family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            process.send_signal(signal.SIGINT if unsynced else signal.SIGQUIT)
            process.wait(30)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        ready = [self.binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        deadline = time.monotonic() + LONGEST_S
        while subprocess.run(ready).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text()[-3000:]}")
            time.sleep(0.02)

    def _as_postgres(self, name: str, *arguments: str | Path) -> None:
        subprocess.run(
            [self.binaries / name, *arguments],
            user="postgres", group="postgres", check=True, capture_output=True, cwd="/",
        )  # fmt: skip


def postgres_binaries() -> Path:
    """The folder with ``postgres`` and ``initdb``; raises FileNotFoundError."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        raise FileNotFoundError("PostgreSQL's server programs are not below /usr/lib/postgresql")
    return found[-1].parent


def _family(pid: int) -> list[int]:
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [pid, *(child.pid for child in children)]


# --- in forked processes ----------------------------------------------------------------------
def _control_plane(place: Any, cut: Cut) -> None:
    from tests.crash.places import point_django_at
    from tests.crash.workload import Worker

    point_django_at(place.database)
    asyncio.run(Worker(place, _plan(place, cut)).run())
    time.sleep(LONGEST_S)  # the power goes afterwards, then


def _plan(place: Any, cut: Cut) -> Any:
    from tests.crash.workload import Plan

    return Plan(cut.plan_seed, place.at, num_steps=200)


def _control_plane_checked(place: Any, cut: Cut) -> list[str]:
    from tests.crash.places import point_django_at
    from tests.crash.recovery import Recovery

    point_django_at(place.database)
    return Recovery(place, _plan(place, cut).orders).check()


def _publishers(place: Any, cut: Cut) -> None:
    asyncio.run(_publish_for_ever(place))


async def _publish_for_ever(place: Any) -> None:
    """Sixteen at once, each telling nodes of its own one generation after the other."""
    from controlplane.adapters.natsbus.connection import connect, ensure_buckets
    from controlplane.adapters.natsbus.publisher import DesiredPublisher
    from controlplane.application.fleet import DesiredNode
    from tests.crash.places import Journal

    journal = Journal(place.journal)
    bus = await connect(place.nats_url, place.nats_creds, "publishers", timeout_s=10)
    await ensure_buckets(bus)

    async def publish(number: int) -> None:
        publisher = DesiredPublisher(bus, "crash")
        for count in range(1, 10**9):
            node = f"n{number}-{count // 10}"
            journal.note("telling", node=node, generation=count)
            await publisher.deliver(DesiredNode(node, 1, count, bool(count % 2)))
            journal.note("told", node=node, generation=count)

    await asyncio.gather(*map(publish, range(NUM_PUBLISHERS)))


def _publishers_checked(place: Any, cut: Cut) -> list[str]:
    return asyncio.run(_missing_on_bus(place))


async def _missing_on_bus(place: Any) -> list[str]:
    from controlplane.adapters.natsbus.connection import connect
    from gpuagent.wire import subjects
    from gpuagent.wire.codec import decode
    from gpuagent.wire.messages import DesiredState
    from tests.crash.places import read_journal

    told: dict[str, int] = {}
    telling: dict[str, int] = {}
    for line in read_journal(place.journal):
        (told if line["what"] == "told" else telling)[line["node"]] = line["generation"]
    bus = await connect(place.nats_url, place.nats_creds, "check", timeout_s=10)
    bucket = await bus.jetstream().key_value(subjects.DESIRED_BUCKET)
    found = []
    for node, generation in told.items():
        entry = await bucket.get(node)
        stored = decode(entry.value or b"", DesiredState).generation
        if stored not in (generation, telling[node]):
            found.append(f"{node} was told {generation}, the bus holds {stored}")
    await bus.close()
    return found


WORK = {"sqlite": _control_plane, "postgres": _control_plane, "jetstream": _publishers}
CHECK = {
    "sqlite": _control_plane_checked,
    "postgres": _control_plane_checked,
    "jetstream": _publishers_checked,
}


# --- the command ------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.powercut")
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--store", choices=STORES, default="sqlite")
    parser.add_argument("--unsynced", action="store_true")
    parser.add_argument("--only", type=int, help="the number of one cut to repeat")
    asked = parser.parse_args(arguments)
    if reason := images.why_not():
        print(f"no power can be cut here: {reason}", file=sys.stderr)
        return 2
    with ExitStack() as closing:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        return _play_all(asked, folder, closing)


def _play_all(asked: argparse.Namespace, folder: Path, closing: ExitStack) -> int:
    from tests.crash.campaign import set_up
    from tests.crash.places import migrated_sqlite

    set_up(folder)
    prepared = Prepared()
    if asked.store == "sqlite":
        prepared = PreparedSqlite(closing.enter_context(migrated_sqlite(folder)))
    elif asked.store == "postgres":
        prepared = PreparedPostgres(folder)
    began, acknowledged, violations = time.monotonic(), 0, 0
    numbers = [asked.only] if asked.only is not None else range(asked.cuts)
    for number in numbers:
        moment = random.Random(f"{asked.seed}/{number}").uniform(0.02, 1.2)
        cut = Cut(asked.seed, number, asked.store, moment, asked.unsynced)
        found = play(cut, folder / str(number), prepared)
        acknowledged += _num_acknowledged(folder / str(number) / "journal")
        shutil.rmtree(folder / str(number), ignore_errors=True)
        violations += len(found)
        for one in found[:5]:
            print(f"{cut}\n  VIOLATION {one}", flush=True)
    print(
        f"{len(numbers)} power cuts of {asked.store}{' unsynced' * asked.unsynced},"
        f" seed {asked.seed}, {time.monotonic() - began:.0f} s: {acknowledged} acknowledged"
    )
    print(f"violations: {violations}")
    return 1 if violations else 0


def _num_acknowledged(journal: Path) -> int:
    from tests.crash.places import read_journal

    known = {"done", "admitted", "ended", "told", "produced", "projected"}
    return sum(line["what"] in known for line in read_journal(journal))


if __name__ == "__main__":
    sys.exit(main())
