"""An issuer of tokens: keys, what it publishes, and an HTTP server that publishes it."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER, AUDIENCE = "https://id.example", "engine"
RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_KEY = rsa.generate_private_key(65537, 2048)
CURVE_KEY = ec.generate_private_key(ec.SECP256R1())
EDWARDS_KEY = ed25519.Ed25519PrivateKey.generate()


def jwk(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    """The public half as an issuer publishes it."""
    kinds = {
        rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
        ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
    }
    algorithm = next(a for kind, a in kinds.items() if isinstance(key, kind))
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, "use": "sig", **more}


JWKS = {
    "keys": [
        jwk(RSA_KEY, "k1", alg="RS256"),
        jwk(CURVE_KEY, "e1"),
        jwk(EDWARDS_KEY, "d1"),
        jwk(OTHER_KEY, "enc", alg="RS256") | {"use": "enc"},
        jwk(rsa.generate_private_key(65537, 1024), "weak", alg="RS256"),
        {"kty": "oct", "kid": "h1", "k": "c2VjcmV0", "alg": "HS256"},
        jwk(OTHER_KEY, ""),
    ]
}
CONFIG = {
    "issuer": ISSUER,
    "audience": AUDIENCE,
    "algorithms": ["RS256", "ES256", "EdDSA"],
    "jwks": JWKS,
    "role_claim": "groups",
    "roles": {"ml-admins": "admin", "ml-readers": "auditor"},
}


def claims(**changes: Any) -> dict[str, Any]:
    """Of a good token; None leaves one out."""
    now = int(time.time())
    full = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "owner": "acme", "iat": now,
            "exp": now + 600} | changes  # fmt: skip
    return {name: value for name, value in full.items() if value is not None}


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: Any = "k1", header: Any = None,
          **changes: Any) -> str:  # fmt: skip
    headers = {"kid": kid} | (header or {})
    return jwt.encode(claims(**changes), key, algorithm, headers=headers)


def part(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=")


def raw(header: Any, payload: Any, key: Any = RSA_KEY) -> str:
    """Signed as RS256 whatever the header says; parts may be values or JSON text."""
    signed = part(header) + b"." + part(payload)
    signature = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256).sign(signed, key)
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def hs256(secret: bytes, kid: str = "k1") -> str:
    signed = raw({"alg": "HS256", "kid": kid}, claims()).rpartition(".")[0]
    mac = hmac.digest(secret, signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


class Issuer:
    """Publishes its keys over HTTP on this machine; ``failing`` answers 503, ``slow_s`` waits."""

    def __init__(self, owner: str = "acme") -> None:
        self.owner, self.failing, self.slow_s, self.num_fetches = owner, False, 0.0, 0
        self._keys: dict[str, Any] = {}
        self.newest = ""
        self.rotate()

    def rotate(self, keep: int = 2) -> str:
        """A new key that signs from now on; the last ``keep`` stay published. Its id."""
        self.newest = f"k{len(self._keys) + 1}-{time.monotonic_ns()}"
        self._keys[self.newest] = ec.generate_private_key(ec.SECP256R1())
        self._published = list(self._keys)[-keep:]
        return self.newest

    def sign(self, kid: str = "", **changes: Any) -> str:
        changes = {"iss": self.url, "owner": self.owner} | changes
        kid = kid or self.newest
        return token(self._keys[kid], "ES256", kid, **changes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "audience": AUDIENCE,
            "algorithms": ["ES256"],
            "jwks_url": f"{self.url}/jwks.json",
            **more,
        }

    def document(self) -> bytes:
        return json.dumps({"keys": [jwk(self._keys[kid], kid) for kid in self._published]}).encode()

    @contextmanager
    def serving(self) -> Iterator["Issuer"]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.num_fetches += 1
                time.sleep(issuer.slow_s)
                if self.path == "/elsewhere.json":
                    self.send_response(302)
                    self.send_header("Location", f"{issuer.url}/jwks.json")
                    self.end_headers()
                    return
                self.send_response(503 if issuer.failing else 200)
                self.end_headers()
                self.wfile.write(issuer.document())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
