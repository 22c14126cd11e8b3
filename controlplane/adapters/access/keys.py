"""API keys at rest: store, recognise, revoke."""

from collections.abc import Sequence

from django.conf import settings

from controlplane.adapters.access import tokens
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.adapters.access.policy import Principal, role_of_scopes

_LAST_USE_SECONDS = 60.0  # `last_used_at` is written at most this often


def store_key(
    key_id: str, secret: str, tenant_id: str, scopes: Sequence[str], expires_at: float | None
) -> None:
    """Keep what recognises the key. Call before the event: a row without one opens nothing new,
    since nobody was shown its secret, while an event without a row would be a dead key."""
    ApiKeySecret.objects.create(
        key_id=key_id,
        tenant_id=tenant_id,
        hash=tokens.hash_secret(secret),
        scopes=list(scopes),
        expires_at=expires_at,
    )


def forget_key(key_id: str) -> None:
    """Erase the row, when issuing failed after all."""
    ApiKeySecret.objects.filter(key_id=key_id).delete()


def revoke_key(key_id: str) -> None:
    ApiKeySecret.objects.filter(key_id=key_id).update(revoked=True)


def find_key(text: str, now: float) -> ApiKeySecret | None:
    """The live key that ``text`` is, else None; takes as long for a wrong secret as for a right."""
    parts = tokens.split_key(text)
    if parts is None:
        return None
    key_id, secret = parts
    key = ApiKeySecret.objects.filter(key_id=key_id).first()
    matches = tokens.secret_matches(secret, key.hash if key else "0" * 64)
    if key is None or not matches or key.revoked:
        return None
    if key.expires_at is not None and key.expires_at <= now:
        return None
    _note_use(key, now)
    return key


def _note_use(key: ApiKeySecret, now: float) -> None:
    if key.last_used_at is None or now - key.last_used_at > _LAST_USE_SECONDS:
        ApiKeySecret.objects.filter(key_id=key.key_id).update(last_used_at=now)


def principal_of_key(text: str, now: float) -> Principal | None:
    """The principal of a live key. Its role is empty, which is allowed nothing, unless it has an
    admin scope; it is confined to its tenant unless that is the operators' own."""
    key = find_key(text, now)
    if key is None:
        return None
    confined_to = "" if key.tenant_id == settings.OPERATOR_TENANT else key.tenant_id
    return Principal(f"key:{key.key_id}", role_of_scopes(key.scopes), confined_to)
