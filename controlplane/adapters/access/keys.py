"""API keys at rest: what recognises their secrets, and when each was last used.

Whether a key is good (revoked, suspended, expired, rotated) is not kept here but in the log, where
every process reads it; a secret without its event opens nothing, and nobody was shown it.
"""

from collections.abc import Mapping

from django.db import OperationalError
from django.db.models import Q

from controlplane.adapters.access import tokens
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.adapters.failed_sync import leave_if_failed
from controlplane.adapters.store_writes import store_writes

LAST_USE_SECONDS = 60.0  # `last_used_at` is written at most this often
_NO_HASH = "0" * 64


def store_secret(secret_id: str, key_id: str, secret: str, tenant_id: str) -> None:
    """Keep what recognises the secret. Call before its event: an event without a row would be a
    dead key. A key's first secret bears the key's own id."""
    ApiKeySecret.objects.create(
        secret_id=secret_id,
        key_id=key_id,
        tenant_id=tenant_id,
        hash=tokens.hash_secret(secret),
    )


def forget_secret(secret_id: str) -> None:
    """Erase one row, when what it was stored for failed after all."""
    ApiKeySecret.objects.filter(secret_id=secret_id).delete()


def forget_key(key_id: str) -> None:
    """Erase every secret of a key; once it is revoked, nothing needs them."""
    ApiKeySecret.objects.filter(key_id=key_id).delete()


def match(text: str) -> ApiKeySecret | None:
    """The stored secret that ``text`` is, else None; takes as long for a wrong one as for a right.

    That the secret matches does not mean that the key is good: ask the log.
    """
    parts = tokens.split_key(text)
    if parts is None:
        return None
    key_id, secret = parts
    stored = list(ApiKeySecret.objects.filter(key_id=key_id))
    found = None
    for row in stored:
        if tokens.secret_matches(secret, row.hash):
            found = row
    if not stored:
        tokens.secret_matches(secret, _NO_HASH)
    return found


def note_use(row: ApiKeySecret, now: float) -> None:
    """Where it cannot be written now it is left: who only reads is not refused for that."""
    if row.last_used_at is not None and now - row.last_used_at < LAST_USE_SECONDS:
        return
    try:
        write_last_use({row.secret_id: now})
    except OperationalError as error:
        leave_if_failed(error)
        store_writes.note_failed(error)


def write_last_use(used: Mapping[str, float]) -> None:
    """``secret_id`` → Unix seconds; an earlier or hardly later time than the kept one is not
    written, however many processes saw the key."""
    for secret_id, at in used.items():
        older = Q(last_used_at__isnull=True) | Q(last_used_at__lte=at - LAST_USE_SECONDS)
        ApiKeySecret.objects.filter(older, secret_id=secret_id).update(last_used_at=at)


def last_uses(tenant_id: str) -> dict[str, float]:
    """When each secret of the tenant was last used, by secret id."""
    rows = ApiKeySecret.objects.filter(tenant_id=tenant_id)
    used = rows.values_list("secret_id", "last_used_at")
    return {secret_id: at for secret_id, at in used if at is not None}
