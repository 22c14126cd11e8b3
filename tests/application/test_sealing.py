"""The controller seals the log and the ledger by itself, and copies the checkpoints to the bus."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from nats.js.errors import NotFoundError

from controlplane import bootstrap
from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.natsbus.checkpoints import STREAM, CheckpointStream
from controlplane.application.notes import Signer, parse_note
from controlplane.application.proving import Damaged, NoteChain
from controlplane.application.seal import EventRecords, Sealed, Sealer
from controlplane.entrypoints.processes.sealing import Sealing
from controlplane.verify import verify_export
from tests.application import bus as ends
from tests.application.bus import until
from tests.application.test_controller import Plane
from tests.natsserver import NatsServer, nats  # noqa: F401
from tests.proof.filling import fill_events, fill_ledger

ROOT = Path(__file__).parents[2]
SIGNER = Signer("test", bytes(32))


async def test_a_leading_controller_seals_and_publishes(
    nats: NatsServer,  # noqa: F811
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events and ended requests are under a checkpoint within a round, in the store, in the file
    and on the bus; a bus that lost its store is filled again; and nobody deletes from the stream.
    """
    plane, seals = Plane(nats), DjangoSealStore()
    plane.store = store = DjangoEventStore(SystemClock())
    await asyncio.to_thread(fill_events, store, 1500)
    await asyncio.to_thread(fill_ledger, 20)
    files = CheckpointFiles(database.parent / "checkpoints")
    sealer = Sealer("test", seals, [SIGNER], plane.clock, files)
    sealing = Sealing(sealer, seals, [EventRecords(store), RequestRecords()])
    async with ends.control(nats) as bus, plane.running(sealing=sealing) as controller:
        stream = CheckpointStream(bus)
        await until(lambda: len(sealing.last) == 2 and sealing._on_bus.get("requests") == 20)
        assert sealing.last["events"].size >= 1000
        note = await stream.last("events")
        assert note in files.notes("events") and Sealed.read(note).checkpoint.size >= 1000
        await bus.jetstream().delete_stream(STREAM)
        await controller._reconnected()
        async with asyncio.timeout(20):
            while await _last(stream) != files.notes("events")[-1]:
                await asyncio.sleep(0.05)
        assert not controller.problems()
        monkeypatch.setattr("django.conf.settings.NATS_URL", nats.url)
        monkeypatch.setattr("django.conf.settings.NATS_CREDS", nats.control_creds)
        on_bus = await bootstrap.checkpoints_on_bus()
        assert on_bus == {log: files.notes(log)[-1:] for log in ("events", "requests")}
    store.close()


async def _last(stream: CheckpointStream) -> str | None:
    try:
        return await stream.last("events")
    except NotFoundError:
        return None


def test_the_key_is_made_once_and_is_for_this_user_alone(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the data, mode 0600, and the same in the next process; or a file that is named."""
    made = bootstrap.signer().public
    path = database.parent / "sealing_key"
    assert path.stat().st_mode & 0o777 == 0o600
    bootstrap.signer.cache_clear()
    assert bootstrap.signer().public == made
    other = Signer.generate("engine")
    (database.parent / "other").write_text(f"{other.line}\n")
    monkeypatch.setattr("django.conf.settings.SEALING_KEY", database.parent / "other")
    bootstrap.signer.cache_clear()
    assert bootstrap.signer().public == other.public


def test_a_key_is_replaced_under_the_old_ones_eyes(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sign one checkpoint; afterwards the new key alone verifies everything, old seals
    included, and whoever knows only the old one is told who signs now."""
    store = bootstrap.event_store()
    fill_events(store, 5)
    call_command("seal", stdout=StringIO(), stderr=StringIO())
    old, path = bootstrap.signer().public, database.parent / "next"
    fill_events(store, 5, seed=2)
    said = StringIO()
    call_command("seal", "--new-key", str(path), stdout=said, stderr=StringIO())
    new = Signer.parse(path.read_text()).public
    assert said.getvalue().split() == sorted([old.line, new.line], key=said.getvalue().find)
    monkeypatch.setattr("django.conf.settings.SEALING_KEY", path)
    bootstrap.signer.cache_clear()
    fill_events(store, 5, seed=3)
    call_command("seal", stdout=StringIO(), stderr=StringIO())
    assert bootstrap.check_store().finding is None
    notes = bootstrap.checkpoint_files().notes("events")
    signers = [parse_note(note).signers([old, new]) for note in notes]
    assert signers == [[old], [old, new], [new]]
    chain = NoteChain("events", [old])
    for note in notes:
        chain.follow(note)
    with pytest.raises(Damaged, match="signed by engine"):
        chain.end()
    store.close()


def test_verify_says_what_holds_and_what_does_not(database: Path) -> None:
    """Both logs by name while they are intact; else the row, and the exit status of a failure."""
    store = bootstrap.event_store()
    fill_events(store, 20)
    fill_ledger(30)
    call_command("seal", stdout=StringIO(), stderr=StringIO())
    said = StringIO()
    call_command("verify", stdout=said)
    assert "events: intact up to position 20, 20 of them under 1 checkpoint" in said.getvalue()
    assert "requests: intact up to position 30" in said.getvalue()
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE ledger_request SET price = price + 1 WHERE position = 17")
    with pytest.raises(CommandError, match="requests, position 17: leaf: changed"):
        call_command("verify", stdout=StringIO())
    last = bootstrap.seal_store().last_verification()
    assert last is not None and not last["intact"] and last["finding"]["position"] == 17
    store.close()


def test_an_export_follows_the_log_until_it_is_stopped(database: Path, tmp_path: Path) -> None:
    """What is appended later comes in parts of its own; stopped at any time, it verifies."""
    store, out = bootstrap.event_store(), tmp_path / "out"
    fill_events(store, 10)
    environment = {
        **os.environ, "ENGINE_DATA_DIR": str(database.parent), "ENGINE_DATABASE_URL": "",
    }  # fmt: skip
    command = [sys.executable, "manage.py", "export_audit", "--out", str(out), "--follow"]
    running = subprocess.Popen(
        [*command, "--interval", "0.1"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's "&" ignores it
    )  # fmt: skip
    try:
        _exported(out, 10)
        fill_events(store, 7, seed=2)
        _exported(out, 17)
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
    assert verify_export(out, [bootstrap.signer().public]).manifest.complete
    store.close()


def _exported(out: Path, rows: int) -> None:
    """Wait until the manifest there has that many."""
    deadline, path = time.monotonic() + 40, out / "manifest.json"
    while not path.exists() or json.loads(path.read_text())["manifest"]["rows"] < rows:
        assert time.monotonic() < deadline
        time.sleep(0.05)
