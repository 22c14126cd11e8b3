"""kill -9 between any two lines, again and again: ``python -m tests.crash.campaign``.

Each run forks a process that follows a seeded plan (``workload``) on a new database and a real
nats-server with the product's configuration, and is killed at a failpoint; in every tenth run at a
random moment instead. Beside some victims another process writes the same database; with some the
nats-server is killed too; some recoveries are themselves killed once. Then a last process recovers
and compares (``recovery``)::

    python -m tests.crash.campaign --runs 500 --seed 7
    python -m tests.crash.campaign --runs 500 --seed 7 --store postgres
    python -m tests.crash.campaign --seed 7 --only 123             that run again, alone
    python -m tests.crash.campaign --point settle.rows --runs 100  100 at one failpoint

A run is decided by ``--seed`` and its number; how threads and processes interleave is not.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_RUN_S = 60.0
# How often a plan passes a failpoint at most, by its family: the n of name:n is drawn below it.
PASSINGS = {"handle": 20, "append": 25, "project": 6, "publish": 5, "ledger": 12, "admit": 6,
            "settle": 6, "reap": 2, "seal": 3}  # fmt: skip
ONLY_SQLITE = {"append.events", "append.keys"}


@dataclass(frozen=True)
class Run:
    """What one run does; everything follows from ``seed`` and ``number``."""

    seed: int
    number: int
    fail_at: str
    bystander: bool
    kill_bus: bool
    fail_recovery_at: str
    kill_after_s: float

    @property
    def point(self) -> str:
        return self.fail_at.partition(":")[0] or "any moment"

    @property
    def plan_seed(self) -> int:
        return self.seed * 1_000_000 + self.number * 10


def draw(seed: int, number: int, points: list[str]) -> Run:
    """Failpoints in turn, so that each has its share; the rest by chance."""
    choose = random.Random(f"{seed}/{number}")
    point = points[number % len(points)]
    anywhere = choose.random() < 0.1
    return Run(
        seed,
        number,
        "" if anywhere else _at(choose, point),
        bystander=point == "append.head" or choose.random() < 0.3,
        kill_bus=choose.random() < 0.15,
        fail_recovery_at=_at(choose, choose.choice(points)) if choose.random() < 0.25 else "",
        kill_after_s=choose.uniform(0.0, 0.25),
    )


def _at(choose: random.Random, point: str) -> str:
    return f"{point}:{choose.randint(1, PASSINGS.get(point.partition('.')[0], 1))}"


@dataclass
class Tally:
    """``num_killed`` counts those that came to their failpoint, by its name."""

    num_runs: int = 0
    num_killed: Counter[str] = field(default_factory=Counter)
    num_finished: Counter[str] = field(default_factory=Counter)
    num_recoveries_killed: int = 0
    num_buses_killed: int = 0
    num_bystanders: int = 0
    num_acknowledged: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Campaign:
    """Runs on one store and one bus, one after the other."""

    def __init__(self, folder: Path, stores: "Stores", server: Any) -> None:
        self.folder, self.stores, self.server = folder, stores, server
        self.tally = Tally()

    def play(self, run: Run) -> list[str]:
        """One run; the violations found."""
        from tests.crash.places import Place

        where = self.folder / str(run.number)
        where.mkdir()
        with self.stores.fresh(where) as database:
            place = Place(
                database,
                where / "journal",
                self.server.url,
                self.server.control_creds,
                time.time(),
                f"s{run.seed}r{run.number}",
            )
            self._kill_one(run, place)
            found = self._recover(run, place)
        self._count(place)
        return found

    # --- the victim -----------------------------------------------------------------------------
    def _kill_one(self, run: Run, place: Any) -> None:
        from tests.crash.places import fork, wait

        bystander = fork(lambda: work(place, run, beside=True)) if run.bystander else None
        log = place.journal.with_name("victim.log")
        victim = fork(lambda: work(place, run, beside=False), log)
        if not run.fail_at:
            time.sleep(run.kill_after_s)
            os.kill(victim, signal.SIGKILL)
        status = wait(victim, LONGEST_RUN_S)
        if status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"run {run.number}: the victim ended with {status}\n{_text(log)}")
        (self.tally.num_killed if status else self.tally.num_finished)[run.point] += 1
        if run.kill_bus:
            self.server.stop(kill=True)
            self.server.start()
            self.tally.num_buses_killed += 1
        if bystander is not None:
            self.tally.num_bystanders += 1
            if status := wait(bystander, LONGEST_RUN_S):
                raise RuntimeError(f"run {run.number}: the bystander ended with {status}")

    # --- afterwards -----------------------------------------------------------------------------
    def _recover(self, run: Run, place: Any) -> list[str]:
        if run.fail_recovery_at:
            status = self._recover_once(run, place, run.fail_recovery_at)
            self.tally.num_recoveries_killed += status != 0
        status = self._recover_once(run, place, "")
        if status:
            log = place.journal.with_name("recovery.log")
            return [f"recovery ended with {status}: {_text(log)}"]
        found: list[str] = json.loads(place.journal.with_name("found").read_text())
        return found

    def _recover_once(self, run: Run, place: Any, fail_at: str) -> int:
        from tests.crash.places import fork, wait

        log = place.journal.with_name("recovery.log")
        log.unlink(missing_ok=True)
        return wait(fork(lambda: recover(place, run, fail_at), log), LONGEST_RUN_S)

    def _count(self, place: Any) -> None:
        from tests.crash.places import read_journal

        what = Counter(line["what"] for line in read_journal(place.journal))
        self.tally.num_acknowledged += what


# --- in forked processes ----------------------------------------------------------------------
def work(place: Any, run: Run, beside: bool) -> None:
    from controlplane.application import failpoints
    from tests.crash.places import point_django_at
    from tests.crash.workload import Worker

    point_django_at(place.database)
    failpoints.arm("" if beside else run.fail_at)
    asyncio.run(Worker(place, plans(place, run)[beside]).run())


def recover(place: Any, run: Run, fail_at: str) -> None:
    from controlplane.application import failpoints
    from tests.crash.places import point_django_at
    from tests.crash.recovery import Recovery

    point_django_at(place.database)
    failpoints.arm(fail_at)
    sent = [order for plan in plans(place, run) for order in plan.orders]
    found = Recovery(place, sent).check()
    place.journal.with_name("found").write_text(json.dumps(found))


def plans(place: Any, run: Run) -> tuple[Any, Any]:
    """The victim's, and that of the process beside it, which leaves the fleet alone."""
    from tests.crash.workload import Plan

    favour = run.point.partition(".")[0]
    return (
        Plan(run.plan_seed, place.at, favour),
        Plan(run.plan_seed + 1, place.at, with_bus=False),
    )


# --- stores -----------------------------------------------------------------------------------
class Stores:
    """Gives each run a migrated, empty database."""

    def __init__(self, kind: str, folder: Path, closing: ExitStack) -> None:
        from tests.crash import places

        self.kind = kind
        if kind == "sqlite":
            self.template = closing.enter_context(places.migrated_sqlite(folder))
        else:
            self.template_name = closing.enter_context(postgres_template())

    @contextmanager
    def fresh(self, folder: Path) -> Iterator[dict[str, Any]]:
        from tests.crash import places

        if self.kind == "sqlite":
            yield places.copied_sqlite(self.template, folder / "engine.sqlite3")
            return
        name = f"{self.template_name}_{folder.name}"
        postgres_execute(f"CREATE DATABASE {name} TEMPLATE {self.template_name}")
        try:
            yield places.postgres(name)
        finally:
            postgres_execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def postgres_template() -> Iterator[str]:
    from tests.crash import places

    name = f"engine_crash_{os.getpid()}"
    postgres_execute(f"CREATE DATABASE {name}")
    try:
        places.migrate(places.postgres(name))
        yield name
    finally:
        postgres_execute(f"DROP DATABASE {name} WITH (FORCE)")


def postgres_execute(statement: str) -> None:
    import psycopg

    server = "host=127.0.0.1 port=5432 user=postgres dbname=postgres"
    with psycopg.connect(server, autocommit=True, connect_timeout=3) as connection:
        connection.execute(statement)


# --- the command ------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.campaign")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--only", type=int, help="the number of one run to repeat")
    parser.add_argument("--point", help="run only this failpoint")
    parser.add_argument("--keep", type=Path, help="a folder that keeps what the runs left")
    asked = parser.parse_args(arguments)
    with ExitStack() as closing:
        folder = asked.keep or Path(closing.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        set_up(folder)
        return _play(asked, folder, closing)


def set_up(folder: Path) -> None:
    """Import once what every forked process needs."""
    os.environ["ENGINE_DATA_DIR"] = str(folder)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    import django

    django.setup()
    import tests.crash.recovery  # noqa: F401  # everything else comes with it


def elsewhere(point: str) -> bool:
    """What lets go of old records has a campaign of its own, ``test_retention``."""
    return point.partition(".")[0] in ("retain", "erase")


def _play(asked: argparse.Namespace, folder: Path, closing: ExitStack) -> int:
    from controlplane.application.failpoints import FAILPOINTS
    from tests.natsserver import nats_server

    server = closing.enter_context(nats_server(folder))
    campaign = Campaign(folder, Stores(asked.store, folder, closing), server)
    skipped = ONLY_SQLITE if asked.store == "postgres" else set()
    points = [
        point
        for point in FAILPOINTS
        if point not in skipped and asked.point in (None, point) and not elsewhere(point)
    ]
    numbers = [asked.only] if asked.only is not None else range(asked.runs)
    began = time.monotonic()
    for number in numbers:
        run = draw(asked.seed, number, points)
        found = campaign.play(run)
        campaign.tally.num_runs += 1
        campaign.tally.violations += [f"run {number} ({run}): {one}" for one in found]
        for one in found:
            print(f"run {number}, {run}\n  VIOLATION {one}", flush=True)
    report(asked, campaign.tally, points, time.monotonic() - began)
    return 1 if campaign.tally.violations else 0


def report(asked: Any, tally: Tally, points: list[str], seconds: float) -> None:
    for point in [*points, "any moment"]:
        killed, finished = tally.num_killed[point], tally.num_finished[point]
        print(f"{point:26} {killed:5} killed {finished:5} ended before")
    acknowledged = tally.num_acknowledged
    print(
        f"{tally.num_runs} runs on {asked.store}, seed {asked.seed}, {seconds:.0f} s:"
        f" {tally.num_killed.total()} victims, {tally.num_recoveries_killed} recoveries and"
        f" {tally.num_buses_killed} nats-servers killed, {tally.num_bystanders} bystanders;"
        f" acknowledged {acknowledged['done']} commands, {acknowledged['admitted']} admissions,"
        f" {acknowledged['ended']} settlements, {acknowledged['told']} deliveries,"
        f" {acknowledged['sealed']} sealings"
    )
    print(f"violations: {len(tally.violations)}")


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()[-4000:]
    return ""


if __name__ == "__main__":
    sys.exit(main())
