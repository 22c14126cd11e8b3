"""JWTs of trusted issuers, checked claim by claim; REST and gateway use the same verifier.

Nothing in a token's header chooses a key but ``kid``, looked up among the issuer's own keys; a
header that points elsewhere (jku, x5u, jwk) or asks for extensions (crit) is refused. The claims
are read strictly, so a duplicate ``owner`` is an error and not the last one. A verified token is
remembered by the SHA-256 of all of it, for at most five minutes and while its key is the issuer's.
"""

import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jwt

from controlplane.adapters.access.issuers import IssuerConfig, KeySet, SigningKey
from controlplane.application import strict_json
from controlplane.domain.policy import GENERAL_SCOPES

LEEWAY_S = 30
CACHE_SIZE = 10_000
CACHE_S = 300.0
MAX_TOKEN_CHARS = 8192
MAX_SUBJECT_CHARS = 200
MAX_KID_CHARS = 255
TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_FORBIDDEN_HEADERS = frozenset({"jku", "x5u", "x5c", "jwk", "crit", "zip", "enc", "b64"})
_REQUIRED = ["exp", "iat", "iss", "aud", "sub"]


class BadToken(Exception):
    """``code``: invalid_token, token_expired, or no_org for a good token without an owner."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Claims(NamedTuple):
    """``owner`` is the tenant. ``role`` and ``scopes`` as the issuer's configuration maps them."""

    owner: str
    subject: str
    expires_at: float
    role: str
    scopes: tuple[str, ...]


class _Asked(NamedTuple):
    """A token taken apart and not yet believed, or (with ``claims``) believed before."""

    digest: bytes
    token: str
    keys: KeySet
    algorithm: str
    kid: str
    payload: dict[str, Any]
    claims: Claims | None = None
    fingerprint: str = ""
    until: float = 0.0


class JwtVerifier:
    """Checks tokens of any of ``issuers``; for threads and event loops alike."""

    def __init__(self, issuers: Sequence[IssuerConfig | KeySet]) -> None:
        sets = [one if isinstance(one, KeySet) else KeySet(one) for one in issuers]
        self._issuers = {keys.config.issuer: keys for keys in sets}
        self._verified: OrderedDict[bytes, _Asked] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, token: str, now: float) -> Claims:
        """The claims of ``token`` at ``now`` (Unix seconds); raises BadToken."""
        asked = self._read(token)
        return self._judge(asked, asked.keys.key(asked.kid), now)

    async def verify_soon(self, token: str, now: float) -> Claims:
        """The same, without holding up the event loop while keys are fetched."""
        asked = self._read(token)
        return self._judge(asked, await asked.keys.key_soon(asked.kid), now)

    def _read(self, token: str) -> _Asked:
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            raise _invalid()
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is not None:
            return known
        header, payload = _parts(token)
        issuer, kid = payload.get("iss"), header.get("kid")
        keys = self._issuers.get(issuer) if isinstance(issuer, str) else None
        if keys is None or not isinstance(kid, str) or not 0 < len(kid) <= MAX_KID_CHARS:
            raise _invalid()
        algorithm = header.get("alg")
        if algorithm not in keys.config.algorithms:
            raise _invalid()
        return _Asked(digest, token, keys, algorithm, kid, payload)

    def _judge(self, asked: _Asked, key: SigningKey | None, now: float) -> Claims:
        if key is None or key.algorithm != asked.algorithm:
            raise _invalid()
        claims = asked.claims
        if claims and key.fingerprint == asked.fingerprint and now < asked.until:
            return claims
        _check_signature(asked, key)
        claims = _checked_claims(asked.payload, asked.keys.config, now)
        until = min(now + CACHE_S, claims.expires_at)
        self._remember(asked._replace(claims=claims, fingerprint=key.fingerprint, until=until))
        return claims

    def _remember(self, asked: _Asked) -> None:
        with self._lock:
            self._verified[asked.digest] = asked
            if len(self._verified) > CACHE_SIZE:
                self._verified.popitem(last=False)


def _check_signature(asked: _Asked, key: SigningKey) -> None:
    """And, by the library, times, issuer and audience."""
    config = asked.keys.config
    try:
        jwt.decode(
            asked.token,
            key.jwk,
            algorithms=[asked.algorithm],
            audience=config.audience,
            issuer=config.issuer,
            leeway=LEEWAY_S,
            options={"require": _REQUIRED},
        )
    except jwt.ExpiredSignatureError as error:
        raise _expired() from error
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
        raise _invalid() from error


def _checked_claims(payload: dict[str, Any], config: IssuerConfig, now: float) -> Claims:
    """What the library is too lenient about: numbers that are strings, our own clock, the owner."""
    times = {name: payload[name] for name in ("exp", "iat", "nbf") if name in payload}
    if not all(isinstance(at, int | float) and not isinstance(at, bool) for at in times.values()):
        raise _invalid()
    if max(times["iat"], times.get("nbf", 0)) > now + LEEWAY_S:
        raise _invalid()
    if times["exp"] <= now - LEEWAY_S:
        raise _expired()
    subject, owner = payload["sub"], payload.get("owner")
    if not isinstance(subject, str) or not 1 <= len(subject) <= MAX_SUBJECT_CHARS:
        raise _invalid()
    if not subject.isprintable():
        raise _invalid()
    if not isinstance(owner, str) or not owner:
        raise BadToken("no_org", "The token names no owner.")
    role = config.role_in(payload) if config.role_claim else ""
    scopes = GENERAL_SCOPES if role else ("inference",)
    return Claims(owner, subject, float(times["exp"]), role or "developer", scopes)


# --- taking apart -----------------------------------------------------------------------------
def _parts(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and claims, strictly parsed and not yet believed."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        raise _invalid()
    header, payload = _object(parts[0]), _object(parts[1])
    if _FORBIDDEN_HEADERS & header.keys():
        raise _invalid()
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower() not in TYPES:
        raise _invalid()
    return header, payload


def _object(part: str) -> dict[str, Any]:
    """One part's JSON object, strictly parsed."""
    try:
        value = strict_json.parse(
            base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True)
        )
    except (binascii.Error, ValueError) as error:
        raise _invalid() from error
    if not isinstance(value, dict):
        raise _invalid()
    return value


def _invalid() -> BadToken:
    return BadToken("invalid_token", "The token is invalid.")


def _expired() -> BadToken:
    return BadToken("token_expired", "The token has expired.")
