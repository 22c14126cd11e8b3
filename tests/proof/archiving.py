"""Moves sealed requests into an archive in a folder, as the controller does into a place."""

from pathlib import Path

from controlplane.adapters.export.destinations import Folder
from controlplane.adapters.export.formats import format_of
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.application.archive import Archived, archive
from controlplane.application.export_scan import Source
from controlplane.application.notes import Signer
from controlplane.application.ports import Clock
from controlplane.application.records import REQUESTS
from controlplane.verify import verify_export


def archive_into(
    folder: Path,
    records: RequestRecords,
    seals: DjangoSealStore,
    signer: Signer,
    clock: Clock,
    before: float,
    most: int,
) -> Archived | None:
    return archive(
        Source("test", records, seals, signer, clock),
        seals,
        format_of("jsonl", REQUESTS),
        lambda name: Folder(folder / name),
        lambda written: verify_export(written, [signer.public]),
        before,
        most,
    )
