"""API keys and playground tickets: making, hashing and checking them.

A key is ``sk_<key id>.<secret>``. The key id is public and finds the row; of the secret only an
HMAC-SHA-256 under the installation's secret key is stored. The secret has 256 random bits, so a
slow password hash would add 300 ms to each request and no safety.

A ticket is ``tkt_<payload>.<mac>``: a tenant, a subject and its role, good for ten
minutes, made by the web process for the dashboard's playground and checked by a gateway without
any look-up::

    ticket = sign_ticket("acme", "user:ann", now=0.0)
    read_ticket(ticket.text, now=60.0)  # Ticket(text=…, tenant_id="acme", subject="user:ann", …)
    read_ticket(ticket.text, now=601.0)  # None: expired
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

import msgspec
from django.conf import settings

KEY_PREFIX = "sk_"
TICKET_PREFIX = "tkt_"
TICKET_SECONDS = 600.0
MAX_TOKEN_LENGTH = 8192  # refused by length before any decoding

_KEY = re.compile(r"sk_([0-9a-f]{12})\.([A-Za-z0-9_-]{20,100})", re.ASCII)


def new_key() -> tuple[str, str, str]:
    """``(key_id, secret, full)``; ``full`` is what the caller shows once."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return key_id, secret, f"{KEY_PREFIX}{key_id}.{secret}"


def new_secret(key_id: str) -> tuple[str, str, str]:
    """``(secret_id, secret, full)`` of one more secret of a key."""
    secret_id, secret, _ = new_key()
    return secret_id, secret, f"{KEY_PREFIX}{key_id}.{secret}"


def split_key(text: str) -> tuple[str, str] | None:
    """``(key_id, secret)`` of a full key, or None if it does not have the form of one."""
    if len(text) > MAX_TOKEN_LENGTH:
        return None
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def hash_secret(secret: str) -> str:
    """Hex HMAC-SHA-256 of ``secret`` under the installation's secret key."""
    return _mac(b"api-key", secret.encode()).hex()


def secret_matches(secret: str, stored_hash: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hash_secret(secret), stored_hash)


class _Claims(msgspec.Struct, frozen=True):
    tenant: str
    sub: str
    role: str
    exp: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """``expires_at`` in Unix seconds; ``subject`` is ``user:<name>``, of that ``role``."""

    text: str
    tenant_id: str
    subject: str
    role: str
    expires_at: float


def sign_ticket(
    tenant_id: str,
    subject: str,
    now: float,
    seconds: float = TICKET_SECONDS,
    role: str = "developer",
) -> Ticket:
    """A ticket for at most ten minutes from ``now`` (Unix seconds)."""
    expires_at = now + min(seconds, TICKET_SECONDS)
    payload = msgspec.json.encode(_Claims(tenant_id, subject, role, expires_at))
    text = f"{TICKET_PREFIX}{_base64(payload)}.{_base64(_mac(b'ticket', payload))}"
    return Ticket(text, tenant_id, subject, role, expires_at)


def read_ticket(text: str, now: float) -> Ticket | None:
    """The ticket's content if we signed it and it has not expired, else None."""
    if not text.startswith(TICKET_PREFIX) or len(text) > MAX_TOKEN_LENGTH:
        return None
    payload_part, _, mac_part = text[len(TICKET_PREFIX) :].partition(".")
    try:
        payload, mac = _unbase64(payload_part), _unbase64(mac_part)
    except (binascii.Error, ValueError):
        return None
    if not hmac.compare_digest(_mac(b"ticket", payload), mac):
        return None
    claims = msgspec.json.decode(payload, type=_Claims)
    if claims.exp <= now:
        return None
    return Ticket(text, claims.tenant, claims.sub, claims.role, claims.exp)


def _mac(purpose: bytes, message: bytes) -> bytes:
    """Keyed by purpose too, so that a hash of one kind never passes for another."""
    return hmac.digest(settings.SECRET_KEY.encode(), purpose + b"\x00" + message, hashlib.sha256)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
