"""A store with a million events and a million requests, and what it still does in a second.

``python -m tests.benchmarks.scale --events 1000000 --requests 1000000 [--keep DIR] [--json FILE]``

Fills an empty database in bulk by the product's own code (``sequence`` gives positions, versions
and hashes; ``admit_all`` and ``settle_all`` write the ledger), then measures, each against its
target: events/s into the read model, ``?as_of=`` at random positions and times, the lists of
events and requests with and without filters, usage, and the memory of an export. p95 of
``--repeats`` requests through Django's handler, in this process. With ``--keep`` the filled folder
is used again the next time. ``--postgres`` uses a scratch database on 127.0.0.1:5432.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
PARSER.add_argument("--events", type=int, default=1_000_000)
PARSER.add_argument("--requests", type=int, default=1_000_000)
PARSER.add_argument("--repeats", type=int, default=40)
PARSER.add_argument("--keep", type=Path, help="Fill this folder, or measure what is in it.")
PARSER.add_argument("--only", action="append", help="fill, project, rebuild, as_of, lists, export")
PARSER.add_argument("--postgres", action="store_true")
PARSER.add_argument("--json", type=Path)
OPTIONS = PARSER.parse_args()

DATA_DIR = OPTIONS.keep or Path(tempfile.mkdtemp(prefix="bench-scale-"))
os.environ.update(
    ENGINE_DATA_DIR=str(DATA_DIR), DJANGO_SETTINGS_MODULE="controlplane.config.settings"
)

import django  # noqa: E402

django.setup()

from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection, connections  # noqa: E402
from django.test import Client  # noqa: E402

from controlplane import bootstrap  # noqa: E402
from controlplane.adapters.access import users  # noqa: E402
from controlplane.adapters.eventstore.connect import open_session  # noqa: E402
from controlplane.adapters.ledger.batch import admit_all, settle_all  # noqa: E402
from controlplane.adapters.ledger.statements import statements  # noqa: E402
from controlplane.adapters.readmodel.rebuild import CODECS  # noqa: E402
from controlplane.application.ports import Append  # noqa: E402
from controlplane.application.sequencer import Batch, prepare, sequence  # noqa: E402
from tests.benchmarks.long_history import World, requests  # noqa: E402
from tests.contracts.stores import postgres_settings, scratch_postgres  # noqa: E402

T = TypeVar("T")
GROUP, COMMIT, LEDGER_BATCH = 50, 10_000, 5_000
MONTH = "since=2025-10-09T00:00:00Z&until=2025-11-09T00:00:00Z"  # of ``long_history``
FIGURES: dict[str, float] = {}


def say(name: str, figure: float, unit: str, target: str = "") -> None:
    FIGURES[name] = figure
    print(f"{name:44} {figure:12,.3f} {unit:9} {target}", flush=True)


def chunks(things: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(things)
    while chunk := list(islice(source, size)):
        yield chunk


# --- filling ----------------------------------------------------------------------------------
def fill_events(number: int) -> None:
    """In transactions of ten thousand; every fifty events share a time, as in a group commit."""
    session, versions = open_session("default"), {}
    for written in chunks(World().events(number), COMMIT):
        before = session.lock_head(None)
        batch = Batch(before)
        for group in chunks(written, GROUP):
            appends = [
                prepare(Append(stream, None, [event], meta)) for stream, event, meta in group
            ]
            known = {stream: versions.get(stream, 0) for stream, _, _ in group}
            now = max(event.at for _, event, _ in group)  # type: ignore[attr-defined]
            placed = sequence(appends, batch.head, known, {}, now)
            batch.head = placed.head
            batch.rows += placed.rows
            versions.update(placed.versions)
        assert session.write(batch, before, 0.0)
    session.close()


def fill_requests(number: int) -> None:
    sql = statements(connection.vendor)
    connection.ensure_connection()
    cursor = connection.connection.cursor()
    for batch in chunks(requests(number), LEDGER_BATCH):
        cursor.execute(sql.begin)
        admit_all(cursor, sql, [intent for intent, _ in batch])
        settle_all(cursor, sql, [terminal for _, terminal in batch])
        cursor.execute("COMMIT")


def fill() -> None:
    call_command("migrate", verbosity=0)
    for name, fill_one, number in (
        ("fill_events", fill_events, OPTIONS.events),
        ("fill_requests", fill_requests, OPTIONS.requests),
    ):
        started = time.perf_counter()
        fill_one(number)
        say(f"{name}_per_s", number / (time.perf_counter() - started), "/s")
    started = time.perf_counter()
    head = bootstrap.event_store().verify()
    say("verify_per_s", head.position / (time.perf_counter() - started), "/s", "the chain is valid")


# --- the read model ---------------------------------------------------------------------------
def project() -> None:
    """From the beginning, as a new installation of the read model would. Beside the rate by the
    clock, that by the processor's time, which others on the machine hardly change."""
    drop_read_model()
    started, busy = time.perf_counter(), time.process_time()
    position = bootstrap.projector().catch_up_all()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    say("into_read_model_per_s", position / seconds, "/s", ">= 20,000")
    say("into_read_model_per_cpu_s", position / busy, "/s")
    say("into_read_model_rss", peak_mib(), "MiB")


def drop_read_model() -> None:
    with connection.cursor() as cursor:
        for codec in CODECS.values():
            cursor.execute(codec.delete_all)
        cursor.execute("DELETE FROM readmodel_checkpoint")
        cursor.execute("DELETE FROM readmodel_snapshot")


def rebuild() -> None:
    started, busy = time.perf_counter(), time.process_time()
    result = bootstrap.projector().rebuild()
    assert result.live == result.rebuilt, "the rebuilt state differs"
    say("rebuild_and_compare", time.perf_counter() - started, "s", "<= 60 for a million")
    say("rebuild_and_compare_cpu", time.process_time() - busy, "s")
    say("rebuild_rss", peak_mib(), "MiB")


def peak_mib() -> float:
    """Of this program; ``ru_maxrss`` would count what its parent had when it forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


# --- reading ----------------------------------------------------------------------------------
def client() -> Callable[[str], Any]:
    """Logged in as an administrator; a failed request ends the benchmark."""
    if not users.User.objects.filter(username="bench").exists():
        users.save_user("bench", "correct horse battery staple", "admin", "")
    browser = Client()
    browser.force_login(users.User.objects.get(username="bench"))

    def get(path: str) -> Any:
        answer = browser.get(f"/api/v1/{path}")
        assert answer.status_code == 200, (path, answer.content)
        return answer

    return get


def timed(name: str, paths: Callable[[], str], target: float = 1.0) -> None:
    """p50 and p95 (nearest rank) of requests for what ``paths`` gives, and the worst."""
    get, seconds = client(), []
    for _ in range(OPTIONS.repeats):
        path = paths()
        started = time.perf_counter()
        get(path)
        seconds.append(time.perf_counter() - started)
    seconds.sort()
    rank = max(0, -(-95 * len(seconds) // 100) - 1)
    print(f"  {name}: p50 {statistics.median(seconds):.3f} s, worst {seconds[-1]:.3f} s")
    say(f"{name}_p95", seconds[rank], "s", f"<= {target:g}")


def as_of() -> None:
    choose = random.Random(2)
    get = client()
    head = get("status/").json()["head"]
    started = time.perf_counter()
    get(f"nodes/?as_of={head - 1}")
    say("as_of_first", time.perf_counter() - started, "s")
    for resource_path in ("nodes/", "models/", "tenants/"):
        timed(
            f"as_of_position_{resource_path[:-1]}",
            lambda path=resource_path: f"{path}?as_of={choose.randrange(1, head)}",  # type: ignore[misc]
        )
    first, last = (
        get(f"events/?after={at}&limit=1").json()["results"][0]["recorded_at"]
        for at in (0, head - 1)
    )

    def at_random_time() -> str:
        moment = choose.uniform(first, last)
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
        return f"routes/?as_of={text}"

    timed("as_of_time_routes", at_random_time)


def lists() -> None:
    choose = random.Random(3)
    head = bootstrap.event_store().head().position
    last = client()("requests/?limit=1").json()["results"][0]["id"]
    paths: dict[str, Callable[[], str]] = {
        "events_newest": lambda: "events/?order=desc",
        "events_page": lambda: f"events/?after={choose.randrange(head)}",
        "events_of_stream": lambda: (
            f"events/?order=desc&stream=node-node-{choose.randrange(12):02d}"
        ),
        "events_of_placement": lambda: f"events/?stream=placement&after={choose.randrange(head)}",
        "events_of_rare_type": lambda: "events/?order=desc&type=NodeJoined",
        "events_of_unknown_actor": lambda: "events/?order=desc&actor=user:nobody",
        "decisions_newest": lambda: "decisions/?limit=50",
        "decisions_of_version": lambda: (
            f"decisions/?limit=50&version_id=model-{choose.randrange(200):03d}@v1"
        ),
        "requests_newest": lambda: "requests/",
        "requests_page": lambda: f"requests/?after={choose.randrange(1, last)}",
        "requests_of_tenant": lambda: f"requests/?tenant=tenant-{choose.randrange(100):02d}",
        "requests_of_model": lambda: f"requests/?model=model-{choose.randrange(200):03d}",
        "requests_of_unknown_model": lambda: "requests/?model=nothing",
        "requests_timeout": lambda: "requests/?outcome=timeout",
        "requests_running": lambda: "requests/?outcome=running",
        "usage_by_tenant_and_day": lambda: f"usage/?group_by=tenant,day&{MONTH}",
        "usage_by_model": lambda: f"usage/?group_by=model&{MONTH}",
        "usage_of_tenant_by_hour": lambda: (
            f"usage/?group_by=hour&tenant=tenant-{choose.randrange(100):02d}&{MONTH}"
        ),
        "nodes": lambda: "nodes/",
        "models": lambda: "models/",
    }
    for name, path in paths.items():
        timed(name, path)


# --- export -----------------------------------------------------------------------------------
def export() -> None:
    """The peak memory of ``manage.py export_audit`` for a tenth and for all: it must not grow."""
    head = bootstrap.event_store().head().position
    for what in ("events", "requests"):
        last = head if what == "events" else OPTIONS.requests
        small, large = (_export(what, upto) for upto in (max(1, last // 10), last))
        say(f"export_{what}_rss_small", small[0], "MiB")
        say(f"export_{what}_rss_all", large[0], "MiB")
        say(f"export_{what}_rss_growth", large[0] - small[0], "MiB", "constant: <= 20")
        say(f"export_{what}_per_s", last / large[1], "/s")


def _export(what: str, upto: int) -> tuple[float, float]:
    """(peak MiB, seconds) of one export in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _MEASURED, "export_audit", "--what", what,
                   "--upto", str(upto), "--out", folder]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, seconds = done.stdout.splitlines()[-1].split()
    return float(peak), float(seconds)


_MEASURED = """
import sys, time
import django
from django.core.management import call_command
django.setup()
started = time.perf_counter()
call_command(*sys.argv[1:])
seconds = time.perf_counter() - started
peak = next(one for one in open("/proc/self/status") if one.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024, seconds)
"""


@contextmanager
def database() -> Iterator[None]:
    if not OPTIONS.postgres:
        yield
        return
    name = f"time_scale_{os.getpid()}"
    with ExitStack() as stack:
        stack.enter_context(scratch_postgres(name))
        configured = {**connections["default"].settings_dict, **postgres_settings(name)}
        connections["default"].close()
        connections.settings["default"] = configured
        del connections["default"]
        yield
        bootstrap.event_store().close()
        connections["default"].close()


def main() -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    parts = {"project": project, "rebuild": rebuild, "as_of": as_of, "lists": lists,
             "export": export}  # fmt: skip
    filled = OPTIONS.keep and (DATA_DIR / "engine.sqlite3").exists() and not OPTIONS.postgres
    with database():
        if not filled:
            fill()
        else:
            call_command("migrate", verbosity=0)
        for name, part in parts.items():
            if not OPTIONS.only or name in OPTIONS.only:
                part()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    kind = "PostgreSQL" if OPTIONS.postgres else "SQLite"
    print(f"on {kind}, {machine}; {OPTIONS.events:,} events, {OPTIONS.requests:,} requests")
    if OPTIONS.json:
        result = {"name": "scale", "machine": machine, "ratios": {}, "figures": FIGURES}
        OPTIONS.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    try:
        main()
    finally:
        if not OPTIONS.keep:
            shutil.rmtree(DATA_DIR, ignore_errors=True)
