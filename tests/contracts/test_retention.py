"""What is old goes by the policy: archived first, noted as it goes, and every proof holds."""

from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.ledger.models import CapturedText, InferenceRequest
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import usage_findings
from controlplane.adapters.ledger.texts import BATCH, TextStore, text_findings
from controlplane.application.archive import Archived
from controlplane.application.capture import Text, TextKey, encrypt
from controlplane.application.check import check_everything
from controlplane.application.handle import CommandHandler
from controlplane.application.notes import Signer
from controlplane.application.ports import EventMeta
from controlplane.application.retain import DAY_S, Retention
from controlplane.application.seal import Sealer
from controlplane.domain.retention import DECIDER, SegmentRemoved, SetRetention
from controlplane.verify import verify_export
from tests.contracts.stores import Stores
from tests.proof.archiving import archive_into
from tests.proof.filling import fill_ledger

SIGNER = Signer("test", bytes(range(32)))


class Installation:
    """Five segments of 60 requests, sealed a day apart, and a text for each of the first ten."""

    def __init__(self, durable: Stores, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.store = durable.open()
        self.seals, self.records = DjangoSealStore(), RequestRecords()
        self.handler = CommandHandler(self.store, self.clock)
        self.files = CheckpointFiles(folder / "copies")
        self.began = self.clock.now()
        sealer = Sealer("test", self.seals, [SIGNER], self.clock, self.files)
        for part in range(5):
            fill_ledger(60, seed=part, first=part * 60 + 1)
            if part == 0:
                self._capture(10)
            sealer.step([self.records], now=True)
            self.clock.advance(DAY_S)

    def _capture(self, count: int) -> None:
        for row in InferenceRequest.objects.order_by("position")[:count]:
            text = encrypt(
                TextKey(0, bytes(32)), row.tenant_id, row.request_id, Text("chat", [], ["x"], [])
            )
            CapturedText.objects.create(
                request_id=row.request_id, tenant_id=row.tenant_id, position=row.position,
                generation=0, nonce=text.nonce, ciphertext=text.ciphertext, at=self.clock.now(),
            )  # fmt: skip
            InferenceRequest.objects.filter(pk=row.pk).update(text_hash=text.hash)

    def retention(self, with_archive: bool = True) -> Retention:
        into = self.archive if with_archive else None
        return Retention(self.handler, self.clock, self.seals, TextStore(), into)

    def archive(self, before: float, most: int = 2) -> Archived | None:
        return archive_into(self.folder, self.records, self.seals, SIGNER, self.clock, before, most)

    def set_days(self, kind: str, days: int | None) -> None:
        order = SetRetention(kind, days, self.clock.now())
        self.handler.handle(DECIDER, DECIDER.stream(kind), order, EventMeta("user:ann"))

    def removed(self) -> list[tuple[int, int, str]]:
        stream = self.store.read_stream("retention-requests")
        events = [one.event for one in stream if isinstance(one.event, SegmentRemoved)]
        return [(one.first, one.upto, one.archive) for one in events]

    def finding(self) -> object:
        return check_everything(
            [self.records],
            self.seals,
            [SIGNER.public],
            {"the copy": self.files.notes},
            also=[text_findings, usage_findings],
        ).finding


@pytest.fixture
def place(durable: Stores, tmp_path: Path) -> Installation:
    return Installation(durable, tmp_path)


def test_nothing_goes_before_its_time(place: Installation) -> None:
    done = place.retention().step()
    assert (done.archived, done.num_noted, done.num_texts) == (None, 0, 0)
    assert InferenceRequest.objects.count() == 300 and place.finding() is None


def test_old_segments_go_by_the_policy_each_with_an_event(place: Installation) -> None:
    """A bounded number at a round; the log says which went where, and everything verifies."""
    place.set_days("requests", 2)
    assert place.finding() is None
    first = place.retention().step()
    assert first.archived == Archived("requests-from-1", 1, 120, 120) and first.num_noted == 2
    second = place.retention().step()
    assert second.archived == Archived("requests-from-121", 121, 180, 60)
    third = place.retention().step()
    assert third.archived is None and third.num_noted == 0
    assert place.removed() == [
        (1, 60, "requests-from-1"),
        (61, 120, "requests-from-1"),
        (121, 180, "requests-from-121"),
    ]
    assert InferenceRequest.objects.count() == 120 and place.finding() is None
    for name in ("requests-from-1", "requests-from-121"):
        assert verify_export(place.folder / name, [SIGNER.public]).manifest.complete


def test_without_a_place_for_archives_requests_stay(place: Installation) -> None:
    place.set_days("requests", 1)
    assert place.retention(with_archive=False).step().archived is None
    assert InferenceRequest.objects.count() == 300


def test_for_ever_is_for_ever(place: Installation) -> None:
    for kind in ("requests", "text"):
        place.set_days(kind, None)
    place.clock.advance(10_000 * DAY_S)
    done = place.retention().step()
    assert (done.archived, done.num_texts) == (None, 0)


def test_text_goes_by_its_own_age_and_no_seal_minds(place: Installation) -> None:
    """Before its request, or long after it."""
    place.set_days("text", 30)
    place.set_days("requests", 1)
    place.retention().step()
    assert CapturedText.objects.count() == 10 and place.finding() is None  # requests are archived
    place.clock.advance(31 * DAY_S)
    assert place.retention().step().num_texts == 10
    assert CapturedText.objects.count() == 0 and place.finding() is None


def test_text_goes_in_bounded_batches(place: Installation) -> None:
    rows = [
        CapturedText(
            request_id=f"old-{n}", tenant_id="t", position=n, generation=0, nonce=b"",
            ciphertext=b"", at=0.0,
        )
        for n in range(BATCH + 1)
    ]  # fmt: skip
    CapturedText.objects.bulk_create(rows)
    texts = TextStore()
    assert [texts.remove_before(1.0) for _ in range(3)] == [BATCH, 1, 0]


def test_a_text_without_its_request_is_found(place: Installation) -> None:
    """Unless that is in an archive."""
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE ledger_text SET request_id = 'stray' WHERE position = 3")
    finding: Any = place.finding()
    assert (finding.position, finding.record_id, finding.check) == (3, "stray", "text")


def test_a_segment_archived_by_hand_is_noted_too(place: Installation) -> None:
    assert place.archive(place.clock.now(), most=1) is not None
    assert place.retention().note() == 1
    assert place.removed() == [(1, 60, "requests-from-1")]
