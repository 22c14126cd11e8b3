"""Only tokens that a trusted issuer signed, for us, now, with an owner; no others."""

import json
import time
from typing import Any

import msgspec
import pytest

from controlplane.adapters.access.issuers import IssuerConfig, keys_of, read_issuers
from controlplane.adapters.access.jwt_tokens import BadToken, JwtVerifier
from tests.access.forgeries import forgeries
from tests.access.issuer import (
    AUDIENCE,
    CONFIG,
    CURVE_KEY,
    EDWARDS_KEY,
    ISSUER,
    JWKS,
    RSA_KEY,
    jwk,
    token,
)

CODES = ("invalid_token", "token_expired", "no_org")
# Well signed, but of nobody here: whether the owner exists is asked where tenants are known.
OF_STRANGERS = {"owner in capitals", "owner with a blank", "owner that is no tenant",
                "owner with an invisible letter", "owner with a Cyrillic letter"}  # fmt: skip
FORGED = [(text, why) for text, why in forgeries() if why not in OF_STRANGERS]


@pytest.fixture
def verifier() -> JwtVerifier:
    return JwtVerifier([msgspec.convert(CONFIG, IssuerConfig)])


async def test_a_good_token_names_owner_and_subject(verifier: JwtVerifier) -> None:
    """RS256, ES256 and EdDSA, a list of audiences, within the leeway; also from memory."""
    now = int(time.time())
    for good in (
        token(),
        token(CURVE_KEY, "ES256", "e1"),
        token(EDWARDS_KEY, "EdDSA", "d1"),
        token(aud=[AUDIENCE, "x"]),
        token(header={"typ": "at+jwt"}),
        token(exp=now - 20, nbf=now + 20, iat=now + 20),
    ):
        for _ in range(2):
            found = await verifier.verify_soon(good, time.time())
            assert found == verifier.verify(good, time.time())
            assert (found.owner, found.subject) == ("acme", "ann")


@pytest.mark.parametrize(("forged", "why"), FORGED, ids=[why for _, why in FORGED])
async def test_a_forged_token_is_refused(verifier: JwtVerifier, forged: str, why: str) -> None:
    """With one of three codes, and never by an exception of another kind."""
    for _ in range(2):
        with pytest.raises(BadToken) as refused:
            await verifier.verify_soon(forged, time.time())
        assert refused.value.code in CODES


def test_the_corpus_is_large_and_each_forgery_is_another() -> None:
    assert len({text for text, _ in forgeries()}) == len({why for _, why in forgeries()}) > 100


async def test_tokens_with_one_prefix_are_judged_apart(verifier: JwtVerifier) -> None:
    """The memory of good tokens is by the whole token."""
    good = token()
    verifier.verify(good, time.time())
    with pytest.raises(BadToken):
        verifier.verify(good[:-4] + "AAAA", time.time())


async def test_a_remembered_token_expires(verifier: JwtVerifier) -> None:
    """At its exp, not when the memory does."""
    short = token(exp=int(time.time()) + 5)
    verifier.verify(short, time.time())
    with pytest.raises(BadToken):
        verifier.verify(short, time.time() + 3600)


def test_without_issuers_no_token_is_good() -> None:
    """The default: nothing but API keys and tickets."""
    with pytest.raises(BadToken):
        JwtVerifier(()).verify(token(), time.time())


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        (["ml-admins"], "admin"),
        ("ml-readers", "auditor"),
        (["x", "ml-readers", "ml-admins"], "admin"),
        (["admin"], ""),
        ([["ml-admins"]], ""),
        ({"ml-admins": 1}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_a_claim_names_the_role(verifier: JwtVerifier, groups: Any, role: str) -> None:
    """As the issuer's configuration maps it, the strongest of several; without one the token is
    good for inference alone."""
    found = verifier.verify(token(groups=groups), time.time())
    assert found.role == (role or "developer")
    assert ("admin:write" in found.scopes) == bool(role)


def test_a_role_may_stand_deeper_and_under_its_own_name() -> None:
    config = IssuerConfig(ISSUER, AUDIENCE, jwks=JWKS, role_claim="realm.roles")
    assert config.role_in({"realm": {"roles": ["viewer", "operator"]}}) == "operator"
    for claims in ({"realm": "operator"}, {"realm": {"roles": ["root"]}}, {"roles": ["admin"]}):
        assert config.role_in(claims) == ""


def test_a_wrong_issuer_file_is_refused(tmp_path: Any) -> None:
    """Unknown fields, symmetric algorithms and plain http keep the process from starting."""
    file = tmp_path / "issuers.json"
    base = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://id.example/jwks"}
    file.write_text(json.dumps([base]))
    assert read_issuers(file)[0].issuer == ISSUER
    for wrong in (
        {"algorithms": ["HS256"]},
        {"algorithms": ["none"]},
        {"algorithms": []},
        {"jwks_url": "http://id.example/jwks"},
        {"jwks_url": "file:///etc/passwd"},
        {"jwks_url": "http://127.0.0.1@evil.example/jwks"},
        {"jwks_url": ""},
        {"jwks_file": "also.json"},
        {"verify": False},
        {"audience": ""},
        {"roles": {"x": "root"}},
    ):
        file.write_text(json.dumps([base | wrong]))
        with pytest.raises(ValueError):
            read_issuers(file)
    file.write_text(json.dumps([base, base]))
    with pytest.raises(ValueError):
        read_issuers(file)


def test_of_a_jwks_only_strong_public_signing_keys_are_taken() -> None:
    """And none of them if two share an id: which one is meant would be a guess."""
    assert set(keys_of(JWKS, ("RS256", "ES256", "EdDSA"))) == {"k1", "e1", "d1"}
    assert set(keys_of(JWKS, ("RS256",))) == {"k1"}
    with pytest.raises(ValueError):
        keys_of({"keys": [jwk(RSA_KEY, "k1"), jwk(CURVE_KEY, "k1")]}, ("RS256", "ES256"))
