"""A tenant's API keys; part of the tenant's aggregate, in its stream ``tenant-<id>``.

A key has a role, scopes and perhaps a list of models, and **secrets**: the first bears the key's
own id, each rotation adds one. Two are good at a time, the newest and the one before until a chosen
moment; rotating again ends the older at once::

    ApiKeyIssued(key k1)                              k1 good
    ApiKeyRotated(secret s2, previous_until=100)      s2 good, k1 until 100
    ApiKeyRotated(secret s3, previous_until=200)      s3 good, s2 until 200, k1 no more

A suspended key opens nothing and may be resumed; a revoked one never comes back. Rejected: a new
key id for each secret, which would split a key's history and its list of models.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from controlplane.domain.decider import Command, Event, State
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import KeyId, TenantId
from controlplane.domain.policy import ALL_SCOPES, ROLES

MAX_OVERLAP_SECONDS = 366 * 86_400.0
MAX_EXPIRY = 253_402_300_800.0  # the year 10000: no calendar shows what comes after it
MAX_MODELS = 256


# --- events -----------------------------------------------------------------------------------
class ApiKeyIssued(Event, frozen=True, tag_field="type", tag="ApiKeyIssued"):
    """The secret is never here: its hash lives in the erasable access store. ``models``: the
    names that the key may ask for; empty means all that its tenant may."""

    tenant_id: TenantId
    key_id: KeyId
    name: str
    last4: str
    scopes: tuple[str, ...]
    expires_at: float | None
    at: float
    role: str = "developer"
    models: tuple[str, ...] = ()


class ApiKeyRotated(Event, frozen=True, tag_field="type", tag="ApiKeyRotated"):
    """``secret_id`` names the newest secret; the one before is good until ``previous_until``."""

    tenant_id: TenantId
    key_id: KeyId
    secret_id: str
    last4: str
    previous_until: float
    at: float


class ApiKeySuspended(Event, frozen=True, tag_field="type", tag="ApiKeySuspended"):
    tenant_id: TenantId
    key_id: KeyId
    reason: str
    at: float


class ApiKeyResumed(Event, frozen=True, tag_field="type", tag="ApiKeyResumed"):
    tenant_id: TenantId
    key_id: KeyId
    at: float


class ApiKeyRevoked(Event, frozen=True, tag_field="type", tag="ApiKeyRevoked"):
    tenant_id: TenantId
    key_id: KeyId
    at: float


KeyEvent = ApiKeyIssued | ApiKeyRotated | ApiKeySuspended | ApiKeyResumed | ApiKeyRevoked


# --- state ------------------------------------------------------------------------------------
class Key(State, frozen=True):
    """A live key. ``previous_until`` counts only while there is a ``previous_secret_id``."""

    role: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    expires_at: float | None
    secret_id: str
    previous_secret_id: str = ""
    previous_until: float = 0.0
    suspended: bool = False


class KeyState(Protocol):
    """What decides whether a key is good now: ``Key``, or a row of the read model."""

    @property
    def expires_at(self) -> float | None: ...
    @property
    def secret_id(self) -> str: ...
    @property
    def previous_secret_id(self) -> str: ...
    @property
    def previous_until(self) -> float: ...
    @property
    def suspended(self) -> bool: ...


class Keys(State, frozen=True):
    """A tenant's keys: the live ones by id, and the ids that were revoked."""

    live: Mapping[str, Key] = msgspec.field(default_factory=dict)
    revoked: frozenset[str] = frozenset()


NO_KEYS = Keys()


def why_not(key: KeyState, secret_id: str, now: float) -> str:
    """Why ``secret_id`` does not open the key at ``now``: suspended, expired, rotated; or ""."""
    if key.suspended:
        return "suspended"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    if secret_id == key.secret_id:
        return ""
    is_previous = bool(secret_id) and secret_id == key.previous_secret_id
    return "" if is_previous and now < key.previous_until else "rotated"


def evolve(keys: Keys, event: KeyEvent) -> Keys:
    match event:
        case ApiKeyIssued(key_id=key_id):
            key = Key(event.role, event.scopes, event.models, event.expires_at, key_id)
            return _put(keys, key_id, key)
        case ApiKeyRevoked(key_id=key_id):
            live = {name: key for name, key in keys.live.items() if name != key_id}
            return Keys(live, keys.revoked | {key_id})
    known = keys.live.get(event.key_id)
    return _put(keys, event.key_id, _changed(known, event)) if known else keys


def _changed(key: Key, event: KeyEvent) -> Key:
    match event:
        case ApiKeyRotated(secret_id=secret_id, previous_until=until):
            return replace(
                key, secret_id=secret_id, previous_secret_id=key.secret_id, previous_until=until
            )
        case ApiKeySuspended():
            return replace(key, suspended=True)
        case ApiKeyResumed():
            return replace(key, suspended=False)
    return key


def _put(keys: Keys, key_id: str, key: Key) -> Keys:
    return replace(keys, live={**keys.live, key_id: key})


# --- commands ---------------------------------------------------------------------------------
class IssueApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    name: str
    last4: str
    scopes: tuple[str, ...]
    expires_at: float | None
    now: float
    role: str = "developer"
    models: tuple[str, ...] = ()


class RotateApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    secret_id: str
    last4: str
    previous_until: float
    now: float


class SuspendApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    reason: str
    now: float


class ResumeApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    now: float


class RevokeApiKey(Command, frozen=True):
    tenant_id: TenantId
    key_id: KeyId
    now: float


KeyCommand = IssueApiKey | RotateApiKey | SuspendApiKey | ResumeApiKey | RevokeApiKey


# --- decisions --------------------------------------------------------------------------------
def decide(keys: Keys, command: KeyCommand) -> list[Event]:
    if isinstance(command, IssueApiKey):
        return _issue(keys, command)
    if isinstance(command, RevokeApiKey) and command.key_id in keys.revoked:
        return []
    key = keys.live.get(command.key_id)
    if key is None:
        raise NotFound("key", command.key_id)
    match command:
        case RotateApiKey():
            return _rotate(key, command)
        case SuspendApiKey(tenant_id, key_id, reason, now):
            return [] if key.suspended else [ApiKeySuspended(tenant_id, key_id, reason, now)]
        case ResumeApiKey(tenant_id, key_id, now):
            return [ApiKeyResumed(tenant_id, key_id, now)] if key.suspended else []
        case RevokeApiKey(tenant_id, key_id, now):
            return [ApiKeyRevoked(tenant_id, key_id, now)]
    raise AssertionError(command)


def _issue(keys: Keys, command: IssueApiKey) -> list[Event]:
    if command.key_id in keys.live:
        return []
    if command.key_id in keys.revoked:
        raise Conflict("key_revoked", "A revoked key cannot be issued again.")
    unknown = set(command.scopes) - set(ALL_SCOPES)
    if unknown or not command.scopes:
        raise Invalid("invalid_scope", f"Scopes are some of {', '.join(ALL_SCOPES)}.", "scopes")
    if command.role not in ROLES:
        raise Invalid("invalid_role", f"role is one of {', '.join(ROLES)}.", "role")
    if command.expires_at is not None and not command.now < command.expires_at < MAX_EXPIRY:
        text = "A key must expire in the future, and before the year 10000."
        raise Invalid("invalid_expiry", text, "expires_at")
    if len(command.models) > MAX_MODELS:
        raise Invalid("too_many", f"At most {MAX_MODELS} models; none means all.", "models")
    return [
        ApiKeyIssued(
            command.tenant_id,
            command.key_id,
            command.name,
            command.last4,
            command.scopes,
            command.expires_at,
            command.now,
            command.role,
            command.models,
        )
    ]


def _rotate(key: Key, command: RotateApiKey) -> list[Event]:
    if command.secret_id in (key.secret_id, key.previous_secret_id):
        return []
    if not command.now <= command.previous_until <= command.now + MAX_OVERLAP_SECONDS:
        raise Invalid(
            "invalid_expiry",
            "The old secret ends between now and a year from now.",
            "previous_valid_until",
        )
    return [
        ApiKeyRotated(
            command.tenant_id,
            command.key_id,
            command.secret_id,
            command.last4,
            command.previous_until,
            command.now,
        )
    ]
