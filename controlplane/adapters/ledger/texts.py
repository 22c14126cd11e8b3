"""Captured text as it lies in the ledger: read by its request, removed by its age, and checked.

What is checked is that the stored ciphertext is the one whose hash is sealed with its request; no
key is needed for that, so it holds after a key was destroyed too. A text that is not there is no
finding, since text is removed long before its record.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from controlplane.adapters.ledger.models import CapturedText, Checkpoint, InferenceRequest
from controlplane.application.capture import EncryptedText, text_hash
from controlplane.application.failpoints import passing
from controlplane.application.proving import Finding
from controlplane.application.records import REQUESTS

BATCH = 500


@dataclass(frozen=True)
class StoredText:
    tenant_id: str
    text: EncryptedText


def find(request_id: str, tenant_id: str | None) -> StoredText | None:
    """``tenant_id``: the only tenant whose text exists for who asks; None for all."""
    rows = CapturedText.objects.filter(request_id=request_id)
    row = (rows if tenant_id is None else rows.filter(tenant_id=tenant_id)).first()
    if row is None:
        return None
    text = EncryptedText(row.generation, bytes(row.nonce), bytes(row.ciphertext))
    return StoredText(row.tenant_id, text)


class TextStore:
    """``retain.Texts``."""

    def __init__(self, alias: str = "default") -> None:
        self._alias = alias

    def remove_before(self, at: float) -> int:
        """Remove a batch of texts that were captured before ``at`` (Unix seconds); how many."""
        rows = CapturedText.objects.using(self._alias)
        old = list(rows.filter(at__lt=at).order_by("at").values_list("pk", flat=True)[:BATCH])
        removed, _ = rows.filter(pk__in=old).delete()
        passing("retain.text")
        return removed


def text_findings(alias: str = "default") -> Iterator[Finding]:
    """The first stored text that is not the one that was sealed with its request."""
    last = 0
    while True:
        rows = CapturedText.objects.using(alias).filter(pk__gt=last).order_by("pk")[:BATCH]
        batch = list(rows)
        if not batch:
            return
        hashes = _hashes(alias, batch)
        for row in batch:
            found = text_hash(bytes(row.nonce), bytes(row.ciphertext))
            if hashes.get(row.request_id, found) != found:
                detail = "its text is not the one that was captured"
                yield Finding(REQUESTS, row.position, row.request_id, "text", detail)
            elif row.request_id not in hashes and not _is_archived(alias, row.position):
                detail = "inserted: a text without its request"
                yield Finding(REQUESTS, row.position, row.request_id, "text", detail)
        last = batch[-1].pk


def _hashes(alias: str, batch: list[CapturedText]) -> dict[str, str]:
    wanted = [row.request_id for row in batch]
    rows = InferenceRequest.objects.using(alias).filter(request_id__in=wanted)
    return dict(rows.values_list("request_id", "text_hash"))


def _is_archived(alias: str, position: int) -> bool:
    """The request of a text that is kept longer than its record lies in an archive."""
    covering = Checkpoint.objects.using(alias).filter(
        log=REQUESTS, first__lte=position, size__gte=position
    )
    return covering.exclude(archive="").exists()
