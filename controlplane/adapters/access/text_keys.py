"""Data keys of captured text: one for each tenant and generation, wrapped, and destroyed for good.

A key lies in a row of its own, encrypted with AES-256-GCM under a key derived from the
installation's secret; no event, export or archive holds it. It is made when the first text is to
be encrypted. Destroying it empties the row and leaves it there, so that a gateway that has not
heard of it yet finds no key where one was, and does not make another::

    row (acme, 0)   wrapped 60 bytes          key_of(acme, 0) -> 32 bytes
    destroy         wrapped b"", destroyed_at
    row (acme, 0)   nothing to unwrap         key_of(acme, 0) -> None, for ever

SQLite overwrites what was deleted (``secure_delete``) and empties its write-ahead log, so no file
here holds the key any more. PostgreSQL keeps old row versions until it vacuums, which is done at
once, and its own write-ahead log until that is recycled. A backup taken before holds the wrapped
key, as it holds all else: destroying it means destroying that backup, or its copy of the secret.
"""

import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.db import connection

from controlplane.adapters.access.models import TextKeyRow
from controlplane.application.capture import TextKey, new_key

_NONCE_BYTES = 12


class WrongSecret(Exception):
    """The key was wrapped under another ``ENGINE_SECRET_KEY`` than that of this process."""


def key_of(tenant_id: str, generation: int, now: float) -> TextKey | None:
    """The key, made if there never was one; None if it is destroyed. Raises WrongSecret."""
    TextKeyRow.objects.bulk_create(
        [
            TextKeyRow(
                key_id=_id(tenant_id, generation),
                tenant_id=tenant_id,
                generation=generation,
                wrapped=_wrap(new_key(), tenant_id, generation),
                created_at=now,
            )
        ],
        ignore_conflicts=True,  # the first one stands, or what is left of it
    )
    return existing_key(tenant_id, generation)


def existing_key(tenant_id: str, generation: int) -> TextKey | None:
    """None if it is destroyed, or never was."""
    row = TextKeyRow.objects.filter(key_id=_id(tenant_id, generation)).first()
    if row is None or row.destroyed_at is not None:
        return None
    return TextKey(generation, _unwrap(bytes(row.wrapped), tenant_id, generation))


def destroy(tenant_id: str, upto: int, now: float) -> int:
    """Destroy the tenant's keys up to generation ``upto``; how many were there. Again: none."""
    there = TextKeyRow.objects.filter(
        tenant_id=tenant_id, generation__lte=upto, destroyed_at__isnull=True
    )
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA secure_delete=ON")
    count = there.update(wrapped=b"", destroyed_at=now)
    _bar(tenant_id, upto, now)
    if count:
        _overwrite()
    return count


def tenants_with_keys() -> dict[str, int]:
    """The oldest generation whose key is not destroyed, by tenant."""
    rows = TextKeyRow.objects.filter(destroyed_at__isnull=True).order_by("-generation")
    return dict(rows.values_list("tenant_id", "generation"))


def _bar(tenant_id: str, generation: int, now: float) -> None:
    """Where no key was made yet, none is made any more."""
    TextKeyRow.objects.bulk_create(
        [
            TextKeyRow(
                key_id=_id(tenant_id, generation),
                tenant_id=tenant_id,
                generation=generation,
                wrapped=b"",
                created_at=now,
                destroyed_at=now,
            )
        ],
        ignore_conflicts=True,
    )


def _overwrite() -> None:
    """Nothing of the old rows stays in a file of the database, as far as that is in our hands."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        elif not connection.in_atomic_block:
            cursor.execute("VACUUM access_textkeyrow")


def _id(tenant_id: str, generation: int) -> str:
    return f"{tenant_id}:{generation}"


def _wrapping_key() -> bytes:
    secret = hashlib.sha256(settings.SECRET_KEY.encode()).digest()
    return HKDF(SHA256(), 32, salt=None, info=b"engine text keys/1").derive(secret)


def _wrap(secret: bytes, tenant_id: str, generation: int) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    about = _id(tenant_id, generation).encode()
    return nonce + AESGCM(_wrapping_key()).encrypt(nonce, secret, about)


def _unwrap(wrapped: bytes, tenant_id: str, generation: int) -> bytes:
    nonce, rest = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
    try:
        return AESGCM(_wrapping_key()).decrypt(nonce, rest, _id(tenant_id, generation).encode())
    except InvalidTag as error:
        raise WrongSecret(
            f"The text key of tenant '{tenant_id}' was made under another ENGINE_SECRET_KEY."
        ) from error
