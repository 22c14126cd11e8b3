"""Who calls: API keys, JWTs and playground tickets, each checked without a database on the way.

The hashes of all secrets are held in memory, loaded at the start; a key that the log issues or
rotates is loaded then. Whether a key is good stands in the read model's rows, which follow the
log: a revoked, suspended or rotated key is over as soon as the follower has read it, well within
the second that is promised. A secret that is not known yet is looked up once, off the event loop.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from controlplane.adapters.access import keys, tokens
from controlplane.adapters.access.jwt_tokens import BadToken, JwtVerifier
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.application.refused import Refused
from controlplane.dispatch.resolve import Caller
from controlplane.domain import policy
from controlplane.domain.api_key import why_not
from controlplane.domain.audit import DashboardUserSaved
from controlplane.domain.decider import Event
from controlplane.domain.policy import USE_MODEL, Rule, allowed
from controlplane.domain.tenant import ApiKeyIssued, ApiKeyRotated
from controlplane.projections.base import Rows
from controlplane.projections.tenants import ApiKey, Tenant

LOOKUPS_PER_SECOND = 20
MAX_CHECKED = 10_000
ROW_WAIT_S = 0.5
BAD_KEY = "Incorrect API key provided."


class TenantPrincipal(msgspec.Struct, frozen=True):
    """``subject`` is the API key's id, ``jwt:<sub>`` or ``user:<name>``; ``models``: the names it
    may ask for, empty for all that the models' own access policies allow."""

    tenant: Tenant
    subject: str
    rights: policy.Principal
    models: tuple[str, ...] = ()

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant.tenant_id, self.rights.role, self.models)


class _Secret(NamedTuple):
    secret_id: str
    hash: str


_NO_SECRET = (_Secret("", "0" * 64),)
_Secrets = dict[str, tuple[_Secret, ...]]


class KeyRing:
    """Secrets by key id. Database access runs in one thread of its own, on one connection."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._secrets: _Secrets = {}
        self._checked: dict[bytes, tuple[str, str]] = {}
        self._used: dict[str, float] = {}
        self._looked_up: list[float] = []
        self._loading: set[asyncio.Task[None]] = set()
        self._loaded = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")

    async def load(self) -> None:
        self._secrets = await self.in_thread(_read_secrets)
        self._loaded = True

    def apply(self, event: Event) -> None:
        """A secret that the log names is fetched before anybody shows it."""
        if self._loaded and isinstance(event, ApiKeyIssued | ApiKeyRotated):
            task = asyncio.ensure_future(self._read(event.key_id))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    def why_not(self, key_id: str) -> str:
        """Why a request that this key began may not go on; "" too if it is no key's id."""
        row = self._rows.get(ApiKey, key_id)
        if row is None or not (row.revoked or row.suspended):
            return ""
        return "revoked" if row.revoked else "suspended"

    async def check(self, text: str, now: float) -> ApiKey:
        """The key's row. A secret seen before is known by the SHA-256 of all of it."""
        digest = hashlib.sha256(text.encode()).digest()
        known = self._checked.get(digest)
        key_id, secret_id = known or await self._match(text)
        row = self._rows.get(ApiKey, key_id)
        if known is None and _is_unheard_of(row, secret_id):
            row = await self._newer_row(key_id, secret_id)
        refusal = "revoked" if row is None or row.revoked else why_not(row, secret_id, now)
        if row is None or refusal in ("revoked", "rotated"):
            raise _bad_key()
        if refusal:
            raise Refused("invalid_api_key", f"This API key is {refusal}.")
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked[digest] = (key_id, secret_id)
        self._used[secret_id] = now
        return row

    async def _newer_row(self, key_id: str, secret_id: str) -> ApiKey | None:
        """A key issued or rotated a moment ago may still be on its way here through the log."""

        def heard_of() -> ApiKey | None:
            row = self._rows.get(ApiKey, key_id)
            return None if _is_unheard_of(row, secret_id) else row

        return await _soon(heard_of) or self._rows.get(ApiKey, key_id)

    async def _match(self, text: str) -> tuple[str, str]:
        """``(key_id, secret_id)``. Takes as long for a wrong secret as for a right one."""
        parts = tokens.split_key(text)
        if parts is None:
            raise _bad_key()
        key_id, secret = parts
        found = _matching(self._secrets.get(key_id, _NO_SECRET), secret)
        if found is None and self._may_look_up():
            await self._read(key_id)
            found = _matching(self._secrets.get(key_id, _NO_SECRET), secret)
        if found is None:
            raise _bad_key()
        return key_id, found

    def _may_look_up(self) -> bool:
        """Only so many times a second, or made-up keys would keep the database busy."""
        now = time.monotonic()
        self._looked_up = [at for at in self._looked_up if now - at < 1]
        if len(self._looked_up) >= LOOKUPS_PER_SECOND:
            return False
        self._looked_up.append(now)
        return True

    async def _read(self, key_id: str) -> None:
        self._secrets.update(await self.in_thread(_read_secrets, key_id))

    async def write_last_use(self) -> None:
        """Call every minute or so."""
        used, self._used = self._used, {}
        if used:
            await self.in_thread(keys.write_last_use, used)

    async def in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What ``function`` gives, called with a database connection off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _with_connection, function, *arguments
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _matching(secrets: tuple[_Secret, ...], text: str) -> str | None:
    found = None
    for one in secrets:
        if tokens.secret_matches(text, one.hash):
            found = one.secret_id
    return found


def _is_unheard_of(row: ApiKey | None, secret_id: str) -> bool:
    return row is None or secret_id not in (row.secret_id, row.previous_secret_id)


def _with_connection(function: Callable[..., Any], *arguments: object) -> Any:
    """Drop a connection that the database closed meanwhile, before and after."""
    from django.db import close_old_connections

    close_old_connections()
    try:
        return function(*arguments)
    finally:
        close_old_connections()


def _read_secrets(key_id: str | None = None) -> _Secrets:
    rows = ApiKeySecret.objects.all()
    if key_id is not None:
        rows = rows.filter(key_id=key_id)
    found: defaultdict[str, list[_Secret]] = defaultdict(list)
    for row in rows:
        found[row.key_id].append(_Secret(row.secret_id, row.hash))
    return {name: tuple(secrets) for name, secrets in found.items()}


async def _soon(find: Callable[[], Any]) -> Any:
    """What ``find`` gives, tried again for half a second."""
    found, until = find(), time.monotonic() + ROW_WAIT_S
    while found is None and time.monotonic() < until:
        await asyncio.sleep(0.05)
        found = find()
    return found


class Authenticator:
    """From the bearer token to the principal; everything after is scoped to its tenant."""

    def __init__(
        self, keys: KeyRing, jwts: JwtVerifier, rows: Rows, operator_tenant: str = ""
    ) -> None:
        self._keys, self._jwts, self._rows = keys, jwts, rows
        self._operator_tenant = operator_tenant
        self._users_changed: dict[str, float] = {}

    def apply(self, event: Event) -> None:
        """A user whose role has changed needs a new ticket: the old one has the old role in it."""
        if isinstance(event, DashboardUserSaved):
            self._users_changed[event.username] = event.at

    async def from_header(self, header: bytes | None, rule: Rule = USE_MODEL) -> TenantPrincipal:
        """Of an ``Authorization`` header, if ``rule`` allows it; raises Refused."""
        return await self.from_token(bearer_token(header), rule)

    async def from_token(self, token: str, rule: Rule = USE_MODEL) -> TenantPrincipal:
        """Of a bearer token of any kind, if ``rule`` allows it; raises Refused."""
        principal = await self._principal(token, time.time())
        if not allowed(principal.rights, *rule):
            raise Refused(
                "insufficient_scope",
                f"This token may not {rule.action} any {rule.resource}: its role is "
                f"'{principal.rights.role}', its scopes are {', '.join(principal.rights.scopes)}.",
            )
        return principal

    async def _principal(self, token: str, now: float) -> TenantPrincipal:
        if len(token) > tokens.MAX_TOKEN_LENGTH:
            raise Refused("invalid_token", "The token is too long.")
        if token.startswith(tokens.KEY_PREFIX):
            return await self._from_key(token, now)
        if token.startswith(tokens.TICKET_PREFIX):
            return await self._from_ticket(token, now)
        if token.count(".") != 2:  # not of the form of a token, so most likely a mistyped key
            raise Refused("invalid_token", BAD_KEY)
        try:
            claims = await self._jwts.verify_soon(token, now)
        except BadToken as error:
            raise Refused(error.code, error.message) from error
        return await self._of(claims.owner, f"jwt:{claims.subject}", claims.role, claims.scopes)

    async def _from_key(self, token: str, now: float) -> TenantPrincipal:
        key = await self._keys.check(token, now)
        found = await self._of(key.tenant_id, key.key_id, key.role, key.scopes)
        return msgspec.structs.replace(found, models=key.models)

    async def _from_ticket(self, token: str, now: float) -> TenantPrincipal:
        ticket = tokens.read_ticket(token, now)
        if ticket is None or not self._stands(ticket):
            raise Refused("invalid_token", "The ticket is invalid or has expired.")
        return await self._of(ticket.tenant_id, ticket.subject, ticket.role)

    def _stands(self, ticket: tokens.Ticket) -> bool:
        """Whoever it was made for may still do what they might then."""
        kind, _, name = ticket.subject.partition(":")
        if kind == "key":
            return not self._keys.why_not(name)
        made_at = ticket.expires_at - tokens.TICKET_SECONDS
        return self._users_changed.get(name, float("-inf")) <= made_at

    async def _of(
        self, tenant_id: str, subject: str, role: str, scopes: tuple[str, ...] = policy.ALL_SCOPES
    ) -> TenantPrincipal:
        tenant = await self._tenant(tenant_id)
        reach = "" if tenant_id == self._operator_tenant else tenant_id
        return TenantPrincipal(tenant, subject, policy.Principal(subject, role, reach, scopes))

    async def _tenant(self, tenant_id: str) -> Tenant:
        """Its row; one made a moment ago may still be on its way here through the log."""
        tenant: Tenant | None = await _soon(lambda: self._rows.get(Tenant, tenant_id))
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
    return Refused("invalid_api_key", BAD_KEY)
