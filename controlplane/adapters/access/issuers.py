"""The JWT issuers that the installation trusts, and their signing keys.

They stand in a JSON file (``ENGINE_JWT_ISSUERS``), a list of::

    {"issuer": "https://id.example", "audience": "engine", "algorithms": ["RS256"],
     "jwks_url": "https://id.example/jwks.json",       or "jwks_file", or "jwks" itself
     "role_claim": "realm_access.roles",               where the token says its role, if anywhere
     "roles": {"ml-admins": "admin"}}                  what that claim's values mean here

Keys are fetched when one is needed and they are older than ten minutes, or when a token names a
key id that is not known; for that at most once in 30 seconds, whatever is asked::

    0 s     token with kid k1     nothing known: fetch, k1 is there
    400 s   the issuer signs with k2 from now on
    401 s   token with kid k2     unknown: fetch, k2 is there
    402 s   token with kid x      unknown, but 30 s are not over: refused
    1010 s  token with kid k2     older than ten minutes: fetch first
    1010 s  the fetch fails       k2 stays good for a day after the last fetch that did not

Of many callers that need a fetch one makes it and the others wait for it. Rejected: PyJWT's own
client, which fetches for every unknown key id and has no limit on how often.
"""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jwt
import msgspec
import structlog

from controlplane.domain.policy import ROLES

TTL_S = 600.0
STALE_S = 24 * 3600.0
REFETCH_S = 30.0
RETRY_S = 5.0  # while there are no keys at all
_INTERVAL = {"first": RETRY_S, "search": REFETCH_S, "renew": REFETCH_S}
FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1 << 20
MIN_RSA_BITS = 2048
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"})

log = structlog.get_logger("issuers")


class IssuerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``role_claim``: a claim's name, or a path into it with dots; without it, and for a token
    whose claim names no role, the token is good for inference alone. ``roles`` empty: the claim's
    values are our roles' own names."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256",)
    jwks_url: str = ""
    jwks_file: str = ""
    jwks: dict[str, Any] | None = None
    role_claim: str = ""
    roles: dict[str, str] = {}

    def role_in(self, claims: Mapping[str, Any]) -> str:
        """The strongest role that the token's claim names; "" if none."""
        found: Any = claims
        for name in self.role_claim.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        values = found if isinstance(found, list) else [found]
        meant = {self._meaning(value) for value in values if isinstance(value, str)}
        return next((role for role in ROLES if role in meant), "")

    def _meaning(self, value: str) -> str:
        return self.roles.get(value, "") if self.roles else value


def read_issuers(path: Path | None) -> tuple[IssuerConfig, ...]:
    """The configured issuers; raises ValueError for a file that is wrong."""
    if path is None:
        return ()
    issuers = msgspec.json.decode(path.read_bytes(), type=tuple[IssuerConfig, ...])
    for issuer in issuers:
        _check(issuer)
    if len({issuer.issuer for issuer in issuers}) < len(issuers):
        raise ValueError("an issuer is named twice")
    return issuers


def _check(issuer: IssuerConfig) -> None:
    name = issuer.issuer
    if not name or not issuer.audience:
        raise ValueError(f"{name}: issuer and audience are needed")
    if not issuer.algorithms or not set(issuer.algorithms) <= ALGORITHMS:
        raise ValueError(f"{name}: algorithms are some of {sorted(ALGORITHMS)}")
    sources = (issuer.jwks_url, issuer.jwks_file, issuer.jwks)
    if sum(bool(source) for source in sources) != 1:
        raise ValueError(f"{name}: one of jwks_url, jwks_file and jwks is needed")
    if issuer.jwks_url and not is_safe_url(issuer.jwks_url):
        raise ValueError(f"{name}: jwks_url is an https:// address")
    if not set(issuer.roles.values()) <= set(ROLES):
        raise ValueError(f"{name}: roles are some of {', '.join(ROLES)}")


def is_safe_url(url: str) -> bool:
    """https, or http to this very machine."""
    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "::1", "localhost")
    return parts.scheme == "https" or (parts.scheme == "http" and local)


# --- keys -------------------------------------------------------------------------------------
class SigningKey(NamedTuple):
    """``fingerprint`` changes with the key, whatever its id."""

    algorithm: str
    jwk: jwt.PyJWK
    fingerprint: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An issuer's address was chosen by the operator; where it redirects to was not."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def read_document(config: IssuerConfig) -> Any:
    """The issuer's JWKS; raises OSError or ValueError."""
    if config.jwks is not None:
        return config.jwks
    if config.jwks_file:
        return json.loads(Path(config.jwks_file).read_bytes())
    with _opener.open(config.jwks_url, timeout=FETCH_TIMEOUT_S) as response:
        body = response.read(MAX_JWKS_BYTES + 1)
    if len(body) > MAX_JWKS_BYTES:
        raise ValueError("the JWKS is too large")
    return json.loads(body)


class KeySet:
    """One issuer's keys by id, for threads and event loops alike; times are monotonic seconds."""

    def __init__(
        self,
        config: IssuerConfig,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self._monotonic = config, monotonic
        self._keys: Mapping[str, SigningKey] = {}
        self._fetched_at = float("-inf")
        self._tried_at: dict[str, float] = {}  # by why: see _reason
        self._lock = threading.Lock()
        self._fetching: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jwks")

    def key(self, kid: str) -> SigningKey | None:
        """Waits for a fetch if one is due."""
        while (fetch := self._due(kid)) is not None:
            fetch.result()
        return self._good(kid)

    async def key_soon(self, kid: str) -> SigningKey | None:
        """The same, without holding up the event loop."""
        while (fetch := self._due(kid)) is not None:
            await asyncio.wrap_future(fetch)
        return self._good(kid)

    def _good(self, kid: str) -> SigningKey | None:
        age = self._monotonic() - self._fetched_at
        return self._keys.get(kid) if age <= STALE_S else None

    def _due(self, kid: str) -> "Future[None] | None":
        """The fetch to wait for before ``kid`` can be judged; None if none is under way or due."""
        if not self._reason(kid):
            return None
        with self._lock:
            if self._fetching is not None and not self._fetching.done():
                return self._fetching
            reason, now = self._reason(kid), self._monotonic()
            if not reason or now - self._tried_at.get(reason, float("-inf")) < _INTERVAL[reason]:
                return None
            self._tried_at[reason] = now
            self._fetching = self._thread.submit(self._fetch, now)
            return self._fetching

    def _reason(self, kid: str) -> str:
        """Why the keys at hand do not do; each reason may cause a fetch only so often, so that
        made-up key ids cannot keep a renewal from happening."""
        if not self._keys:
            return "first"
        if kid not in self._keys:
            return "search"
        return "renew" if self._monotonic() - self._fetched_at > TTL_S else ""

    def _fetch(self, now: float) -> None:
        """The old keys stay if the new ones cannot be had."""
        try:
            self._keys = keys_of(read_document(self.config), self.config.algorithms)
            self._fetched_at = now
        except Exception as error:  # what another party's server may send has no end
            log.warning("keys not fetched", issuer=self.config.issuer, error=type(error).__name__)


def keys_of(document: Any, algorithms: Sequence[str]) -> dict[str, SigningKey]:
    """The public signature keys of the allowed algorithms that have an id; raises ValueError if
    two share one."""
    found: dict[str, SigningKey] = {}
    for item in document["keys"]:
        kid = item.get("kid")
        if not isinstance(kid, str) or not kid or not _is_public_signing_key(item):
            continue
        if kid in found:
            raise ValueError("two keys have one id")
        key = jwt.PyJWK(item)
        if key.algorithm_name in algorithms and _is_strong(key):
            text = json.dumps(item, sort_keys=True)
            found[kid] = SigningKey(str(key.algorithm_name), key, text)
    return found


def _is_public_signing_key(item: Mapping[str, Any]) -> bool:
    usable = item.get("use", "sig") == "sig" and "verify" in item.get("key_ops", ["verify"])
    return usable and item.get("kty") in ("RSA", "EC", "OKP") and "d" not in item


def _is_strong(key: jwt.PyJWK) -> bool:
    return key.key_type != "RSA" or key.key.key_size >= MIN_RSA_BITS
