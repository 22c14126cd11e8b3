"""The check of a live store on SQLite and on PostgreSQL: intact holds, and damage is named."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import file_findings, usage_findings
from controlplane.application.check import Checked, check_everything
from controlplane.application.notes import Signer
from controlplane.application.seal import EventRecords, Sealer
from tests.contracts.stores import Stores
from tests.contracts.test_event_store_damage import UNGUARD
from tests.proof.filling import fill_events, fill_ledger

SIGNER = Signer("test", bytes(range(32)))
UNGUARDED = {
    "sqlite": (*UNGUARD["sqlite"], "DROP TRIGGER ledger_checkpoint_no_delete"),
    "postgres": (*UNGUARD["postgres"], "ALTER TABLE ledger_checkpoint DISABLE TRIGGER ALL"),
}


class Place:
    """40 events and 30 requests in two segments each, and 5 of both that are not sealed yet."""

    def __init__(self, durable: Stores, folder: Path) -> None:
        self.durable, self.store = durable, durable.open()
        self.logs = [EventRecords(self.store), RequestRecords()]
        self.seals, self.files = DjangoSealStore(), CheckpointFiles(folder / "c")
        sealer = Sealer("test", self.seals, [SIGNER], ManualClock(), self.files)
        for part in range(2):
            fill_events(self.store, 20, seed=part)
            fill_ledger(15, seed=part, first=part * 15 + 1)
            sealer.step(self.logs, now=True)
        fill_events(self.store, 5, seed=3)
        fill_ledger(5, seed=3, first=31)
        for statement in UNGUARDED[durable.name]:
            self.execute(statement)

    def execute(self, sql: str, *parameters: Any) -> None:
        self.durable.execute(sql, parameters)  # type: ignore[misc]

    def check(self) -> Checked:
        return check_everything(
            self.logs,
            self.seals,
            [SIGNER.public],
            {"the copy": self.files.notes},
            also=[usage_findings, file_findings],
        )

    def found(self) -> tuple[str, int, str]:
        finding = self.check().finding
        assert finding is not None
        return finding.log, finding.position, finding.check


@pytest.fixture
def place(durable: Stores, tmp_path: Path) -> Place:
    return Place(durable, tmp_path)


def test_an_intact_store_holds(place: Place) -> None:
    """Sealed or not yet, every record is recomputed."""
    checked = place.check()
    assert checked.finding is None and checked.records == 45 + 35
    assert [(one.log, one.head, one.sealed) for one in checked.logs] == [
        ("events", 45, 40), ("requests", 35, 30),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE eventstore_event SET actor = 'eve' WHERE position = 23", ("events", 23, "chain")),
        ("UPDATE eventstore_event SET actor = 'eve' WHERE position = 43", ("events", 43, "chain")),
        ("DELETE FROM eventstore_event WHERE position = 7", ("events", 7, "position")),
        ("DELETE FROM eventstore_event WHERE position > 30", ("events", 31, "position")),
        ("UPDATE ledger_request SET price = price + 1 WHERE position = 20",
         ("requests", 20, "leaf")),
        ("UPDATE ledger_request SET ttft_ms = NULL WHERE position = (SELECT max(position) FROM"
         " ledger_request WHERE ttft_ms IS NOT NULL AND position < 30)", ("requests", 0, "leaf")),
        ("UPDATE ledger_request SET position = NULL WHERE position = 3",
         ("requests", 3, "position")),
        ("DELETE FROM ledger_request WHERE position = 35", ("requests", 35, "head")),
        ("UPDATE ledger_request SET num_output_tokens = num_output_tokens + 1 WHERE position = 33",
         ("requests", 0, "usage")),
        ("UPDATE ledger_head SET position = 34", ("requests", 35, "position")),
        ("DELETE FROM ledger_checkpoint WHERE log = 'events' AND first = 1",
         ("events", 1, "checkpoint")),
        ("DELETE FROM ledger_checkpoint WHERE log = 'requests' AND first = 16",
         ("requests", 16, "copy")),
    ],
)  # fmt: skip
def test_damage_is_named(place: Place, statement: str, named: tuple[str, int, str]) -> None:
    place.execute(statement)
    found = place.found()
    assert (found[0], found[2]) == (named[0], named[2])
    assert found[1] == named[1] or (named == ("requests", 0, "leaf") and 0 < found[1] < 30)


def test_a_log_cut_off_with_its_seals_is_found_by_the_copy(place: Place) -> None:
    """Rows, head and checkpoint are gone together: only what lies beside the database tells."""
    place.execute("DELETE FROM ledger_request WHERE position > 15")
    place.execute("UPDATE ledger_head SET position = 15")
    place.execute("DELETE FROM ledger_checkpoint WHERE log = 'requests' AND size > 15")
    assert place.found() == ("requests", 16, "copy")
