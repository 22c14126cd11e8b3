"""Who calls: API keys, JWTs and playground tickets, each checked without a database on the way.

API keys are held in memory (their hashes, that is), loaded at the start and kept up to date by the
log: an ``ApiKeyRevoked`` closes the key here as soon as the follower has read it, well within the
second that is promised. A key that is not known yet is looked up once, off the event loop.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from controlplane.adapters.access import tokens
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.application.serve import Refused
from controlplane.domain.decider import Event
from controlplane.domain.tenant import ApiKeyIssued, ApiKeyRevoked, TenantDeleted
from controlplane.entrypoints.openai.jwt_tokens import JwtVerifier
from controlplane.projections.base import Rows
from controlplane.projections.tenants import Tenant

LOOKUPS_PER_SECOND = 20
MAX_CHECKED = 10_000
TENANT_WAIT_S = 0.5


class Principal(msgspec.Struct, frozen=True):
    """``subject`` is the API key's id, ``jwt:<sub>`` or ``user:<name>``."""

    tenant: Tenant
    subject: str


@dataclass(frozen=True, slots=True)
class _Key:
    tenant_id: str
    hash: str
    scopes: tuple[str, ...]
    expires_at: float | None


_NO_HASH = "0" * 64


class KeyRing:
    """Live keys by id. Database access runs in one thread of its own, on one connection."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._checked: dict[bytes, tuple[str, _Key]] = {}
        self._revoked: set[str] = set()
        self._used: dict[str, float] = {}
        self._looked_up: list[float] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")

    async def load(self) -> None:
        for key_id, key in (await self._in_thread(_read_keys)).items():
            self._keys[key_id] = key

    def apply(self, event: Event) -> None:
        """Take in what the log says about keys."""
        if isinstance(event, ApiKeyRevoked):
            self._revoked.add(event.key_id)
            self._keys.pop(event.key_id, None)
        elif isinstance(event, TenantDeleted):
            gone = [k for k, key in self._keys.items() if key.tenant_id == event.tenant_id]
            for key_id in gone:
                del self._keys[key_id]
        elif isinstance(event, ApiKeyIssued):
            self._revoked.discard(event.key_id)

    def is_revoked(self, key_id: str) -> bool:
        return key_id in self._revoked

    async def check(self, text: str, now: float) -> tuple[str, _Key]:
        """The key and its id. A key seen before is known by the SHA-256 of all of it."""
        digest = hashlib.sha256(text.encode()).digest()
        key_id, key = self._checked.get(digest) or await self._check(text)
        if self._keys.get(key_id) is not key:  # revoked since
            raise _bad_key()
        if key.expires_at is not None and key.expires_at <= now:
            raise Refused("invalid_api_key", "This API key has expired.")
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked[digest] = (key_id, key)
        self._used[key_id] = now
        return key_id, key

    async def _check(self, text: str) -> tuple[str, _Key]:
        """Takes as long for a wrong secret as for a right one."""
        parts = tokens.split_key(text)
        if parts is None:
            raise _bad_key()
        key_id, secret = parts
        key = self._keys.get(key_id) or await self._look_up(key_id)
        matches = tokens.secret_matches(secret, key.hash if key else _NO_HASH)
        if key is None or not matches:
            raise _bad_key()
        return key_id, key

    async def _look_up(self, key_id: str) -> _Key | None:
        """Only so many times a second, or made-up keys would keep the database busy."""
        now = time.monotonic()
        self._looked_up = [at for at in self._looked_up if now - at < 1]
        if key_id in self._revoked or len(self._looked_up) >= LOOKUPS_PER_SECOND:
            return None
        self._looked_up.append(now)
        key = (await self._in_thread(_read_keys, key_id)).get(key_id)
        if key is not None and key_id not in self._revoked:
            self._keys[key_id] = key
        return self._keys.get(key_id)

    async def write_last_use(self) -> None:
        """Call every minute or so."""
        used, self._used = self._used, {}
        if used:
            await self._in_thread(_write_last_use, used)

    async def _in_thread(
        self, function: Callable[..., dict[str, _Key]], *arguments: object
    ) -> dict[str, _Key]:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _with_connection, function, *arguments
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _with_connection(
    function: Callable[..., dict[str, _Key]], *arguments: object
) -> dict[str, _Key]:
    """Drop a connection that the database closed meanwhile, before and after."""
    from django.db import close_old_connections

    close_old_connections()
    try:
        return function(*arguments)
    finally:
        close_old_connections()


def _read_keys(key_id: str | None = None) -> dict[str, _Key]:
    rows = ApiKeySecret.objects.filter(revoked=False)
    if key_id is not None:
        rows = rows.filter(key_id=key_id)
    return {
        row.key_id: _Key(row.tenant_id, row.hash, tuple(row.scopes), row.expires_at) for row in rows
    }


def _write_last_use(used: dict[str, float]) -> dict[str, _Key]:
    for key_id, at in used.items():
        ApiKeySecret.objects.filter(key_id=key_id).update(last_used_at=at)
    return {}


class Authenticator:
    """From the bearer token to the principal; everything after is scoped to its tenant."""

    def __init__(self, keys: KeyRing, jwts: JwtVerifier, rows: Rows) -> None:
        self._keys, self._jwts, self._rows = keys, jwts, rows

    async def from_header(self, header: bytes | None) -> Principal:
        """Of an ``Authorization`` header; raises Refused."""
        return await self.from_token(bearer_token(header))

    async def from_token(self, token: str) -> Principal:
        """Of a bearer token of any kind; raises Refused."""
        if len(token) > tokens.MAX_TOKEN_LENGTH:
            raise Refused("invalid_token", "The token is too long.")
        now = time.time()
        if token.startswith(tokens.KEY_PREFIX):
            return await self._from_key(token, now)
        if token.startswith(tokens.TICKET_PREFIX):
            ticket = tokens.read_ticket(token, now)
            if ticket is None:
                raise Refused("invalid_token", "The ticket is invalid or has expired.")
            return Principal(await self._tenant(ticket.tenant_id), ticket.subject)
        claims = await self._jwts.verify(token, now)
        return Principal(await self._tenant(claims.owner), f"jwt:{claims.subject}")

    async def _from_key(self, token: str, now: float) -> Principal:
        key_id, key = await self._keys.check(token, now)
        if "inference" not in key.scopes:
            raise Refused("insufficient_scope", "This API key has no scope 'inference'.")
        return Principal(await self._tenant(key.tenant_id), key_id)

    async def _tenant(self, tenant_id: str) -> Tenant:
        """Its row; one made a moment ago may still be on its way here through the log."""
        tenant = self._rows.get(Tenant, tenant_id)
        until = time.monotonic() + TENANT_WAIT_S
        while tenant is None and time.monotonic() < until:
            await asyncio.sleep(0.05)
            tenant = self._rows.get(Tenant, tenant_id)
        if tenant is None:
            raise Refused("no_org", "The token belongs to no tenant of this installation.")
        if tenant.suspended:
            raise Refused("tenant_suspended", "The tenant is suspended.")
        return tenant


def bearer_token(header: bytes | None) -> str:
    """The token in an ``Authorization`` header; raises Refused."""
    scheme, _, token = (header or b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refused("invalid_api_key", "Send 'Authorization: Bearer <API key>'.")
    return token.strip()


def _bad_key() -> Refused:
    return Refused("invalid_api_key", "Incorrect API key provided.")
