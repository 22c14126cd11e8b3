"""Whoever is killed while old records leave, or text is erased, loses nothing and leaves nothing.

Each failpoint on the way kills a forked process once; the next one goes on from what is found.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock, SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import usage_findings
from controlplane.adapters.ledger.texts import TextStore, text_findings
from controlplane.application import failpoints
from controlplane.application.archive import Archived
from controlplane.application.capture import Text, TextKey, encrypt
from controlplane.application.check import check_everything
from controlplane.application.erase import finish_all
from controlplane.application.failpoints import FAILPOINTS
from controlplane.application.handle import CommandHandler
from controlplane.application.notes import Signer
from controlplane.application.ports import EventMeta
from controlplane.application.records import REQUESTS
from controlplane.application.retain import DAY_S, Retention
from controlplane.application.seal import Sealer
from controlplane.domain import capture, retention, tenant
from controlplane.domain.ids import TenantId
from controlplane.domain.retention import SegmentRemoved, SetRetention
from controlplane.verify import verify_export
from tests.crash.places import copied_sqlite, fork, point_django_at, run, wait
from tests.proof.archiving import archive_into
from tests.proof.filling import fill_ledger

SIGNER = Signer("test", bytes(range(32)))
META = EventMeta("user:ann")
ACME = TenantId("acme")
SEGMENTS, SIZE = 4, 30


class Place:
    """A store, its archives, and what was done in it: for one process at a time."""

    def __init__(self, folder: Path, database: dict[str, Any]) -> None:
        self.folder, self.database = folder, database

    def connect(self) -> None:
        point_django_at(self.database)
        self.clock = ManualClock()
        self.clock.advance(SEGMENTS * DAY_S)
        self.store = DjangoEventStore(SystemClock())
        self.handler = CommandHandler(self.store, self.clock)
        self.seals, self.records = DjangoSealStore(), RequestRecords()
        self.files = CheckpointFiles(self.folder / "copies")

    def fill(self) -> None:
        """Segments a day apart, and a text that is older than they are."""
        self.connect()
        began = ManualClock()
        sealer = Sealer("test", self.seals, [SIGNER], began, self.files)
        for part in range(SEGMENTS):
            fill_ledger(SIZE, seed=part, first=part * SIZE + 1)
            if part == 0:
                self._capture()
            sealer.step([self.records], now=True)
            began.advance(DAY_S)
        for kind, days in (("requests", 2), ("text", 1)):
            stream = retention.DECIDER.stream(kind)
            self.handler.handle(retention.DECIDER, stream, SetRetention(kind, days, 1.0), META)

    def _capture(self) -> None:
        from controlplane.adapters.ledger.models import CapturedText, InferenceRequest

        row = InferenceRequest.objects.get(position=1)
        text = encrypt(
            TextKey(0, bytes(32)), row.tenant_id, row.request_id, Text("chat", [], ["x"], [])
        )
        CapturedText.objects.create(
            request_id=row.request_id, tenant_id=row.tenant_id, position=1, generation=0,
            nonce=text.nonce, ciphertext=text.ciphertext, at=ManualClock().now(),
        )  # fmt: skip
        InferenceRequest.objects.filter(pk=row.pk).update(text_hash=text.hash)

    def retain(self) -> None:
        self.connect()
        rounds = Retention(self.handler, self.clock, self.seals, TextStore(), self._archive)
        while (done := rounds.step()).archived or done.num_noted or done.num_texts:
            pass

    def _archive(self, before: float) -> Archived | None:
        return archive_into(self.folder, self.records, self.seals, SIGNER, self.clock, before, 1)

    def check(self, finished: bool) -> None:
        """Every record is here or in a verified archive; what was removed is noted, once."""
        self.connect()
        copies = {"the copy": self.files.notes}
        also = [text_findings, usage_findings]
        checked = check_everything([self.records], self.seals, [SIGNER.public], copies, also=also)
        assert checked.finding is None, checked.finding
        here = {row[0] for row in self.records.read(0, 10_000, 10_000, "request/3")}
        for path in self.folder.glob("requests-from-*"):
            if (path / "manifest.json").exists():
                manifest = verify_export(path, [SIGNER.public]).manifest
                here |= set(range(manifest.first_position, manifest.last_position + 1))
        assert here == set(range(1, SEGMENTS * SIZE + 1))
        stream = self.store.read_stream("retention-requests")
        noted = [one.event.first for one in stream if isinstance(one.event, SegmentRemoved)]
        assert len(set(noted)) == len(noted)
        marked = [first for first, _, _ in self.seals.marked(REQUESTS, 0, 100)]
        assert set(noted) <= set(marked)
        assert not finished or noted == marked == [1, SIZE + 1]


@pytest.fixture
def place(migrated_file: Path, tmp_path: Path, django_db_blocker: Any) -> Iterator[Place]:
    database = copied_sqlite(migrated_file, tmp_path / "store" / "engine.sqlite3")
    with django_db_blocker.unblock():
        yield Place(tmp_path, database)


def killed_at(point: str, work: Any, log: Path) -> int:
    def armed() -> None:
        failpoints.arm(point)
        work()

    return wait(fork(armed, log), 60)


@pytest.mark.parametrize("point", [p for p in FAILPOINTS if p.startswith("retain.")])
@pytest.mark.parametrize("number", [1, 2])
def test_a_round_killed_anywhere_is_gone_on_with(place: Place, point: str, number: int) -> None:
    run(place.fill)
    status = killed_at(f"{point}:{number}", place.retain, place.folder / "log")
    assert status == -signal.SIGKILL, (place.folder / "log").read_text()
    run(lambda: place.check(finished=False))
    run(place.retain)
    run(lambda: place.check(finished=True))


@pytest.mark.parametrize("point", [p for p in FAILPOINTS if p.startswith("erase.")])
def test_an_erasure_killed_before_its_key_is_gone_is_finished(place: Place, point: str) -> None:
    def ordered() -> None:
        from controlplane.adapters.access import text_keys

        place.connect()
        stream = tenant.DECIDER.stream(ACME)
        for order in (
            tenant.CreateTenant(ACME, ACME, "free", 1.0),
            capture.StartCapture(ACME, 2.0),
        ):
            place.handler.handle(tenant.DECIDER, stream, order, META)
        assert text_keys.key_of(ACME, 0, 3.0) is not None
        place.handler.handle(tenant.DECIDER, stream, capture.EraseText(ACME, 4.0), META)
        finish_all(place.handler, text_keys, place.clock)

    def finished() -> None:
        from controlplane.adapters.access import text_keys

        place.connect()
        finish_all(place.handler, text_keys, place.clock)
        assert text_keys.tenants_with_keys() == {}
        assert text_keys.existing_key(ACME, 0) is None

    status = killed_at(f"{point}:1", ordered, place.folder / "log")
    assert status == -signal.SIGKILL, (place.folder / "log").read_text()
    run(finished)
