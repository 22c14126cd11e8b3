"""Exports from SQLite and from PostgreSQL: whole, resumable, the same bytes, checked offline."""

import csv
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.export.destinations import Bucket, Endpoint, Folder, destination_of
from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.application.export_job import ExportJob, FileExport
from controlplane.application.export_scan import Source
from controlplane.application.exports import MANIFEST, Destination, ExportError, Filters
from controlplane.application.notes import NoteError, Signer
from controlplane.application.ports import IntegrityError
from controlplane.application.seal import EventRecords, Sealer
from controlplane.verify import main, verify_export
from tests.contracts.stores import Stores
from tests.contracts.test_event_store_damage import UNGUARD
from tests.proof.filling import AT, fill_events, fill_ledger

SIGNER = Signer("test", bytes(range(32)))
COUNT = {"events": 230, "requests": 170}


class Place:
    """A filled and sealed store, and exports from it in parts of 50."""

    def __init__(self, durable: Stores, folder: Path) -> None:
        self.durable, self.folder, clock = durable, folder, ManualClock()
        self.store = durable.open()
        fill_events(self.store, COUNT["events"])
        fill_ledger(COUNT["requests"])
        self.seals = DjangoSealStore()
        logs = [EventRecords(self.store), RequestRecords()]
        self.sealer = Sealer("test", self.seals, [SIGNER], clock, CheckpointFiles(folder / "c"))
        self.sealer.step(logs, now=True)
        self.logs = logs
        self.sources = {one.log: Source("test", one, self.seals, SIGNER, clock) for one in logs}

    def job(
        self,
        log: str,
        form: str,
        to: Destination | Path,
        filters: Filters = Filters(),  # noqa: B008
        safe: bool = True,
    ) -> ExportJob:
        place = Folder(to) if isinstance(to, Path) else to
        return ExportJob(self.sources[log], format_of(form, log, safe), filters, place, 50, safe)


@pytest.fixture
def place(durable: Stores, tmp_path: Path) -> Place:
    return Place(durable, tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("log", COUNT)
def test_an_export_holds_everything_and_verifies_with_the_key_alone(
    place: Place, log: str, form: str
) -> None:
    """Every row, in order; the log's own checkpoints are recomputed from them."""
    folder = place.folder / "out"
    parts = list(place.job(log, form, folder).run())
    assert [part.rows for part in parts[:-1]] == [50] * (len(parts) - 1)
    verified = verify_export(folder, [SIGNER.public])
    manifest = verified.manifest
    assert manifest.complete and manifest.rows == COUNT[log] == verified.sealed
    assert (manifest.first_position, manifest.last_position) == (1, COUNT[log])
    last = place.seals.last(log)
    assert last is not None and manifest.root == last.checkpoint.root.hex()


def test_formats_hold_the_same_values(place: Place) -> None:
    """JSON lines, CSV without its guards and Parquet agree cell by cell."""
    for form in ("jsonl", "csv", "parquet"):
        list(place.job("requests", form, place.folder / form, safe=False).run())
    lines = [
        json.loads(line)
        for path in sorted((place.folder / "jsonl").glob("part-*"))
        for line in path.read_text().split("\n")[:-1]
    ]
    rows: list[dict[str, str]] = []
    for path in sorted((place.folder / "csv").glob("part-*")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    table: list[dict[str, Any]] = []
    for path in sorted((place.folder / "parquet").glob("part-*")):
        table += pq.read_table(path).to_pylist()
    assert table == [{name: line[name] for name in table[0]} for line in lines]
    for line, row in zip(lines, rows, strict=True):
        assert {name: "" if v is None else str(v) for name, v in line.items()} == row


def test_a_spreadsheet_runs_nothing_of_a_csv_and_a_reader_gets_it_back(place: Place) -> None:
    folder = place.folder / "out"
    list(place.job("events", "csv", folder).run())
    with (folder / "part-00001.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r"))]
    verify_export(folder, [SIGNER.public])


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_that_was_killed_goes_on_and_makes_the_same_bytes(
    place: Place, form: str
) -> None:
    """Killed after each part in turn, and once with a part written that no manifest names."""
    whole, pieces = place.folder / "whole", place.folder / "pieces"
    list(place.job("events", form, whole).run())
    while True:
        try:
            next(place.job("events", form, pieces).run())
        except StopIteration:
            break
        (pieces / f"part-09999.{form}").unlink(missing_ok=True)
    assert contents(pieces) == contents(whole)


def test_the_same_command_again_takes_what_came_since(place: Place) -> None:
    folder = place.folder / "out"
    list(place.job("events", "jsonl", folder).run())
    before = contents(folder)
    assert list(place.job("events", "jsonl", folder).run()) == [] and contents(folder) == before
    fill_events(place.store, 20, seed=9)
    place.sealer.step(place.logs, now=True)
    assert [part.rows for part in place.job("events", "jsonl", folder).run()] == [20]
    assert verify_export(folder, [SIGNER.public]).manifest.rows == COUNT["events"] + 20


def test_what_is_not_sealed_yet_costs_no_question_for_each_row(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail behind the last checkpoint: one look for all that was read at once."""
    fill_ledger(500, first=COUNT["requests"] + 1, seed=2)
    looked: list[int] = []
    checkpoints = DjangoSealStore.checkpoints

    def counted(self: DjangoSealStore, log: str, after: int, limit: int) -> Any:
        looked.append(after)
        return checkpoints(self, log, after, limit)

    monkeypatch.setattr(DjangoSealStore, "checkpoints", counted)
    everything = COUNT["requests"] + 500
    form = format_of("jsonl", "requests")
    made = FileExport(place.sources["requests"], form, Filters(), everything)
    rows = b"".join(made.chunks()).splitlines()
    assert len(rows) == everything and len(looked) < 10


@pytest.mark.parametrize("log", COUNT)
def test_filters_leave_out_the_rest(place: Place, log: str) -> None:
    """By tenant, type, time and position; each such export verifies, and says what it took."""
    middle = AT + 100
    kind = "TenantCreated" if log == "events" else "chat"
    cases = {
        "tenant": Filters(tenant="t3"),
        "type": Filters(types=(kind,)),
        "time": Filters(since=middle, until=middle + 50),
        "after": Filters(after=100),
        "nothing": Filters(types=("none",)),
    }
    for name, filters in cases.items():
        folder = place.folder / name
        list(place.job(log, "jsonl", folder, filters).run())
        verified = verify_export(folder, [SIGNER.public])
        rows = [
            json.loads(line)
            for path in sorted(folder.glob("part-*"))
            for line in path.read_text().split("\n")[:-1]
        ]
        assert verified.manifest.rows == len(rows)
        if name == "tenant":
            owner = {row.get("tenant_id") or row["stream"] for row in rows}
            assert owner <= {"t3", "tenant-t3"} and rows
        if name == "type" and log == "events":
            assert {row["type"] for row in rows} == {kind}
        if name == "time" and log == "requests":
            assert rows and all(middle <= row["ended_at"] < middle + 50 for row in rows)
        if name == "after":
            assert [row["position"] for row in rows] == list(range(101, COUNT[log] + 1))
            assert verified.sealed == COUNT[log]
        assert (name == "nothing") == (not rows) or name == "time"


def test_a_place_with_another_export_is_left_alone(place: Place) -> None:
    folder = place.folder / "out"
    list(place.job("events", "jsonl", folder).run())
    for other in (
        lambda: place.job("requests", "jsonl", folder),
        lambda: place.job("events", "csv", folder),
        lambda: place.job("events", "jsonl", folder, Filters(tenant="t1")),
    ):
        with pytest.raises(ExportError, match="Another export"):
            other()
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(ExportError, match="cannot be continued"):
        place.job("events", "jsonl", folder)


@pytest.mark.parametrize("filters", [Filters(), Filters(tenant="t3")])
def test_a_damaged_record_is_not_exported_with_a_good_signature(
    place: Place, filters: Filters
) -> None:
    for statement in UNGUARD[place.durable.name]:
        place.durable.execute(statement, ())  # type: ignore[misc]
    place.durable.execute(  # type: ignore[misc]
        "UPDATE eventstore_event SET actor = 'user:eve' WHERE position ="
        " (SELECT max(position) FROM eventstore_event WHERE stream = 'tenant-t3')",
        (),
    )
    with pytest.raises(IntegrityError):
        list(place.job("events", "jsonl", place.folder / "out", filters).run())


def test_an_export_goes_to_a_bucket(place: Place) -> None:
    """The object store's own memory: the same files under the prefix, and it resumes there."""
    store, folder = MemoryStore(), place.folder / "out"
    next(place.job("events", "parquet", Bucket(store, "audit/2026")).run())
    list(place.job("events", "parquet", Bucket(store, "audit/2026")).run())
    folder.mkdir()
    for batch in store.list():
        for one in batch:
            name = one["path"].removeprefix("audit/2026/")
            (folder / name).write_bytes(bytes(store.get(one["path"]).bytes()))
    assert verify_export(folder, [SIGNER.public]).manifest.rows == COUNT["events"]


class Ingest:
    """Somebody's endpoint: takes POSTs, fails when told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, bytes]] = []
        self.failures: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.failures.pop(0) if outer.failures else 204
                if status < 300:
                    name, key = self.headers["X-Export-Name"], self.headers["Idempotency-Key"]
                    outer.taken.append((name, key, body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/ingest"


@pytest.fixture
def ingest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ingest]:
    monkeypatch.setattr("controlplane.adapters.export.destinations._PAUSE_S", 0.001)
    made = Ingest()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_an_export_is_pushed_at_least_once_and_in_order(place: Place, ingest: Ingest) -> None:
    """Failures are tried again; a run that ended early goes on at the cursor, not at the start."""
    ingest.failures = [503, 500, 429]
    state = Folder(place.folder / "state")
    next(place.job("events", "ocsf", Endpoint(ingest.url, state)).run())
    list(place.job("events", "ocsf", Endpoint(ingest.url, state)).run())
    parts = [(name, key) for name, key, _ in ingest.taken if name.startswith("part-")]
    assert [name for name, _ in parts] == [f"part-0000{n}.ocsf" for n in range(1, 6)]
    assert len({key for _, key in parts}) == 5
    folder = place.folder / "out"
    folder.mkdir()
    for name, _, body in ingest.taken:
        (folder / name).write_bytes(body)
    assert verify_export(folder, [SIGNER.public]).manifest.complete


def test_an_endpoint_that_refuses_ends_the_export_and_the_cursor_stays(
    place: Place, ingest: Ingest
) -> None:
    state = Folder(place.folder / "state")
    ingest.failures = [403]
    with pytest.raises(ExportError, match="403"):
        list(place.job("events", "jsonl", Endpoint(ingest.url, state)).run())
    assert state.get(MANIFEST) is None
    ingest.failures = [503] * 6
    with pytest.raises(ExportError, match="6 tries"):
        list(place.job("events", "jsonl", Endpoint(ingest.url, state)).run())


def test_a_destination_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="ftp://"):
        destination_of("ftp://host/x")
    with pytest.raises(ExportError, match="--state"):
        destination_of("https://host/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be made"):
        destination_of(str(tmp_path / "file"))


def test_one_file_with_its_manifest_is_an_export_too(place: Place) -> None:
    """What the REST API gives: a file, and the manifest of exactly that file."""
    for number, form in enumerate(FORMATS):
        folder = place.folder / form
        folder.mkdir()
        made = FileExport(
            place.sources["requests"], format_of(form, "requests"), Filters(after=number * 10), 150
        )
        (folder / made.name).write_bytes(b"".join(made.chunks()))
        (folder / MANIFEST).write_bytes(made.manifest())
        verified = verify_export(folder, [SIGNER.public])
        assert verified.manifest.rows == 150 - number * 10


def test_the_verifier_says_what_it_found_and_with_which_status(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for intact, 1 for damaged or unfinished, 2 for a question that has no answer."""
    folder, key = place.folder / "out", SIGNER.public.line
    job = place.job("requests", "jsonl", folder)
    next(job.run())
    assert main([str(folder), "--key", key]) == 1
    assert "NOT COMPLETE" in capsys.readouterr().out
    assert main([str(folder), "--key", key, "--allow-partial"]) == 0
    list(job.run())
    assert main([str(folder), "--key", key]) == 0
    assert "records/s" in capsys.readouterr().out
    stranger = Signer.generate("test").public.line
    assert main([str(folder), "--key", stranger]) == 1
    assert main([str(folder), "--key", "nothing"]) == 2
    path = folder / "part-00002.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"id":', b'"id":1', 1))
    assert main([str(folder), "--key", key]) == 1
    said = capsys.readouterr().out
    assert "NOT INTACT: requests, position 51 (req-" in said and "leaf: row 51: changed" in said
    with pytest.raises(NoteError):
        Signer.parse("x")
