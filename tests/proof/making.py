"""A sealed store and exports of it, to be damaged; and how they are checked."""

import sqlite3
from pathlib import Path
from typing import Any

from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.export.destinations import Folder
from controlplane.adapters.export.formats import FORMATS, format_of
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import file_findings, usage_findings
from controlplane.application.check import Checked, check_everything
from controlplane.application.export_job import ExportJob
from controlplane.application.export_scan import Source
from controlplane.application.exports import Filters
from controlplane.application.notes import Signer
from controlplane.application.ports import StoreUnavailable
from controlplane.application.proving import Damaged, Finding
from controlplane.application.seal import EventRecords, Sealer
from controlplane.verify import verify_export
from tests.databases import pointed_at
from tests.proof.filling import fill_events, fill_ledger

SIGNER = Signer("test", bytes(range(32)))
EVENTS, REQUESTS = 700, 420


class Made:
    """``sealed``: how many records of each log are under a checkpoint; all are, here."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder, self.database = folder, folder / "intact.sqlite3"
        self.files = CheckpointFiles(folder / "checkpoints")
        self.sealed = {"events": EVENTS, "requests": REQUESTS}
        store = DjangoEventStore(ManualClock())
        source = self._fill(store)
        self.exports = [self._export(source, log, form) for log in source for form in FORMATS]
        self.exports += [self._export(source, log, "jsonl", "t3") for log in source]
        store.close()
        self._keep(database)
        self.whole = self.dump(self.database)
        assert self.check(self.database) is None
        assert all(self.check_export(one) is None for one in self.exports)

    def _fill(self, store: DjangoEventStore) -> dict[str, Source]:
        seals, clock = DjangoSealStore(), ManualClock()
        logs = [EventRecords(store), RequestRecords()]
        for part in range(4):
            fill_events(store, EVENTS // 4, seed=part)
            count = REQUESTS // 4
            fill_ledger(count, seed=part, first=part * count + 1)
            Sealer("test", seals, [SIGNER], clock, self.files).step(logs, now=True)
        return {one.log: Source("test", one, seals, SIGNER, clock) for one in logs}

    def _export(
        self, source: dict[str, Source], log: str, form: str, tenant: str | None = None
    ) -> Path:
        folder = self.folder / f"{log}-{tenant or 'all'}-{form}"
        made = format_of(form, log)
        job = ExportJob(source[log], made, Filters(tenant=tenant), Folder(folder), part_rows=130)
        list(job.run())
        return folder

    def _keep(self, database: Path) -> None:
        """The database as one file, without the triggers that refuse to change records."""
        source, kept = sqlite3.connect(database), sqlite3.connect(self.database)
        source.backup(kept)
        source.close()
        kept.execute("PRAGMA journal_mode=DELETE")
        triggers = kept.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in triggers:
            kept.execute(f"DROP TRIGGER {name}")
        kept.commit()
        kept.close()

    def check(self, database: Path) -> Finding | None:
        """What a verification of that file finds."""
        with pointed_at(database):
            store = DjangoEventStore(ManualClock())
            try:
                return self._checked(store).finding
            finally:
                store.close()

    def _checked(self, store: DjangoEventStore) -> Checked:
        from django.db import DatabaseError

        return check_everything(
            [EventRecords(store), RequestRecords()],
            DjangoSealStore(),
            [SIGNER.public],
            {"the copy": self.files.notes},
            unreadable=(StoreUnavailable, DatabaseError, UnicodeError),
            also=[usage_findings, file_findings],
        )

    def check_export(self, folder: Path) -> Finding | None:
        try:
            verify_export(folder, [SIGNER.public])
        except Damaged as damaged:
            return damaged.finding
        return None

    def dump(self, database: Path) -> list[Any]:
        """Every record as it reads."""
        db = sqlite3.connect(database)
        try:
            tables = ("eventstore_event", "ledger_request WHERE position IS NOT NULL")
            return [db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
        finally:
            db.close()
