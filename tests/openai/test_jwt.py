"""Only tokens that a trusted issuer signed, for us, now, with an owner; no others."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from controlplane.application.serve import Refused
from controlplane.entrypoints.openai.jwt_tokens import (
    IssuerConfig,
    JwtVerifier,
    read_issuers,
)

ISSUER, AUDIENCE = "https://id.example", "engine"
KEY = rsa.generate_private_key(65537, 2048)
OTHER = rsa.generate_private_key(65537, 2048)
CURVE = ec.generate_private_key(ec.SECP256R1())


def jwk(key: Any, kid: str, algorithm: type[Any] = jwt.algorithms.RSAAlgorithm) -> dict[str, Any]:
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, "use": "sig"}


JWKS = {
    "keys": [
        jwk(KEY, "k1") | {"alg": "RS256"},
        jwk(CURVE, "e1", jwt.algorithms.ECAlgorithm),
        {"kty": "oct", "kid": "h1", "k": "c2VjcmV0"},
    ]
}


@pytest.fixture
def verifier() -> JwtVerifier:
    return JwtVerifier([IssuerConfig(ISSUER, AUDIENCE, ("RS256", "ES256"), jwks=JWKS)])


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    full = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "owner": "acme", "iat": now,
            "exp": now + 600} | changes  # fmt: skip
    return {name: value for name, value in full.items() if value is not None}


def token(key: Any = KEY, algorithm: str = "RS256", kid: Any = "k1", header: Any = None,
          **changes: Any) -> str:  # fmt: skip
    headers = {"kid": kid} | (header or {})
    return jwt.encode(claims(**changes), key, algorithm, headers=headers)


def raw(header: Any, payload: Any, key: Any = KEY) -> str:
    """Signed as RS256 whatever the header says; parts may be dicts or JSON text."""

    def part(value: Any) -> bytes:
        text = value if isinstance(value, str) else json.dumps(value)
        return base64.urlsafe_b64encode(text.encode()).rstrip(b"=")

    signed = part(header) + b"." + part(payload)
    signature = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256).sign(signed, key)
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


HEADER = {"alg": "RS256", "kid": "k1", "typ": "JWT"}


async def test_a_good_token_names_owner_and_subject(verifier: JwtVerifier) -> None:
    """RS256 and ES256, a list of audiences, and the second time from memory."""
    for good in (token(), token(CURVE, "ES256", "e1"), token(aud=[AUDIENCE, "x"])):
        for _ in range(2):
            found = await verifier.verify(good, time.time())
            assert (found.owner, found.subject) == ("acme", "ann")


def forgeries() -> list[tuple[str, str]]:
    """(token, why) pairs; all must be refused."""
    now = int(time.time())
    public = KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    unsigned = raw({"alg": "none", "kid": "k1"}, claims()).rpartition(".")[0] + "."
    good = token()
    return [
        (unsigned, "alg none"),
        (raw({"alg": "nOnE", "kid": "k1"}, claims()), "alg nOnE"),
        (raw({"alg": "HS256", "kid": "k1"}, claims()), "HS256 by header"),
        (_hs256(public), "HS256 signed with the public key"),
        (_hs256(b"secret", "h1"), "a symmetric key in the JWKS"),
        (token(OTHER), "another key"),
        (token(algorithm="RS512"), "algorithm not listed"),
        (token(CURVE, "ES256", "k1"), "algorithm differs from the key's"),
        (token(kid="unknown"), "unknown kid"),
        (token(kid="../../dev/null"), "kid as a path"),
        (token(kid="' UNION SELECT 1 --"), "kid as SQL"),
        (raw(HEADER | {"kid": 7}, claims()), "kid as a number"),
        (raw({"alg": "RS256"}, claims()), "no kid"),
        (token(header={"crit": ["x"], "x": 1}), "crit"),
        (token(header={"jku": "https://evil.example"}), "jku"),
        (token(header={"x5u": "https://evil.example"}), "x5u"),
        (token(header={"jwk": JWKS["keys"][0]}), "embedded jwk"),
        (token(header={"zip": "DEF"}), "zip"),
        (raw(HEADER | {"typ": "JOSE"}, claims()), "typ"),
        (token(iss="https://id.example.evil"), "issuer with a suffix"),
        (raw(HEADER, claims(iss=[ISSUER])), "issuer as a list"),
        (token(iss=None), "no issuer"),
        (token(aud="other"), "audience"),
        (token(aud=None), "no audience"),
        (token(exp=now - 100), "expired"),
        (token(exp=None), "no exp"),
        (raw(HEADER, claims(exp=str(now + 600))), "exp as a string"),
        (raw(HEADER, json.dumps(claims()).replace(str(now + 600), "1e999")), "exp 1e999"),
        (raw(HEADER, claims(exp=True)), "exp as a boolean"),
        (token(nbf=now + 600), "not yet valid"),
        (token(iat=now + 600), "issued in the future"),
        (token(iat=None), "no iat"),
        (raw(HEADER, claims(iat=str(now))), "iat as a string"),
        (token(sub=None), "no subject"),
        (raw(HEADER, claims(sub=7)), "subject as a number"),
        (token(sub=""), "empty subject"),
        (token(owner=None), "no owner"),
        (token(owner=""), "empty owner"),
        (raw(HEADER, claims(owner=7)), "owner as a number"),
        (raw(HEADER, claims(owner=["acme"])), "owner as a list"),
        (raw(HEADER, json.dumps(claims())[:-1] + ',"owner":"rich"}'), "two owners"),
        (raw(HEADER, "[]"), "claims as a list"),
        (raw("[]", claims()), "header as a list"),
        (raw(HEADER, "{" * 5000), "nested claims"),
        (good[:-6] + "AAAAAA", "signature changed"),
        (good.rpartition(".")[0], "no signature"),
        (good + ".x", "a fourth part"),
        (good.replace(".", "..", 1), "an empty part"),
        ("a.b.c", "no base64"),
        ("", "nothing"),
        ("é.é.é", "no ASCII"),
    ]


def _hs256(secret: bytes, kid: str = "k1") -> str:
    signed = raw({"alg": "HS256", "kid": kid}, claims()).rpartition(".")[0]
    mac = hmac.digest(secret, signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


@pytest.mark.parametrize(("forged", "why"), forgeries(), ids=[why for _, why in forgeries()])
async def test_a_forged_token_is_refused(verifier: JwtVerifier, forged: str, why: str) -> None:
    """With one of three codes, and never by an exception of another kind."""
    with pytest.raises(Refused) as refused:
        await verifier.verify(forged, time.time())
    assert refused.value.code in ("invalid_token", "token_expired", "no_org")


async def test_tokens_with_one_prefix_are_judged_apart(verifier: JwtVerifier) -> None:
    """The memory of good tokens is by the whole token."""
    good = token()
    await verifier.verify(good, time.time())
    with pytest.raises(Refused):
        await verifier.verify(good[:-4] + "AAAA", time.time())


async def test_a_remembered_token_expires(verifier: JwtVerifier) -> None:
    """At its exp, not when the memory does."""
    short = token(exp=int(time.time()) + 5)
    await verifier.verify(short, time.time())
    with pytest.raises(Refused):
        await verifier.verify(short, time.time() + 3600)


async def test_without_issuers_no_token_is_good() -> None:
    """The default: nothing but API keys and tickets."""
    with pytest.raises(Refused):
        await JwtVerifier(()).verify(token(), time.time())


def test_a_wrong_issuer_file_is_refused(tmp_path: Any) -> None:
    """Unknown fields, symmetric algorithms and plain http keep the process from starting."""
    file = tmp_path / "issuers.json"
    base = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://id.example/jwks"}
    file.write_text(json.dumps([base]))
    assert read_issuers(file)[0].issuer == ISSUER
    for wrong in ({"algorithms": ["HS256"]}, {"jwks_url": "http://x"}, {"verify": False}):
        file.write_text(json.dumps([base | wrong]))
        with pytest.raises(ValueError):
            read_issuers(file)
