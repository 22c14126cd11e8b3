"""A failed fsync (EIO, injected) ends the process, and no acknowledged row is lost."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.adapters.failed_sync import EXIT_STATUS
from tests.absent import skip_without

ROOT = Path(__file__).parents[2]
SYNCS_BEFORE = 12

EVENTS = """
import django, time
django.setup()
from controlplane import bootstrap
from controlplane.application.ports import StoreUnavailable
from tests.contracts.stores import append, created
store = bootstrap.event_store()
for number in range(100):
    try:
        print("acked", store.append(append("tenant-acme", None, created())).position, flush=True)
    except StoreUnavailable as error:
        print("refused", error.code, flush=True)
time.sleep(20)
"""
ORM = """
import django, time
django.setup()
from django.db import Error, connection
from controlplane.adapters.failed_sync import has_failed, leave_if_failed
from controlplane.adapters.ledger.models import SealingKey
for number in range(100):
    try:
        if has_failed():
            raise Error("ending")
        SealingKey.objects.create(line=str(number), at=1.0)
        print("acked", number + 1, flush=True)
    except Error as error:
        leave_if_failed(error)
        print("refused", type(error).__name__, flush=True)
time.sleep(20)
"""
LEDGER = """
import asyncio, django
django.setup()
from controlplane import bootstrap
from controlplane.application.ports import AuditUnavailable
from tests.contracts.test_ledger import an_intent
async def main():
    ledger = bootstrap.ledger()
    for number in range(100):
        try:
            await ledger.admit(an_intent())
            print("acked", number + 1, flush=True)
        except AuditUnavailable as error:
            print("refused", type(error).__name__, flush=True)
    await asyncio.sleep(20)
asyncio.run(main())
"""


@pytest.fixture
def strace() -> str:
    found = shutil.which("strace")
    if found is None:
        skip_without("strace: apt-get install strace")
    return found


@pytest.mark.parametrize(
    ("program", "table"),
    [(EVENTS, "eventstore_event"), (LEDGER, "ledger_request"), (ORM, "ledger_sealing_key")],
)
def test_a_failed_sync_ends_the_process(
    strace: str, database: Path, tmp_path: Path, program: str, table: str
) -> None:
    """The caller is refused, every later one too, without another sync of any file; the process
    exits with 74; and a new process finds all that was acknowledged."""
    trace = tmp_path / "trace"
    fault = f"inject=fsync,fdatasync:error=EIO:when={SYNCS_BEFORE}"
    ran = subprocess.run(
        [strace, "-f", "-o", str(trace), "-e", "trace=fsync,fdatasync",
         "-e", fault, sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "ENGINE_DATA_DIR": str(database.parent), "ENGINE_DATABASE_URL": "",
             "DJANGO_SETTINGS_MODULE": "controlplane.config.settings", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == EXIT_STATUS, ran.stdout + ran.stderr
    said = ran.stdout.split("\n")
    acked = [line for line in said if line.startswith("acked")]
    refused = [line for line in said if line.startswith("refused")]
    assert acked and refused and "failed to sync" in ran.stderr
    assert said.index(refused[0]) == len(acked), "nothing is acknowledged after the failure"
    syncs = re.findall(r"f(?:data)?sync\(\d+\) += (.+)", trace.read_text())
    assert "EIO" in syncs[-1] and sum("EIO" in one for one in syncs) == 1, "no sync after it"
    assert _count(database, table) >= len(acked)


def _count(database: Path, table: str) -> int:
    import sqlite3

    db = sqlite3.connect(database)
    try:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        db.close()
