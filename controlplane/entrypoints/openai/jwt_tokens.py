"""JWTs of the issuers that the installation trusts, checked claim by claim.

The issuers stand in a JSON file, a list of::

    {"issuer": "https://id.example", "audience": "engine", "algorithms": ["RS256"],
     "jwks_url": "https://id.example/jwks.json"}          or "jwks_file", or "jwks" itself

Nothing in a token's header chooses a key but ``kid``, looked up among the issuer's own keys; a
header that points elsewhere (jku, x5u, jwk) or asks for extensions (crit) is refused. The claims
are read by the strict JSON parser, so a duplicate ``owner`` is an error and not the last one.
A verified token is remembered by the SHA-256 of all of it, for at most five minutes.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import msgspec

from controlplane.application.serve import Refused
from controlplane.entrypoints.openai import strict_json

LEEWAY_S = 30
CACHE_SIZE = 10_000
CACHE_S = 300.0
JWKS_TTL_S = 600.0
JWKS_STALE_S = 24 * 3600.0
REFETCH_S = 30.0
FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1 << 20
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"})
_FORBIDDEN_HEADERS = frozenset({"jku", "x5u", "x5c", "jwk", "crit", "zip", "enc", "b64"})


@dataclass(frozen=True, slots=True)
class Claims:
    owner: str
    subject: str
    expires_at: float


class IssuerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256",)
    jwks_url: str = ""
    jwks_file: str = ""
    jwks: dict[str, Any] | None = None


@dataclass
class _Issuer:
    """One trusted issuer with its keys by ``kid``; times are monotonic seconds."""

    config: IssuerConfig
    keys: dict[str, jwt.PyJWK] = field(default_factory=dict)
    fetched_at: float = float("-inf")
    tried_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def key(self, kid: str) -> jwt.PyJWK | None:
        """By id; keys are fetched anew when old, and for an unknown id at most twice a minute."""
        now = time.monotonic()
        if kid not in self.keys or now - self.fetched_at > JWKS_TTL_S:
            await self._refresh()
        if time.monotonic() - self.fetched_at > JWKS_STALE_S:
            return None
        return self.keys.get(kid)

    async def _refresh(self) -> None:
        async with self.lock:
            now = time.monotonic()
            if now - self.tried_at < REFETCH_S:
                return
            self.tried_at = now
            try:
                document = await asyncio.to_thread(self._read)
                self.keys = _keys_of(document, self.config.algorithms)
                self.fetched_at = now
            except (OSError, ValueError, jwt.PyJWTError):
                return  # the old keys stay good for a day

    def _read(self) -> Any:
        if self.config.jwks is not None:
            return self.config.jwks
        if self.config.jwks_file:
            return json.loads(Path(self.config.jwks_file).read_bytes())
        with urllib.request.urlopen(self.config.jwks_url, timeout=FETCH_TIMEOUT_S) as response:
            return json.loads(response.read(MAX_JWKS_BYTES))


def _keys_of(document: Any, algorithms: Sequence[str]) -> dict[str, jwt.PyJWK]:
    """Signature keys of the allowed algorithms that have an id."""
    found = {}
    for item in document["keys"]:
        if item.get("kid") and item.get("use", "sig") == "sig" and item.get("kty") != "oct":
            key = jwt.PyJWK(item)
            if key.algorithm_name in algorithms:
                found[str(item["kid"])] = key
    return found


def read_issuers(path: Path | None) -> tuple[IssuerConfig, ...]:
    """The configured issuers; raises ValueError for a file that is wrong."""
    if path is None:
        return ()
    issuers = msgspec.json.decode(path.read_bytes(), type=tuple[IssuerConfig, ...])
    for issuer in issuers:
        if not issuer.algorithms or not set(issuer.algorithms) <= ALGORITHMS:
            raise ValueError(f"{issuer.issuer}: algorithms are some of {sorted(ALGORITHMS)}")
        if issuer.jwks_url and not issuer.jwks_url.startswith("https://"):
            raise ValueError(f"{issuer.issuer}: jwks_url is an https:// address")
    return issuers


class JwtVerifier:
    """Checks tokens of any of ``issuers``."""

    def __init__(self, issuers: Sequence[IssuerConfig]) -> None:
        self._issuers = {config.issuer: _Issuer(config) for config in issuers}
        self._verified: OrderedDict[bytes, tuple[Claims, float]] = OrderedDict()

    async def verify(self, token: str, now: float) -> Claims:
        """The claims; raises Refused invalid_token, token_expired or no_org."""
        name = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(name)
        if known is not None and now < min(known[1], known[0].expires_at):
            return known[0]
        claims = await self._verify(token, now)
        self._verified[name] = (claims, now + CACHE_S)
        if len(self._verified) > CACHE_SIZE:
            self._verified.popitem(last=False)
        return claims

    async def _verify(self, token: str, now: float) -> Claims:
        header, payload = _read_parts(token)
        issuer = self._issuers.get(_text(payload, "iss"))
        if issuer is None:
            raise _invalid()
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in issuer.config.algorithms or not isinstance(kid, str):
            raise _invalid()
        key = await issuer.key(kid)
        if key is None or key.algorithm_name != algorithm:
            raise _invalid()
        _check_signature(token, key, str(algorithm), issuer.config)
        return _checked_claims(payload, now)


def _read_parts(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and claims, strictly parsed and not yet believed."""
    parts = token.split(".")
    if len(parts) != 3:
        raise _invalid()
    try:
        header, payload = (strict_json.parse_object(_unbase64(part)) for part in parts[:2])
    except Refused as error:
        raise _invalid() from error
    if _FORBIDDEN_HEADERS & header.keys():
        raise _invalid()
    if str(header.get("typ", "JWT")).lower() not in ("jwt", "at+jwt"):
        raise _invalid()
    return header, payload


def _check_signature(token: str, key: jwt.PyJWK, algorithm: str, config: IssuerConfig) -> None:
    try:
        jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=config.audience,
            issuer=config.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iat", "iss", "aud", "sub", "owner"]},
        )
    except jwt.ExpiredSignatureError as error:
        raise Refused("token_expired", "The token has expired.") from error
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
        raise _invalid() from error


def _checked_claims(payload: dict[str, Any], now: float) -> Claims:
    """What the library is too lenient about: numbers that are strings, and the owner."""
    times = [payload.get(name) for name in ("exp", "iat", "nbf") if name in payload]
    if not all(isinstance(at, int | float) and not isinstance(at, bool) for at in times):
        raise _invalid()
    if payload["iat"] > now + LEEWAY_S:
        raise _invalid()
    if payload["exp"] <= now - LEEWAY_S:
        raise Refused("token_expired", "The token has expired.")
    owner = payload.get("owner")
    if not isinstance(owner, str) or not owner:
        raise Refused("no_org", "The token names no owner.")
    subject = _text(payload, "sub")
    if not 1 <= len(subject) <= 200:
        raise _invalid()
    return Claims(owner, subject, float(payload["exp"]))


def _text(payload: dict[str, Any], name: str) -> str:
    value = payload.get(name)
    if not isinstance(value, str):
        raise _invalid()
    return value


def _unbase64(part: str) -> bytes:
    try:
        return base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _invalid() from error


def _invalid() -> Refused:
    return Refused("invalid_token", "The token is invalid.")
