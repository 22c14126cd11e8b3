"""Old requests leave the database only for a verified archive, and every proof still holds."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connections

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.export.destinations import Folder
from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import usage_findings
from controlplane.application.archive import Archived, archive, archive_mark
from controlplane.application.check import check_everything
from controlplane.application.export_job import ExportJob, signed_bytes
from controlplane.application.export_scan import Source
from controlplane.application.exports import MANIFEST, Filters, read_manifest
from controlplane.application.merkle import inclusion_proof, leaf_hash, proves_inclusion
from controlplane.application.notes import Signer
from controlplane.application.proving import Damaged
from controlplane.application.records import NEWEST, REQUESTS, record_bytes
from controlplane.application.seal import Sealer
from controlplane.application.tiles import nodes_in
from controlplane.verify import verify_export
from tests.contracts.stores import Stores
from tests.proof.filling import fill_ledger

SIGNER = Signer("test", bytes(range(32)))


class Ledger:
    """Five segments of 60 requests, sealed a day apart."""

    def __init__(self, durable: Stores, folder: Path) -> None:
        self.clock, self.folder, self.seals = ManualClock(), folder, DjangoSealStore()
        self.records, self.files = RequestRecords(), CheckpointFiles(folder / "c")
        sealer = Sealer("test", self.seals, [SIGNER], self.clock, self.files)
        self.began = self.clock.now()
        for part in range(5):
            fill_ledger(60, seed=part, first=part * 60 + 1)
            sealer.step([self.records], now=True)
            self.clock.advance(86_400)
        self.source = Source("test", self.records, self.seals, SIGNER, self.clock)

    def archive(self, days: float, verify: Any = None, place: Any = None) -> Archived | None:
        return archive(
            self.source,
            self.seals,
            format_of("jsonl", REQUESTS),
            place or (lambda name: Folder(self.folder / name)),
            verify or (lambda folder: verify_export(folder, [SIGNER.public])),
            self.began + days * 86_400,
        )

    def count(self) -> int:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM ledger_request")
            return int(cursor.fetchone()[0])

    def finding(self) -> object:
        copies = {"the copy": self.files.notes}
        keys = [SIGNER.public]
        return check_everything(
            [self.records], self.seals, keys, copies, also=[usage_findings]
        ).finding


@pytest.fixture
def ledger(durable: Stores, tmp_path: Path) -> Ledger:
    return Ledger(durable, tmp_path)


def test_old_segments_move_out_and_the_store_still_verifies(ledger: Ledger) -> None:
    """Whole segments, in order, as time goes by; checkpoints and roots hold across the gap."""
    assert ledger.archive(0) is None
    assert ledger.archive(1.5) == Archived("requests-from-1", 1, 120, 120)
    assert ledger.count() == 180 and ledger.finding() is None
    assert ledger.archive(1.5) is None
    assert ledger.archive(2.5) == Archived("requests-from-121", 121, 180, 60)
    assert ledger.count() == 120 and ledger.finding() is None
    verified = verify_export(ledger.folder / "requests-from-121", [SIGNER.public])
    assert (verified.manifest.first_position, verified.sealed) == (121, 180)


def test_an_archived_request_is_still_proved_to_have_been_there(ledger: Ledger) -> None:
    row = ledger.records.read(41, 42, 1, NEWEST[REQUESTS])[0]
    ledger.archive(1.5)
    last = ledger.seals.last(REQUESTS)
    assert last is not None and not ledger.records.read(41, 42, 1, NEWEST[REQUESTS])
    nodes = nodes_in(lambda *tile: ledger.seals.tile(REQUESTS, *tile))
    leaf = leaf_hash(record_bytes(NEWEST[REQUESTS], row))
    proof = inclusion_proof(nodes, 41, 300)
    assert proves_inclusion(leaf, 41, 300, proof, last.checkpoint.root)


def test_nothing_leaves_before_its_archive_was_read_back(ledger: Ledger) -> None:
    """A place that damages what it is given: the verification fails and no row is gone."""

    class Lossy(Folder):
        def put(self, name: str, content: bytes) -> None:
            super().put(name, content[:-1] if name.startswith("part") else content)

    with pytest.raises(Damaged):
        ledger.archive(1.5, place=lambda name: Lossy(ledger.folder / "lossy" / name))
    assert ledger.count() == 300 and ledger.finding() is None


def test_a_run_that_was_killed_is_repeated(ledger: Ledger) -> None:
    """After the export, or between two segments: the next run leaves the same state."""

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.archive(1.5, verify=killed)
    first = ledger.seals.oldest(REQUESTS)[0]
    assert ledger.count() == 300
    mark = archive_mark(first.checkpoint, "requests-from-1", SIGNER)
    ledger.seals.move_out(first, mark)
    assert ledger.finding() is None
    assert ledger.archive(1.5) == Archived("requests-from-61", 61, 120, 60)
    assert ledger.count() == 180 and ledger.finding() is None


def test_nobody_else_can_say_that_rows_are_archived(ledger: Ledger) -> None:
    """A mark without a signature, one of another segment, and a row left behind a good one."""
    first, second = ledger.seals.oldest(REQUESTS)[:2]
    stranger = Signer.generate("test")
    for mark in (
        "requests-from-1",
        archive_mark(first.checkpoint, "x", stranger),
        archive_mark(second.checkpoint, "x", SIGNER),
    ):
        with connections["default"].cursor() as cursor:
            cursor.execute("UPDATE ledger_checkpoint SET archive = %s WHERE first = 1", (mark,))
        finding: Any = ledger.finding()
        assert (finding.position, finding.check) == (1, "signature")
    with connections["default"].cursor() as cursor:
        mark = archive_mark(first.checkpoint, "x", SIGNER)
        cursor.execute("UPDATE ledger_checkpoint SET archive = %s WHERE first = 1", (mark,))
    assert "archived" in str(ledger.finding())


def test_a_row_taken_out_without_an_archive_is_found(ledger: Ledger) -> None:
    ledger.archive(1.5)
    with connections["default"].cursor() as cursor:
        cursor.execute("DELETE FROM ledger_request WHERE position = 130")
    finding: Any = ledger.finding()
    assert (finding.position, finding.check) == (130, "position")


def test_attempts_are_sealed_and_go_into_the_archive_with_their_requests(ledger: Ledger) -> None:
    """A changed attempt is a changed record; an archived one lies beside its request's part."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "UPDATE ledger_attempt SET node_id = 'n9' WHERE position = 100 AND attempt = 1"
        )
        finding: Any = ledger.finding()
        assert (finding.position, finding.check) == (100, "leaf")
        cursor.execute(
            "UPDATE ledger_attempt SET node_id = 'n1' WHERE position = 100 AND attempt = 1"
        )
        cursor.execute("SELECT count(*) FROM ledger_attempt WHERE position <= 120")
        (moving,) = cursor.fetchone()
        for position in (120, 121):
            cursor.execute(
                "INSERT INTO ledger_dispatch (request_id, position, data) VALUES ('r', %s, '{}')",
                (position,),
            )
    ledger.archive(1.5)
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM ledger_attempt WHERE position <= 120")
        assert cursor.fetchone() == (0,)
        cursor.execute("SELECT position FROM ledger_dispatch")
        assert cursor.fetchall() == [(121,)]
    assert ledger.finding() is None
    lines = (ledger.folder / "requests-from-1" / "attempts-00001.jsonl").read_bytes().splitlines()
    assert sum(len(json.loads(line)[1]) for line in lines) == moving > 120


def test_an_attempt_changed_in_an_archive_is_named_even_by_who_signs_it(ledger: Ledger) -> None:
    """Its hash stands in its request's row, and that row under the log's own checkpoint."""
    ledger.archive(1.5)
    folder = ledger.folder / "requests-from-1"
    path = folder / "attempts-00001.jsonl"
    changed = path.read_bytes().replace(b'"n1"', b'"n8"', 1)
    path.write_bytes(changed)
    with pytest.raises(Damaged, match="is changed"):
        verify_export(folder, [SIGNER.public])
    found = read_manifest((folder / MANIFEST).read_bytes(), [SIGNER.public])
    files = [
        msgspec.structs.replace(one, sha256=sha256(changed).hexdigest())
        if one.name == path.name
        else one
        for one in found.files
    ]
    forged = msgspec.structs.replace(found, files=tuple(files))
    (folder / MANIFEST).write_bytes(signed_bytes(forged, SIGNER))
    with pytest.raises(Damaged, match="attempts"):
        verify_export(folder, [SIGNER.public])


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_sealed_and_exported_as_request_2_still_verifies(
    durable: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """By a build that knows more columns; and it goes on from there in the new shape."""
    with monkeypatch.context() as before:
        before.setitem(NEWEST, REQUESTS, "request/2")  # type: ignore[arg-type]
        # A build of that day had no attempts to export.
        before.setattr(RequestRecords, "attempts", lambda self, after, upto: {})
        ledger = Ledger(durable, tmp_path)
        export = ExportJob(
            ledger.source, format_of(form, REQUESTS), Filters(), Folder(tmp_path / form)
        )
        assert [part.rows for part in export.run()] == [300]
    assert verify_export(tmp_path / form, [SIGNER.public]).sealed == 300
    fill_ledger(60, seed=9, first=301)
    sealer = Sealer("test", ledger.seals, [SIGNER], ledger.clock, ledger.files)
    assert sealer.step([ledger.records], now=True) == 1
    shapes = {one.checkpoint.record for one in ledger.seals.checkpoints(REQUESTS, 0, 9)}
    assert shapes == {"request/2", "request/3"} and ledger.finding() is None
    assert ledger.archive(9) == Archived("requests-from-1", 1, 360, 360)
    assert ledger.finding() is None
