"""Tokens that nobody may accept, each with what is wrong with it."""

import json
import time
from typing import Any

from cryptography.hazmat.primitives import serialization

from tests.access.issuer import (
    AUDIENCE,
    CURVE_KEY,
    ISSUER,
    JWKS,
    OTHER_KEY,
    RSA_KEY,
    claims,
    hs256,
    raw,
    token,
)

HEADER = {"alg": "RS256", "kid": "k1", "typ": "JWT"}


def forgeries() -> list[tuple[str, str]]:
    """``(token, why)``; all must be refused."""
    return [*_algorithms(), *_headers(), *_issuers(), *_times(), *_owners(), *_shapes()]


def _algorithms() -> list[tuple[str, str]]:
    encoding, form = serialization.Encoding, serialization.PublicFormat
    public = RSA_KEY.public_key()
    pem = public.public_bytes(encoding.PEM, form.SubjectPublicKeyInfo)
    der = public.public_bytes(encoding.DER, form.SubjectPublicKeyInfo)
    unsigned = raw({"alg": "none", "kid": "k1"}, claims()).rpartition(".")[0]
    return [
        (f"{unsigned}.", "alg none, no signature"),
        (raw({"alg": "none", "kid": "k1"}, claims()), "alg none, signed"),
        (raw({"alg": "nOnE", "kid": "k1"}, claims()), "alg nOnE"),
        (raw({"alg": "", "kid": "k1"}, claims()), "alg empty"),
        (raw({"alg": ["RS256"], "kid": "k1"}, claims()), "alg as a list"),
        (raw({"kid": "k1"}, claims()), "no alg"),
        (raw({"alg": "rs256", "kid": "k1"}, claims()), "alg in small letters"),
        (raw({"alg": "HS256", "kid": "k1"}, claims()), "HS256 by header"),
        (hs256(pem), "HS256 signed with the public key"),
        (hs256(der), "HS256 signed with the public key's bytes"),
        (hs256(b"secret", "h1"), "a symmetric key in the JWKS"),
        (hs256(b""), "HS256 signed with nothing"),
        (token(OTHER_KEY), "another key"),
        (token(OTHER_KEY, kid="enc"), "a key for encryption"),
        (token(OTHER_KEY, kid=""), "a key without an id"),
        (token(RSA_KEY, kid="weak"), "the id of a weak key"),
        (token(algorithm="RS512"), "algorithm not listed"),
        (token(algorithm="PS256"), "another padding of the same key"),
        (token(CURVE_KEY, "ES256", "k1"), "algorithm differs from the key's"),
        (raw(HEADER | {"kid": "e1"}, claims()), "key of another type"),
        (raw(HEADER | {"alg": "ES256"}, claims()), "algorithm of another key"),
    ]


def _headers() -> list[tuple[str, str]]:
    evil = "https://evil.example/jwks.json"
    return [
        (token(kid="unknown"), "unknown kid"),
        (token(kid="../../dev/null"), "kid as a path"),
        (token(kid="' UNION SELECT 'k1' --"), "kid as SQL"),
        (token(kid="k1\x00"), "kid with NUL"),
        (token(kid="K1"), "kid in capitals"),
        (token(kid="k" * 4000), "a long kid"),
        (token(kid="k" * 1_000_000), "a kid of a megabyte"),
        (raw(HEADER | {"kid": 7}, claims()), "kid as a number"),
        (raw(HEADER | {"kid": ["k1"]}, claims()), "kid as a list"),
        (raw(HEADER | {"kid": None}, claims()), "kid null"),
        (raw({"alg": "RS256"}, claims()), "no kid"),
        (raw('{"alg":"RS256","kid":"x","kid":"k1"}', claims()), "two kids"),
        (raw('{"alg":"none","alg":"RS256","kid":"k1"}', claims()), "two algs"),
        (token(header={"crit": ["x"], "x": 1}), "crit"),
        (token(header={"crit": []}), "empty crit"),
        (token(header={"b64": False, "crit": ["b64"]}), "unencoded payload"),
        (token(header={"jku": evil}), "jku"),
        (token(header={"x5u": evil}), "x5u"),
        (token(header={"x5c": ["MIIB"]}), "x5c"),
        (token(OTHER_KEY, header={"jwk": JWKS["keys"][-1]}), "embedded jwk"),
        (token(header={"zip": "DEF"}), "zip"),
        (token(header={"enc": "A256GCM"}), "enc"),
        (raw(HEADER | {"typ": "JOSE"}, claims()), "typ"),
        (raw(HEADER | {"typ": "logout+jwt"}, claims()), "a logout token"),
        (raw(HEADER | {"typ": 1}, claims()), "typ as a number"),
    ]


def _issuers() -> list[tuple[str, str]]:
    return [
        (token(iss="https://id.example.evil"), "issuer with a suffix"),
        (token(iss="https://id.exampl"), "issuer cut short"),
        (token(iss="HTTPS://ID.EXAMPLE"), "issuer in capitals"),
        (token(iss=f"{ISSUER}/"), "issuer with a slash"),
        (raw(HEADER, claims(iss=[ISSUER])), "issuer as a list"),
        (token(iss=None), "no issuer"),
        (token(aud="other"), "audience"),
        (token(aud=f"{AUDIENCE} "), "audience with a blank"),
        (token(aud=[]), "no audience in the list"),
        (token(aud=None), "no audience"),
        (raw(HEADER, claims(aud=[AUDIENCE, 7])), "audiences that are no strings"),
        (raw(HEADER, claims(aud={AUDIENCE: 1})), "audience as an object"),
    ]


def _times() -> list[tuple[str, str]]:
    now = int(time.time())
    text = json.dumps(claims(exp=now + 600))
    return [
        (token(exp=now - 100), "expired"),
        (token(exp=0), "expired in 1970"),
        (token(exp=-1), "expired before"),
        (token(exp=None), "no exp"),
        (raw(HEADER, claims(exp=str(now + 600))), "exp as a string"),
        (raw(HEADER, text.replace(str(now + 600), "1e999")), "exp 1e999"),
        (raw(HEADER, text.replace(str(now + 600), "Infinity")), "exp Infinity"),
        (raw(HEADER, text.replace(str(now + 600), "NaN")), "exp NaN"),
        (raw(HEADER, text.replace(str(now + 600), "9" * 5000)), "an endless exp"),
        (raw(HEADER, claims(exp=True)), "exp as a boolean"),
        (raw(HEADER, claims(exp=[now + 600])), "exp as a list"),
        (token(nbf=now + 600), "not yet valid"),
        (raw(HEADER, claims(nbf="0")), "nbf as a string"),
        (token(iat=now + 600), "issued in the future"),
        (token(iat=None), "no iat"),
        (raw(HEADER, claims(iat=str(now))), "iat as a string"),
        (raw(HEADER, claims(iat=[now])), "iat as a list"),
        (raw(HEADER, text[:-1] + f',"exp":{now + 900}}}'), "two exps"),
    ]


def _owners() -> list[tuple[str, str]]:
    whole = json.dumps(claims())[:-1]
    return [
        (token(sub=None), "no subject"),
        (raw(HEADER, claims(sub=7)), "subject as a number"),
        (token(sub=""), "empty subject"),
        (token(sub="a" * 300), "a long subject"),
        (token(sub="ann\nroot"), "subject with a line break"),
        (token(owner=None), "no owner"),
        (token(owner=""), "empty owner"),
        (token(owner="ACME"), "owner in capitals"),
        (token(owner=" acme"), "owner with a blank"),
        (token(owner="acme\u200b"), "owner with an invisible letter"),
        (token(owner="аcme"), "owner with a Cyrillic letter"),
        (token(owner="nobody"), "owner that is no tenant"),
        (raw(HEADER, claims(owner=7)), "owner as a number"),
        (raw(HEADER, claims(owner=["acme"])), "owner as a list"),
        (raw(HEADER, claims(owner={"acme": 1})), "owner as an object"),
        (raw(HEADER, claims(owner=True)), "owner as a boolean"),
        (raw(HEADER, f'{whole},"owner":"globex"}}'), "two owners"),
    ]


def _shapes() -> list[tuple[str, str]]:
    good = token()
    head, payload, signature = good.split(".")
    other = token(owner="globex").split(".")[1]
    return [
        (raw(HEADER, "[]"), "claims as a list"),
        (raw("[]", claims()), "header as a list"),
        (raw('"x"', claims()), "header as a string"),
        (raw(HEADER, "{" * 5000), "nested claims"),
        (raw(HEADER, '{"a":' * 1500 + "1" + "}" * 1500), "deep claims"),
        (f"{head}.{other}.{signature}", "claims of another token"),
        (f"{good[:-6]}AAAAAA", "signature changed"),
        (f"{head}.{payload}.", "no signature"),
        (f"{head}.{payload}", "two parts"),
        (f"{good}.x", "a fourth part"),
        (f"{head}.{payload}.{signature}.a.b", "the five parts of an encrypted token"),
        (good.replace(".", "..", 1), "an empty part"),
        (f"{good}=", "padding"),
        (good.replace("e", "é", 1), "no ASCII"),
        ("a.b.c", "no base64"),
        ("' OR '1'='1", "SQL"),
        ("A" * 1_000_000, "a megabyte"),
        (token(sub="a", extra="x" * 9000), "more than 8 KiB"),
    ]


def pieces(value: Any) -> str:
    """A name for a test, from what is wrong."""
    return str(value).replace(" ", "-")
